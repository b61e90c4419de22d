"""A run by several processes: ``torchrun --nproc-per-node 4 -m erlangen train …``

The first worker runs `run.train` as if it were alone: folder, ledger, metrics, checkpoint and certificate are its. The
others learn the configuration and the state of the session from it and step along. What a run is does not depend on how
many there are, so that it can be resumed by another number of them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from erlangen.training import checkpoint
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.session import Session
from erlangen.workers import Workers, local_rank

if TYPE_CHECKING:
    from erlangen.training.run import Result

#: seconds without an answer after which a worker counts as lost
TIMEOUT = 600.0


def train(*args: Any, **options: Any) -> Result | None:
    """`run.train` by all workers; the result is on the first one, None on the others."""
    from erlangen.training import run

    return _together(lambda workers: run.train(*args, workers=workers, **options))


def resume(*args: Any, **options: Any) -> Result | None:
    """`run.resume` by all workers, however many there were before."""
    from erlangen.training import run

    return _together(lambda workers: run.resume(*args, workers=workers, **options))


def _together(lead: Callable[[Workers], Result]) -> Result | None:
    with joined() as workers:
        if not workers.first:
            follow(workers)
            return None
        try:
            return lead(workers)
        except BaseException as error:
            give_up(workers, error)
            raise


def is_first() -> bool:
    """Whether this process is the one that speaks, before any group exists."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def joined() -> Iterator[Workers]:
    """The workers that torchrun started, or those of the caller's process group; alone where there is neither.

    ``ERLANGEN_TIMEOUT`` is the number of seconds without an answer after which a worker counts as lost.
    """
    if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_gpu = torch.cuda.is_available() and local_rank() < torch.cuda.device_count()
        if on_gpu:
            torch.cuda.set_device(local_rank())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_timeout()))
        try:
            yield Workers.current()
        except BaseException:
            raise  # without a farewell: with a lost worker it would wait for ever
        else:
            dist.destroy_process_group()
    else:
        yield Workers.current()


def _timeout() -> float:
    text = os.environ.get("ERLANGEN_TIMEOUT", str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"ERLANGEN_TIMEOUT is {text!r}; give a number of seconds > 0")
    return seconds


# --- the first worker ----------------------------------------------------------------------------------------------


def begin(session: Session, last: int) -> int:
    """Everybody at the state of the first worker's session, to train up to step ``last``; returns it."""
    if session.workers.alone:
        return last
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        if session.workers.first:
            checkpoint.save(path, session.state_dict())
        content = session.workers.tell(path.read_bytes() if session.workers.first else b"")
        if not session.workers.first:
            path.write_bytes(content)
            session.load_state_dict(checkpoint.load(path))
    return int(session.workers.decide(lambda: last))


def give_up(workers: Workers, error: BaseException) -> None:
    """Say why there is no run, if the others are still waiting for it to begin."""
    if not workers.alone and not workers.begun:
        workers.tell(json.dumps({"failed": str(error) or type(error).__name__}).encode())


# --- the others ----------------------------------------------------------------------------------------------------


def follow(workers: Workers) -> Session:
    """Step along until the first worker's last step. Nothing is written, printed or evaluated here."""
    from erlangen.training.run import Interrupted, stop_requests

    facts = workers.decide(dict)
    session = Session(TrainConfig.from_dict(facts["config"]), run_id=facts["run"], workers=workers)
    last = begin(session, 0)
    with stop_requests() as asked:
        while session.step_count < last:
            session.step()
            if workers.any(bool(asked)) and session.step_count < last:
                raise Interrupted(f"rank {workers.rank} stopped after step {session.step_count}")
    return session
