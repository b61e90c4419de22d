"""How equivariant layers and networks are at angles between the grid's: the table in docs/methods/equivariant.md.

    python benchmarks/equivariance.py [--only convolutions]

Errors at initialisation, seed 0, smooth images of 33×33 (networks: 32×32), each the largest over the groups in its row; on the
grid they are exact, and a layer that is not raises an error. A minute or two on one core.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import nn

from erlangen import equivariant as eq
from erlangen.models.equivariant import c8_steerable_cnn, equivariant_resnet9

GROUPS = ("C3", "C6", "C8", "C16", "D3", "D6", "D8", "SO(2)", "O(2)")
Case = Callable[[], Any]
CHAINS = "60 random chains, error over the sum of the bounds"


def inner(group: Any) -> Any:
    return eq.regular_fields(group, 2) if group.is_finite else eq.fields(eq.spectral(group, 2), 2)


def convolutions(sizes: Iterable[int], dilation: int = 1, **options: Any) -> Iterator[Case]:
    for name in GROUPS:
        group = eq.group_by_name(name)
        for size in sizes:
            padding = (size - 1) // 2 * dilation
            for first in (eq.trivial_fields(group, 2), inner(group)):
                yield partial(
                    eq.SteerableConv2d, first, inner(group), size, padding=padding, dilation=dilation, **options
                )


def nonlinearities() -> Iterator[Case]:
    c8, so2 = eq.cyclic(8), eq.so2()
    yield lambda: eq.Pointwise(eq.regular_fields(c8, 3), nn.Mish())
    yield lambda: eq.GatedNonlinearity(eq.fields([eq.irrep(c8, 1), eq.irrep(c8, 3)]))
    yield lambda: eq.NormNonlinearity(eq.fields([eq.irrep(so2, 1), eq.irrep(so2, 2)]))
    yield lambda: eq.FourierNonlinearity(so2, 2, 3, nn.Mish())


def statistics_and_bases() -> Iterator[Case]:
    c8, so2 = eq.cyclic(8), eq.so2()
    yield lambda: eq.EquivariantGroupNorm(eq.regular_fields(c8, 4), 2)
    yield lambda: eq.FieldInstanceNorm(eq.fields(eq.spectral(so2, 2), 3))
    yield lambda: eq.GroupPool(eq.regular_fields(c8, 3))
    yield lambda: eq.Restrict(eq.regular_fields(eq.cyclic(16), 2), c8)
    yield lambda: eq.Disentangle(eq.regular_fields(c8, 2))


def pools(kind: Any, size: int, stride: int, pixels: int) -> tuple[list[Case], int]:
    finite = [group for group in map(eq.group_by_name, GROUPS) if group.is_finite]
    return [partial(kind, eq.regular_fields(group, 3), size, stride=stride) for group in finite], pixels


def networks(names: Iterable[str]) -> Iterator[tuple[str, list[Case]]]:
    yield "C8 CNN, last feature map", [c8_steerable_cnn]
    for name in names:
        options = {"frequency": 3} if name == "SO(2)" else {}
        yield f"Equivariant-ResNet-9, {name}", [partial(equivariant_resnet9, group=name, **options)]


def chain(seed: int) -> eq.EquivariantSequential:
    """One to four convolutions with nonlinearities, norms and pooling between them, drawn at random."""
    draw = random.Random(seed)
    group = eq.group_by_name(draw.choice(GROUPS))
    current, hidden = eq.trivial_fields(group, 2), inner(group)
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        size = draw.choice((3, 5, 7))
        layers.append(eq.SteerableConv2d(current, hidden, size, padding=size // 2, standardise=draw.random() < 0.5))
        pointwise = eq.Pointwise(hidden, nn.Mish()) if group.is_finite else eq.FourierNonlinearity(group, 2, 2, nn.Mish())
        layers.append(draw.choice((pointwise, eq.NormNonlinearity(hidden))))
        layers += draw.choice(([], [eq.FieldInstanceNorm(hidden)]))
        current = hidden
    if draw.random() < 0.5:  # once: 33×33 maps leave 11×11
        pool = draw.choice((eq.SpatialAvgPool, eq.SpatialMaxPool)) if group.is_finite else eq.SpatialAvgPool
        layers.insert(draw.choice([k for k, layer in enumerate(layers) if layer.in_type == hidden]), pool(hidden, 3))
    return eq.EquivariantSequential(*layers)


def of_the_bound(count: int) -> float:
    """The largest error of random chains, over the sum of their layers' bounds."""
    worst = 0.0
    for seed in range(count):
        torch.manual_seed(seed)
        made = chain(seed)
        worst = max(worst, made.check_equivariance(off_grid_tolerance=math.inf).off_grid / made.off_grid_bound)
    return worst


def rows() -> Iterator[tuple[str, list[Case], int | None]]:
    yield "convolutions, 2×2 to 7×7", list(convolutions((2, 3, 5, 7))), None
    for stretch in (True, False):
        for dilation in (2, 3, 4):
            label = f"convolutions, 3×3 to 7×7, dilation {dilation}" + ("" if stretch else ", escnn's convention")
            yield label, list(convolutions((3, 5, 7), dilation, stretch=stretch)), None
    for stride, pixels in ((2, 33), (3, 34), (4, 33)):
        yield f"convolutions, 3×3 to 7×7, stride {stride}", list(convolutions((3, 5, 7), stride=stride)), pixels
    yield "convolutions, 3×3 and 5×5, cutoff 3", list(convolutions((3, 5), cutoff=3.0)), None
    yield "nonlinearities", list(nonlinearities()), None
    yield "norms, group pooling, restriction, change of basis", list(statistics_and_bases()), None
    for name, kind in (("average", eq.SpatialAvgPool), ("max", eq.SpatialMaxPool)):
        for size, stride, pixels in ((2, 2, 32), (3, 1, 33), (3, 2, 33), (3, 3, 33), (4, 4, 32)):
            yield f"{name} pooling, {size}×{size} of stride {stride}", *pools(kind, size, stride, pixels)
    for label, cases in networks(("C8", "D8", "C16", "SO(2)")):
        yield label, cases, None


def measured(cases: Iterable[Case], size: int | None) -> float:
    """The largest error off the grid; on it an error is raised."""
    worst = 0.0
    for case in cases:
        torch.manual_seed(0)
        options = {} if size is None else {"size": size}
        worst = max(worst, case().check_equivariance(off_grid_tolerance=math.inf, **options).off_grid)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose label holds this")
    only = parser.parse_args().only
    for label, cases, size in rows():
        if only in label:
            print(f"{label:60} {measured(cases, size):.3f}", flush=True)
    if only in CHAINS:
        print(f"{CHAINS:60} {of_the_bound(60):.3f}", flush=True)


if __name__ == "__main__":
    main()
