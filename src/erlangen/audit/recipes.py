"""How every registered mechanism is built for an audit: its variants, and small networks that suit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from erlangen.audit.montecarlo import Subject
from erlangen.audit.steps import Step
from erlangen.mechanisms import Context, Mechanism, StreamNoise, make_clipping, mechanisms
from erlangen.streams import seed_layers

#: options under which a registered mechanism is audited; a builder may bring its own as an attribute ``audited``
VARIANTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "spectral": ({}, {"order": "clip-first"}, {"as_published": True}),
    "gredp": ({}, {"as_published": "complex"}, {"as_published": "real"}, {"as_published": "per-sample"}),
    "geodp": ({}, {"form": "shrink"}, {"form": "angles"}, {"magnitude": "scaled"}, {"as_published": True, "beta": 0.1}),
    "clipless": ({"loss": 1.0}, {"loss": 1.0, "split": "local"}, {"loss": 1.0, "split": "global"}),
}
BATCH = 4.0


def small_network() -> nn.Module:
    """A convolution with a bias and a linear head: 18 parameters, few enough for full covariances."""
    return nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(4, 2, bias=False))


def small_lipschitz_network() -> nn.Module:
    from erlangen import lipschitz as lip

    first, kernel = lip.BoundedInput((1, 3, 3), 1.0), lip.SpectralConv2d(1, 1, 3, bias=True)
    return lip.Sequential(first, kernel, lip.Flatten(), lip.SpectralDense(9, 2))


def large_network() -> nn.Module:
    """A convolution and a dense layer of some ten thousand parameters each."""
    return nn.Sequential(nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(128, 80, bias=False))


def large_lipschitz_network() -> nn.Module:
    from erlangen import lipschitz as lip

    first, kernel = lip.BoundedInput((32, 4, 4), 1.0), lip.SpectralConv2d(32, 32, 3, bias=True)
    return lip.Sequential(first, kernel, lip.Flatten(), lip.SpectralDense(512, 20))


def dense_lipschitz_network() -> nn.Module:
    """Two dense layers with orthogonal weights: every bound of it is reached by some record."""
    from erlangen import lipschitz as lip

    return lip.Sequential(lip.BoundedInput((5,), 1.0), lip.SpectralDense(5, 5), lip.SpectralDense(5, 3))


NETWORKS: tuple[Callable[[], nn.Module], ...] = (small_network, small_lipschitz_network)
#: the same kinds of layers, larger
ENLARGED: Mapping[Callable[[], nn.Module], Callable[[], nn.Module]] = {
    small_network: large_network, small_lipschitz_network: large_lipschitz_network,
}  # fmt: skip
#: networks on which a mechanism that was built on the key is trained, with the shape of their inputs
TRAINED: Mapping[Callable[[], nn.Module], tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...]] = {
    small_network: ((small_network, (1, 4, 4)),),
    small_lipschitz_network: ((dense_lipschitz_network, (5,)), (small_lipschitz_network, (1, 3, 3))),
}


@dataclass(frozen=True)
class Recipe:
    """How to build one registered mechanism for an audit, again and again."""

    mechanism: str
    options: Mapping[str, Any]
    network: Callable[[], nn.Module] = small_network
    clipping: str = "flat"
    bound: float = 0.7
    sigma: float = 1.0
    seed: int | None = None
    batch: float = BATCH

    @property
    def name(self) -> str:
        told = ", ".join(f"{k}={v}" for k, v in self.options.items() if k != "loss")
        rule = "" if self.clipping == "flat" else f", {self.clipping}"
        return self.mechanism + rule + (f" ({told})" if told else "")

    def build(self) -> Mechanism:
        seed_layers(0)
        module = self.network()
        rule = make_clipping(self.clipping, self.bound)
        context = Context(self.sigma, rule, StreamNoise(self.seed, "audit"), module, self.batch, dict(self.options))
        mechanism = mechanisms()[self.mechanism](context)
        mechanism.bind(dict(module.named_parameters()), self.batch)
        return mechanism

    def subject(self) -> Subject:
        return Subject(self.name, self.build, dict(self.build().shapes))

    def steps(self) -> Iterator[Callable[[], Step]]:
        """The same mechanism in training, on every network that suits it."""
        for network, shape in TRAINED.get(self.network, ()):
            yield partial(self._step, network, shape)

    def _step(self, network: Callable[[], nn.Module], shape: tuple[int, ...]) -> Step:
        seed_layers(0)
        return Step(
            network(), shape, self.mechanism, dict(self.options), sigma=self.sigma, bound=self.bound, clipping=self.clipping,
            seed=self.seed,
        )  # fmt: skip


def recipes(only: str | None = None, **settings: Any) -> Iterator[Recipe | tuple[str, str]]:
    """A recipe for every variant of every registered mechanism (or one), or (name, why it could not be built)."""
    for name, builder in mechanisms().items():
        if only not in (None, name):
            continue
        for options in VARIANTS.get(name, getattr(builder, "audited", ({},))):
            yield first_that_builds(name, options, **settings)


def first_that_builds(name: str, options: Mapping[str, Any], **settings: Any) -> Recipe | tuple[str, str]:
    reasons = []
    for network in NETWORKS:
        recipe = Recipe(name, options, network, **settings)
        try:
            recipe.build()
        except (TypeError, ValueError) as error:
            reasons.append(str(error))
            continue
        return recipe
    return Recipe(name, options).name, reasons[-1]
