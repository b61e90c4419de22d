"""Who may read what: the token, the host, the paths, the methods."""

from __future__ import annotations

import json
import os
from urllib.parse import quote

import pytest

from erlangen.ui import Server
from erlangen.ui.app import ASSETS
from tests.ui.conftest import Client, started

ADDRESSES = ["", "plotly.js", *(f"asset/{name}" for name in ASSETS), "api/runs", "api/run?name=first",
             "api/compare?name=first", "api/cost?sigma=1&rate=0.01&steps=10&delta=1e-5", "api/noise"]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_the_token_everything_is_refused(client, address):
    token = client.server.token
    wrong = token[:-1] + ("A" if token[-1] != "A" else "B")
    for path in (f"/{address}", f"/{wrong}/{address}", f"/{address}?token={token}", f"//{address}", f"/x/../{address}"):
        status, headers, body = client.raw(path)
        assert status == 403, path
        assert token not in body
        assert headers["cache-control"] == "no-store"


def test_two_servers_have_two_tokens_of_256_bits(folder):
    one, two = Server(folder), Server(folder)
    assert one.token != two.token
    assert len(one.token) >= 43
    assert one.token not in repr(one)
    assert one.port != two.port


def test_only_this_machine_listens(client):
    assert client.server._socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.1", "0.0.0.0", ""]
)
def test_a_foreign_host_name_finds_nothing(client, host):
    """DNS rebinding: the request reaches 127.0.0.1 with the attacker's name in Host, here even with the right token."""
    status, _, body = client.raw(f"/{client.server.token}/api/runs", host=host)
    assert status == 400
    assert "first" not in body


def test_this_machine_s_names_are_welcome(client):
    for host in ("127.0.0.1", f"localhost:{client.server.port}"):
        assert client.raw(f"/{client.server.token}/api/runs", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client, folder, method):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    for address in ("", "api/runs", "api/run?name=first"):
        assert client.raw(f"/{client.server.token}/{address}", method)[0] == 405
    client.get("api/runs")
    client.get("api/run", [("name", "first")])
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


ESCAPES = ["..", "../outside", "../secret.txt", "link", "first/../first", "/etc/passwd", "first/", "./first", "first\0", "nested",
           "first/config.json", "", "~", "....//outside", "..\\outside"]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_names_are_never_paths(client, name):
    status, _, body = client.get("api/run", [("name", name)])
    assert status == 404
    assert "SECRET" not in body
    assert client.json("api/compare", [("name", name)])["rows"] == []


FILES = ["asset/../app.py", "asset/..%2fapp.py", "asset/%2e%2e/app.py", "asset//etc/passwd", "asset/ui.html",
         "asset/..%2f..%2f..%2fpyproject.toml", "../../../etc/passwd", "%2e%2e/secret.txt"]  # fmt: skip


@pytest.mark.parametrize("path", FILES)
def test_files_are_named_not_found(client, path):
    status, _, body = client.raw(f"/{client.server.token}/{path}")
    assert status in (403, 404)
    assert "def make_app" not in body
    assert "SECRET" not in body
    assert "root:" not in body


def test_links_out_of_the_folder_are_not_followed(client, folder):
    assert os.path.islink(folder / "link")
    assert "link" not in [r["name"] for r in client.json("api/runs")["runs"]]


def test_the_browser_is_told_to_run_and_fetch_nothing_else(client):
    _, headers, body = client.get("")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "frame-ancestors 'none'" in policy
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in headers
    assert "http" not in body.lower()  # no address but its own


def test_names_travel_as_data_not_as_markup(client, folder):
    listed = client.get("api/runs")
    assert listed[1]["content-type"] == "application/json"
    name = next(r["name"] for r in json.loads(listed[2])["runs"] if "<script>" in r["name"])
    found = client.json("api/run", [("name", name)])
    assert found["name"] == name
    for figure in client.json("api/compare", [("name", name), ("name", "first")])["figures"]:
        assert "<script" not in json.dumps(figure["plot"])  # plotly reads markup: escaped for it
    assert quote(name)  # and it can stand in an address


def test_the_host_check_has_teeth(folder, monkeypatch):
    """The broken twin: a server that takes any host name answers the request that the real one refuses."""
    monkeypatch.setattr("erlangen.ui.app.HOSTS", ("*",))
    server = Server(folder)
    thread = started(server)
    try:
        assert Client(server).raw(f"/{server.token}/api/runs", host="evil.example")[0] == 200
        assert Client(server).raw("/api/runs", host="evil.example")[0] == 403
    finally:
        server.stop()
        thread.join(10)
