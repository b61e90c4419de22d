"""The gradients of every row of a stack, one piece per parameter, kept as they were formed until they are summed.

A piece knows the squared norms of its rows and their weighted sums. Formed gradients stay in the precision and the order
of the product that made them; norm and sum read exactly those values, so that a row's contribution is at most what was
measured. The gradient of a linear map on one vector is an outer product and is never formed; nor is that of a wide
convolution of few positions, where kernels can run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import conv_gradient, conv_unformed, stacked_filters, usable
from erlangen.gradients.kernels import stacked_rows as kernel
from erlangen.gradients.kernels.filtered_maps import POINT, filtered_maps
from erlangen.gradients.precision import exact_float32


@dataclass(frozen=True)
class Taps:
    """Kernels [O, C, k·k] stored as [O, k·k·C and some zeros]: the order in which windows lie."""

    outputs: int
    taps: int
    channels: int
    width: int

    def read(self, stored: Tensor) -> Tensor:
        """[…, O·width] → […, O·C·k·k], the parameter's own order."""
        entries = stored.unflatten(-1, (self.outputs, self.width))[..., : self.taps * self.channels]
        return entries.unflatten(-1, (self.taps, self.channels)).transpose(-1, -2).flatten(-3)

    def write(self, values: Tensor, fill: float) -> Tensor:
        """The other way; ``fill`` where nothing is stored."""
        entries = values.unflatten(-1, (self.outputs, self.channels, self.taps)).transpose(-1, -2).flatten(-2)
        return F.pad(entries, (0, self.width - self.taps * self.channels), value=fill).flatten(-2)


@dataclass(frozen=True)
class Fields:
    """Coefficients of pairs of fields [out, in, n] stored as [in, out, n]."""

    fields_out: int
    fields_in: int

    def read(self, stored: Tensor) -> Tensor:
        return stored.unflatten(-1, (self.fields_in, self.fields_out, -1)).transpose(-3, -2).flatten(-3)

    def write(self, values: Tensor, fill: float) -> Tensor:
        return values.unflatten(-1, (self.fields_out, self.fields_in, -1)).transpose(-3, -2).flatten(-3)


Order = Taps | Fields


@dataclass(frozen=True)
class Filter:
    """How a filtered kernel is measured, for every model: ‖g·M‖² = share·‖g‖² + ‖g·B‖², by runs of K entries of the parameter.

    ``share`` [E] and ``columns`` B [E, K, J] in float32 or more. ``matrix`` M [E, K, K] is a filter itself, and commutes with
    shifts as B does not. Where it filters ``everywhere``, in all models, rows may add up g·B·Bᵀ: nothing that is filtered out is in
    that sum, and its norm is ‖g·B‖.
    """

    matrix: Tensor
    share: Tensor
    columns: Tensor
    everywhere: bool = False

    @property
    def size(self) -> int:
        return self.columns.shape[1]


class Rows(ABC):
    """Gradients of one parameter: E models, P rows each, d entries."""

    @abstractmethod
    def energy(self, metric: Tensor | None = None) -> Tensor:
        """‖g/m‖² of every row, [E, P] in float64; ``metric`` [E, d]."""

    def filtered_energy(self, by: Filter, metric: Tensor | None = None) -> Tensor:
        """The same through a filter, ‖(g/m)·M‖²."""
        g = self.dense() if metric is None else self.dense() / metric[:, None]
        return stacked_filters.reference(g, by.share, by.columns, _runs(g.shape[2], by.size))

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i g_i, [E, d]; rows of weight zero are left out, whatever they hold."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[E, P, d], in float32 or more."""


class Formed(Rows):
    """Rows that were written down, [E·P, …]."""

    def __init__(self, models: int, values: Tensor, order: Order | None = None) -> None:
        self.values = values.reshape(models, values.shape[0] // models, -1).contiguous()
        self.order = order

    def energy(self, metric: Tensor | None = None) -> Tensor:
        if metric is not None and self.order is not None:
            metric = self.order.write(metric, 1.0)
        fast = usable(self.values) and self.values.dtype != torch.float64
        return (kernel.energy if fast else kernel.reference_energy)(self.values, metric)

    def filtered_energy(self, by: Filter, metric: Tensor | None = None) -> Tensor:
        groups = self._groups(by.size)
        if metric is not None or groups is None:
            return super().filtered_energy(by, metric)
        fast = usable(self.values) and by.columns.dtype == torch.float32 and stacked_filters.fits(self.values, groups)
        measure = stacked_filters.filtered_energy if fast else stacked_filters.reference
        return measure(self.values, by.share, by.columns, groups)

    def _groups(self, size: int) -> stacked_filters.Groups | None:
        """Where runs of ``size`` entries of the parameter lie; None where they are scattered."""
        if self.order is None:
            return _runs(self.values.shape[2], size)
        if isinstance(self.order, Taps) and self.order.taps == size:
            return stacked_filters.Groups(self.order.outputs, size, self.order.channels, self.order.width)
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        fast = usable(self.values) and weights.dtype == torch.float32 and self.values.dtype != torch.float64
        total = (kernel.weighted_sum if fast else kernel.reference_sum)(weights.contiguous(), self.values)
        return total if self.order is None else self.order.read(total)

    def dense(self) -> Tensor:
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        return values if self.order is None else self.order.read(values)


class Outer(Rows):
    """Rows d aᵀ: ‖d aᵀ‖ = ‖d‖·‖a‖, and the sum is one product in full precision.

    Squares are taken in float64, where those of float32 neither vanish nor overflow. In the sum a row is d/|d|_max times
    w·|d|_max·a, whose entries are at most those of its contribution: w·d could overflow, or be left with a bit or two.
    """

    def __init__(self, models: int, d: Tensor, a: Tensor) -> None:
        self.d, self.a = d.unflatten(0, (models, -1)), a.unflatten(0, (models, -1))

    def energy(self, metric: Tensor | None = None) -> Tensor:
        d, a = self.d.double().square(), self.a.double().square()
        if metric is None:
            return d.sum(2) * a.sum(2)
        inverse = metric.reshape(len(metric), d.shape[2], a.shape[2]).double().square().reciprocal()
        return ((d @ inverse) * a).sum(2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        size = self.d.abs().amax(2, keepdim=True)
        keep = (weights != 0)[..., None] & (size > 0)
        size = torch.where(keep, size, 1.0)
        right = (self.a.double() * (weights[..., None].double() * size.double())).to(weights.dtype)
        with exact_float32():
            return (torch.where(keep, self.d / size, 0.0).mT @ torch.where(keep, right, 0.0)).flatten(1)

    def dense(self) -> Tensor:
        return (self.d[..., :, None] * self.a[..., None, :]).flatten(2)


@dataclass(frozen=True)
class Plane:
    """Where a convolution's windows lie."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter((self.size, self.stride, self.padding, self.dilation))


class Unformed(Rows):
    """Kernel gradients that `conv_unformed` measures and sums from inputs x and cotangents d, channels-last.

    In another metric, or asked for in full, they are formed after all, and from then on those values are the ones that are
    measured and summed. Through a filter of kernels the maps are filtered, and what is left is a 1×1 convolution of these.
    """

    def __init__(self, models: int, x: Tensor, d: Tensor, plane: Plane) -> None:
        self.models, self.x, self.d, self.plane = models, x, d, plane
        self._formed: Formed | None = None
        #: behind a filter, and its columns
        self._behind: tuple[Unformed, Tensor] | None = None

    def form(self) -> Formed:
        if self._formed is None:
            kernels = conv_gradient.conv_gradient(self.x, self.d, 1, *self.plane)[0]  # [N, O, taps, C]
            _, outputs, taps, channels = kernels.shape
            self._formed = Formed(self.models, kernels.flatten(2), Taps(outputs, taps, channels, taps * channels))
        return self._formed

    def energy(self, metric: Tensor | None = None) -> Tensor:
        self._behind = None  # what is summed is what was measured last
        if metric is not None or self._formed is not None:
            return self.form().energy(metric)
        return conv_unformed.squared_norms(self.x, self.d, 1, *self.plane).double().unflatten(0, (self.models, -1))

    def filtered_energy(self, by: Filter, metric: Tensor | None = None) -> Tensor:
        self._behind, taps = None, math.prod(self.plane.size)
        if metric is not None or self._formed is not None or by.size != taps or not by.everywhere:
            return self.form().filtered_energy(by, metric)
        y = filtered_maps(self.x, by.columns.float(), *self.plane)
        self._behind = Unformed(self.models, y, self.d, Plane(*POINT)), by.columns
        return self._behind[0].energy() * (1 + 4 * taps * torch.finfo(torch.float32).eps)  # rounding on the way through Bᵀ

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._behind is not None:
            point, columns = self._behind
            found = point.weighted_sum(weights).unflatten(1, (self.d.shape[1], -1, self.x.shape[1]))  # [E, O, J, C]
            with exact_float32():
                return torch.einsum("eojc,ekj->eock", found, columns.to(found.dtype)).flatten(1)
        if self._formed is not None:
            return self._formed.weighted_sum(weights)
        parts = zip(self.x.chunk(self.models), self.d.chunk(self.models), weights, strict=True)
        sums = [conv_unformed.weighted_sum(x, d, w, 1, *self.plane) for x, d, w in parts]
        return torch.stack(sums).transpose(2, 3).flatten(1)

    def dense(self) -> Tensor:
        return self.form().dense()


def _runs(entries: int, size: int) -> stacked_filters.Groups:
    """Runs of ``size`` consecutive entries."""
    return stacked_filters.Groups(entries // size, size, 1, size)


def norms(energies: list[Tensor], dtype: torch.dtype) -> Tensor:
    """‖g‖ of every row from the energies of its pieces; infinite where the square is, in ``dtype``."""
    return torch.stack(energies).sum(0).to(dtype).sqrt()
