"""Poisson sampling for real: rates, independence, empty batches; units and virtual batches lose nobody."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import TensorDataset

from erlangen.accounting import epsilon, gaussian
from erlangen.data import from_torch
from erlangen.sampling import PoissonSampler, ShuffledBatches, Units, samplers


@pytest.mark.parametrize("secure", [False, True])
def test_inclusion_is_bernoulli_and_independent(secure):
    steps, n, batch = 4000, 20, 6
    sampler = PoissonSampler(n, batch, None if secure else 0, secure=secure)
    hits = torch.zeros(steps, n)
    for t in range(steps):
        hits[t, sampler.draw()] = 1
    q = batch / n
    per_unit = hits.sum(0)
    assert min(stats.binomtest(int(k), steps, q).pvalue for k in per_unit) > 1e-5
    sizes = hits.sum(1)
    assert float(sizes.var()) == pytest.approx(n * q * (1 - q), rel=0.15)
    corr = torch.corrcoef(hits.T) - torch.eye(n)
    assert corr.abs().max() < 5.5 / steps**0.5
    serial = ((hits[1:] - q) * (hits[:-1] - q)).mean(0) / (q * (1 - q))
    assert serial.abs().max() < 5.5 / steps**0.5


def test_fixed_batches_do_not_pass_for_poisson():
    """The broken twin: shuffled batches have no variance in size and correlate between records."""
    sampler = ShuffledBatches(20, 5, 0)
    sizes = torch.tensor([len(sampler.draw()) for _ in range(400)]).float()
    assert float(sizes.var()) == 0


def test_rates_are_exact():
    assert PoissonSampler(7, 3).sample_rate == 3 / 7
    assert len(PoissonSampler(5, 5).draw()) == 5
    sizes = [len(PoissonSampler(50, 1, seed).draw()) for seed in range(300)]
    assert 0 in sizes
    assert sum(sizes) / 300 == pytest.approx(1.0, abs=0.25)


def test_events():
    assert epsilon(PoissonSampler(100, 1).event(gaussian(1.0)), 1e-5) < epsilon(gaussian(1.0), 1e-5)
    assert epsilon(ShuffledBatches(100, 1).event(gaussian(1.0)), 1e-5) == epsilon(gaussian(1.0), 1e-5)
    assert {s.neighbouring for s in samplers().values()} == {"add-or-remove-one", "replace-special"}


def test_state_continues_the_draws():
    a, b = PoissonSampler(50, 10, 7), PoissonSampler(50, 10, 7)
    drawn = [a.draw() for _ in range(4)]
    b.load_state_dict({"step": 2})
    assert torch.equal(b.draw(), drawn[2])
    assert not torch.equal(PoissonSampler(50, 10, 7, run_id="other").draw(), drawn[0])


def test_an_epoch_of_shuffled_batches_sees_everybody_once():
    for secure in (False, True):
        sampler = ShuffledBatches(23, 5, None, secure=secure)
        for _ in range(2):
            seen = torch.cat([sampler.draw() for _ in range(sampler.steps_per_epoch)])
            assert torch.equal(seen.sort().values, torch.arange(23))


@pytest.mark.parametrize(
    ("units", "batch", "match"), [(0, 1, "empty"), (5, 0, "positive"), (5, 6, "larger"), (5, -1, "positive")]
)
def test_bad_sizes(units, batch, match):
    with pytest.raises(ValueError, match=match):
        PoissonSampler(units, batch)


@settings(max_examples=50, deadline=None)
@given(labels=st.lists(st.integers(0, 6), min_size=1, max_size=30), limit=st.one_of(st.none(), st.integers(1, 10)))
def test_physical_batches_keep_units_whole_and_complete(labels, limit):
    units = Units(len(labels), labels, "patient")
    chosen = torch.arange(units.count)
    parts = units.physical(chosen, limit)
    rows = torch.cat([r for r, _ in parts])
    assert sorted(rows.tolist()) == list(range(len(labels)))
    owners = [set(o.tolist()) for _, o in parts]
    assert sum(map(len, owners)) == units.count, "a unit was split between physical batches"
    for r, o in parts:
        names = sorted(set(labels))
        assert [names[k] for k in o.tolist()] == [labels[i] for i in r.tolist()]
        if limit:
            assert len(r) <= limit or len(set(o.tolist())) == 1


def test_records_and_nobody():
    units = Units(10)
    assert [r.tolist() for r, _ in units.physical(torch.tensor([1, 4, 5]), 2)] == [[1, 4], [5]]
    assert [len(r) for r, _ in units.physical(torch.zeros(0, dtype=torch.long), 2)] == [0]
    grouped = Units(3, ["a", "b", "a"])
    assert [len(r) for r, _ in grouped.physical(torch.zeros(0, dtype=torch.long), 2)] == [0]


@pytest.mark.parametrize(
    "labels",
    [
        ["p1", "p2", float("nan"), float("nan")], ["p1", None, None, "p2"], ["p1", "", "", "p2"], [1.0, math.nan, math.nan, 2.0],
        np.array(["p1", "", "", "p2"]), np.array(["p1", None, None, "p2"], dtype=object),
        np.array(["2020-01-01", "NaT", "NaT", "2020-01-02"], dtype="datetime64[D]"),
    ],
)  # fmt: skip
def test_records_of_nobody_are_not_one_unit_together(labels):
    """numpy turned two NaN among names into the unit 'nan': strangers in it moved each other's clipped average by two bounds."""
    with pytest.raises(ValueError, match=r"no value .* for record [12]: give every record an id"):
        Units(4, labels)
    with pytest.raises(ValueError, match="no value"):
        from_torch(TensorDataset(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])), unit=labels)
    assert Units(4, ["nancy", "0", "nancy", "p"]).count == 3
    assert Units(4, torch.tensor([0, 0, 1, 2])).count == 3
