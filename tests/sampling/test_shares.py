"""A logical batch divided among workers and padded to static shapes: nobody is lost, doubled or split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.sampling import PoissonSampler, ShuffledBatches, Units
from erlangen.sampling.physical import static_rows
from erlangen.streams import SharedWords, Stream
from erlangen.workers import Workers


def all_shares(units: Units, batch: torch.Tensor, limit: int | None, count: int, padded: bool = False):
    return [units.share(batch, limit, Workers(rank, count), padded) for rank in range(count)]


def check_partition(units: Units, batch: torch.Tensor, shares: list, limit: int | None) -> None:
    """Each unit of the batch, with all its rows, is in exactly one physical batch of one worker, in order."""
    rows = [r for s in shares for rows, owner in s.parts for r, o in zip(rows.tolist(), owner.tolist()) if o >= 0]
    assert rows == [r for unit in units.rows_of(batch) for r in unit.tolist()]
    places = [{int(u) for u in owner if u >= 0} for s in shares for _, owner in s.parts]
    assert sum(len(p) for p in places) == len(set().union(*places)) == len(batch)
    assert len({len(s.parts) for s in shares}) == 1
    assert {s.total for s in shares} == {len(rows)}
    before = 0
    for s in shares:
        assert s.start == before
        before += sum(int((owner >= 0).sum()) for _, owner in s.parts)
    if limit and not units.grouped:
        assert all(len(rows) <= limit for s in shares for rows, _ in s.parts)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_shares_are_a_partition(data):
    labels = np.array(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=25)))
    units = Units(len(labels), labels if data.draw(st.booleans()) else None)
    chosen = data.draw(st.sets(st.integers(0, units.count - 1)))
    batch = torch.tensor(sorted(chosen), dtype=torch.long)
    limit, count = data.draw(st.sampled_from([None, 1, 3, 8])), data.draw(st.integers(1, 5))
    padded = limit is not None and data.draw(st.booleans())
    shares = all_shares(units, batch, limit, count, padded)
    check_partition(units, batch, shares, None if padded else limit)
    assert all(len(rows) == len(owner) > 0 for s in shares for rows, owner in s.parts)
    if padded:
        assert all(len(rows) % limit == 0 and len(rows) for s in shares for rows, _ in s.parts)


def test_work_is_balanced():
    shares = all_shares(Units(1000), torch.arange(0, 1000, 2), None, 4)
    assert [len(s.parts[0][0]) for s in shares] == [125] * 4


class LosesTheLast(Units):
    """The broken twin: cuts between the rows before a unit instead of after it."""

    def _ends(self, units, count):
        rows = self._sizes(units).cumsum(0)
        return torch.searchsorted(rows, torch.tensor([int(rows[-1]) * k // count for k in range(count + 1)]))


class SplitsPatients(Units):
    """The broken twin: divides rows, not units."""

    def share(self, units, limit, workers, padded=False):
        rows = torch.cat(self.rows_of(units))
        owner = units.repeat_interleave(self._sizes(units))
        mine = slice(len(rows) * workers.rank // workers.count, len(rows) * (workers.rank + 1) // workers.count)
        from erlangen.sampling.units import Share

        return Share([(rows[mine], owner[mine])], mine.start, len(rows))


@pytest.mark.parametrize("twin", [LosesTheLast, SplitsPatients])
def test_broken_divisions_are_caught(twin):
    units, batch = twin(9, np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])), torch.arange(3)
    with pytest.raises(AssertionError):
        check_partition(units, batch, all_shares(units, batch, None, 2), None)


def test_a_batch_that_overflows_its_padding_is_split_not_cut():
    units = Units(100)
    parts = units.physical(torch.arange(10), 8, padded=True)
    assert [len(rows) for rows, _ in parts] == [8, 8]
    assert sum(int((owner >= 0).sum()) for _, owner in parts) == 10
    with pytest.raises(ValueError, match="limit"):
        units.physical(torch.arange(3), None, padded=True)


def test_static_rows_are_rarely_exceeded():
    from scipy import stats

    for expected in (1.0, 40.0, 8192.0):
        rows = static_rows(expected)
        assert rows % 8 == 0
        assert stats.poisson.sf(rows, expected) < 1e-4 if expected < 10 else stats.poisson.sf(rows, expected) < 2e-8


class Told(Workers):
    """Two workers in one process: the second hears what the first said."""

    said: list[bytes]

    def __init__(self, rank: int, said: list[bytes]) -> None:
        super().__init__(rank, 2)
        self.said = said

    def tell(self, message: bytes) -> bytes:
        if self.first:
            self.said.append(message)
            return message
        return self.said.pop(0)


@pytest.mark.parametrize("kind", [PoissonSampler, ShuffledBatches])
@pytest.mark.parametrize("how", [{"seed": 3}, {}, {"secure": True}])
def test_workers_draw_the_same_batches_without_asking_again(kind, how):
    said: list[bytes] = []
    samplers = [kind(60, 12, **how) for _ in range(2)]
    for rank, sampler in enumerate(samplers):
        sampler.join(Told(rank, said))
    assert not said
    draws = [[sampler.draw() for _ in range(20)] for sampler in samplers]
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    assert len({tuple(d.tolist()) for d in draws[0]}) == 20
    if how == {"seed": 3}:  # several workers see what one would
        alone = kind(60, 12, seed=3)
        assert all(torch.equal(alone.draw(), d) for d in draws[0])


def test_secure_shared_draws_are_bernoulli_and_the_key_is_forgotten():
    words = SharedWords(bytes(32))
    first = words._key
    hits = torch.stack([(words(40) & ((1 << 62) - 1)) < (1 << 60) for _ in range(3000)]).double()
    assert float(hits.mean()) == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / hits.numel()) ** 0.5)
    correlation = torch.corrcoef(hits.T) - torch.eye(40)
    assert float(correlation.abs().max()) < 6 / 3000**0.5
    assert words._key != first
    assert len(words(0)) == 0
    with pytest.raises(ValueError, match="32"):
        SharedWords(b"short")


def test_streams_are_shared_by_entropy_not_by_chance():
    a, b = (Stream("sampling").sharing("abc") for _ in range(2))
    draw = lambda s: torch.rand(4, generator=s.at(0))  # noqa: E731
    assert torch.equal(draw(a), draw(b))
    assert not torch.equal(draw(a), draw(Stream("sampling")))
