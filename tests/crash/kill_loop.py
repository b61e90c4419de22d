"""Kill real training at random moments: is every release that was used on disk, and does every checkpoint load?

    python tests/crash/kill_loop.py -n 200

A warmed parent forks a child per trial. The child trains with Adam, EMA and a cosine schedule, writing a checkpoint at
every other step, and counts in shared memory each noisy gradient that it has *used*. SIGKILL comes at a uniformly random
time. Then: the ledger must count at least what was used, the checkpoint (if there is one) must load, and the run must
resume and finish within its budget.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch

from erlangen.accounting import epsilon
from erlangen.accounting.ledger import LedgerError, read_ledger
from erlangen.training import TrainConfig, checkpoint, run
from erlangen.training.session import Session

CONFIG = TrainConfig(
    model="mlp", model_options={"width": 32}, optimizer="adam", schedule="cosine", ema=0.9, batch=64, steps=40,
    evaluations=20, epsilon=3.0, clipping="adaptive",
)  # fmt: skip


def counting(shared: mmap.mmap) -> None:
    """Count every use of a noisy gradient, from inside the process that is going to be killed."""
    plain = Session._private

    def private(self: Session):
        training = plain(self)
        finish = training.mechanism.finish

        def finish_and_count(expected_batch: float):
            released = finish(expected_batch)
            used = struct.unpack("q", shared[:8])[0]
            shared[:8] = struct.pack("q", used + 1)
            return released

        training.mechanism.finish = finish_and_count
        return training

    Session._private = private


def trial(folder: Path, delay: float) -> dict:
    """One life and death of a run."""
    shared = mmap.mmap(-1, 8)
    child = os.fork()
    if not child:
        try:
            counting(shared)
            run.train(CONFIG, folder)
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"delay": delay, **judge(folder, struct.unpack("q", shared[:8])[0])}


def judge(folder: Path, used: int) -> dict:
    verdict = {
        "used": used,
        "counted": 0,
        "under_counted": False,
        "unloadable": False,
        "over_budget": False,
        "resumed": False,
    }
    try:
        verdict["counted"] = read_ledger(folder / "ledger.jsonl").steps
    except LedgerError:
        verdict["counted"] = 0  # killed before the ledger existed: nothing may have been used
    verdict["under_counted"] = verdict["counted"] < used
    saved = folder / "checkpoint.safetensors"
    if saved.exists():
        try:
            checkpoint.load(saved)
        except checkpoint.CheckpointError:
            verdict["unloadable"] = True
    if (folder / "ledger.jsonl").exists() and (folder / "config.json").exists():
        result = run.resume(folder)
        verdict["resumed"] = True
        book = read_ledger(folder / "ledger.jsonl")
        verdict["over_budget"] = epsilon(book.pairs(), result.session.config.delta) > CONFIG.epsilon + 1e-9
        verdict["under_counted"] |= book.steps < verdict["counted"]
    return verdict


def main(trials: int, seed: int | None = None, quiet: bool = False) -> dict:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="erlangen-kill-"))
    try:
        started = time.perf_counter()
        run.train(CONFIG, root / "warm")  # imports, calibration and caches are inherited by every child
        started = time.perf_counter()
        run.train(CONFIG, root / "again")
        life = time.perf_counter() - started
        results = []
        for k in range(trials):
            results.append(trial(root / f"run{k}", rng.uniform(0, 1.1 * life)))
            shutil.rmtree(root / f"run{k}", ignore_errors=True)
            if not quiet and sys.stderr.isatty():
                print(f"\r{k + 1}/{trials}", end="", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    flags = ("under_counted", "unloadable", "over_budget", "resumed")
    return {"trials": trials, "mid_run": sum(0 < r["used"] < CONFIG.steps for r in results),
            **{flag: sum(r[flag] for r in results) for flag in flags}}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    outcome = main(args.n, args.seed)
    print(json.dumps(outcome))
    sys.exit(bool(outcome["under_counted"] or outcome["unloadable"] or outcome["over_budget"]))
