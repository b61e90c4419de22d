"""Poisson batches of many members, laid out in tables of a static size: every record that was drawn, once."""

from __future__ import annotations

import copy
import math
import multiprocessing

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.streams import Stream
from erlangen.training.padding import PaddedBatches, PoissonProcess, physical_size
from tests.alone import alone


def test_the_process_is_poisson_sampling():
    """Sizes, inclusion rates and independence of records and steps, against N independent trials."""
    records, batch, steps = 50, 7, 6400
    drawn = PoissonProcess(records, batch, Stream("t", 1)).draw(steps)
    hits = np.zeros((steps, records))
    for k, indices in enumerate(drawn):
        assert len(np.unique(indices)) == len(indices)
        hits[k, indices] = 1
    q = batch / records
    error = math.sqrt(q * (1 - q) / steps)
    assert np.abs(hits.mean(0) - q).max() < 4.5 * error
    assert abs(hits.sum(1).var() / (records * q * (1 - q)) - 1) < 0.08
    centred = (hits - q) / math.sqrt(q * (1 - q))
    across = centred.T @ centred / steps - np.eye(records)
    assert np.abs(across).max() < 5 / math.sqrt(steps)
    lag = (centred[:-1, -1] * centred[1:, 0]).mean()
    assert abs(lag) < 4.5 / math.sqrt(steps), "the end of a step leaks into the next"


def test_full_batches_hold_everyone():
    assert all(len(b) == 9 for b in PoissonProcess(9, 9, Stream("t", 1)).draw(3))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 23), min_size=4, max_size=4), min_size=1, max_size=4), rows=st.integers(1, 9)
)
def test_tables_hold_every_record_once(sizes, rows):
    rng = np.random.default_rng(0)
    batches = [[rng.permutation(1000)[:n] for n in member] for member in sizes]
    table, passes = PaddedBatches([lambda n, m=m: m for m in batches], rows).draw(4)
    assert table.shape == (passes.sum(), len(sizes), rows)
    ends = np.cumsum(passes)
    for step in range(4):
        part = table[ends[step] - passes[step] : ends[step]]
        assert passes[step] == max(1, max(-(-member[step] // rows) for member in sizes))
        for k, member in enumerate(batches):
            held = part[:, k].reshape(-1)
            assert sorted(held[held >= 0]) == sorted(member[step])


def test_the_static_size_balances_padding_and_second_passes():
    assert physical_size(60_000, 64, 1) < physical_size(60_000, 64, 60) <= 112
    assert physical_size(50, 50, 3) == 50
    assert physical_size(60_000, 1, 20) % 8 == 0


def batches_after_fork() -> list[list[int]]:
    """The next batch of a process of draws that both sides of a fork hold, in the middle of a block."""
    process, context = PoissonProcess(400, 200, Stream("sampling")), multiprocessing.get_context("fork")
    process.draw(3)
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(process.draw(1)[0].tolist()))
    child.start()
    found = [answers.get(), process.draw(1)[0].tolist()]
    child.join()
    return found


def test_forks_and_copies_draw_batches_of_their_own_in_the_middle_of_a_block():
    """Two releases on one draw cost more than two on a draw each, which is what both sides account."""
    one, other = alone(batches_after_fork)
    assert one != other
    for seed, same in ((None, False), (3, True)):
        process = PoissonProcess(400, 200, Stream("sampling", seed))
        process.draw(3)
        assert np.array_equal(copy.deepcopy(process).draw(1)[0], process.draw(1)[0]) is same
