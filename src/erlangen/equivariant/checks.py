"""Measuring equivariance: f(g·x) against g·f(x), for elements on and off the pixel grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.equivariant.fields import FieldType
from erlangen.equivariant.groups import Element, Group

#: sides of maps: a window of stride s lies symmetrically on every s-th
SIZES = (33, 32, 31, 30, 29)


class EquivarianceError(AssertionError):
    """A module does not commute with its group to the tolerance asked for."""


@dataclass(frozen=True)
class EquivarianceReport:
    """Worst relative errors of f(gx) against g f(x) over the elements that were tried.

    On the grid: largest difference over largest value. Off the grid, where images are interpolated: root mean square
    of the difference over that of f(x), inside the disc that rotations keep in the image.
    """

    on_grid: float
    off_grid: float


def move_image(x: Tensor, g: Element) -> Tensor:
    """The image at g⁻¹x: exact for quarter turns and flips, bicubic interpolation about the centre otherwise."""
    if x.dim() < 4 or x.shape[-1] == x.shape[-2] == 1:
        return x
    turns = g.quarter_turns()
    if turns is not None:
        return torch.rot90(x.flip(-1) if g.flip else x, turns, (-2, -1))
    down = np.diag([1.0, -1.0])  # sampling coordinates run downwards
    theta = np.concatenate([down @ g.inverse().matrix() @ down, np.zeros((2, 1))], axis=1)
    matrix = torch.as_tensor(theta, dtype=x.dtype, device=x.device).expand(x.shape[0], 2, 3)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bicubic", padding_mode="zeros", align_corners=False)


def transform(x: Tensor, field_type: FieldType, g: Element) -> Tensor:
    """The action [g·f](x) = ρ(g) f(g⁻¹x) on a feature map [batch, channels, height, width] (or vectors)."""
    if x.shape[1] != field_type.size:
        raise ValueError(f"{field_type} has {field_type.size} channels, the tensor has {x.shape[1]}")
    rho = torch.as_tensor(field_type.matrix(g), dtype=x.dtype, device=x.device)
    return torch.einsum("ab,nb...->na...", rho, move_image(x, g))


def elements_to_try(group: Group) -> list[Element]:
    """Elements to try: all of a finite group, sixteen angles (with reflections) of a continuous one."""
    return list(group.elements) if group.is_finite else group.sample(16)


def smooth_input(channels: int, size: int, seed: int, batch: int = 2) -> Tensor:
    """Random smooth images that fade towards the border: interpolation is accurate and corners do not matter."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64)
    axis = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    radius2 = axis[:, None] ** 2 + axis[None] ** 2
    low_pass = torch.exp(-radius2 / (2 * 2.5**2))
    kernel = low_pass[size // 2 - 7 : size // 2 + 8, size // 2 - 7 : size // 2 + 8] if size >= 15 else low_pass
    smooth = F.conv2d(noise.flatten(0, 1)[:, None], kernel[None, None], padding=kernel.shape[-1] // 2)
    smooth = smooth[..., :size, :size].view_as(noise)
    smooth = smooth * torch.exp(-((radius2 / (0.35 * size) ** 2) ** 2))
    return smooth / smooth.std()


def _relative_error(found: Tensor, expected: Tensor, exact: bool) -> float:
    difference = found - expected
    if exact:
        return float(difference.abs().max() / expected.abs().max().clamp_min(1e-30))
    if difference.dim() == 4:
        size = difference.shape[-1]
        axis = torch.arange(size, device=found.device) - (size - 1) / 2
        inside = (axis[:, None] ** 2 + axis[None] ** 2) <= (0.45 * size) ** 2
        difference, expected = difference[..., inside], expected[..., inside]
    return float(difference.norm() / expected.norm().clamp_min(1e-30))


@torch.no_grad()
def measure(
    function: Callable[[Tensor], Tensor],
    in_type: FieldType,
    out_type: FieldType,
    *,
    size: int = 33,
    elements: Iterable[Element] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> EquivarianceReport:
    """Errors of ``function`` over ``elements`` (by default those of the output's group, which may be a subgroup)."""
    noise = torch.randn(2, in_type.size, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inputs = {True: noise.to(device, dtype), False: smooth_input(in_type.size, size, seed).to(device, dtype)}
    worst = {True: 0.0, False: 0.0}
    outputs: dict[bool, Tensor] = {}
    group_in = in_type if in_type.group == out_type.group else in_type.restrict(out_type.group)
    for g in elements_to_try(out_type.group) if elements is None else elements:
        exact = g.quarter_turns() is not None
        if exact not in outputs:
            outputs[exact] = function(inputs[exact])
        expected = transform(outputs[exact], out_type, g)
        found = function(transform(inputs[exact], group_in, g))
        worst[exact] = max(worst[exact], _relative_error(found, expected, exact))
    return EquivarianceReport(on_grid=worst[True], off_grid=worst[False])


def check_equivariance(
    module: nn.Module,
    in_type: FieldType | None = None,
    out_type: FieldType | None = None,
    *,
    function: Callable[[Tensor], Tensor] | None = None,
    size: int | None = None,
    tolerance: float = 1e-5,
    off_grid_tolerance: float = 0.1,
    seed: int = 0,
) -> EquivarianceReport:
    """Raise :class:`EquivarianceError` unless ``module`` commutes with its group; return the errors found.

    Quarter turns and reflections must hold to ``tolerance``. Other angles are interpolated on a grid, and hold to
    ``off_grid_tolerance`` on smooth inputs only. The module is checked in evaluation mode (no dropout), on maps of ``size``
    pixels; where none is given, on the first of `SIZES` on which strides and windows lie symmetrically.
    """
    found_in = in_type or getattr(module, "in_type", None)
    found_out = out_type or getattr(module, "out_type", None)
    if found_in is None or found_out is None:
        raise ValueError(f"{type(module).__name__} has no in_type and out_type; pass both to check_equivariance")
    floating = (t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point())
    like = next(floating, getattr(module, "like", torch.empty(0)))
    training = module.training
    module.eval()
    measured = partial(measure, function or module, found_in, found_out, dtype=like.dtype, device=like.device, seed=seed)
    try:
        report = measured(size=SIZES[0] if size is None else size)
        for other in SIZES[1:] if size is None else ():
            if report.on_grid <= tolerance:
                break
            report = min(report, measured(size=other), key=lambda r: r.on_grid)
    finally:
        module.train(training)
    if not report.on_grid <= tolerance:
        raise EquivarianceError(
            f"{type(module).__name__} breaks {found_out.group} by {report.on_grid:.2e} on the pixel grid "
            f"(tolerance {tolerance:.0e}); strides on even sizes and unequal padding are the usual causes"
        )
    if not report.off_grid <= off_grid_tolerance:
        raise EquivarianceError(
            f"{type(module).__name__} breaks {found_out.group} by {report.off_grid:.2e} off the pixel grid "
            f"(tolerance {off_grid_tolerance:.1e}); use larger or more band-limited kernels, and sizes that strides divide"
        )
    return report
