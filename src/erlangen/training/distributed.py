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
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from erlangen.training import checkpoint
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.moments import is_checkpoint, is_evaluation
from erlangen.training.session import Session
from erlangen.workers import LostWorker, Workers, local_rank

if TYPE_CHECKING:
    from erlangen.training.run import Result

#: seconds without an answer after which a worker counts as lost
TIMEOUT = 600.0


def train(*args: Any, **options: Any) -> Result:
    """`run.train`, with the help of the other workers; for the first one."""
    from erlangen.training.run import train as run

    return _lead(lambda workers: run(*args, **{**options, "workers": workers}))


def resume(*args: Any, **options: Any) -> Result:
    """`run.resume`, with the help of the other workers, however many there were before; for the first one."""
    from erlangen.training.run import resume as run

    return _lead(lambda workers: run(*args, **{**options, "workers": workers}))


def assist() -> None:
    """What every other worker does meanwhile."""
    with joined() as workers:
        follow(workers)


def _lead(run: Callable[[Workers], Result]) -> Result:
    with joined() as workers:
        if not workers.first:
            raise RuntimeError(f"rank {workers.rank} cannot lead a run: call assist() on all ranks but the first")
        workers.busy(_timeout() / 4)
        try:
            return run(workers)
        except BaseException as error:
            give_up(workers, error)
            raise


@contextmanager
def joined() -> Iterator[Workers]:
    """The workers that torchrun started, or those of the caller's process group; alone where there is neither.

    ``ERLANGEN_TIMEOUT`` is the number of seconds without an answer after which a worker counts as lost.
    """
    if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _require_rendezvous()
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices:
            torch.cuda.set_device(local_rank() % devices)
        one_each = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= devices  # NCCL wants a device for every process
        dist.init_process_group("cpu:gloo,cuda:nccl" if one_each else "gloo", timeout=timedelta(seconds=_timeout()))
        try:
            yield Workers.current()
        except BaseException:
            raise  # without a farewell: with a lost worker it would wait for ever
        else:
            dist.destroy_process_group()
    else:
        yield Workers.current()


def _require_rendezvous() -> None:
    """Where the processes meet, as torchrun tells them."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        count = os.environ["WORLD_SIZE"]
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set, so that the processes cannot meet: start them with "
            f"torchrun --nproc-per-node {count} -m erlangen train …, or unset WORLD_SIZE to train in one"
        )


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
    workers = session.workers
    if workers.alone:
        return last
    last, workers.begun = workers.decide(lambda: last), True
    if session.shards is not None:
        session.shards.hand_out()
        session.shards.leading = workers.first
        return last
    if last == session.step_count and workers.first:
        workers.tell(b"")
        return last
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        if workers.first:
            checkpoint.save(path, session.state_dict())
        content = workers.tell(path.read_bytes() if workers.first else b"")
        if not workers.first and content:
            path.write_bytes(content)
            session.load_state_dict(checkpoint.load(path))
    return last if content else session.step_count


def meet(session: Session, for_good: bool = False) -> None:
    """Between two steps the first worker may ask the others to evaluate or gather shards with it; until here they attend."""
    shards = session.shards
    if shards is None:
        return
    if not session.workers.first:
        shards.attend()
    else:
        shards.dismiss()
        shards.leading = shards.leading and not for_good


def agree(session: Session, last: int) -> None:
    """Before weights are evaluated or kept, all workers compare theirs."""
    done = session.step_count
    if done == last or is_evaluation(session.config, done) or is_checkpoint(session.config, done):
        session.training.agree()


def anyone_asks(session: Session, asked: list[int]) -> bool:
    """Whether any worker was asked to stop."""
    meet(session)
    return session.workers.any(bool(asked))


def give_up(workers: Workers, error: BaseException) -> None:
    """Say why there is no run, if the others are still waiting for it to begin."""
    if not workers.alone and not workers.begun:
        with suppress(LostWorker):  # they may have stopped for the same reason
            workers.tell(json.dumps({"failed": str(error) or type(error).__name__}).encode())


# --- the others ----------------------------------------------------------------------------------------------------


def follow(workers: Workers) -> Session:
    """Step along until the first worker's last step. Nothing is written, printed or evaluated here."""
    from erlangen.training.run import Interrupted, stop_requests

    facts: dict[str, Any] = workers.decide(dict)
    session = Session(TrainConfig.from_dict(facts["config"]), run_id=facts["run"], workers=workers)
    last = begin(session, 0)
    with stop_requests() as asked:
        while session.step_count < last:
            session.step()
            agree(session, last)
            if anyone_asks(session, asked) and session.step_count < last:
                meet(session)
                raise Interrupted(f"rank {workers.rank} stopped after step {session.step_count}")
    meet(session)
    return session
