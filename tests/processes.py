"""Several gloo processes on this machine, for tests."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erlangen.workers import Workers

GATHERS = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="before PyTorch 2.7 shards are not gathered on a CPU"
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([  # imported once, before the processes are forked
    "erlangen.training.distributed", "erlangen.models.small", "erlangen.audit.named", "dp_accounting.pld", "dp_accounting.rdp",
    "sklearn.datasets", "scipy.stats", "torch._dynamo", "torch.func", "torch.distributed.fsdp", "tests.processes",
])  # fmt: skip


def _process(answers: Any, fn: Callable[..., Any], rank: int, count: int, store: str, timeout: float, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
        )
        answers.put((rank, pickle.dumps(fn(Workers.current(), *args)), None))
        dist.destroy_process_group()
    except BaseException as error:
        answers.put((rank, pickle.dumps(error), traceback.format_exc()))


def together(
    count: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, failing: bool = False, spawn: bool = False
) -> list[Any]:
    """``fn(workers, *args)`` in ``count`` processes: the results by rank. With ``failing`` exceptions are results; a process that
    uses a GPU must be a new one (``spawn``)."""
    context: Any = multiprocessing.get_context("spawn") if spawn else CONTEXT
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        processes = [
            context.Process(target=_process, args=(answers, fn, rank, count, str(Path(folder) / "store"), timeout, args))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        got = {rank: (pickle.loads(value), trace) for rank, value, trace in (answers.get(timeout=4 * timeout) for _ in processes)}
        for process in processes:
            process.join()
    if not failing:
        broken = [trace for _, trace in got.values() if trace]
        assert not broken, "\n".join(broken)
    return [got[rank][0] for rank in range(count)]


class Only(Workers):
    """A group of one that behaves as one of many: what a device and its back end can be asked without a second one."""

    @property
    def alone(self) -> bool:
        return False


def over_nccl() -> None:
    """The group of this process, alone, with the back ends of a machine with GPUs."""
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
