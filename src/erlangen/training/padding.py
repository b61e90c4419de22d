"""Poisson batches of many runs in tables of a static size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from erlangen.streams import Stream


class PoissonProcess:
    """Poisson batches, many steps at a time: every record is in every batch independently with probability q.

    The N·S trials of S steps are one Bernoulli sequence; the gaps between its successes are geometric. So the cost is
    one draw per record that is *in* a batch, and the distribution is that of a trial for each record (up to the 53 bits
    of a double). Steps are drawn in blocks of `BLOCK`, each from its own stream, so that a run can be resumed.
    """

    BLOCK = 64

    def __init__(self, records: int, batch: float, stream: Stream) -> None:
        self.records, self.q, self.stream, self.step = records, batch / records, stream, 0
        self._held: list[np.ndarray] = []
        #: the root of the stream that they were drawn from: copies and forks draw batches of their own
        self._of = stream.root

    def draw(self, steps: int) -> list[np.ndarray]:
        """The next ``steps`` batches."""
        batches = []
        for _ in range(steps):
            block, place = divmod(self.step, self.BLOCK)
            if place == 0 or not self._held or self._of != self.stream.root:
                self._held = self._block(block)
            batches.append(self._held[place])
            self.step += 1
        return batches

    def _block(self, block: int) -> list[np.ndarray]:
        self._of = self.stream.root
        if self.q >= 1:
            return [np.arange(self.records)] * self.BLOCK
        rng = np.random.Generator(np.random.PCG64(self.stream.at(block).initial_seed()))
        trials, expected = self.records * self.BLOCK, self.records * self.BLOCK * self.q
        places, last = [], -1
        while last < trials:
            gaps = rng.geometric(self.q, int(expected + 6 * math.sqrt(expected)) + 8)
            places.append(last + np.cumsum(gaps))
            last = int(places[-1][-1])
        found = np.concatenate(places)
        found = found[: np.searchsorted(found, trials)]
        starts = np.searchsorted(found, np.arange(1, self.BLOCK) * self.records)
        return np.split(found % self.records, starts)


class PaddedBatches:
    """The batches of all members as tables [passes, members, rows] of record indices, −1 for padding.

    A batch that is longer than ``rows`` continues in another pass of the same step: nothing is truncated.
    """

    def __init__(self, draws: Sequence[Callable[[int], list[np.ndarray]]], rows: int) -> None:
        self.draws, self.rows = list(draws), rows

    def draw(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The table of ``steps`` steps, and how many of its passes belong to each step (at least one)."""
        with ThreadPoolExecutor(min(8, len(self.draws))) as pool:  # numpy draws without the interpreter's lock
            batches = list(pool.map(lambda draw: draw(steps), self.draws))
        sizes = np.array([[len(batch) for batch in member] for member in batches])
        passes = np.maximum(1, -(-sizes.max(0) // self.rows))
        first = np.concatenate([[0], np.cumsum(passes)[:-1]])
        table = np.full((int(passes.sum()), len(batches), self.rows), -1, dtype=np.int32)
        for k, member in enumerate(batches):
            step = np.repeat(np.arange(steps), sizes[k])
            rank = np.arange(len(step)) - np.repeat(np.cumsum(sizes[k]) - sizes[k], sizes[k])
            table[first[step] + rank // self.rows, k, rank % self.rows] = np.concatenate(member)
        return table, passes

    def skip_to(self, step: int) -> None:
        """Go on as if ``step`` steps had been drawn; for samplers that count their steps."""
        for draw in self.draws:
            process = getattr(draw, "__self__", None)
            if not isinstance(process, PoissonProcess):
                raise ValueError("draws given by the caller cannot be resumed; give the members their own samplers")
            if step < process.step:  # set back: unless it is seeded, a batch that was drawn before is not drawn again
                process.stream = process.stream.renewed()
            process.step, process._held = step, process._block(step // process.BLOCK)


def physical_size(records: int, batch: float, members: int) -> int:
    """The static size, a multiple of 8, with the least work per step: rows × expected passes.

    A second pass is needed when any of the members draws more than fits: Poisson tail for each, union over them.
    """
    if batch >= records:
        return records
    sizes = range(8 * math.ceil(batch / 8), 8 * math.ceil((batch + 12 * math.sqrt(batch) + 16) / 8), 8)
    return min(sizes, key=lambda size: size * (1 + min(1.0, members * _tail(batch, size))))


def _tail(mean: float, size: int) -> float:
    """Pr[Poisson(mean) > size]"""
    terms = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(size + 1))
    return max(0.0, 1.0 - math.fsum(terms))
