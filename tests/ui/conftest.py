"""A folder of runs and a real server over it."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from erlangen.training import TrainConfig, run
from erlangen.ui import Server

SCRIPT = "<script>window.hacked = 1<∕script><img src=x onerror=window.hacked=1>"
SMALL = TrainConfig(
    model="logistic", epsilon=None, noise_multiplier=1.5, steps=6, batch=64, lr=0.5, seed=0, evaluations=6
)  # fmt: skip


class Client:
    """Requests to one server, with or without its token."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def raw(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
        """A request for exactly ``path``: nothing is normalised on the way."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{self.server.port}" if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found

    def get(self, path: str, values=()):
        return self.raw(f"/{self.server.token}/{path}" + (f"?{urlencode(list(values))}" if values else ""))

    def json(self, path: str, values=()):
        status, _, body = self.get(path, values)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Two finished runs, one of them with markup for a name, one forged, one that is no run, and a secret beside them."""
    root = tmp_path_factory.mktemp("home")
    runs = root / "runs"
    run.train(SMALL, runs / "first")
    (runs / "nested").mkdir()
    run.train(
        TrainConfig.from_dict({**json.loads(SMALL.to_json()), "seed": 1, "noise_multiplier": 3.0}),
        runs / "nested" / SCRIPT,
    )
    shutil.copytree(runs / "first", runs / "forged")
    certificate = runs / "forged" / "certificate.json"
    certificate.write_text(certificate.read_text().replace('"steps": 6', '"steps": 2'))
    (runs / "broken").mkdir()
    for name in ("config.json", "ledger.jsonl"):
        (runs / "broken" / name).write_text("{")
    (root / "secret.txt").write_text("SECRET")
    shutil.copytree(runs / "first", root / "outside")
    (runs / "link").symlink_to(root / "outside")
    return runs


def started(server: Server) -> threading.Thread:
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.time() + 20
    while not server._server.started and time.time() < until:
        time.sleep(0.01)
    assert server._server.started
    return thread


@pytest.fixture(scope="session")
def client(folder) -> Iterator[Client]:
    server = Server(folder)
    thread = started(server)
    yield Client(server)
    server.stop()
    thread.join(10)
