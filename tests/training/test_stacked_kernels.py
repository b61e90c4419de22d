"""The kernels of ensembles against their twins, and whole networks with and without them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.circulant import CirculantConv2d, expand
from erlangen.gradients import kernels
from erlangen.gradients.kernels import (
    stacked_circulant,
    stacked_conv,
    stacked_fields,
    stacked_norm,
    stacked_pool,
    stacked_windows,
)
from erlangen.gradients.kernels.norm_act import NormAct
from erlangen.models import make_model
from erlangen.training.stacked import Stack
from erlangen.training.stacked_rows import Fields, Plane, Taps, Unformed, norms
from tests.kernels import DEVICE, HALF, close
from tests.kernels import channels_last as maps


@pytest.mark.parametrize(("largest", "relu"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(3, 6, 4, 8), (2, 16, 6, 2), (5, 1, 2, 2)])
@pytest.mark.parametrize("ties", [False, True])
def test_pools_are_the_native_ones(largest, relu, shape, ties):
    torch.manual_seed(0)
    x = maps(*shape)
    x = x.round() if ties else x - 0.5  # windows without a positive entry, too
    assert stacked_pool.fits(x)
    leaf = x.clone().requires_grad_()
    want = stacked_pool.reference(leaf, largest, relu)
    cotangent = torch.randn_like(want)
    want.backward(cotangent)
    torch.testing.assert_close(stacked_pool.forward(x, largest, relu), want)
    torch.testing.assert_close(stacked_pool.backward(x if largest else None, cotangent, largest, relu), leaf.grad)


@pytest.mark.parametrize("relu", [False, True])
def test_a_nan_goes_through_a_pool_as_it_does_natively(relu):
    x = maps(1, 1, 2, 4).abs()
    x[0, 0, 1, 1] = float("nan")
    found = stacked_pool.forward(x, True, relu)
    assert torch.equal(found.isnan(), F.max_pool2d(x, 2).isnan())
    assert int(stacked_pool.backward(x, torch.ones_like(found), True, relu).ne(0).sum()) == 2


@pytest.mark.parametrize("fast", [False, True])
def test_a_pool_takes_the_relu_before_it(monkeypatch, fast):
    """Once, in a chain, and before maxima only; on either path the model is the same."""
    monkeypatch.setattr(kernels, "FORCED", fast)
    torch.manual_seed(10)
    shared = nn.ReLU()
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU(), nn.AvgPool2d(2), shared, nn.MaxPool2d(2), shared,
        nn.Flatten(), nn.Linear(3, 2),
    )  # fmt: skip
    models = [build().to(DEVICE) for _ in range(2)]
    stack, x = Stack(models, 1), torch.randn(2, 1, 8, 8, device=DEVICE)
    assert [stack.skeleton[k].__dict__["forward"].relu for k in (2, 4, 6)] == [True, False, False]
    assert ["forward" in stack.skeleton[k].__dict__ for k in (1, 3, 5)] == [True, False, False]
    found = stack.dense(stack.backward(stack(x), torch.tensor([0, 1], device=DEVICE)))
    for k, model in enumerate(models):
        loss = F.cross_entropy(model(x[k : k + 1]), torch.tensor([k], device=DEVICE))
        want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        close(found[k, 0], want, 1e-5)


@pytest.mark.parametrize(
    ("channels", "size", "stride", "padding", "dilation"),
    [(3, (5, 5), 1, 0, 1), (4, (3, 2), 2, 1, 1), (2, (3, 3), 1, 2, 2)],
)
def test_gathering_is_folding(channels, size, stride, padding, dilation):
    torch.manual_seed(1)
    shape = torch.Size((3, channels, 9, 8))
    out = [(n + 2 * padding - dilation * (s - 1) - 1) // stride + 1 for n, s in zip(shape[2:], size, strict=True)]
    sent = torch.randn(3, out[0] * out[1], size[0] * size[1] * channels + 5, device=DEVICE)
    found = stacked_windows.gather(sent, shape, (out[0], out[1]), size, stride, padding, dilation)
    close(found, stacked_windows.reference(sent.double(), shape, size, stride, padding, dilation), 1e-6)


@pytest.mark.parametrize(
    ("channels", "outputs", "size", "stride", "padding", "dilation", "bias"),
    [
        (16, 24, (3, 3), 1, (1, 1), 1, True),
        (20, 16, (5, 3), 1, (2, 0), 1, False),
        (72, 136, (3, 3), 2, (1, 1), 2, True),
    ],
)
def test_convolutions_of_many_models_are_theirs(channels, outputs, size, stride, padding, dilation, bias):
    torch.manual_seed(2)
    x = maps(6, channels, 7, 9, dtype=HALF)
    w = (torch.randn(2, size[0] * size[1] * channels, outputs, device=DEVICE) / 10).to(HALF)
    b = torch.randn(2, outputs, device=DEVICE) if bias else None
    plane = size, stride, padding, dilation
    wanted = stacked_conv.reference(x.double(), w.double(), None if b is None else b.double(), *plane)
    found = stacked_conv.conv(x, w, b, *plane)
    assert found.shape == wanted.shape
    close(found, wanted, 1e-2)


@pytest.mark.parametrize(("channels", "groups", "size"), [(16, 8, 7), (24, 3, 5), (12, 1, 4), (32, 4, 6)])
@pytest.mark.parametrize("pre", ["identity", "mish"])
@pytest.mark.parametrize("pieces", [False, True])
def test_norms_of_many_models_are_theirs(monkeypatch, channels, groups, size, pre, pieces):
    torch.manual_seed(3)
    spec = NormAct(groups, 1e-5, pre)
    y, cotangent = maps(6, channels, size, size), maps(6, channels, size, size)
    gamma, beta = torch.randn(2, channels, device=DEVICE), torch.randn(2, channels, device=DEVICE)
    if pieces:
        whole = stacked_norm._launch

        def small(*args):
            constants, programs, warps = whole(*args)
            return {**constants, "PIXELS": 16}, programs, warps

        monkeypatch.setattr(stacked_norm, "_launch", small)
    z, mean, rstd = stacked_norm.forward(y, gamma, beta, spec)
    found = stacked_norm.backward(y, cotangent, gamma, mean, rstd, spec)
    leaf = y.double().requires_grad_()
    rows = [p.double().repeat_interleave(3, 0).requires_grad_() for p in (gamma, beta)]
    want = stacked_norm.reference(leaf, rows[0], rows[1], spec)
    close(z, want, 1e-5)
    for a, b in zip(found, torch.autograd.grad(want, [leaf, *rows], cotangent.double()), strict=True):
        close(a, b, 1e-4)


@pytest.mark.parametrize(
    ("fields", "components", "outputs", "size", "stride", "padding", "dilation"),
    [(2, 8, 16, (5, 5), 1, 2, 1), (4, 4, 136, (3, 3), 2, 1, 1), (3, 8, 24, (3, 3), 1, 0, 2)],
)
def test_gradients_by_field_are_those_of_unfolding(fields, components, outputs, size, stride, padding, dilation):
    torch.manual_seed(7)
    x = maps(2, fields * components, 9, 11, dtype=HALF)
    assert stacked_fields.fits(x, outputs, components, size[0] * size[1])
    out = [(n + 2 * padding - dilation * (s - 1) - 1) // stride + 1 for n, s in zip(x.shape[2:], size, strict=True)]
    d = maps(2, outputs, *out, dtype=HALF)
    plane = components, size, stride, padding, dilation
    close(stacked_fields.gradients(x, d, *plane), stacked_fields.reference(x.double(), d.double(), *plane), 1e-2)


def folded_by_autograd(dense: torch.Tensor, block: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient of ⟨expand(w), G⟩ w.r.t. the free parameters w [O/b, C/b, b, taps], G [O, taps, C]."""
    w = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    outputs, _, inputs = dense.shape
    whole = expand(w)[:outputs, :inputs]
    return torch.autograd.grad((whole * dense.double().cpu().transpose(1, 2)).sum(), w)[0]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("block", "outputs", "inputs", "taps", "spare"),
    [(4, 8, 12, 9, 0), (3, 7, 5, 4, 6), (1, 3, 4, 2, 0), (6, 4, 3, 1, 5)],
)
def test_folding_is_the_pullback_of_the_circulant_expansion(block, outputs, inputs, taps, spare, dtype):
    torch.manual_seed(8)
    dense = torch.randn(2, outputs, taps * inputs + spare, device=DEVICE).to(dtype)
    p, q = -(-outputs // block), -(-inputs // block)
    order = Taps(p, block * taps, q, block * taps * q)
    for fold in (stacked_circulant.fold, stacked_circulant.reference_fold):
        found = fold(dense, block, taps, inputs)
        assert found.dtype == dtype
        assert found.shape == (2, p, block * taps, q)
        for row, g in zip(order.read(found.flatten(1)), dense, strict=True):
            want = folded_by_autograd(g[:, : taps * inputs].view(outputs, taps, inputs), block, (p, q, block, taps))
            close(row, want.flatten(), 1e-6 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(stacked_circulant.fold(dense, block, taps, inputs), found, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "channels", "outputs", "size", "stride", "padding", "dilation"),
    [
        (4, 64, 128, (3, 3), (1, 1), (1, 1), (1, 1)),
        (2, 80, 72, (3, 2), (2, 2), (1, 1), (1, 1)),
        (2, 32, 64, (1, 3), (1, 1), (2, 2), (2, 2)),
    ],
)
def test_gradients_of_free_parameters_are_those_of_unfolding(block, channels, outputs, size, stride, padding, dilation):
    """Channels that fill no tile, more pixels than a product is deep and fewer, a stride."""
    torch.manual_seed(9)
    for side in (2, 5):
        x = maps(2, channels, side, side + 1, dtype=HALF)
        out = [
            (n + 2 * p - e * (s - 1) - 1) // t + 1
            for n, p, e, s, t in zip(x.shape[2:], padding, dilation, size, stride)
        ]
        d = maps(2, outputs, *out, dtype=HALF)
        assert stacked_circulant.worth_it(x, outputs, block)
        plane = block, size, stride, padding, dilation
        wanted = stacked_circulant.reference_gradients(x.double(), d.double(), *plane)
        close(stacked_circulant.gradients(x, d, *plane), wanted, 1e-2)


NETWORKS = {
    "c8-cnn": (1, 8, {"field_counts": (2, 2), "kernel_size": 5, "head_pool": "max"}),
    "lenet": (1, 28, {}),
    "resnet": (3, 4, {}),
    "wide": (3, 8, {}),
    "strided": (3, 10, {}),
    "deep": (3, 4, {}),
    "circulant": (3, 4, {}),
}


def network(name: str) -> nn.Module:
    channels, size, options = NETWORKS[name]
    if name == "resnet":
        from erlangen.models.geodp import Block

        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False), Block(16, 16), nn.AvgPool2d(2), Block(16, 24), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4),
        )  # fmt: skip
    if name == "wide":
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4),
        )  # fmt: skip
    if name == "deep":  # few positions and many channels: gradients that are never formed
        return nn.Sequential(
            nn.Conv2d(channels, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(64, 72, 2),
            nn.Flatten(), nn.Linear(72, 4),
        )  # fmt: skip
    if (
        name == "circulant"
    ):  # one layer of many blocks, whose dense gradient is never formed, and one of few that do not fit
        return nn.Sequential(
            nn.Conv2d(channels, 32, 1), nn.ReLU(), CirculantConv2d(32, 64, 3, 2, padding=1), nn.MaxPool2d(2),
            CirculantConv2d(64, 22, 2, 4), nn.Flatten(), nn.Linear(22, 4),
        )  # fmt: skip
    if name == "strided":
        return nn.Sequential(
            nn.Conv2d(channels, 6, 4, 2),
            nn.ReLU(),
            nn.Conv2d(6, 5, 2),
            nn.GroupNorm(1, 5),
            nn.Flatten(),
            nn.Linear(45, 4),
        )
    if name == "lenet":
        from erlangen.models.gredp import lenet5

        return lenet5((channels, size, size), 4)
    return make_model(name, (channels, size, size), 4, **options)


def rows_of(name: str, precision: torch.dtype | None, monkeypatch, fast: bool):
    """Weights, then the gradients of every row, by the same seed."""
    torch.manual_seed(4)
    models = [network(name).to(DEVICE) for _ in range(2)]
    channels, size, _ = NETWORKS[name]
    x, y = torch.randn(6, channels, size, size, device=DEVICE), torch.randint(0, 4, (6,), device=DEVICE)
    if precision == torch.float64:
        models, x = [m.double() for m in models], x.double()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "FORCED", fast)
        if not fast:
            patch.setattr(kernels, "HAS_TRITON", False)
        stack = Stack(models, 3, precision)
        rows = stack.backward(stack(x), y)
        weights = torch.rand(2, 3, device=DEVICE, dtype=stack.flat.dtype)
        parts = [rows[n].weighted_sum(weights) for n in rows]
        return (
            stack.dense(rows),
            norms([r.energy() for r in rows.values()], stack.flat.dtype),
            weights,
            torch.cat(parts, 1),
            rows,
        )


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("half", [False, True])
def test_networks_with_kernels_have_the_gradients_of_those_without(monkeypatch, name, half):
    if name == "circulant" and not half and DEVICE == "cpu":
        pytest.skip("folds the gradients of every row, which is tested by itself: slow under the interpreter")
    precision = HALF if half else None
    found, measured, weights, summed, rows = rows_of(name, precision, monkeypatch, True)
    plain = rows_of(name, precision, monkeypatch, False)[0]
    exact = rows_of(name, torch.float64, monkeypatch, False)[0]
    rounding = (plain - exact).norm() / exact.norm()  # what this precision costs anyway
    assert (found - exact).norm() / exact.norm() < 1.5 * rounding + (0.01 if half else 1e-5)
    steerable = any(isinstance(getattr(piece, "order", None), Fields) for piece in rows.values())
    assert steerable == (half and name == "c8-cnn")
    if name == "circulant":  # the taps of every place in a block
        assert [rows[n].order.taps for n in ("2.weight", "4.weight")] == [2 * 9, 4 * 4]
    unformed = any(isinstance(piece, Unformed) for piece in rows.values())
    assert unformed == (half and name == "deep")
    torch.testing.assert_close(measured, found.norm(dim=2), rtol=5e-3 if unformed else 1e-5, atol=0)
    flat = torch.cat([rows[n].dense() for n in rows], 2)
    want = (weights[..., None] * flat).sum(1)
    assert (summed - want).norm() / want.norm() < (5e-3 if unformed else 1e-5)


@pytest.mark.parametrize("fast", [False, True])
def test_a_norm_takes_the_activation_before_it(monkeypatch, fast):
    """Once, and only where nothing else reads what the activation gives; on either path the model is the same."""
    monkeypatch.setattr(kernels, "FORCED", fast)
    torch.manual_seed(6)
    shared = nn.SiLU()
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 4, 3),
        nn.Mish(),
        nn.GroupNorm(2, 4),
        shared,
        nn.GroupNorm(1, 4),
        shared,
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    models = [build().to(DEVICE) for _ in range(2)]
    stack, x = Stack(models, 1), torch.randn(2, 1, 4, 4, device=DEVICE)
    assert [stack.skeleton[k].__dict__["forward"].spec.pre for k in (2, 4)] == ["mish", "identity"]
    found = stack.dense(stack.backward(stack(x), torch.tensor([0, 1], device=DEVICE)))
    for k, model in enumerate(models):
        loss = F.cross_entropy(model(x[k : k + 1]), torch.tensor([k], device=DEVICE))
        want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        close(found[k, 0], want, 1e-5)


def test_a_row_that_is_never_formed_is_at_most_what_was_measured(monkeypatch):
    monkeypatch.setattr(kernels, "FORCED", True)
    torch.manual_seed(5)
    x, d = maps(4, 16, 3, 3, dtype=HALF), maps(4, 16, 3, 3, dtype=HALF)
    plane = Plane((3, 3), (1, 1), (1, 1), (1, 1))
    rows = Unformed(2, x, d, plane)
    energy = rows.energy()
    alone = [rows.weighted_sum(torch.tensor([[1.0, 0.0], [0.0, 1.0]][k], device=DEVICE).expand(2, 2)) for k in range(2)]
    for k in range(2):
        contributed = alone[k].double().square().sum(1)
        assert bool((contributed <= energy[:, k]).all())
        assert bool((contributed >= energy[:, k] * 0.99).all())
    x[1] = float("nan")
    spoilt = Unformed(2, x, d, plane)
    assert not torch.isfinite(spoilt.energy()[0, 1])
    assert torch.equal(spoilt.weighted_sum(torch.tensor([[1.0, 0.0]] * 2, device=DEVICE)), alone[0])
    metric = torch.rand(2, 16 * 16 * 9, device=DEVICE) + 0.5
    formed = Unformed(2, *(t[:4] for t in (rows.x.nan_to_num(), rows.d)), plane)
    close(formed.energy(metric), (formed.dense() / metric[:, None]).double().square().sum(2), 1e-5)
    weights = torch.rand(2, 2, device=DEVICE)
    close(formed.weighted_sum(weights), (weights[..., None] * formed.dense()).sum(1), 1e-5)
