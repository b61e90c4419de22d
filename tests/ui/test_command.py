"""``erlangen ui`` as a command: an address at once, an end by Ctrl-C, clear refusals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from erlangen.cli.main import app
from erlangen.ui import Server


def test_serves_until_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "erlangen", "ui", str(tmp_path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}api/runs", timeout=30) as answer:
            assert json.load(answer) == {"folder": tmp_path.name, "runs": []}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert url not in errors  # no log holds the token
        assert "Traceback" not in errors
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_folder_that_is_not_there_and_a_port_that_is_taken(tmp_path):
    found = CliRunner().invoke(app, ["ui", str(tmp_path / "none")])
    assert found.exit_code == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="port is"):
            Server(tmp_path, taken.getsockname()[1])
