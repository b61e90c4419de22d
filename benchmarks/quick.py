"""Does every preset finish in minutes? Runs ``erlangen reproduce NAME --quick`` for each of them and prints seconds.

    python benchmarks/quick.py                                  # all, one after another, two threads each
    python benchmarks/quick.py eq-table6 rep-table1             # some
    python benchmarks/quick.py --workers 4 --json quick.json    # four at a time

A preset fails if its exit code is not 0, if it takes longer than the limit, or if it does not say that it is no result.
Data is looked for in $ERLANGEN_DATA; what is not there is replaced by random images, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from erlangen.experiments.presets import presets, tables


def run(name: str, threads: int, limit: float) -> dict[str, Any]:
    """Seconds, exit code and what the command said of itself."""
    environment = {**os.environ, **{f"{kind}_NUM_THREADS": str(threads) for kind in ("OMP", "MKL")}}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "erlangen", "reproduce", name, "--quick", "--json", "--out", str(Path(folder, name))]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            code, out, error = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, out, error = None, "", f"not finished after {limit:g} s"
    seconds = round(time.monotonic() - started, 1)
    parts = json.loads(out or "{}")
    parts = parts.get("parts", [parts])
    honest = code == 0 and all(part["quick"] and "no result" in part["note"] for part in parts)
    return {
        "preset": name, "seconds": seconds, "exit_code": code, "says_no_result": honest,
        "rows": sum(len(part.get("rows", [])) for part in parts),
        "stand_ins": sorted({each for part in parts for each in part.get("stand_ins", [])}),
        "error": "" if code == 0 else error.strip()[-2000:],
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    verdict = "ok" if found["says_no_result"] else f"FAILED ({found['exit_code']}): {found['error'][-300:]}"
    made_up = f"  random images for {', '.join(found['stand_ins'])}" if found["stand_ins"] else ""
    return f"{found['preset']:20} {found['seconds']:7.1f} s  {found['rows']:3} rows  {verdict}{made_up}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="presets; all tables and figures, and ours beside them, if none is given")
    parser.add_argument("--workers", type=int, default=1, help="presets at a time")
    parser.add_argument("--threads", type=int, default=2, help="threads of each")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each")
    parser.add_argument("--json", type=Path, help="write what was found into this file")
    arguments = parser.parse_args()
    names = arguments.names or [*tables(), *(p.name for p in presets() if p.beside)]
    found: list[dict[str, Any]] = []

    def one(name: str) -> None:
        found.append(run(name, arguments.threads, arguments.limit))
        print(line(found[-1]), flush=True)
        if arguments.json:  # after each, so that an interrupted list is not lost
            arguments.json.write_text(json.dumps({"threads": arguments.threads, "presets": found}, indent=1) + "\n")

    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(one, names))
    slow = max(found, key=lambda each: each["seconds"])
    good = sum(each["says_no_result"] for each in found)
    print(f"{good} of {len(found)} finished and say that they are no result; the slowest is {slow['preset']}, {slow['seconds']} s")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
