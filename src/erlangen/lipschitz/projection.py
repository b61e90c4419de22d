"""Keeping a network inside its constraints: projection after every step, checked before every use.

A full certification costs some linear algebra per layer, independent of the batch; layers of equal rank share their
kernels, nothing waits for the device, and on a GPU the whole projection is captured once and replayed. Between two full
ones the triangle inequality is enough: ‖W‖ ≤ ‖W_ref‖ + c·‖W − W_ref‖_F (c = 1 dense, √(⌈kh/sh⌉⌈kw/sw⌉) for convolutions)
is as certified and nearly free, but looser: noise moves a weight much further in Frobenius than in operator norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from erlangen.lipschitz.base import Constrained, LipschitzLayer
from erlangen.lipschitz.compose import layers
from erlangen.lipschitz.norms import TINY, Symbols, largest_values
from erlangen.lipschitz.places import places

#: outward factor on a bound that was scaled together with its weight
_SCALED = 1.0 + 1e-6


class Projector:
    """Projects a network; certifies fully every ``every`` calls and by the triangle inequality in between."""

    def __init__(self, network: nn.Module, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"certify_every is {every}; certify every step (1) or every few")
        self.network, self.every = network, every
        self._calls = 0
        self._seen: list[tuple[int, int]] = []
        self._left = torch.empty(0)
        self._places = places(network)
        found = list(layers(network))
        #: layers that only scale their weight: certified together
        self.scaled: list[Constrained] = [m for _, m in found if _only_scales(m)]  # type: ignore[misc]
        self.others = [m for _, m in found if not _only_scales(m)]
        self._known: tuple[float, ...] = ()
        self._full, self._cheap = _Captured(self._certify), _Captured(self._follow)

    @torch.no_grad()
    def __call__(self) -> None:
        """After this every bound of every layer holds."""
        full = self._calls % self.every == 0
        for layer in self.others:
            layer.project()
        if self.scaled:
            key = self._key()
            if key != self._known:
                self._known, full = key, True
                self._prepare()
            (self._full if full else self._cheap)(key, self.scaled[0].weight.is_cuda)
        self._calls += 1
        self._keep()

    def _keep(self) -> None:
        """How the weights were left, in memory that stays where it is."""
        self._seen, now = self._versions(), self.flat()
        if (now.shape, now.dtype, now.device) == (self._left.shape, self._left.dtype, self._left.device):
            self._left.copy_(now)
        else:
            self._left = now

    def _prepare(self) -> None:
        """What the captured calls read and write, in memory that stays where it is."""
        weights = [layer.weight.detach() for layer in self.scaled]
        numbers = torch.zeros(len(weights), dtype=torch.float64, device=weights[0].device)
        self._reference, self._reference_bound = [w.clone() for w in weights], numbers
        self._limits = numbers.new_tensor([layer.lipschitz for layer in self.scaled])
        self._certificate: tuple[Tensor, Tensor] | None = None
        # a float32 sum of n squares is wrong by at most n·u of itself, in any order
        rounding = [1.0 + 2.0**-23 * (w.numel() + 8) for w in weights]
        factors = [layer.frobenius_factor() * r for layer, r in zip(self.scaled, rounding, strict=True)]
        self._factors = numbers.new_tensor(factors)

    def _certify(self) -> None:
        """Certified norms of all layers, and their weights scaled by min(1, l/norm)."""
        scale, bound = self._shrink(self.bounds())
        if self.every > 1:
            self._reference_bound.copy_((scale * bound).nan_to_num(nan=0.0, posinf=0.0) * _SCALED)
            torch._foreach_copy_(self._reference, [layer.weight.detach() for layer in self.scaled])

    def bounds(self) -> Tensor:
        """Full certificates of the layers that only scale their weight, as they are now."""
        together = [(k, s) for k, layer in enumerate(self.scaled) if (s := _symbols(layer)) is not None]
        values, factors = largest_values([s for _, s in together])
        found = {k: v for (k, _), v in zip(together, values, strict=True)}
        own = {k: layer.certified_norm() for k, layer in enumerate(self.scaled) if k not in found}
        every = torch.stack([(found | own)[k].to(self._limits) for k in range(len(self.scaled))])
        if (
            self._certificate is None
        ):  # numbers that depend on shapes alone: they reach the device once, before any capture
            factor, added = [1.0] * len(every), [0.0] * len(every)
            for (k, _), f in zip(together, factors, strict=True):
                factor[k], added[k] = f, TINY
            self._certificate = self._limits.new_tensor(factor), self._limits.new_tensor(added)
        return torch.addcmul(self._certificate[1], every, self._certificate[0])

    def _follow(self) -> None:
        self._shrink(self.between())

    def between(self) -> Tensor:
        """Bounds by the triangle inequality from the last full certificates."""
        moved = torch._foreach_sub([layer.weight.detach() for layer in self.scaled], self._reference)
        lengths = torch.stack(torch._foreach_norm(moved)).double()
        return self._reference_bound + lengths * self._factors + TINY

    def _shrink(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        scales, broken = (self._limits / bounds).clamp(max=1.0), ~(bounds < math.inf)
        for layer, scale, zero in zip(self.scaled, scales, broken, strict=True):
            layer.weight.detach().mul_(scale).masked_fill_(zero, 0.0)
            layer.project_bias()
        return scales, bounds

    def ensure(self) -> None:
        """Project again if any parameter was written to since (a loaded checkpoint, an optimizer of the user's own)."""
        if self._versions() != self._seen:
            self._calls = 0
            self()

    @torch.no_grad()
    def intact(self, before: Tensor) -> Tensor:
        """Whether the weights, and what `flat` said ``before``, are as they were left, said where they are: nobody waits for it.
        Writing to ``.data`` counts no version, so that `ensure` cannot see it."""
        both = torch.cat([*self._vectors(), before]).view(2, before.numel())
        return (both == self._left).all()

    def _key(self) -> tuple[float, ...]:
        """Where the weights lie and what they are held to: if that changes, nothing recorded is used again."""
        found: list[float] = [slots[key].data_ptr() for slots, key, _ in self._places]
        for layer in self.scaled:
            found += (layer.lipschitz, layer.bias_bound)
            found += getattr(layer, "outputs", None) or ()  # the size that a convolution is certified for
        return tuple(found)

    def _weights(self) -> list[Tensor]:
        return [slots[key] for slots, key, _ in self._places]

    @torch.no_grad()
    def flat(self) -> Tensor:
        """All weights as one vector, copied."""
        vectors = self._vectors()
        return torch.cat(vectors) if vectors else torch.empty(0)

    def _vectors(self) -> list[Tensor]:
        weights = self._weights()
        return [w.reshape(-1).to(weights[0].device) for w in weights]

    def _versions(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self._weights()]


def _only_scales(layer: LipschitzLayer) -> bool:
    return isinstance(layer, Constrained) and type(layer).project is Constrained.project


class _Captured:
    """A call without arguments on memory that stays where it is; on a GPU recorded at its second use, then replayed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.possible = call, True
        self.key: tuple[float, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, key: tuple[float, ...], graph: bool) -> None:
        if not (graph and self.possible):
            self.call()
        elif key != self.key:  # the first use: everything that is cached gets cached
            self.key, self.graph = key, None
            self.call()
        elif self.graph is None:
            self._record()
        else:
            self.graph.replay()

    def _record(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.call()
            return
        recorded = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(recorded):
                self.call()
        except RuntimeError:  # something in a layer cannot be recorded: it runs as it is
            self.possible = False
            self.call()
            return
        self.graph = recorded
        recorded.replay()


def _symbols(layer: Constrained) -> Symbols | None:
    """What the shared certification needs of a layer; None if the layer certifies itself in its own way.

    A subclass that overrides `certified_norm` alone has said that the inherited symbols do not describe it.
    """
    kinds = type(layer).__mro__
    place = {
        name: next(k for k, kind in enumerate(kinds) if name in vars(kind)) for name in ("certified_norm", "symbols")
    }
    return None if place["certified_norm"] < place["symbols"] else layer.symbols()
