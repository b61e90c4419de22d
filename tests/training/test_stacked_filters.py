"""Norms through a filter, read from gradients as they were stored: exact, attacked, and the same for members as for sessions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from erlangen.circulant import CirculantConv2d
from erlangen.data.base import Dataset
from erlangen.gradients import kernels
from erlangen.gradients.kernels import conv_gradient, conv_unformed, stacked_circulant, stacked_filters
from erlangen.mechanisms.frequency import GUARD, low_pass
from erlangen.models import register_model
from erlangen.training import stacked_conv, stacked_pool, stacked_rows  # noqa: F401  (a kernel that is first read while they are off is none)
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.stacked_release import _guarded
from erlangen.training.stacked_rows import Filter, Formed, Outer, Plane, Rows, Taps, Unformed, norms
from tests.kernels import DEVICE, HALF, channels_last
from tests.training.members import trained_alike

MODELS, COUNT = 2, 3
#: (where the parameter lies in memory, entries of a group)
ORDERS = {
    "taps": (Taps(4, 9, 16, 144), (3, 3)),
    "taps and zeros": (Taps(3, 9, 3, 32), (3, 3)),
    "folded": (Taps(2, 36, 5, 180), (4, 3, 3)),
    "runs": (None, (4,)),
    "long runs": (None, (5, 5)),
}
#: those that Triton's interpreter is quick with
SMALL = ["taps", "taps and zeros", "runs"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def kept_of(sizes: tuple[int, ...], ratio: float) -> Tensor:
    """Columns of H that a low-pass filter keeps, from the definition: cas(2π⟨k, x⟩/n)."""
    at = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64) / n for n in sizes]).view(-1, len(sizes))
    waves = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64) for n in sizes]).view(-1, len(sizes))
    angle = 2 * math.pi * at @ waves.T
    return ((angle.cos() + angle.sin()) / math.sqrt(math.prod(sizes)))[:, low_pass(sizes, ratio).flatten()]


def low_pass_filter(sizes: tuple[int, ...]) -> tuple[Filter, list[Tensor]]:
    """The first model is filtered, the second is not; and their projectors."""
    kept, size = kept_of(sizes, 0.5), math.prod(sizes)
    by = _guarded([kept, None], size, torch.zeros((), device=DEVICE))
    return by, [p.to(DEVICE) for p in (kept @ kept.T, torch.eye(size, dtype=torch.float64))]


def rows_of(name: str, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Formed, tuple[int, ...]]:
    order, sizes = ORDERS[name]
    torch.manual_seed(0)
    entries = math.prod(sizes) * 24 if order is None else order.outputs * order.taps * order.channels
    values = scale * torch.randn(MODELS * COUNT, entries, device=DEVICE)
    return Formed(MODELS, (values if order is None else order.write(values, 0.0)).to(dtype), order), sizes


def by_definition(rows: Rows, by: Filter) -> Tensor:
    g = rows.dense().double()
    turned = g.view(*g.shape[:1], -1, by.size) @ by.matrix.double()
    return turned.view(g.shape).square().sum(2)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, t) for n in SMALL for t in DTYPES), ("folded", HALF), ("long runs", HALF)]
)
def test_the_filtered_norm_is_that_of_the_dense_rows(path, name, dtype):
    rows, sizes = rows_of(name, dtype)
    by, _ = low_pass_filter(sizes)
    found = rows.filtered_energy(by)
    torch.testing.assert_close(found, by_definition(rows, by), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], rows.energy()[1], rtol=1e-6, atol=0)


def test_kernel_and_twin_agree_on_any_columns(path):
    """Also more groups than a program takes at a time, and a number of columns that does not come out even."""
    if path == "twins":
        pytest.skip("the twin itself")
    torch.manual_seed(1)
    for size, width, outputs, channels in ((9, 7, 5, 300), (36, 4, 2, 70), (64, 3, 1, 9)):
        groups = stacked_filters.Groups(outputs, size, channels, size * channels + 3)
        g = torch.randn(2, 1, outputs * groups.width, device=DEVICE, dtype=HALF)
        share, columns = torch.rand(2, device=DEVICE), torch.randn(2, size, width, device=DEVICE)
        assert stacked_filters.fits(g, groups)
        found = stacked_filters.filtered_energy(g, share, columns, groups)
        torch.testing.assert_close(found, stacked_filters.reference(g, share, columns, groups), rtol=1e-6, atol=0)


def test_groups_too_large_for_registers_are_left_to_the_twin(path):
    rows = Formed(1, torch.randn(3, 200, device=DEVICE))
    by = _guarded([kept_of((10, 10), 0.5)], 100, torch.zeros((), device=DEVICE))
    assert not stacked_filters.fits(rows.values, rows._groups(100))
    torch.testing.assert_close(rows.filtered_energy(by), by_definition(rows, by), rtol=1e-6, atol=0)


def test_little_memory_changes_nothing(monkeypatch):
    rows, sizes = rows_of("taps", torch.bfloat16)
    by, _ = low_pass_filter(sizes)
    whole = rows.filtered_energy(by)
    for few in (1, 2, COUNT, COUNT + 1):
        monkeypatch.setattr(stacked_filters, "chunk_size", lambda entries, like, few=few: few)
        torch.testing.assert_close(rows.filtered_energy(by), whole, rtol=1e-7, atol=0)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_metric_and_other_runs_than_the_stored_ones(path, scattered):
    """Runs of a third of the taps lie scattered in memory; a metric is divided by before the filter."""
    rows, _ = rows_of("taps")
    by, _ = low_pass_filter((3,) if scattered else (3, 3))
    torch.testing.assert_close(rows.filtered_energy(by), by_definition(rows, by), rtol=1e-6, atol=0)
    metric = torch.rand(MODELS, rows.dense().shape[2], device=DEVICE) + 0.5
    scaled = Formed(MODELS, (rows.dense() / metric[:, None]).flatten(0, 1))
    torch.testing.assert_close(rows.filtered_energy(by, metric), by_definition(scaled, by), rtol=1e-5, atol=0)


def test_outer_products_are_formed_for_a_filter(path):
    rows, (by, _) = (
        Outer(MODELS, torch.randn(6, 4, device=DEVICE), torch.randn(6, 6, device=DEVICE)),
        low_pass_filter((3,)),
    )
    torch.testing.assert_close(rows.filtered_energy(by), by_definition(rows, by), rtol=1e-6, atol=0)


# -- attacks --------------------------------------------------------------------------------------------------------


def contribution(rows: Rows, found: Tensor, bound: float, k: int) -> Tensor:
    """What row k alone adds to the sums, clipped to the bound by the norms that were found, [E, d]."""
    weights = torch.zeros_like(found)
    weights[:, k] = (bound * (1 - 32 * torch.finfo(torch.float32).eps) / found[:, k]).clamp(max=1.0)
    return rows.weighted_sum(weights).double()


def projected(sums: Tensor, projectors: list[Tensor]) -> Tensor:
    size = len(projectors[0])
    return torch.stack([(s.view(-1, size) @ p).norm() for s, p in zip(sums, projectors, strict=True)])


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e12])
@pytest.mark.parametrize("name", SMALL)
def test_a_row_just_over_the_bound_adds_the_bound(path, name, scale):
    rows, sizes = rows_of(name, torch.bfloat16, scale)
    by, projectors = low_pass_filter(sizes)
    length = norms([rows.filtered_energy(by)], torch.float32)
    for k in range(COUNT):
        bound = float(length[:, k].min()) * (1 - 1e-6)
        added = contribution(rows, length, bound, k)
        assert bool((projected(added, projectors) <= bound).all())
        assert float(added[1].norm()) == pytest.approx(bound, rel=1e-5)
        assert bool((added.norm(dim=1) <= bound / GUARD).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_a_row_that_the_filter_removes_is_clipped_all_the_same(path, name, dtype):
    """Nothing of it is released, but in the sum it would absorb the others: no term may exceed 1/κ times the bound."""
    rows, sizes = rows_of(name)
    by, (project, _) = low_pass_filter(sizes)
    g = rows.dense().double().view(MODELS * COUNT, -1, len(project))
    high = (1e4 * (g - g @ project)).flatten(1).to(dtype)
    rows = Formed(MODELS, high if rows.order is None else rows.order.write(high, 0.0), rows.order)
    left = rows.dense()[0].view(COUNT, -1, len(project)).double() @ project
    assert float(left.norm(dim=(1, 2)).max()) < 0.01 * float(rows.dense()[0].norm(dim=1).min()), (
        "the filtered part is tiny"
    )
    length = lambda by: norms([rows.filtered_energy(by)], torch.float32)  # noqa: E731
    added = contribution(rows, length(by), 1.0, 2)
    assert 0.9 / GUARD < float(added[0].norm()) <= 1 / GUARD
    blind = dataclasses.replace(by, share=torch.zeros_like(by.share))
    assert float(contribution(rows, length(blind), 1.0, 2)[0].norm()) > 2 / GUARD, "the broken twin lets it pass"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", SMALL)
def test_a_row_that_is_not_finite_is_not_read(path, name, value):
    """One entry, at a place that the filter could take for a constant; its square overflows if it is finite."""
    rows, sizes = rows_of(name, torch.bfloat16)
    spoilt, _ = rows_of(name, torch.bfloat16)
    spoilt.values[:, 2, 1] = value
    by, _ = low_pass_filter(sizes)
    length = norms([spoilt.filtered_energy(by)], torch.float32)
    assert length.isfinite().tolist() == [[True, True, False]] * MODELS
    weights = (1.0 / length).masked_fill(~length.isfinite(), 0.0)
    assert torch.equal(spoilt.weighted_sum(weights), rows.weighted_sum(weights))


def test_rows_that_are_formed_for_a_filter_are_summed_as_they_were_measured(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "FORCED", True)
    torch.manual_seed(5)
    x, d = channels_last(4, 16, 3, 3, dtype=HALF), channels_last(4, 16, 3, 3, dtype=HALF)
    rows, (by, projectors) = Unformed(2, x, d, Plane((3, 3), (1, 1), (1, 1), (1, 1))), low_pass_filter((3, 3))
    energy = rows.filtered_energy(by)
    torch.testing.assert_close(energy, by_definition(rows, by), rtol=1e-6, atol=0)
    formed = rows.form()
    for k in range(2):
        weights = torch.zeros(2, 2, device=DEVICE)
        weights[:, k] = 1.0
        alone = rows.weighted_sum(weights)
        assert torch.equal(alone, formed.weighted_sum(weights))
        assert bool((projected(alone.double(), projectors).square() <= energy[:, k] * (1 + 1e-6)).all())


def alternating(rows: int, channels: int, size: int) -> Tensor:
    """Maps that change sign from pixel to pixel: a low-pass filter leaves little of their windows but rounding."""
    sign = torch.ones(size, device=DEVICE)
    sign[1::2] = -1
    board = torch.outer(sign, sign)
    return (board.expand(rows, channels, size, size) * 1e3).to(HALF).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("what", ["random", "alternating", "one is not finite"])
def test_filtered_maps_are_summed_as_they_were_measured(what, monkeypatch):
    """Filtered in every model: nothing is formed, what is added up is the gradient that is left, and no row adds more than was
    measured of it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "FORCED", True)
    torch.manual_seed(6)
    plane = Plane((3, 3), (1, 1), (1, 1), (1, 1))
    x, d = channels_last(4, 20, 3, 3, dtype=HALF), channels_last(4, 16, 3, 3, dtype=HALF)
    if what == "alternating":
        x = alternating(4, 20, 3)
    formed = Formed(2, conv_gradient.conv_gradient(x, d, 1, *plane)[0].flatten(2), Taps(16, 9, 20, 180)).dense().double()
    if what == "one is not finite":
        x[1, 3, 0, 2] = math.inf
    kept = [kept_of((3, 3), ratio) for ratio in (0.5, 0.2)]
    by = _guarded(kept, 9, torch.zeros((), device=DEVICE))
    assert by.everywhere
    rows = Unformed(2, x, d, plane)
    energy = rows.filtered_energy(by)
    if what == "one is not finite":
        assert energy.isfinite().tolist() == [[True, False], [True, True]]
    for k in range(2):
        weights = torch.zeros(2, 2, device=DEVICE)
        weights[:, k] = energy[:, k].isfinite().float()
        alone = rows.weighted_sum(weights).double()
        assert bool((alone.square().sum(1) <= energy[:, k].nan_to_num(0.0, posinf=0.0) * (1 + 1e-6)).all())
        if what == "random":
            left = torch.stack([(g.view(-1, 9) @ q @ q.T).flatten() for g, q in zip(formed[:, k].cpu(), kept, strict=True)])
            assert float((alone.cpu() - left).norm() / left.norm()) < 4 * torch.finfo(HALF).eps
            assert bool((energy[:, k] <= alone.square().sum(1) * 1.01).all()), "rounded outwards, by little"
    assert rows._formed is None
    if what == "random":  # measured otherwise afterwards: the sum goes along
        weights = torch.ones(2, 2, device=DEVICE)
        behind = rows.weighted_sum(weights)
        rows.energy()
        whole = rows.weighted_sum(weights).double()
        assert float((whole - formed.sum(1)).norm() / whole.norm()) < 4 * torch.finfo(HALF).eps
        rows.dense()
        rows.filtered_energy(by)
        assert torch.equal(rows.weighted_sum(weights), rows.form().weighted_sum(weights))
        assert not torch.allclose(behind.double(), whole)


# -- members are their sessions ---------------------------------------------------------------------------------------


def filtered_network(circulant: int | None) -> nn.Module:
    conv = nn.Conv2d(2, 4, 3) if circulant is None else CirculantConv2d(2, 4, 3, circulant)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


register_model("filtered", lambda shape, classes, circulant=None: filtered_network(circulant))


@pytest.mark.parametrize("circulant", [None, 2, 3])
def test_members_of_many_filters_are_their_sessions(circulant: int | None) -> None:
    """Filters of unlike sizes, one after clipping, one that keeps everything, and none."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2, 4, 4)).astype(np.float32)
    data = Dataset("filtered", x, (x[:, 0].mean((1, 2)) > 0).astype(np.int64), None, None, 3)
    base = TrainConfig(
        data="filtered", model="filtered", model_options={} if circulant is None else {"circulant": circulant}, epsilon=None,
        noise_multiplier=0.0, batch=16, steps=4, lr=0.3, momentum=0.5, ema=0.0, max_grad_norm=0.2, device="cpu",
    )  # fmt: skip
    filters = [
        {"ratio": 0.4}, {"ratio": 0.4, "axes": {"0.weight": [-1]}}, {"ratio": 0.5, "order": "clip-first"}, {"ratio": 1.0}, None,
    ]  # fmt: skip
    configs = [
        dataclasses.replace(base, seed=k, **({} if f is None else {"mechanism": "spectral", "mechanism_options": f}))
        for k, f in enumerate(filters)
    ]
    trained_alike(configs, data, rtol=1e-3, atol=2e-5, rows=9)


register_model(
    "filtered-wide",
    lambda shape, classes: nn.Sequential(
        nn.Conv2d(2, 64, 1), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), CirculantConv2d(64, 64, 2, 2),
        nn.Flatten(), nn.Linear(64, 3),
    ),
)  # fmt: skip


def test_kernels_take_the_steps_of_the_plain_layers(monkeypatch):
    """Maps that are filtered, so that no gradient is formed, and circulant gradients that are formed at once, in 16 bits."""
    pytest.importorskip("triton")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 2, 4, 4)).astype(np.float32)
    data = Dataset("filtered-wide", x, rng.integers(0, 3, 8), None, None, 3)
    base = TrainConfig(
        data="filtered-wide", model="filtered-wide", epsilon=None, noise_multiplier=0.0, batch=2, steps=1, lr=1.0, momentum=0.0,
        ema=0.0, max_grad_norm=0.2, device=DEVICE, seed=0, mechanism="spectral",
    )  # fmt: skip

    def moved(precision: torch.dtype | None, fast: bool) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, *(("FORCED", True) if fast else ("HAS_TRITON", False)))
            draws = [lambda n: [np.array([1, 5])] * n]
            ensemble = Ensemble([base], data, precision=precision, graph=False, draws=draws, rows=2)
            before = ensemble.stack.flat.clone()
            ensemble.run()
            return (before - ensemble.stack.flat).double()

    calls = []
    watched = (
        (stacked_circulant, "gradients"), (conv_gradient, "conv_gradient"), (stacked_filters, "filtered_energy"),
        (stacked_rows, "filtered_maps"), (conv_unformed, "squared_norms"), (conv_unformed, "weighted_sum"),
    )  # fmt: skip
    for where, name in watched:
        whole = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, name=name, whole=whole: (calls.append(name), whole(*a))[1])
    exact, plain = moved(None, False), moved(HALF, False)
    assert not calls
    fast = moved(HALF, True)
    assert sorted(calls) == ["filtered_energy", "filtered_maps", "gradients", "squared_norms", "weighted_sum"]
    error = lambda found: float((found - exact).norm() / exact.norm())  # noqa: E731
    assert 0 < error(fast) < 2 * error(plain) + 0.003
    assert float(exact.norm()) == pytest.approx(0.2, rel=0.1), "two clipped rows of two"
