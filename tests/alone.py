"""A test's function in a Python of its own: what forks must not inherit the threads of whatever ran before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def alone(function: Callable[[], Any], seconds: float = 180.0) -> Any:
    """What a function at the top of a module returns, as JSON, from a new process with one thread; it ends in time or fails."""
    code = f"import json; from {function.__module__} import {function.__name__} as f; print(json.dumps(f()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
