"""What is known of which record is where without reading them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from erlangen.sampling.order import order_of

N = 64


class Listed(Dataset):
    """Whatever it holds of each record; reading one says nothing."""

    def __init__(self, held) -> None:
        self.held = held

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> int:
        return 0


def swapped(places: list, a: int = 5, b: int = 6) -> list:
    places = list(places)
    places[a], places[b] = places[b], places[a]
    return places


HELD = {
    "names": lambda order: [f"/data/{k:03}.png" for k in order],
    "paths": lambda order: [Path("/data") / f"{k:03}.png" for k in order],
    "names and labels": lambda order: [(f"/data/{k:03}.png", k % 3) for k in order],
    "labels": tuple,
    "tensor": torch.tensor,
    "array": np.array,
    "names in an array": lambda order: np.array([f"{k:03}" for k in order]),
    "a subset": lambda order: Subset(TensorDataset(torch.arange(N)), order),
    "another": lambda order: Listed(order),
}


@pytest.mark.parametrize("held", HELD)
def test_two_records_in_each_other_s_place_are_seen_in_what_a_data_set_holds(held):
    make, order = HELD[held], list(range(N))
    assert order_of(Listed(make(order))) == order_of(Listed(make(order)))
    assert order_of(Listed(make(order))) != order_of(Listed(make(swapped(order))))
    assert order_of(Listed(make(order)), read=False) == order_of(Listed(make(swapped(order))), read=False), "nobody asked"
    joined = [ConcatDataset([Listed(make(o)), Listed(make(order))]) for o in (order, swapped(order))]
    assert order_of(joined[0]) != order_of(joined[1])


def test_folders_of_other_machines_and_what_is_not_of_each_record_are_no_other_order(tmp_path):
    here, there = ([f"/{root}/images/{k:03}.png" for k in range(N)] for root in ("node-1/tmp", "scratch"))
    assert order_of(Listed(here)) == order_of(Listed(there))
    for one, other in ((np.float32(1), np.float32(2)), ([1], [2]), ([None] * N, [object()] * N), (torch.ones(()), torch.zeros(()))):
        assert order_of(Listed(one)) == order_of(Listed(other))
    assert order_of(Listed(type("Endless", (Dataset,), {})())) == order_of(Listed(None)), "without a length it has no order"
    own = Listed(None)
    own.held = own
    assert order_of(own) == order_of(Listed(None))
    files = [np.memmap(tmp_path / f"{k}", np.float32, "w+", shape=(N,)) for k in range(2)]
    files[1][:] = 1
    assert order_of(Listed(files[0])) == order_of(Listed(files[1])), "arrays on disk are not read"
