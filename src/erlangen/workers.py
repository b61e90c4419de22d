"""The processes that train one model together, and the few things they say to each other.

The *first* worker (rank 0) keeps the books: sums go to it, it writes the release down and adds the noise, and sends the
private gradient to all. A process that trains alone is a group of one, for which every call here is free. Messages are
bytes and tensors; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class LostWorker(RuntimeError):
    """A process of the group ended, hung or refused; nothing that it had not yet released was used."""


class Workers:
    """A group of processes. ``Workers()`` is the group of one; `Workers.current` the initialised default group."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        if not 0 <= rank < count:
            raise ValueError(f"rank is {rank} in a group of {count}; ranks are 0…{count - 1}")
        self.rank, self.count = rank, count
        #: whether training has begun; until then the others wait for the first one's word
        self.begun = False
        #: ends `busy`, if that was begun
        self._speak: Callable[[], None] = lambda: None

    @classmethod
    def current(cls) -> Workers:
        """Everybody in the default process group; alone if there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    # -- tensors --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Σ over workers on the first one, zeros on the others: afterwards each sum is held once."""
        if self.alone:
            return list(tensors)
        result: list[Tensor] = [torch.zeros_like(t) for t in tensors]
        for places, flat in _buckets(tensors):
            there = self._place(flat)
            with self.asking("adding up gradients"):
                dist.reduce(there, 0, dist.ReduceOp.SUM)
            if self.first:
                for k, part in zip(places, _split(there.to(flat.device), [tensors[k] for k in places]), strict=True):
                    result[k] = part
        return result

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first worker's tensors, on every worker; the others give tensors of the same shapes."""
        if self.alone:
            return list(tensors)
        result: list[Tensor] = list(tensors)
        for places, flat in _buckets(tensors):
            there = self._place(flat)
            with self.asking("sending gradients"):
                dist.broadcast(there, 0)
            for k, part in zip(places, _split(there.to(flat.device), [tensors[k] for k in places]), strict=True):
                result[k] = part
        return result

    def align(self, module: nn.Module) -> None:
        """Parameters and buffers as the first worker has them."""
        if self.alone:
            return
        own = [*module.parameters(), *module.buffers()]
        with torch.no_grad():
            for mine, theirs in zip(own, self.send([t.detach() for t in own]), strict=True):
                mine.copy_(theirs)

    # -- facts ----------------------------------------------------------------------------------------------------

    def tell(self, message: bytes) -> bytes:
        """The first worker's message; what the others give is not read."""
        if self.alone:
            return message
        self._speak()
        return self._tell(message)

    def _tell(self, message: bytes) -> bytes:
        size = self._place(torch.tensor([len(message)]))
        with self.asking("waiting for the first worker"):
            dist.broadcast(size, 0)
            held = torch.frombuffer(bytearray(message), dtype=torch.uint8) if self.first and message else None
            body = self._place(torch.zeros(int(size), dtype=torch.uint8) if held is None else held)
            dist.broadcast(body, 0)
        return bytes(body.cpu().numpy().tobytes())

    def busy(self, every: float) -> None:
        """From now to its next word the first worker has something to do that may outlast the others' patience (to learn a
        prior, to read the data): they wait in `decide`, and are told so every so many seconds."""
        if self.alone or not self.first or "gloo" not in str(dist.get_backend_config()):
            return
        over = threading.Event()

        def beat() -> None:
            with suppress(LostWorker):  # the next word finds out, and says so
                while not over.wait(every):
                    self._tell(json.dumps({"busy": True}).encode())

        thread = threading.Thread(target=beat, name="busy", daemon=True)

        def speak() -> None:
            over.set()
            thread.join()

        self._speak = speak
        thread.start()

    def decide(self, make: Callable[[], T]) -> T:
        """``make()`` on the first worker, its result (plain JSON) on all; if it raises there, everybody stops."""
        if self.alone:
            return make()
        if not self.first:
            answer = json.loads(self.tell(b""))
            while "busy" in answer:
                answer = json.loads(self.tell(b""))
            if "failed" in answer:
                raise LostWorker(f"the first worker stopped: {answer['failed']}")
            return answer["value"]
        try:
            value = make()
            message = json.dumps({"value": value})
        except BaseException as error:
            with suppress(LostWorker):  # what went wrong here comes first
                self.tell(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
            raise
        self.tell(message.encode())
        return value

    def any(self, flag: bool) -> bool:
        """Whether any worker says so."""
        if self.alone:
            return flag
        said = self._place(torch.tensor([int(flag)]))
        with self.asking("finding out whether to stop"):
            dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())

    def require_same(self, facts: Mapping[str, str]) -> None:
        """Everybody was started with the same of these; if not, everybody raises and says who differs in what."""
        if self.alone:
            return
        first = json.loads(self.tell(json.dumps(dict(facts)).encode()))
        different = [name for name, value in facts.items() if first.get(name) != value]
        if self.any(bool(different)):
            whose = f"on rank {self.rank}: {', '.join(different)}" if different else "on another rank"
            raise ValueError(f"the workers were not started alike; different from the first worker's {whose}")

    def require_equal_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Checksums of the bits of every parameter agree, or everybody raises."""
        if self.alone:
            return
        own = self._place(torch.stack([_checksum(t) for t in weights.values()]).cpu())
        theirs = own.clone()
        with self.asking("comparing weights"):
            dist.broadcast(theirs, 0)
        different = [name for name, same in zip(weights, (own == theirs).tolist(), strict=True) if not same]
        if self.any(bool(different)):
            where = f"{different[0]!r} on rank {self.rank}" if different else "a parameter of another rank"
            raise LostWorker(
                f"the workers' weights differ after step {step}: {where} is not the first worker's. Nothing outside "
                "optimizer.step() may write to them, and all workers need the same kind of device and the same versions; "
                "resume from the last checkpoint"
            )

    # -- the wire -------------------------------------------------------------------------------------------------

    def _place(self, t: Tensor) -> Tensor:
        """A copy of ``t`` where the group's back end can carry it."""
        names = str(dist.get_backend_config())
        carried = "cuda" if "nccl" in names else "cpu"
        if "gloo" in names and t.device.type == "cpu":
            carried = "cpu"
        device = torch.device(carried, torch.cuda.current_device()) if carried == "cuda" else torch.device(carried)
        return t.to(device, copy=True).contiguous()

    @contextmanager
    def asking(self, doing: str) -> Iterator[None]:
        """What back ends raise inside is a `LostWorker`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # what back ends raise for closed connections and timeouts
            lines = re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).splitlines()  # without the back end's own source line
            why = lines[0].split(". ")[0][:120] if lines else type(error).__name__
            raise LostWorker(
                f"rank {self.rank} of {self.count} lost another worker while {doing} ({why}). No gradient was used that "
                "was not accounted first. Go on with `erlangen train --resume`, or from the last checkpoint of your own script, "
                "with as many workers as you like"
            ) from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """(places, flat copy) of all tensors of one kind: one message each, in the same order on every worker."""
    kind = lambda k: (str(tensors[k].device.type), str(tensors[k].dtype))  # noqa: E731
    for _, group in groupby(sorted(range(len(tensors)), key=kind), key=kind):
        places = list(group)
        yield places, torch.cat([tensors[k].detach().flatten() for k in places])


def _split(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    like = list(like)
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(t: Tensor) -> Tensor:
    """A sum over the bit patterns, each weighted by its place: equal bits have equal sums."""
    words = t.detach().contiguous().view(_WORD[t.element_size()]).flatten().to(torch.int64)
    return (words * (2 * torch.arange(words.numel(), device=t.device) + 1)).sum()


def local_rank() -> int:
    """Which of its machine's processes this one is, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))
