"""A data loader whose batches are drawn by a private sampler.

Each logical batch is one draw; `max_physical_batch` cuts it into physical batches, and only the last of them is a step.
The loader tells ``announce`` whose rows a batch holds just before it hands the batch out, so that the training loop
stays an ordinary one.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate

from erlangen.gradients.rows import RowMap
from erlangen.sampling.records import layout_of, require_layout
from erlangen.sampling.samplers import Draw, Sampler
from erlangen.sampling.tickets import Pass
from erlangen.sampling.units import Units, require_units
from erlangen.streams import seed_layers
from erlangen.workers import Workers

#: told (whose rows, first of its logical batch, last of its logical batch, which pass) before each physical batch
Announce = Callable[[RowMap, bool, bool, Pass], None]


class _Batches:
    """The batch sampler: lists of row indices, and beside them what each physical batch is."""

    def __init__(self, sampler: Sampler, units: Units, limit: int | None, workers: Workers) -> None:
        self.sampler, self.units, self.limit, self.workers = sampler, units, limit, workers
        self.coming: deque[tuple[RowMap, bool, bool, float, Draw]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        coming = self.coming
        for _ in range(self.sampler.steps_per_epoch):
            expected = self.sampler.expected_batch
            parts = self.units.share(self.sampler.draw(), self.limit, self.workers).parts
            draw = self.sampler.last  # loaders draw ahead
            for k, (rows, owner) in enumerate(parts):
                plain = not self.units.grouped and int(owner[0]) >= 0
                owners = RowMap.regular(len(rows)) if plain else RowMap.of(owner)
                coming.append((owners, k == 0, k == len(parts) - 1, expected, draw))
                yield rows.tolist()

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch


class _RenewedWorker:
    """A worker process begins as the user has it begin, and then draws what nobody knows: a seed that was set there is known."""

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self.begin = begin

    def __call__(self, worker: int) -> None:
        if self.begin is not None:
            self.begin(worker)
        renew_generators()


class PrivateLoader(DataLoader):
    """Behaves as the `DataLoader` it was made from; an epoch has round(N / expected batch) logical batches.

    Of several workers each gets its share of every logical batch, in equally many physical batches.
    """

    def __init__(
        self, plain: DataLoader, sampler: Sampler, units: Units, limit: int | None, announce: Announce,
        workers: Workers | None = None,
    ) -> None:  # fmt: skip
        refuse_iterable(plain)
        self.private_sampler, self.units, self._announce = sampler, units, announce
        self._layout = layout_of(plain.dataset)
        #: the attribute of the data set that says whose each record is, where there is one
        self.unit_attribute: str | None = None
        self._batches = _Batches(sampler, units, limit, workers or Workers())
        self._collate = plain.collate_fn or default_collate
        loading: dict[str, Any] = {}
        if plain.num_workers:
            loading = {"prefetch_factor": plain.prefetch_factor, "persistent_workers": plain.persistent_workers}
        super().__init__(
            plain.dataset,
            batch_sampler=self._batches,  # type: ignore[arg-type]
            collate_fn=self._collate,
            num_workers=plain.num_workers,
            pin_memory=plain.pin_memory,
            timeout=plain.timeout,
            worker_init_fn=plain.worker_init_fn if sampler.seeded else _RenewedWorker(plain.worker_init_fn),
            generator=plain.generator if sampler.seeded else None,
            multiprocessing_context=plain.multiprocessing_context,
            **loading,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        require_layout(self.dataset, self._layout)
        if self.unit_attribute is not None:
            require_units(self.dataset, self.unit_attribute, self.units)
        if self.collate_fn is not self._collate:
            raise RuntimeError(
                "the collate function is another one than when the loader was made private: whether it puts a record into the "
                "rows of others was not looked at. Give it to the DataLoader that make_private is called with"
            )
        if not self.private_sampler.seeded:
            renew_generators()
        coming = self._batches.coming = deque()  # a queue of its own: iterations may overlap
        this = Pass()
        try:
            for batch in super().__iter__():
                rows, first, last, this.expected_batch, this.draw = coming.popleft()
                if not self.private_sampler.seeded:  # whoever fetched it, or made the last step, may have seeded them
                    renew_generators(unused=False)
                    this.seed = torch.initial_seed()
                self._announce(rows, first, last, this)
                yield batch
        except GeneratorExit:  # the loop was left, or one batch was looked at
            this.left = True
            raise
        finally:
            this.over = True


def renew_generators(unused: bool = True) -> None:
    """What dropout and augmentation draw from now on is known to nobody, whatever was seeded before.

    A record's mask depends on how many rows are before it. Where the seed is known, one record more changes the masks, and with
    them the clipped gradients, of all that follow; where it is not, every record has a mask of its own, independent of the others.
    With ``unused`` also on devices that nobody has used yet, which takes PyTorch longer.
    """
    if unused:
        torch.seed()
    seed_layers(secrets.randbits(63))
    random.seed(secrets.randbits(128))
    np.random.seed(np.frombuffer(os.urandom(16), np.uint32))  # noqa: NPY002 (what transforms draw from)


def refuse_iterable(loader: Any) -> None:
    """Poisson sampling needs random access to a data set of known size."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"data_loader is a {type(loader).__name__}; pass a torch DataLoader over a map-style data set")
    if isinstance(loader, PrivateLoader):
        raise ValueError(
            "data_loader is private already, because an earlier make_private returned it: pass the DataLoader it was made from"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"the data set {type(loader.dataset).__name__} is iterable-style: private sampling needs len() and random "
            "access. Use a map-style data set."
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise ValueError("the data set is empty: there is nothing to train on")
    if loader.batch_size is None:
        raise ValueError("the data loader has no batch_size (a custom batch sampler): pass one with batch_size=")
