"""Kernels of an equivariant network: every filter of a regular field is one filter, turned by the elements of the group."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from erlangen.equivariant.checks import measure
from erlangen.equivariant.conv import SteerableConv2d
from erlangen.equivariant.groups import Element
from erlangen.report.chart import Gallery, Picture
from erlangen.report.folder import Run

FIELDS, CHANNELS = 4, 16


@torch.no_grad()
def figures(run: Run, model: nn.Module) -> list[Gallery]:
    """The strongest filters of the first steerable layer; empty for other networks."""
    first = next(
        ((p, m) for p, m in model.named_modules() if isinstance(m, SteerableConv2d) and m.kernel_size > 1), None
    )
    if first is None:
        return []
    path, layer = first
    kernel = layer.kernel().cpu().double().numpy()
    group, out_type = layer.out_type.group, layer.out_type
    error = measure(layer, layer.in_type, out_type).on_grid
    strength = [np.square(kernel[c]).sum() for c in range(len(kernel))]
    starts, sizes = out_type.starts, [rho.size for rho in out_type.representations]
    order = sorted(range(len(out_type)), key=lambda f: -sum(strength[starts[f] : starts[f] + sizes[f]]))[:FIELDS]
    top = max(float(np.abs(kernel).max()), 1e-12)
    pictures = []
    for rank, field in enumerate(order):
        channels = range(starts[field], starts[field] + min(sizes[field], CHANNELS))
        regular = group.is_finite and sizes[field] == group.order
        strongest = int(np.square(kernel[list(channels)]).sum((0, 2, 3)).argmax())
        for k, channel in enumerate(channels):
            turned = _words(group.elements[k]) if regular else f"channel {k + 1}"
            pictures.append(
                Picture(
                    kernel[channel, strongest] / top,
                    turned,
                    f"filter {rank + 1}, {turned}",
                    signed=True,
                )
            )
    columns = min(max(sizes[f] for f in order), CHANNELS)
    caption = (
        f"The strongest filters of {path} ({group}-equivariant), one to a row; along a row the same few numbers, turned by "
        f"the group. Only the first is learned. Measured: turning the image and then filtering differs from filtering and "
        f"then turning by {error:.1e} of the largest value, for turns that keep the pixel grid."
    )
    alt = f"{len(order)} filters of the layer {path}, each in {columns} orientations under the group {group}."
    return [Gallery("kernels", "Kernels and their rotations", caption, alt, tuple(pictures), columns)]


def _words(g: Element) -> str:
    degrees = round(math.degrees(g.angle)) % 360
    return f"{degrees}°" + (", mirrored" if g.flip else "")
