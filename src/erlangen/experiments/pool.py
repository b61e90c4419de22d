"""Independent jobs: in this process, in several processes, or on a Ray cluster. Results come as they finish."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from erlangen import plugins
from erlangen.extras import require

Job = TypeVar("Job")


@dataclass(frozen=True)
class Pool:
    """``workers`` processes of ``threads`` threads each; with ``cluster``, the address of a Ray cluster ("auto")."""

    workers: int = 1
    threads: int = 1
    cluster: str | None = None
    gpus: float = 0.0

    def run(self, work: Callable[[Job], Any], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
        """(job, result) in the order of completion. A failed job ends the run; what is finished is kept by its writer."""
        if self.cluster is not None:
            yield from self._on_ray(work, jobs)
        elif self.workers == 1 or len(jobs) <= 1:
            for job in jobs:
                yield job, work(job)
        else:
            yield from self._in_processes(work, jobs)

    def _in_processes(self, work: Callable[[Job], Any], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
        context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
        others = set(multiprocessing.active_children())
        with ProcessPoolExecutor(min(self.workers, len(jobs)), context, _start, (self.threads, plugins.named())) as pool:
            try:
                futures = {pool.submit(work, job): job for job in jobs}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:  # Ctrl-C, or a job that failed: what still runs would be waited for
                pool.shutdown(wait=False, cancel_futures=True)
                for child in set(multiprocessing.active_children()) - others:
                    child.kill()  # results are written whole or not at all
                raise

    def _on_ray(self, work: Callable[[Job], Any], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
        require_ray()
        import ray

        if not ray.is_initialized():
            _refuse_dead(self.cluster)
            try:
                ray.init(address=self.cluster, log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError as error:
                where = os.environ.get("RAY_ADDRESS") or "this machine"
                raise ValueError(
                    f"no Ray cluster was found at {where}: start one with `ray start --head`, or set RAY_ADDRESS"
                ) from error
        remote = ray.remote(num_cpus=self.threads, num_gpus=self.gpus)(_with_threads)
        pending = {remote.remote(work, job, self.threads, plugins.named()): job for job in jobs}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            for reference in ready:
                yield pending.pop(reference), ray.get(reference)


def require_ray() -> None:
    require("--cluster", "cluster", "ray")


def _refuse_dead(cluster: str | None) -> None:
    """A cluster that was ended without `ray stop` leaves its address behind, at which Ray would wait for minutes."""
    if cluster != "auto":
        return
    last = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    address = os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.is_file() else "")
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return  # another form, or nothing known: Ray's own search is quick
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"the Ray cluster at {address} does not answer ({error}): `ray stop`, then `ray start --head`, or set RAY_ADDRESS"
        ) from error


def default_workers(threads: int = 1) -> int:
    """One process per core; one alone where there is a GPU, which the runs would have to share."""
    import torch

    if torch.cuda.is_available():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def _start(threads: int, named: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(threads)
    plugins.load(named)


def _with_threads(work: Callable[[Any], Any], job: Any, threads: int, named: Sequence[str]) -> Any:
    _start(threads, named)
    return work(job)
