"""Convolutions on few positions: norms, filtered norms and sums of gradients that are never formed, against formed ones."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from erlangen.circulant import CirculantConv2d
from erlangen.data.base import Dataset
from erlangen.models import register_model
from erlangen.training import stacked_positions
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.stacked import Stack
from erlangen.training.stacked_positions import TEN_BITS, Blocks, Positions
from erlangen.training.stacked_rows import Filter, Formed
from tests.training.members import trained_alike


def small(circulant: int | None = None) -> nn.Module:
    conv = nn.Conv2d(6, 8, 3, padding=1) if circulant is None else CirculantConv2d(6, 8, 3, circulant, padding=1)
    last = nn.Conv2d(8, 5, 2, bias=False) if circulant is None else CirculantConv2d(8, 5, 2, circulant, bias=False)
    return nn.Sequential(conv, nn.ReLU(), last, nn.Flatten(), nn.Linear(5, 3))


register_model("two-by-two", lambda shape, classes, circulant=None: small(circulant))


def records() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 6, 2, 2)).astype(np.float32)
    y = (x[:, 0].mean((1, 2)) > 0).astype(np.int64)
    return Dataset("two-by-two", x, y, x[:20], y[:20], 3)


def a_filter(sizes: list[int]) -> Tensor:
    """Any real convolution over these axes, as a matrix from the right."""
    kernel = torch.fft.fftn(torch.randn(sizes))
    units = torch.eye(math.prod(sizes)).view(-1, *sizes)
    axes = tuple(range(1, len(sizes) + 1))
    return torch.fft.ifftn(torch.fft.fftn(units, dim=axes) * kernel, dim=axes).real.flatten(1)


def through(matrices: Tensor) -> Filter:
    return Filter(matrices, torch.zeros(len(matrices)), matrices)


def rows_of(circulant: int | None, positions: int) -> dict[str, Formed | Positions]:
    torch.manual_seed(1)
    stack = Stack([small(circulant) for _ in range(3)], 4, positions=positions)
    x, y = torch.randn(12, 6, 2, 2), torch.randint(0, 3, (12,))
    return stack.backward(stack(x), y)  # type: ignore[return-value]


def assert_covers(got: Tensor, want: Tensor) -> None:
    """Squared norms are never too small, and hardly too large."""
    assert bool((got >= want * (1 - 1e-6)).all())
    torch.testing.assert_close(got, want, rtol=5e-4, atol=0)


@pytest.mark.parametrize("largest", [1, 2500, 1 << 28])
@pytest.mark.parametrize("circulant", [None, 2, 4])
def test_norms_and_sums_are_those_of_formed_gradients(
    circulant: int | None, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_positions, "LARGEST", largest)
    formed, kept = rows_of(circulant, 0), rows_of(circulant, 4)
    weights = torch.rand(3, 4)
    weights[1, 2] = 0.0
    for name in ("0.weight", "2.weight"):
        ours, theirs = kept[name], formed[name].dense()
        assert isinstance(ours, Positions)
        assert_covers(ours.energy(), theirs.double().square().sum(2))
        torch.testing.assert_close(ours.weighted_sum(weights), torch.einsum("ep,epd->ed", weights, theirs))
        sizes = [circulant] * (circulant is not None) + [3, 3] if name.startswith("0") else [circulant or 1, 2, 2]
        size, matrices = math.prod(sizes), torch.stack([a_filter(sizes) for _ in range(3)])
        turned = torch.einsum("epnk,ekm->epnm", theirs.unflatten(2, (-1, size)), matrices)
        assert_covers(ours.filtered_energy(through(matrices)), turned.double().square().sum((2, 3)))
        torch.testing.assert_close(ours.dense(), theirs)
        metric = torch.rand(3, theirs.shape[2]) + 0.5
        torch.testing.assert_close(
            ours.energy(metric), (theirs / metric[:, None]).double().square().sum(2), rtol=1e-5, atol=0
        )


#: channels in and out, kernel, stride, padding, dilation, side of the map, block
ODD = [
    (2, 3, (2, 1), 1, 0, 1, 2, None), (2, 3, (3, 1), 1, 0, 1, 3, 2), (1, 1, (1, 1), 1, 0, 1, 1, None),
    (5, 3, (1, 1), 3, 0, 1, 4, 4), (7, 5, (3, 3), 2, 1, 1, 4, 3), (3, 8, (3, 2), 1, 2, 2, 1, 6),
    (1, 2, (1, 3), 1, 2, 1, 3, 6), (5, 1, (2, 2), 2, 1, 2, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", ODD)
def test_odd_shapes_are_those_of_one_record_at_a_time(case: tuple, rows: int) -> None:
    inputs, outputs, size, stride, padding, dilation, side, block = case
    torch.manual_seed(0)
    x, y = torch.randn(2 * rows, inputs, side, side), torch.randint(0, 3, (2 * rows,))

    def model() -> nn.Module:
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        plain = block is None
        conv = (
            nn.Conv2d(inputs, outputs, size, **options)
            if plain
            else CirculantConv2d(inputs, outputs, size, block, **options)
        )
        return nn.Sequential(conv, nn.Flatten(), nn.Linear(conv(x[:1]).numel(), 3))

    models = [model(), model()]
    stack = Stack(models, rows, positions=100)
    ours = stack.backward(stack(x), y)["0.weight"]
    assert isinstance(ours, Positions)
    alone = []
    for k in range(2 * rows):
        loss = nn.functional.cross_entropy(models[k // rows](x[k : k + 1]), y[k : k + 1])
        alone.append(torch.autograd.grad(loss, models[k // rows][0].weight)[0].flatten())
    want, weights = torch.stack(alone).unflatten(0, (2, rows)), torch.rand(2, rows)
    energy = want.double().square().sum(2)
    assert bool((ours.energy() >= energy * (1 - 1e-5)).all())
    torch.testing.assert_close(ours.energy(), energy, rtol=3e-3, atol=0)
    torch.testing.assert_close(ours.weighted_sum(weights), torch.einsum("ep,epd->ed", weights, want))
    torch.testing.assert_close(ours.dense(), want)


def test_a_row_of_weight_zero_is_left_out_whatever_it_holds() -> None:
    a, d = torch.randn(4, 2, 3, 6), torch.randn(4, 2, 5)
    a[1], d[2] = float("nan"), float("inf")
    rows = Positions(2, a, d, Blocks())
    weights = torch.tensor([[0.5, 0.0], [0.0, 2.0]])
    assert rows.weighted_sum(weights).isfinite().all()
    assert rows.energy().isfinite().tolist() == [[True, False], [False, True]]


def cut(t: Tensor) -> Tensor:
    """To ten bits, the way a careless unit does it: downwards in magnitude."""
    return (t.view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.mark.parametrize("block", [1, 2])
def test_the_norm_covers_cotangents_of_ten_bits(block: int) -> None:
    """Positions that nearly cancel: rounding one factor moves the sum by far more than ten bits of its norm."""
    torch.manual_seed(0)
    a = torch.randn(1, 1, 1, 6).expand(8, 2, 1, 6).contiguous().bfloat16()
    d = torch.randn(8, 1, 4) * torch.tensor([1.0, -1.001])[None, :, None]
    blocks = Blocks(block)
    length = lambda d, a: blocks.folded(torch.einsum("nto,ntkc->nokc", d, a)).norm(dim=1)  # noqa: E731
    exact = length(d.double(), a.double())
    rows = Positions(1, a, d, blocks)
    rows.fast = True  # as on a GPU
    covered = rows.energy()[0].sqrt()
    weights = torch.rand(8) + 0.5
    moved = length(cut(weights[:, None, None] * d), a.float())
    assert bool((moved <= weights * covered * (1 + 1e-6)).all())
    assert bool((moved > weights * exact).any()), "the broken twin: without the margin terms pass that are too long"
    terms = (a.float().norm(dim=(2, 3)) * d.norm(dim=2)).sum(1)
    assert bool((covered <= exact + 2 * TEN_BITS * math.sqrt(block) * terms).all())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("channels", [256, 2048])
def test_equal_entries_that_nearly_cancel_are_clipped(channels: int, block: int, fast: bool) -> None:
    """Their Gram matrices err by one rounding per product, always the same way: the norm came out at a fifth of what it is."""
    torch.manual_seed(0)
    rows = 100
    size, ratio = torch.rand(rows, 1, 1, 1) + 0.5, 1 + 10 ** (-5 + 3 * torch.rand(rows, 1, 1, 1))
    a = torch.cat([size, size * ratio], 1).expand(rows, 2, 9, channels)
    a = a.bfloat16() if fast else a
    d = torch.tensor([1.0, -1.0])[None, :, None].expand(rows, 2, 16)
    ours, eye = Positions(1, a, d, Blocks(block)), torch.eye(9 * block)[None]
    ours.fast = fast  # as on a GPU
    exact = ours.blocks.folded(torch.einsum("nto,ntkc->nokc", d.double(), a.double())).norm(dim=1)
    for covered in (ours.energy()[0].sqrt(), ours.filtered_energy(through(eye))[0].sqrt()):
        assert bool((exact <= covered * (1 + 1e-6)).all())


FAMILY = [
    {"mechanism": "spectral", "mechanism_options": {"ratio": 0.4}}, {"momentum": 0.0}, {"mechanism": "gredp"},
    {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}},
]  # fmt: skip


@pytest.mark.parametrize("circulant", [None, 2])
def test_without_noise_members_are_their_sessions(circulant: int | None) -> None:
    options = {} if circulant is None else {"circulant": circulant}
    base = TrainConfig(
        data="two-by-two", model="two-by-two", model_options=options, epsilon=None, noise_multiplier=0.0, batch=16, steps=5,
        lr=0.3, momentum=0.5, ema=0.9, max_grad_norm=0.3, device="cpu",
    )  # fmt: skip
    configs = [dataclasses.replace(base, seed=k, **change) for k, change in enumerate(FAMILY)]
    trained_alike(configs, records(), rtol=1e-3, atol=2e-5, rows=9, positions=4)


ALONE = TrainConfig(
    data="two-by-two", model="two-by-two", epsilon=None, noise_multiplier=0.0, batch=16, steps=1, lr=0.3,
    max_grad_norm=0.3, device="cpu", seed=0, mechanism="spectral",
)  # fmt: skip


@pytest.mark.parametrize(
    ("circulant", "axes"),
    [(None, [1, 2, 3]), (None, [0, 1, 2, 3]), (None, [3]), (2, [3, 4]), (2, [1, 2, 3, 4]), (2, [0, 1, 2, 3, 4])],
)
def test_filters_over_other_axes_are_those_of_the_session(circulant: int | None, axes: list[int]) -> None:
    """A filter over output channels cannot act on windows: it would mix positions, and records."""
    options = {} if circulant is None else {"circulant": circulant}
    filters = {"ratio": 0.4, "axes": {"0.weight": axes}}
    config = dataclasses.replace(ALONE, model_options=options, mechanism_options=filters)
    trained_alike([config], records(), rtol=1e-4, atol=1e-6, rows=30, positions=4)


@pytest.mark.parametrize("axes", [[0], [1], [2], [1, 3]])
def test_filters_that_are_not_over_the_last_axes_are_left_to_sessions(axes: list[int]) -> None:
    filters = {"ratio": 0.2, "axes": {"0.weight": axes}}
    with pytest.raises(ConfigError, match="last axes"):
        Ensemble([dataclasses.replace(ALONE, mechanism_options=filters)], records(), positions=4)
    Ensemble([dataclasses.replace(ALONE, mechanism_options={**filters, "ratio": 1.0})], records(), positions=4)


def test_no_gradient_of_a_row_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside GReDP and Spectral-DP too: 2.4 million weights a row would be gigabytes."""

    def refused(self: Positions) -> Formed:
        raise AssertionError("formed")

    monkeypatch.setattr(Positions, "form", refused)
    base = TrainConfig(
        data="two-by-two",
        model="two-by-two",
        epsilon=None,
        noise_multiplier=1.0,
        batch=16,
        steps=2,
        seed=0,
        device="cpu",
    )
    Ensemble([dataclasses.replace(base, **change) for change in FAMILY], records(), positions=4).run()
