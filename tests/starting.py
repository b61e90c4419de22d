"""What code costs a fresh interpreter, in processor time: other processes on the machine do not count."""

from __future__ import annotations

import math
import os
import subprocess
import sys

USED = "(lambda u: u.ru_utime + u.ru_stime)(resource.getrusage(resource.RUSAGE_SELF))"


def cpu_seconds(code: str, enough: float, after: str = "") -> float:
    """The best of five, or the first below ``enough``. With ``after``, what comes behind it as a share of what it took: a slow
    hour of the machine does not count either."""
    before = f"{after}\nbefore = {USED}" if after else "before = 0"
    best = math.inf
    for _ in range(5):
        best = min(best, _measured(f"{before}\n{code}\nprint(({USED} - before) / (before or 1))"))
        if best < enough:
            break
    return best


def compared(code: str, other: str, enough: float) -> float:
    """Processor time of ``code`` over that of ``other``, each in an interpreter of its own: the least of each of five, or of as
    many as it takes to come below ``enough``."""
    ours, theirs = math.inf, math.inf
    for _ in range(5):
        ours = min(ours, _measured(f"{code}\nprint({USED})"))
        theirs = min(theirs, _measured(f"{other}\nprint({USED})"))
        if ours < enough * theirs:
            break
    return ours / theirs


def _measured(code: str) -> float:
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # only the tests of kernels need Triton
    done = subprocess.run(
        [sys.executable, "-c", f"import resource\n{code}"], check=True, capture_output=True, text=True, env=plain
    )
    return float(done.stdout.split()[-1])
