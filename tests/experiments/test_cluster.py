"""A comparison on a real cluster, as `ray start` makes one: it runs there, can be stopped, and goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'erlangen[cluster]'"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster():
    """The environment that finds a cluster of two processors, which nobody else uses."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "disabled"}
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=2",
        "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000",
    ]  # fmt: skip
    head = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.time() + 120
        while not answers(port):
            assert head.poll() is None, "the cluster did not start"
            assert time.time() < deadline, "the cluster did not start in two minutes"
            time.sleep(0.5)
        yield environment
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


def command(out: Path) -> list[str]:
    options = "--cluster --data digits --epsilon 2,4 --mechanism iso,clipless --seeds 2 --trials 1 --steps 8 --batch 64"
    return [sys.executable, "-m", "erlangen", "compare", *options.split(), "--out", str(out)]


def finished(out: Path) -> dict[Path, int]:
    files = [*out.glob("runs/*/summary.json"), *out.glob("tuning/*.json")]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("left", ["nothing", "an address"])
def test_without_a_cluster_the_cure_is_named_at_once(tmp_path, left):
    """First in this file: later there is one. A cluster that was killed leaves its address, where nobody answers."""
    import ray

    if ray._private.services.find_gcs_addresses():
        pytest.skip("a Ray cluster runs on this machine")
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = str(tmp_path)
    if left == "an address":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    done = subprocess.run(command(tmp_path / "out"), env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "ray start --head" in done.stderr


def test_a_comparison_is_stopped_and_goes_on(cluster, tmp_path):
    first = subprocess.Popen(command(tmp_path), env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 300
    while len(finished(tmp_path)) < 3:
        assert first.poll() is None, first.communicate()[1]
        assert time.time() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130, error
    assert "goes on from there" in error
    kept = finished(tmp_path)
    assert 3 <= len(kept) < 12

    second = subprocess.run(command(tmp_path), env=cluster, capture_output=True, text=True, timeout=400)
    assert second.returncode == 0, second.stderr
    assert "clipless" in second.stdout
    after = finished(tmp_path)
    assert len(after) == 12
    assert {path: after[path] for path in kept} == kept, "finished work was done again"
    for run in tmp_path.glob("runs/*"):
        verified = subprocess.run([sys.executable, "-m", "erlangen", "verify", str(run)], env=cluster, capture_output=True)
        assert verified.returncode == 0, run
