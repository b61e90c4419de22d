"""A few of the crash trials, in a process of their own (they fork); the slow test does many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_loop.py")
ROOT = Path(__file__).parents[2]


def killed(trials: int) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "-n", str(trials)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("trials", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_is_lost_in_a_crash(trials):
    outcome = killed(trials)
    assert outcome["under_counted"] == outcome["unloadable"] == outcome["over_budget"] == 0
    assert outcome["mid_run"] > 0, "no trial was killed while it trained: the test saw nothing"
