"""Samplers draw the units of one logical batch and say how the draw changes the cost of a release."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from erlangen.accounting import poisson
from erlangen.streams import SharedWords, Stream, secure_words
from erlangen.workers import Workers

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Draw(NamedTuple):
    """Which of a sampler's draws a batch is, and, where workers divide it, a number of 24 bits made of who is in it: after a
    run was set back two draws may have the same place, and a record can be in both."""

    step: int
    mark: int = 0


class Sampler(ABC):
    """Draws batches of unit indices 0…N−1. ``expected_batch`` is the fixed denominator of every step."""

    name: str
    neighbouring: str
    #: why batches drawn like this give no guarantee, for samplers that give none; `event` must then be non-private
    unsound: str | None = None

    def __init__(
        self, units: int, expected_batch: float, seed: int | None = None, run_id: str = "", secure: bool = False
    ) -> None:
        if units < 1:
            raise ValueError("the data set is empty: there is nothing to train on")
        if not (math.isfinite(expected_batch) and expected_batch > 0):
            raise ValueError(f"the batch size is {expected_batch}; it must be positive")
        if expected_batch > units:
            raise ValueError(
                f"the batch size {expected_batch:g} is larger than the data set ({units} units of privacy); lower it"
            )
        self.units, self.expected_batch, self.secure = units, float(expected_batch), secure
        self.step = 0
        #: steps below this one were drawn from the stream in hand
        self._drawn = 0
        self.last, self._divided = Draw(0), False
        self._stream = Stream("sampling", seed, run_id)
        self._words: Callable[[int], Tensor] = secure_words

    def join(self, workers: Workers) -> None:
        """From here on all workers draw the same batches, each by itself: one Poisson draw, which they divide.

        The first worker's entropy (or, in secure mode, a fresh key) is sent once; after that nothing is said.
        """
        if not workers.alone:
            key = workers.tell(os.urandom(32))
            self._stream, self._words = self._stream.sharing(key.hex()), SharedWords(key)
            self.step, self._divided = workers.decide(lambda: self.step), True

    @property
    def seeded(self) -> bool:
        """Whether whoever knows the seed can draw the same batches."""
        return self._stream.seed is not None

    @property
    def sample_rate(self) -> float:
        return self.expected_batch / self.units

    @property
    def steps_per_epoch(self) -> int:
        return max(1, round(self.units / self.expected_batch))

    def at(self, expected_batch: float) -> Sampler:
        """This sampler as it was, or will be, at another expected batch: for the price of what was drawn then."""
        if expected_batch == self.expected_batch:
            return self
        other = copy.copy(self)
        other.expected_batch = expected_batch
        return other

    def draw(self) -> Tensor:
        """The units of the next logical batch; may be empty. A run that was set back draws other batches than it did before,
        unless it is seeded: each release is priced as one on a draw of its own."""
        if self.step < self._drawn:
            self._stream = self._stream.renewed()
        batch = self._draw(self.step)
        self.last = Draw(self.step, _mark(batch) if self._divided else 0)
        self.step += 1
        self._drawn = self.step
        return batch

    @abstractmethod
    def _draw(self, step: int) -> Tensor: ...

    @abstractmethod
    def event(self, release: DpEvent) -> DpEvent:
        """The event of one step: the release as this sampler amplifies it (or not)."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "units": self.units,
            "expected_batch": self.expected_batch,
            "sample_rate": self.sample_rate,
            "secure": self.secure,
        }


def _mark(batch: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(batch.numpy().tobytes()).digest()[:3], "little")


_SAMPLERS: dict[str, type[Sampler]] = {}


def register_sampler(kind: type[Sampler]) -> type[Sampler]:
    """Make a sampler known by its ``name``: the static audit looks at every one."""
    _SAMPLERS[kind.name] = kind
    return kind


@register_sampler
class PoissonSampler(Sampler):
    """Every unit is in the batch independently with probability q = expected_batch/N, exactly.

    Inclusion compares a uniform 62-bit integer with ⌈q·2⁶²⌉, so that the true rate differs from q by less than 2⁻⁶².
    """

    name = "poisson"
    neighbouring = "add-or-remove-one"

    def _draw(self, step: int) -> Tensor:
        top = 1 << 62
        threshold = min(top, math.ceil(self.sample_rate * top))
        if threshold == top:
            return torch.arange(self.units)
        if self.secure:
            draws = self._words(self.units) & (top - 1)
        else:
            draws = torch.randint(0, top, (self.units,), generator=self._stream.at(step))
        return torch.nonzero(draws < threshold).flatten()

    def event(self, release: DpEvent) -> DpEvent:
        return poisson(self.sample_rate, release)


@register_sampler
class ShuffledBatches(Sampler):
    """A fresh permutation each epoch, cut into batches of fixed size; the last may be smaller. No amplification.

    Each step is charged as a release on the whole data set. The neighbouring relation is replacing a record by one that
    contributes nothing (N is public): adding a record would shift every later batch.
    """

    name = "shuffled"
    neighbouring = "replace-special"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order: tuple[int, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.units / self.expected_batch)

    def _draw(self, step: int) -> Tensor:
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        size = int(self.expected_batch)
        return self._order[1][index * size : (index + 1) * size]

    def _permutation(self, epoch: int) -> Tensor:
        if self.secure:  # 64-bit keys: a tie has probability N²/2⁶⁵
            return torch.argsort(self._words(self.units))
        return torch.randperm(self.units, generator=self._stream.at(epoch))

    def event(self, release: DpEvent) -> DpEvent:
        return release


def samplers() -> dict[str, type[Sampler]]:
    """Every registered sampler by name."""
    return dict(_SAMPLERS)
