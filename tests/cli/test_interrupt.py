"""Ctrl-C at a terminal: what the user sees, and how the run goes on."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from erlangen.cli.main import app

pty = pytest.importorskip("pty", reason="needs a terminal of POSIX")


def typed(arguments: list[str], cwd: Path, stop_at: bytes | None) -> tuple[int, str]:
    """Exit code and what the screen showed; Ctrl-C is typed as soon as ``stop_at`` is there."""
    child, screen = pty.fork()
    if child == 0:
        os.chdir(cwd)
        os.environ.update(TERM="xterm", COLUMNS="140", OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, "-m", "erlangen", *arguments])
    shown, deadline = b"", time.time() + 240
    while time.time() < deadline:
        try:
            if select.select([screen], [], [], 1.0)[0]:
                shown += os.read(screen, 65536)
        except OSError:  # the terminal is closed: the command has ended
            break
        if stop_at is not None and stop_at in shown:
            os.write(screen, b"\x03")
            stop_at = None
    _, status = os.waitpid(child, 0)
    os.close(screen)
    return os.waitstatus_to_exitcode(status), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_ctrl_c_says_what_is_spent_and_the_run_goes_on(tmp_path):
    train = ["train", "--model", "mlp", "--steps", "600", "--batch", "256", "--set", "evaluations=2", "--out", "run"]
    code, screen = typed(train, tmp_path, stop_at="ε 0.".encode())
    assert code == 130
    last = [line for line in re.split(r"[\r\n]+", screen) if line.strip()][-1]
    found = re.search(r"stopped after step (\d+) of 600: ε = ([\d.]+) at δ = 1.0e-05 is spent; go on with: (.*)", last)
    assert found, last
    steps, spent, command = int(found[1]), float(found[2]), found[3]
    assert steps < 300, "ε was shown only when the run first evaluated"
    left = [line for line in re.split(r"[\r\n]+", screen) if f"{steps}/600" in line][-1]
    shown = re.search(r"ε ([\d.]+)", left)
    assert shown is None or float(shown[1]) >= spent - 1e-3, "the bar that stays showed the ε of an earlier step"

    book = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--json"]).stdout)
    assert book["epsilon"]["pld"] == pytest.approx(spent, rel=1e-3)
    code, screen = typed(command.split()[1:], tmp_path, stop_at=None)
    assert code == 0, screen[-500:]
    assert "600/600" in screen
    assert "Privacy        ε = 3" in screen
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run")]).exit_code == 0
