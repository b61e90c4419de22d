"""Jobs in one process, in several, and on a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from erlangen.experiments.pool import Pool, default_workers


def square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def fail(x: int) -> int:
    raise ValueError(f"job {x} is bad")


def test_alone_it_runs_here():
    results = list(Pool().run(square, [1, 2, 3]))
    assert [(job, value) for job, (value, _) in results] == [(1, 1), (2, 4), (3, 9)]
    assert {pid for _, (_, pid) in results} == {os.getpid()}
    assert default_workers() >= 1


@pytest.mark.slow
def test_processes_are_others_and_errors_come_back():
    results = dict(Pool(workers=2).run(square, [1, 2, 3]))
    assert {job: value for job, (value, _) in results.items()} == {1: 1, 2: 4, 3: 9}
    assert os.getpid() not in {pid for _, pid in results.values()}
    with pytest.raises(ValueError, match="is bad"):
        list(Pool(workers=2).run(fail, [1, 2]))


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_the_jobs():
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's `&` leaves it ignored
    code = f"{heard}; from erlangen.experiments.pool import Pool; import time; list(Pool(2).run(time.sleep, [600, 601]))"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL) as driver:
        time.sleep(20)
        started = time.time()
        os.kill(driver.pid, signal.SIGINT)
        try:
            driver.wait(30)
        finally:
            if driver.returncode is None:
                os.killpg(driver.pid, signal.SIGKILL)
    assert time.time() - started < 30


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_cure_is_named():
    with pytest.raises(ImportError, match=r"pip install 'erlangen\[cluster\]'"):
        list(Pool(cluster="auto").run(square, [1]))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'erlangen[cluster]'")
def test_on_a_local_cluster():
    import ray

    try:
        results = dict(Pool(cluster="local").run(square, [1, 2, 3]))
    finally:
        ray.shutdown()
    assert {job: value for job, (value, _) in results.items()} == {1: 1, 2: 4, 3: 9}
    assert os.getpid() not in {pid for _, pid in results.values()}
