"""Which drawn batch a step belongs to.

A loop draws a batch, trains on it, and draws the next one. Whoever draws further before the step (a prefetcher, a list of
batches) or skips a batch leaves several candidates; whose rows a batch holds must not be guessed, so that is an error.
"""

from __future__ import annotations

import warnings

import torch

from erlangen.sampling.samplers import Draw

_GIVEN_UP = (
    "a batch went through the module and was given up before its step, in a loop that goes on. If what it held decided that (a "
    "loss that is not finite, or too large), a step that was not taken says so, and no ε covers it: step on every batch. A record "
    "whose gradient is not finite counts for nothing anyway."
)

_SKIPPED = (
    "{count} batch(es) were drawn by next(iter(loader)) and given up since the last step, in a loop that draws the batches of its "
    "steps so. If what a batch held decided that (its loss, its size, a value in it), a step that was not taken says so, and no ε "
    "covers it: step on every batch that is drawn, and look at records in a DataLoader of their own."
)

_SEEDED = (
    "torch was seeded between the draw of a batch and its step, and numbers were drawn after that. The masks of dropout, and "
    "whatever else is drawn for each row, are known then: one record more moves them for all rows behind it, and the sum by many "
    "bounds. Seed before the loop, not in it, or inside torch.random.fork_rng(), which sets the generator back."
)

_ADDED_UP = (
    "a batch went backward, and the next one was drawn before optimizer.step(): gradients are not added up over batches, because "
    "each is clipped and noised as one draw. For a larger batch give the DataLoader the larger batch_size, and make_private "
    "max_physical_batch=…, the rows that fit into memory; then step on every batch the loader gives."
)

#: batches in a row that went elsewhere before that is said: one or two are looked at
ELSEWHERE = 3
_ELSEWHERE = (
    f"{ELSEWHERE} batches of the private loader in a row went elsewhere than through the private module. Copies of it (deepcopy, "
    "pickle, torch.load) are ordinary modules: what they, or any other module, learn from these records is neither clipped nor "
    "noised, and no ε covers it; nor does one cover statistics of them. Train the module that make_private returned, or make the "
    "copy private, too."
)


class Pass:
    """One iteration over a data loader."""

    def __init__(self) -> None:
        self.over = self.left = self.stepped = self.given_up = False
        #: batches drawn in it so far
        self.draws = 0
        #: the sampler's expected batch when the batch in hand was drawn: loaders draw ahead, and it may have moved since
        self.expected_batch: float | None = None
        #: which of the sampler's draws that batch is a part of
        self.draw: Draw | None = None
        #: of the generators when that batch was handed out; None where the training is seeded
        self.seed: int | None = None

    @property
    def single(self) -> bool:
        """Left with its first batch: ``next(iter(loader))``."""
        return self.left and self.draws == 1

    @property
    def idle(self) -> bool:
        """Nobody is going to train on what is open of it: it was left early, or ran through without a single step."""
        return self.left or (self.over and not self.stepped)


class Tickets:
    """The batches that were drawn and not trained on yet."""

    def __init__(self) -> None:
        self._open: list[Pass | None] = []
        #: the pass of the last step, and how many were left with a batch in hand since
        self._last: Pass | None = None
        self._skipped = 0
        self._said_seeded = False
        #: batches in a row that the module never saw
        self._elsewhere = 0

    def draw(self, source: Pass | None, tried: bool, backward: bool = False, used: bool = True) -> None:
        """A batch was drawn in the pass ``source`` (None: announced by hand, which says what comes next).

        ``tried``: the batch before went through the module and was then given up, as after an exception; ``backward``: it went
        all the way back, and nobody stepped or discarded it. ``used``: any layer was called since it was drawn.
        """
        self._remark_on_elsewhere(source, used)
        if backward and source is not None and self._open == [source]:
            self._open.clear()
            raise RuntimeError(_ADDED_UP)
        if source is not None:
            self._count_skipped(source, tried)
        if source is None or (tried and len(self._open) == 1):
            if source is not None and self._open == [source]:
                source.given_up = True
            self._open.clear()
        self._open = [p for p in self._open if p is source or (p is not None and not p.idle)]
        self._open.append(source)

    def _remark_on_elsewhere(self, source: Pass | None, used: bool) -> None:
        """Once: a loop goes on over batches, and not with the module that is private."""
        if used:
            self._elsewhere = 0
        elif source is not None and source.draws:
            self._elsewhere += 1
            if self._elsewhere == ELSEWHERE:
                warnings.warn(_ELSEWHERE, stacklevel=5)

    def _count_skipped(self, source: Pass, tried: bool) -> None:
        """Batches of passes that were left: looked at before training began, or given up by a loop that goes on elsewhere."""
        source.draws += 1
        for p in self._open:
            if p is None or p is source or not p.left:
                continue
            if p.stepped:  # a loop that was left: by a count of steps, or after it had seen what the batch held
                source.given_up |= tried
            else:
                self._skipped += p.single

    def take(self) -> None:
        """The batch of this step: there must be exactly one."""
        waiting, self._open = self._open, []
        if not waiting:
            raise RuntimeError(
                "this batch was not drawn by the data loader that make_private returned (or was used twice): sampling, "
                "owners and accounting belong to its draws. Iterate over the returned loader. (Batches of your own, announced with "
                "engine.training.announce(RowMap…), are accounted without amplification.)"
            )
        if len(waiting) > 1:
            raise RuntimeError(
                f"{len(waiting)} batches were drawn since the last step, so whose rows this one holds is not known: a prefetcher "
                "runs ahead, batches were collected in a list, or one was skipped. Train on each batch before the next one "
                "is drawn, empty ones too; num_workers= and pin_memory= of the DataLoader prefetch without this."
            )
        if waiting[0] is not None:
            waiting[0].stepped = True
            if not self._said_seeded and _known_since(waiting[0].seed):
                warnings.warn(_SEEDED, stacklevel=5)
                self._said_seeded = True
            if waiting[0].given_up:
                warnings.warn(_GIVEN_UP, stacklevel=5)
                waiting[0].given_up = False
            if self._skipped and waiting[0].draws == 1 and self._last is not None and self._last.single:
                warnings.warn(_SKIPPED.format(count=self._skipped), stacklevel=5)
        self._last, self._skipped = waiting[0], 0


def _known_since(seed: int | None) -> bool:
    """Whether somebody has set another seed than this one, and drawn from it. Of other devices only the seed is compared."""
    now = torch.initial_seed()
    if seed is None or now == seed:
        return False
    return torch.cuda.is_initialized() or not torch.equal(torch.Generator().manual_seed(now).get_state(), torch.get_rng_state())
