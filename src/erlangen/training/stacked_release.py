"""Clip, sum and noise for all members of an ensemble at once: one class per family of mechanisms.

Each is its mechanism, batched over members: `add` gives every row a weight and adds the weighted gradients to ``total``
[E, d]; `release` adds noise once and returns what is stepped with. No call asks the device for a value, so that both can
be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.precision import exact_float32
from erlangen.mechanisms import (
    Diagonal,
    Direction,
    Fourier,
    GaussianMechanism,
    Geometry,
    Layerwise,
    Mechanism,
    PublishedGeoDP,
    PublishedGReDP,
    Shrink,
)
from erlangen.mechanisms.clipping import PSAC, AutoS, ClippingRule, Flat, PerLayer
from erlangen.mechanisms.frequency import GUARD, hartley, parity
from erlangen.mechanisms.geodp import SHORTEST
from erlangen.mechanisms.hyperspherical import from_spherical, to_spherical
from erlangen.mechanisms.rep import Aligned
from erlangen.streams import fill_normal
from erlangen.training.config import ConfigError
from erlangen.training.stacked_rows import Filter, Rows, norms

if TYPE_CHECKING:
    from erlangen.training.stacked import Stack


class StackedRelease(ABC):
    """What the members release. ``state`` are the tensors that change from step to step; ``groups`` the parameters that are
    clipped together, all of them but where a family knows ``per_layer`` clipping."""

    per_layer = False

    def __init__(self, mechanisms: Sequence[Mechanism], stack: Stack) -> None:
        self.mechanisms, self.stack = list(mechanisms), stack
        self.state: dict[str, Tensor] = {}
        rules = [m.clipping for m in mechanisms]  # type: ignore[attr-defined]
        known = (Flat, AutoS, PSAC, *((PerLayer,) if self.per_layer else ()))
        groups = [rule.groups(list(stack.shapes)) for rule in rules]
        if (
            len({type(rule) for rule in rules}) > 1
            or type(rules[0]) not in known  # a subclass may clip otherwise
            or any(g != groups[0] for g in groups)
        ):
            raise ConfigError(
                "the members of an ensemble clip alike: all flat, all auto-s, all psac, or (iso, rep, spectral and gredp) all the "
                "same layers; else use Session"
            )
        self.rule: ClippingRule = rules[0]
        self.groups: list[list[str]] = groups[0]
        count = len(self.groups)
        each = [rule.each(count) if isinstance(rule, PerLayer) else [rule.bound] for rule in rules]
        safe = [[rule.safe_bound(stack.flat, bound) for bound in own] for rule, own in zip(rules, each, strict=True)]
        #: of every group, [E, 1]
        self.bounds = [self.column(values) for values in zip(*safe, strict=True)]
        self.metric = torch.ones_like(stack.flat)

    def column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.stack.flat.dtype, device=self.stack.flat.device)[:, None]

    def weights(self, norms: Tensor, bound: Tensor) -> Tensor:
        """The clipping rule on norms [E, P] of what is clipped together."""
        if isinstance(self.rule, AutoS):
            return bound / (norms + self.rule.gamma)
        if isinstance(self.rule, PSAC):
            return bound / (norms + self.rule.r / (norms + self.rule.r))
        return (bound / norms).clamp(max=1.0)

    def energies(self, gradients: Mapping[str, Rows]) -> dict[str, Tensor]:
        """Squared norms of every parameter's rows, [E, P]."""
        return {name: rows.energy() for name, rows in gradients.items()}

    def add(self, gradients: Mapping[str, Rows], present: Tensor, total: Tensor) -> None:
        """Rows that are ``present`` [E, P]; one that is not finite contributes exactly zero, and is not read."""
        energies = self.energies(gradients)
        here = lambda group: [name for name in group if name in gradients]  # noqa: E731
        groups = [(group, bound) for group, bound in zip(map(here, self.groups), self.bounds, strict=True) if group]
        found = [norms([energies[name] for name in group], bound.dtype) for group, bound in groups]
        drop = ~(present & torch.isfinite(torch.stack(found)).all(0))
        parts = self.stack.split(total)
        for (group, bound), norm in zip(groups, found, strict=True):
            weights = self.row_weights(norm, drop, bound).masked_fill(drop, 0.0)
            for name in group:
                parts[name].add_(gradients[name].weighted_sum(weights))

    def row_weights(self, norms: Tensor, drop: Tensor, bound: Tensor) -> Tensor:
        return self.weights(norms, bound)

    def forget(self) -> None:
        """What was added up besides ``total`` and not released yet."""

    @abstractmethod
    def release(self, total: Tensor, batch: float, generator: torch.Generator) -> Tensor:
        """The private mean gradients [E, d]; ``total`` may be overwritten."""

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return fill_normal(torch.empty_like(like), generator)


class StackedGaussian(StackedRelease):
    """Identity, diagonal and Fourier geometries, and GReDP and Spectral-DP as published.

    Noise is white before geometry, of its own scale in every layer, but for GReDP's noise with unlike parts a and b: with Π the
    parity of a kernel's places and z white, ½(a + b)·z + ½(a − b)·Πz has variance a² on even sequences and b² on odd ones.
    """

    per_layer = True

    def __init__(self, mechanisms: Sequence[GaussianMechanism], stack: Stack) -> None:
        super().__init__(mechanisms, stack)
        ones = {n: torch.ones(s) for n, s in stack.shapes.items()}
        metrics = [m.geometry.m if isinstance(m.geometry, Diagonal) else ones for m in mechanisms]
        self.metric = torch.stack([stack.vector(m) for m in metrics])
        self.plain = not any(isinstance(m.geometry, Diagonal) for m in mechanisms)
        white, turned = zip(*(_scales(m, stack) for m in mechanisms))
        self.std, self.turned_std = torch.stack(white) * self.metric, torch.stack(turned)
        self.turn = _parity(mechanisms, stack) if bool(self.turned_std.any()) else None
        self.filters: dict[str, Filter] = {}
        self.frames: dict[str, Tensor] = {}
        if not all(_unfiltered(m) for m in mechanisms):
            self._filter(mechanisms)

    def _filter(self, mechanisms: Sequence[GaussianMechanism]) -> None:
        """Per filtered kernel: how it is measured where the norm sees the filter, and the projector [E, K, K]."""
        for name in self.stack.shapes:
            sizes = {m.geometry.mask[name].shape for m in mechanisms if isinstance(m.geometry, Fourier)}
            size = max((s.numel() for s in sizes), default=1)
            kept = [_kept(m, name, size) for m in mechanisms]
            if any(k is not None for k in kept):
                identity = torch.eye(size, dtype=torch.float64)
                project = torch.stack([identity if k is None else k @ k.T for k in kept])
                self.frames[name] = project.to(self.stack.flat)
                seen = [None if _clips_first(m) else k for m, k in zip(mechanisms, kept, strict=True)]
                if any(k is not None for k in seen):
                    self.filters[name] = _guarded(seen, size, self.stack.flat)

    def energies(self, gradients: Mapping[str, Rows]) -> dict[str, Tensor]:
        metrics = {} if self.plain else self.stack.split(self.metric)
        energy = lambda name, rows: (  # noqa: E731
            rows.filtered_energy(self.filters[name], metrics.get(name))
            if name in self.filters
            else rows.energy(metrics.get(name))
        )
        return {name: energy(name, rows) for name, rows in gradients.items()}

    def release(self, total: Tensor, batch: float, generator: torch.Generator) -> Tensor:
        z = self.noise(total, generator)
        noisy = total.addcmul_(z, self.std)
        if self.turn is not None:
            noisy = noisy.addcmul_(z.index_select(1, self.turn), self.turned_std)
        with exact_float32():
            for name, project in self.frames.items():
                part = self.stack.split(noisy)[name]
                part.copy_((part.reshape(part.shape[0], -1, project.shape[1]) @ project).view(part.shape))
        return noisy.div_(batch)


def _scales(mechanism: GaussianMechanism, stack: Stack) -> tuple[Tensor, Tensor]:
    """The noise of every coordinate of the sum before geometry, [d]: what multiplies z, and what multiplies Πz."""
    layer = {n: mechanism.layer_std(n) for n in stack.shapes}
    ones = stack.vector({n: torch.full(shape, layer[n]) for n, shape in stack.shapes.items()})
    if not isinstance(mechanism, PublishedGReDP):
        return ones, torch.zeros_like(ones)
    (a, b), often = mechanism.split, math.sqrt(mechanism.repeats)
    return ones * (often * (a + b) / 2), ones * (often * (a - b) / 2)


def _parity(mechanisms: Sequence[GaussianMechanism], stack: Stack) -> Tensor:
    """Where the negative of each place of each kernel lies in ``flat``, [d]."""
    uneven = [m for m in mechanisms if isinstance(m, PublishedGReDP) and m.split[0] != m.split[1]]
    dims = [m.geometry.dims for m in uneven if isinstance(m.geometry, Fourier)]
    if any(d != dims[0] for d in dims):
        raise ConfigError(
            "members whose noise is not white are transformed over the same axes; train others with Session"
        )
    place, parts = 0, []
    for name, shape in stack.shapes.items():
        places = torch.arange(place, place + shape.numel()).view(shape)
        parts.append(parity(places, dims[0][name]).flatten())
        place += shape.numel()
    return torch.cat(parts).to(stack.flat.device)


def _unfiltered(mechanism: GaussianMechanism) -> bool:
    g = mechanism.geometry
    return not isinstance(g, Fourier) or all(bool(mask.all()) for mask in g.mask.values())


def _clips_first(mechanism: GaussianMechanism) -> bool:
    return isinstance(mechanism.geometry, Fourier) and mechanism.geometry.order == "clip-first"


def _kept(mechanism: GaussianMechanism, name: str, size: int) -> Tensor | None:
    """The frequencies of one kernel that are kept, orthonormal columns [K, J]; None where it is not filtered."""
    g = mechanism.geometry
    if not isinstance(g, Fourier) or bool(g.mask[name].all()):
        return None
    mask = g.mask[name]  # over as many entries as any member filters together, or a part of them
    units = torch.eye(size, dtype=torch.float64).view(size, -1, *mask.shape)
    return hartley(units, tuple(range(2, mask.ndim + 2))).flatten(1)[:, mask.flatten().repeat(units.shape[1])]


def _guarded(kept: Sequence[Tensor | None], size: int, like: Tensor) -> Filter:
    """‖(P + κ²I)^½ g‖² = κ²‖g‖² + ‖g·kept‖² for every model; ‖g‖² where nothing is filtered."""
    identity, nothing = torch.eye(size, dtype=torch.float64), torch.zeros(size, 0, dtype=torch.float64)
    width = max(k.shape[1] for k in kept if k is not None)
    columns = [F.pad(k, (0, width - k.shape[1])) for k in (nothing if k is None else k for k in kept)]
    inside, outside = math.sqrt(1 + GUARD**2), GUARD
    matrices = [identity if k is None else outside * identity + (inside - outside) * k @ k.T for k in kept]
    share = torch.tensor([1.0 if k is None else GUARD**2 for k in kept])
    everywhere = all(k is not None for k in kept)
    return Filter(torch.stack(matrices).to(like), share.to(like), torch.stack(columns).to(like), everywhere)


class StackedDirection(StackedRelease):
    """GeoDP's `direction` and `shrink`: normalised rows and the sum of their clipped norms."""

    def __init__(self, mechanisms: Sequence[Direction], stack: Stack) -> None:
        super().__init__(mechanisms, stack)
        flat = stack.flat
        self.direction_std = self.column([m.direction_std for m in mechanisms])
        self.magnitude_std = self.column([m.magnitude_std for m in mechanisms])
        self.limit = self.column([m.clipping.bound for m in mechanisms])
        self.scaled = self.column([float(m.magnitude == "scaled") for m in mechanisms])
        self.shrinks = self.column([float(isinstance(m, Shrink)) for m in mechanisms])
        self.unit = mechanisms[0].clipping.safe_bound(flat, 1.0)
        self.state = {"magnitude": torch.zeros_like(flat[:, :1]), "reference": torch.zeros_like(flat)}

    def row_weights(self, norms: Tensor, drop: Tensor, bound: Tensor) -> Tensor:
        reported = torch.minimum(self.weights(norms, bound).nan_to_num(0.0, 0.0, 0.0) * norms, self.limit)
        self.state["magnitude"].add_(torch.where(drop, 0.0, reported).sum(1, keepdim=True))
        return torch.where(norms > SHORTEST, self.unit / norms, 0.0)

    def forget(self) -> None:
        self.state["magnitude"].zero_()

    def release(self, total: Tensor, batch: float, generator: torch.Generator) -> Tensor:
        u = total.addcmul_(self.noise(total, generator), self.direction_std)
        magnitude, reference = self.state["magnitude"], self.state["reference"]
        m = (magnitude + self.noise(magnitude, generator) * self.magnitude_std).clamp_(min=0.0)
        u = torch.where(self.shrinks > 0, self._shrunk(u, reference), u)
        length = torch.linalg.vector_norm(u, dim=1, keepdim=True)
        inverse = torch.where(length > 0, 1.0 / length, 0.0)
        reference.copy_(u * inverse)
        magnitude.zero_()
        factor = m * inverse * torch.where(self.scaled > 0, length / batch, 1.0)
        return u * (factor / batch)

    def _shrunk(self, u: Tensor, reference: Tensor) -> Tensor:
        """James–Stein towards the last direction; u itself where there is none yet."""
        along = (u * reference).sum(1, keepdim=True)
        orthogonal = (u.square().sum(1, keepdim=True) - along.square()).clamp(min=0.0)
        keep = (1.0 - (u.shape[1] - 1) * self.direction_std.square() / orthogonal).nan_to_num(0.0).clamp(min=0.0)
        known = reference.any(1, keepdim=True)
        return torch.where(known, keep * u + (1.0 - keep) * along * reference, u)


class StackedPublishedGeoDP(StackedRelease):
    """GeoDP as published: noise on the angles and the length of the average. No guarantee."""

    def __init__(self, mechanisms: Sequence[PublishedGeoDP], stack: Stack) -> None:
        super().__init__(mechanisms, stack)
        d = stack.flat.shape[1]
        self.spread = self.column([m.noise_multiplier * m.beta * math.pi * math.sqrt(d + 2) for m in mechanisms])
        self.length_std = self.column([m.noise_multiplier * m.clipping.sensitivity for m in mechanisms])

    def release(self, total: Tensor, batch: float, generator: torch.Generator) -> Tensor:
        radius, phi = to_spherical(total / batch)
        phi = phi.addcmul(self.noise(phi, generator), self.spread / batch)
        radius = radius + self.noise(radius, generator) * self.length_std[:, 0] / batch
        return from_spherical(radius, phi)


def stacked_release(mechanisms: Sequence[Mechanism], stack: Stack) -> StackedRelease:
    """The batched form of mechanisms of one family; ConfigError where there is none."""
    for family, build in FAMILIES.items():
        if all(type(m) in family and _stackable(m) for m in mechanisms):
            return build(mechanisms, stack)  # type: ignore[arg-type]
    names = sorted({f"{m.name} ({type(m).__name__})" for m in mechanisms})
    raise ConfigError(
        f"{', '.join(names)} cannot share an ensemble: members are of one family (diagonal or Fourier geometries, GeoDP's "
        "direction and shrink, or GeoDP as published), subclasses are not, and filters act on the last axes; train others with "
        "Session"
    )


#: exactly these classes: what a subclass does otherwise would not be done, and its event charged all the same
FAMILIES: Mapping[tuple[type[Mechanism], ...], Callable[[Sequence[Any], Stack], StackedRelease]] = {
    (PublishedGeoDP,): StackedPublishedGeoDP,
    (Direction, Shrink): StackedDirection,
    (GaussianMechanism, Aligned, Layerwise, PublishedGReDP): StackedGaussian,
}


def _stackable(mechanism: Mechanism) -> bool:
    if not isinstance(mechanism, GaussianMechanism) or isinstance(mechanism, PublishedGeoDP):
        return True
    if type(mechanism.geometry) not in (Geometry, Diagonal, Fourier):
        return False
    return _unfiltered(mechanism) or _on_last_axes(mechanism.geometry)  # type: ignore[arg-type]


def _on_last_axes(g: Fourier) -> bool:
    """Whether filters are matrices from the right, as `_kept` takes them."""
    filtered = (name for name, mask in g.mask.items() if not bool(mask.all()))
    return all(g.dims[name] == tuple(range(-len(g.dims[name]), 0)) for name in filtered)


__all__ = ["StackedRelease", "stacked_release"]
