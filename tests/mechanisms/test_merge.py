"""Sums of several workers are the sum of one: for every mechanism of the registry, whatever it keeps pending."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.accounting import Accountant
from erlangen.audit.recipes import Recipe, recipes
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.mechanisms import GaussianMechanism, Mechanism, StreamNoise
from erlangen.mechanisms.clipping import AdaptiveQuantile
from erlangen.mechanisms.clipping.base import ClippingRule
from erlangen.private import PrivateTraining
from erlangen.sampling import PoissonSampler
from erlangen.workers import Workers

RECIPES = [r for r in recipes(sigma=0.3, seed=0) if isinstance(r, Recipe)]


def merge_all(mechanisms: list[Mechanism]) -> None:
    """What `Workers.add_up` does, in one process: totals on the first mechanism, zeros on the others."""
    handed: list[list[torch.Tensor]] = []
    for mechanism in reversed(mechanisms):
        calls = iter(range(10))

        def add_up(tensors: list[torch.Tensor], first=mechanism is mechanisms[0], calls=calls) -> list[torch.Tensor]:
            k = next(calls)
            while len(handed) <= k:
                handed.append([])
            if not handed[k]:
                handed[k] = [torch.zeros_like(t) for t in tensors]
            handed[k] = [a + b for a, b in zip(handed[k], tensors, strict=True)]
            return handed[k] if first else [torch.zeros_like(t) for t in tensors]

        mechanism.merge(add_up)


def gradients(mechanism: Mechanism, n: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(n, *shape, generator=g) for name, shape in mechanism.shapes.items()}


def check_merge(build) -> None:
    """Two steps of four workers, one without records, against one process with the same noise."""
    alone, several = build(), [build() for _ in range(4)]
    for step in range(2):
        all_of_it = gradients(alone, 9, step)
        whole = alone.release(all_of_it)
        for mechanism, (start, end) in zip(several, ((0, 4), (4, 4), (4, 7), (7, 9)), strict=True):
            mechanism.accumulate(PerSampleGradients.from_dense({n: t[start:end] for n, t in all_of_it.items()}))
        merge_all(several)
        released = several[0].finish(alone.expected_batch)
        for name, value in whole.items():
            torch.testing.assert_close(released[name], value, rtol=1e-4, atol=1e-6)
        state = several[0].state_dict()
        assert state == alone.state_dict() or "reference" in state
        for mechanism in several[1:]:
            mechanism.load_state_dict({**state, "noise": mechanism.noise.state_dict()})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_mechanism_adds_up(recipe):
    check_merge(recipe.build)


def adaptive(kind: type[GaussianMechanism] = GaussianMechanism, rule: type[ClippingRule] = AdaptiveQuantile):
    def build() -> Mechanism:
        mechanism = kind(0.3, rule(0.5), noise=StreamNoise(0))
        mechanism.bind({"w": torch.zeros(3, 2), "b": torch.zeros(3)}, 8.0)
        return mechanism

    return build


def test_counts_of_adaptive_clipping_are_added_up():
    check_merge(adaptive())


class ForgetsTheCount(GaussianMechanism):
    """The broken twin: hands over the gradients and keeps the side query's count to itself."""

    def merge(self, add_up) -> None:
        self._sum = dict(zip(self._sum, add_up(list(self._sum.values())), strict=True))


def test_a_mechanism_that_forgets_a_sum_is_caught():
    with pytest.raises(AssertionError):
        check_merge(adaptive(ForgetsTheCount))


class Silent(GaussianMechanism):
    merge = Mechanism.merge


def test_a_mechanism_that_does_not_say_is_refused_by_several_workers():
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    mechanism = Silent(1.0, 1.0)
    make = lambda workers: PrivateTraining(  # noqa: E731
        module, optimizer, Tape({}, "sum"), mechanism, PoissonSampler(4, 2), Accountant(), None, workers
    )
    make(Workers())
    with pytest.raises(ValueError, match="merge"):
        make(Workers(0, 2))
