"""Downloads against a real server on this machine: broken transfers resume, wrong bytes never arrive."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from erlangen import terminal
from erlangen.data import DataError, load, store
from erlangen.data.archives import read_idx
from erlangen.data.download import Remote, fetch, unpack

CONTENT = np.random.default_rng(0).bytes(300_000)


class Handler(BaseHTTPRequestHandler):
    """Serves ``server.files``; cuts the first ``server.cuts`` answers after a third of what they promised."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        body = server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = 0
        wanted = self.headers.get("Range")
        if wanted and server.ranges:
            start = int(wanted[len("bytes=") :].rstrip("-"))
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start + server.shift}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        rest = body[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if server.cuts:
            server.cuts -= 1
            rest = rest[: len(rest) // 3]
        self.wfile.write(rest)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.requests, server.cuts, server.ranges, server.shift = {"/data.bin": CONTENT}, [], 0, True, 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def remote(server, kind="sha256", path="/data.bin", content=CONTENT):
    return Remote(path[1:], (server.address + path,), f"{kind}:{hashlib.new(kind, content).hexdigest()}")


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_a_file_arrives_once(server, tmp_path, kind):
    path = fetch(remote(server, kind), tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    fetch(remote(server, kind), path.parent)
    assert len(server.requests) == 1


def test_its_bar_has_the_terminal_to_itself(server, tmp_path, monkeypatch):
    heard = []

    class Spinner:
        def start(self):
            heard.append(f"start after {len(server.requests)} request")

        def stop(self):
            heard.append(f"stop after {len(server.requests)} request")

    monkeypatch.setattr(terminal, "waiting", [Spinner()])
    path = fetch(remote(server), tmp_path)
    assert heard == ["stop after 0 request", "start after 1 request"]
    fetch(remote(server), path.parent)
    assert len(heard) == 2, "nothing moves where nothing is fetched"


def test_a_broken_transfer_goes_on_where_it_stopped(server, tmp_path):
    server.cuts = 2
    assert fetch(remote(server), tmp_path, wait=0).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=100000-", "bytes=166666-"]


def test_a_transfer_goes_on_in_the_next_call(server, tmp_path):
    server.cuts = 1
    with pytest.raises(DataError, match=r"ended after 100,000 of 300,000 bytes.*run it again"):
        fetch(remote(server), tmp_path, attempts=1)
    assert (tmp_path / "data.bin.part").stat().st_size == 100_000
    assert not (tmp_path / "data.bin").exists()
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.requests[-1][1] == "bytes=100000-"


def test_a_server_that_cannot_resume_starts_again(server, tmp_path):
    server.cuts, server.ranges = 1, False
    assert fetch(remote(server), tmp_path, wait=0).read_bytes() == CONTENT


def test_a_server_that_resumes_elsewhere_is_not_believed(server, tmp_path):
    server.cuts, server.shift = 1, 7
    with pytest.raises(DataError, match="not at byte 100000"):
        fetch(remote(server), tmp_path, wait=0)
    assert not (tmp_path / "data.bin").exists()


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server, tmp_path):
    server.files["/data.bin"] = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=r"the checksum is sha256:.*refused and removed"):
        fetch(remote(server), tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".lock"]


def test_a_part_that_belongs_to_another_file_is_refused_then_replaced(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(b"z" * 1000)
    with pytest.raises(DataError, match="checksum"):
        fetch(remote(server), tmp_path)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_complete_part_is_checked_not_fetched(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_the_next_address_is_tried(server, tmp_path):
    file = Remote("data.bin", (server.address + "/gone", server.address + "/data.bin"), remote(server).checksum)
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    with pytest.raises(DataError, match="Not Found"):
        fetch(Remote("other", (server.address + "/gone",), "sha256:0"), tmp_path)


def test_two_at_once_share_one_download(server, tmp_path):
    threads = [threading.Thread(target=fetch, args=(remote(server), tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 1


# -- archives -------------------------------------------------------------------------------------------------------


def tar_of(path, names, kind=tarfile.REGTYPE):
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.type = (3 if kind == tarfile.REGTYPE else 0), kind
            info.linkname = "/etc/passwd"
            tar.addfile(info, io.BytesIO(b"abc"))
    return path


def test_archives_appear_complete(tmp_path):
    tar = tar_of(tmp_path / "a.tar.gz", ["top/x.bin", "top/deep/y.bin"])
    assert (unpack(tar, tmp_path, "top") / "deep" / "y.bin").read_bytes() == b"abc"
    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as packed:
        packed.writestr("x.amat", "1 2")
    assert (unpack(tmp_path / "flat.zip", tmp_path, "named") / "x.amat").read_text() == "1 2"
    assert not list(tmp_path.glob(".*unpacking"))


@pytest.mark.parametrize(("name", "kind"), [
    ("../evil", tarfile.REGTYPE), ("/evil", tarfile.REGTYPE), ("top/link", tarfile.SYMTYPE), ("top/hard", tarfile.LNKTYPE),
])  # fmt: skip
def test_archives_that_reach_outside_are_not_unpacked(tmp_path, name, kind):
    tar = tar_of(tmp_path / "a.tar.gz", [name], kind)
    with pytest.raises(DataError, match="not unpacked"):
        unpack(tar, tmp_path / "in", "top")
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "in" / "top").exists()


def test_zips_that_climb_are_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("../evil", "x")
    with pytest.raises(DataError, match="leaves its folder"):
        unpack(tmp_path / "a.zip", tmp_path / "in", "top")


# -- the look-up ----------------------------------------------------------------------------------------------------


def idx(values):
    head = b"\x00\x00\x08" + bytes([values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return gzip.compress(head + values.tobytes())


@pytest.fixture
def small_mnist(server, tmp_path, monkeypatch):
    """MNIST's own format and code path, with five and two images, served here."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (7, 28, 28), dtype=np.uint8), np.array([0, 1, 2, 3, 4, 5, 6], np.uint8)
    parts = (x[:5], y[:5], x[5:], y[5:])
    files = []
    for file, values in zip(store.PUBLISHED["mnist"].files, parts, strict=True):
        server.files[f"/{file.name}"] = idx(values)
        files.append(remote(server, path=f"/{file.name}", content=idx(values)))
    monkeypatch.setitem(store.PUBLISHED, "mnist", store.Published("mnist", tuple(files), "tiny"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ERLANGEN_DATA", raising=False)
    monkeypatch.delenv("ERLANGEN_OFFLINE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return x, y


def test_first_the_folder_then_the_cache_then_the_network(server, small_mnist, tmp_path, monkeypatch):
    x, y = small_mnist
    monkeypatch.setenv("ERLANGEN_OFFLINE", "1")
    with pytest.raises(DataError, match=r"ERLANGEN_OFFLINE forbids.*set ERLANGEN_DATA"):
        load("mnist")
    monkeypatch.delenv("ERLANGEN_OFFLINE")
    data = load("mnist")
    assert np.array_equal(data.y_train, y[:5])
    np.testing.assert_allclose(data.x_test[:, 0], x[5:] / 127.5 - 1, atol=1e-6)
    assert len(server.requests) == 4
    load("mnist")  # from the cache
    assert len(server.requests) == 4
    assert store.locate("mnist") == tmp_path / "cache" / "erlangen" / "data" / "mnist"
    np.savez(tmp_path / "mnist.npz", x_train=x[:3], y_train=y[:3])
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    assert len(load("mnist")) == 3


def test_what_cannot_be_had_says_all_it_tried(server, small_mnist):
    server.files.clear()
    with pytest.raises(DataError, match=r"(?s)data set 'mnist' was not found in .*Not Found.*set ERLANGEN_DATA"):
        load("mnist")


def test_published_archives_come_the_same_way(server, tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 10, (4, 2 + 3072), dtype=np.uint8)
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as tar:
        for name in ("train.bin", "test.bin"):
            info = tarfile.TarInfo(f"cifar-100-binary/{name}")
            info.size = rows.size
            tar.addfile(info, io.BytesIO(rows.tobytes()))
        names = "\n".join(f"c{k}" for k in range(100)).encode()
        info = tarfile.TarInfo("cifar-100-binary/fine_label_names.txt")
        info.size = len(names)
        tar.addfile(info, io.BytesIO(names))
    content = (tmp_path / "c.tar.gz").read_bytes()
    server.files["/c.tar.gz"] = content
    file = remote(server, path="/c.tar.gz", content=content)
    monkeypatch.setitem(store.PUBLISHED, "cifar100", store.Published("cifar-100-binary", (file,), "tiny", archive=True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("ERLANGEN_DATA", raising=False)
    data = load("cifar100")
    assert np.array_equal(data.y_train, rows[:, 1])
    assert data.class_names[7] == "c7"
    assert not (tmp_path / "cache" / "erlangen" / "data" / "c.tar.gz").exists()


def test_every_published_file_has_an_address_and_a_checksum():
    for name, published in store.PUBLISHED.items():
        for file in published.files:
            kind, _, digest = file.checksum.partition(":")
            assert len(digest) == {"sha256": 64, "md5": 32}[kind], name
            assert all(url.startswith(("https://", "http://")) and url.endswith(file.name) for url in file.urls)


def test_files_that_are_no_idx_are_refused(tmp_path):
    for content, words in ((b"junk", "gzip"), (gzip.compress(b"junk"), "not an IDX"), (gzip.compress(
        b"\x00\x00\x08\x01" + (9).to_bytes(4, "big") + b"abc"), "promises 17")):  # fmt: skip
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_idx(tmp_path / "a.gz")


def test_cifar10_from_its_binary_batches(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    batches = {f"data_batch_{k}.bin": rng.integers(0, 10, (2, 3073), dtype=np.uint8) for k in range(1, 6)}
    batches["test_batch.bin"] = rng.integers(0, 10, (3, 3073), dtype=np.uint8)
    for name, rows in batches.items():
        rows.tofile(folder / name)
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    data = load("cifar10")
    assert data.x_train.shape == (10, 3, 32, 32)
    assert data.y_train[2] == batches["data_batch_2.bin"][0, 0]
    pixels = batches["test_batch.bin"][1, 1:].reshape(3, 32, 32)
    np.testing.assert_allclose(data.x_test[1], pixels / 127.5 - 1, atol=1e-6)
