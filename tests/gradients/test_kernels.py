"""Every fused kernel against its twin in plain PyTorch: on a GPU as compiled, elsewhere under Triton's interpreter."""

import ast
import copy
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.gradients import RowMap, Tape, attach, detach, kernels
from erlangen.gradients.joined import join, runs
from erlangen.gradients.kernels import conv_gradient as convs
from erlangen.gradients.kernels import im2col, moments, norm_act, row_sum, tied_sum, tuned
from erlangen.mechanisms import GaussianMechanism
from tests.kernels import DEVICE, HALF, channels_last, close


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("pre", "post"), [("mish", "identity"), ("identity", "relu"), ("silu", "mish"), ("relu", "silu")])
@pytest.mark.parametrize(("channels", "groups", "size"), [(16, 2, 8), (24, 3, 4), (20, 4, 8), (12, 1, 4), (112, 14, 4)])
def test_norm_act_is_its_twin(channels, groups, size, pre, post, pool):
    torch.manual_seed(channels + size)
    spec = norm_act.NormAct(groups, 1e-5, pre, post, pool)
    y = channels_last(3, channels, size, size)
    gamma, beta = torch.randn(channels, device=DEVICE), torch.randn(channels, device=DEVICE)
    assert norm_act.fits(y, spec)
    z, mean, rstd = norm_act.forward(y, gamma, beta, spec)
    close(z, norm_act.reference(y.double(), gamma.double(), beta.double(), spec), 1e-5)
    cotangent = torch.randn_like(z)
    found = norm_act.backward(y, cotangent, gamma, beta, mean, rstd, spec)
    wanted = norm_act.reference_backward(y.double(), cotangent.double(), gamma.double(), beta.double(), spec)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-4)


def test_norm_act_in_pieces_of_the_map_is_the_same(monkeypatch):
    """A map too large for registers is read in pieces; the choice changes nothing."""
    torch.manual_seed(0)
    y = channels_last(2, 16, 8, 8)
    gamma, beta = torch.randn(16, device=DEVICE), torch.randn(16, device=DEVICE)
    launch = norm_act._launch
    for pool in (False, True):
        spec = norm_act.NormAct(2, 1e-5, "mish", "relu", pool)
        whole = norm_act.forward(y, gamma, beta, spec)
        cotangent = torch.randn_like(whole[0])
        back = norm_act.backward(y, cotangent, gamma, beta, *whole[1:], spec)

        def small(*args, launch=launch):
            constants, programs, warps = launch(*args)
            return {**constants, "PIXELS": 16}, programs, warps

        with monkeypatch.context() as patch:
            patch.setattr(norm_act, "_launch", small)
            parts = norm_act.forward(y, gamma, beta, spec)
            back_parts = norm_act.backward(y, cotangent, gamma, beta, *parts[1:], spec)
        for a, b in zip((*whole, *back), (*parts, *back_parts), strict=True):
            close(a, b, 1e-5)


@pytest.mark.parametrize(
    ("channels", "outputs", "size", "views", "kernel", "stride", "padding", "dilation"),
    [
        (16, 16, 8, 2, (3, 3), (1, 1), (1, 1), (1, 1)),
        (72, 16, 4, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
        (16, 136, 4, 2, (3, 3), (2, 2), (1, 1), (1, 1)),
        (80, 16, 6, 1, (5, 3), (1, 2), (2, 0), (1, 2)),
        (16, 24, 5, 3, (1, 1), (1, 1), (0, 0), (1, 1)),
        (20, 24, 8, 5, (3, 3), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_kernel_gradients_are_those_of_unfolding(channels, outputs, size, views, kernel, stride, padding, dilation):
    torch.manual_seed(1)
    x = channels_last(2 * views, channels, size, size + 1)
    out = [(s + 2 * p - e * (k - 1) - 1) // t + 1 for s, p, e, k, t in zip(x.shape[2:], padding, dilation, kernel, stride)]
    d = channels_last(2 * views, outputs, *out)
    plane = kernel, stride, padding, dilation
    found, norms = convs.conv_gradient(x, d, views, *plane, convs.OWNERS)
    close(norms, found.float().square().sum((1, 2, 3)), 1e-5)
    again, filters = convs.conv_gradient(x, d, views, *plane, convs.FILTERS)
    assert torch.equal(again, found)
    close(filters[:, 0], found.float().square().sum((2, 3)), 1e-5)
    close(filters[:, 1], found.float().sum((2, 3)), 1e-4)
    for setting in (tuned.Gradient(True, 64, 32, 32, 4, 2), tuned.Gradient(False, 64, 64, 32, 4, 2, flat=True)):
        others = convs.conv_gradient(x, d, views, *plane, convs.FILTERS, setting=setting)
        close(others[0], found, 1e-5)
        close(others[1], filters, 1e-4)
        close(convs.conv_gradient(x, d, views, *plane, convs.OWNERS, setting=setting)[1], norms, 1e-4)
    wanted = convs.reference(x.double(), d.double(), views, kernel, stride, padding, dilation)
    close(found, wanted, 1e-2 if DEVICE == "cuda" else 1e-5)  # on the GPU the matrix units round float32 operands


@pytest.mark.parametrize("jacobian", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_tied_sum_is_its_twin(scaled, jacobian):
    torch.manual_seed(2)
    owners, fields, copies, entries = 3, 2, 4, 24
    kernels = torch.randn(owners, fields, copies, entries, device=DEVICE).bfloat16()
    source = torch.stack([torch.randperm(entries) for _ in range(copies)]).to(DEVICE, torch.int32)
    scale = torch.rand(entries, device=DEVICE) if scaled else None
    a = torch.randn(entries, device=DEVICE)
    rows = lambda: torch.randn(fields, entries, device=DEVICE)  # noqa: E731
    vectors = tied_sum.Standardisation(rows(), rows(), torch.rand(fields, device=DEVICE), a / a.norm())
    given = kernels, source, scale, vectors if jacobian else None
    found, exact = tied_sum.tied_sum(*given), tied_sum.reference(*given)
    for f, w in zip(found, exact, strict=True):
        close(f, w, 1e-5)
    kept, norms = tied_sum.tied_sum(*given, torch.bfloat16)
    assert kept.dtype == torch.bfloat16
    close(kept, exact[0], torch.finfo(torch.bfloat16).eps)
    close(norms, kept.double().square().sum((1, 2)), 1e-6)  # of what is kept: it is what will be summed
    for f, w in zip((kept, norms), tied_sum.reference(*given, torch.bfloat16), strict=True):
        close(f, w, 2 * torch.finfo(torch.bfloat16).eps)  # the interpreter cuts, and does not round


@pytest.mark.parametrize("length", [9, 1100])
def test_moments_are_their_twins(length):
    torch.manual_seed(8)
    g, w = torch.randn(3, 5, length, device=DEVICE).bfloat16(), torch.randn(5, length, device=DEVICE)
    for f, r in zip(moments.moments(g, w), moments.reference(g, w), strict=True):
        close(f, r, 1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (37, 700), (130, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_sum_never_reads_a_row_of_weight_zero(rows, columns, dtype):
    torch.manual_seed(3)
    g, w = torch.randn(rows, columns, device=DEVICE).to(dtype), torch.rand(rows, device=DEVICE)
    if rows > 1:
        w[::3] = 0
        g[::3] = float("nan")
    found = row_sum.row_sum(w, g)
    assert torch.isfinite(found).all()
    close(found, row_sum.reference(w, g), 1e-5)


def test_windows_of_an_image_are_those_of_unfolding():
    torch.manual_seed(4)
    x = channels_last(3, 3, 7, 6)
    for kernel, stride, padding, dilation in (((3, 3), (1, 1), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 2), (1, 2))):
        wanted = im2col.reference(x, kernel, stride, padding, dilation)
        size = [(s + 2 * p - e * (k - 1) - 1) // t + 1 for s, p, e, k, t in zip(x.shape[2:], padding, dilation, kernel, stride)]
        found = im2col.im2col(x, kernel, stride, padding, dilation, tuple(size))
        assert torch.equal(found, wanted)


@pytest.fixture
def forced(monkeypatch):
    """Use the kernels on this device, whatever it is."""
    monkeypatch.setattr(kernels, "FORCED", True)


def networks(pool: bool = True):
    from erlangen.equivariant import EquivariantSequential, regular_fields, trivial_fields
    from erlangen.equivariant.groups import group_by_name
    from erlangen.models.equivariant import EquivariantClassifier, EquivariantResidual, Style

    def d4(basis: str) -> nn.Module:
        g = group_by_name("D4")
        style, two = Style(basis=basis), regular_fields(g, 2)
        body = EquivariantSequential(style.block(two, two))
        return EquivariantClassifier(
            EquivariantSequential(
                style.block(trivial_fields(g, 3), two), style.block(two, two, pool=pool),
                EquivariantResidual(body, style.norm(two)),
            ),
            4, head_pool="max" if pool else "avg",
        )  # fmt: skip

    def plain() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2) if pool else nn.Identity(),
            nn.Conv2d(16, 32, 3, 2, padding=1), nn.Mish(), nn.GroupNorm(8, 32), nn.Flatten(), nn.Linear(512, 4),
        )  # fmt: skip

    def standardised() -> nn.Module:
        from erlangen.models.resnet import convolution

        first, second = (convolution(a, b, 3, bias=True, standardise=True) for a, b in ((3, 16), (16, 16)))
        return nn.Sequential(first, nn.GroupNorm(4, 16), nn.ReLU(), second, nn.Flatten(), nn.Linear(16 * 64, 4))

    by = {"D4 by pixels": lambda: d4("pixel"), "D4 band-limited": lambda: d4("steerable")}
    return {"plain": plain, "standardised": standardised, **by}


def recorded(model: nn.Module, x: Tensor, y: Tensor, views: int, autocast: bool):
    tape = Tape(dict(model.named_parameters()), "mean")
    tape.rows = RowMap.regular(len(x) // views, views)
    attach(model, tape)
    try:
        with torch.autocast(DEVICE, HALF, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    finally:
        detach(model)
    return tape.gradients()


@pytest.mark.parametrize("name", ["plain", "standardised", "D4 by pixels", "D4 band-limited"])
def test_networks_through_the_kernels_have_the_gradients_of_float64(forced, monkeypatch, name):
    """The whole fast path in 16 bits: every owner's gradient near the exact one, norms bound what is summed. Without max
    pooling: in 16 bits another pixel of a window may win, and the gradient jumps, of either path and by chance."""
    torch.manual_seed(5)
    x, y = channels_last(6, 3, 8, 8), torch.randint(0, 4, (3,), device=DEVICE).repeat_interleave(2)
    model = networks(pool=False)[name]().to(DEVICE).to(memory_format=torch.channels_last)
    found = recorded(model, x, y, 2, autocast=True)
    norms = found.norms_squared()
    weights = torch.rand(3, device=DEVICE)
    sums = found.weighted_sum(dict.fromkeys(found.names, weights))
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    layer_by_layer = recorded(model, x, y, 2, autocast=True)
    exact = recorded(copy.deepcopy(model).double(), x.double(), y, 2, autocast=False)
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    for i in range(3):
        a, b, c = (
            torch.cat([g.dense(n)[i].detach().double().flatten() for n in found.names])
            for g in (found, exact, layer_by_layer)
        )
        rounding = (c - b).norm() / b.norm()  # what 16 bits cost these layers anyway
        assert (a - b).norm() / b.norm() < 1.3 * rounding + 0.01
    alone = [found.weighted_sum(dict.fromkeys(found.names, torch.eye(3, device=DEVICE)[i])) for i in range(3)]
    for n in found.names:
        contributed = torch.stack([one[n].square().sum() for one in alone])
        assert bool((contributed <= norms[n] * (1 + 1e-5)).all())
        close(norms[n], contributed, 0.02 if name == "standardised" else 2e-4)  # rounded outwards
        close(sums[n], sum(w * one[n] for w, one in zip(weights, alone, strict=True)), 1e-5)


def small_maps() -> nn.Module:
    """In float32 the norms of the second convolution come from Gram matrices, and its gradients are not formed."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 4), nn.ReLU(), nn.Conv2d(16, 64, 3, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.Linear(64, 4),
    )  # fmt: skip


@pytest.mark.parametrize(("build", "autocast"), [(lambda: networks()["D4 by pixels"](), True), (small_maps, False)])
def test_a_gradient_that_is_not_finite_leaves_no_trace(forced, build, autocast):
    """One record's NaN costs that record alone its contribution, without a look at the device."""
    torch.manual_seed(6)
    model = build().to(DEVICE).to(memory_format=torch.channels_last)
    x, y = channels_last(4, 3, 16, 16), torch.randint(0, 4, (4,), device=DEVICE)
    x[1] = float("nan")

    def released(rows: list[int]) -> dict[str, Tensor]:
        mechanism = GaussianMechanism(0.0, 1.0)
        mechanism.bind(dict(model.named_parameters()), 4)
        gradients = recorded(model, x[rows], y[rows], 1, autocast)
        assert gradients.guarded
        with torch.no_grad():
            mechanism.accumulate(gradients)
        return mechanism.finish(4)

    with_nan, without = released([0, 1, 2, 3]), released([0, 2, 3])
    flat = lambda gradients: torch.cat([g.flatten() for g in gradients.values()])  # noqa: E731
    close(flat(with_nan), flat(without), 1e-2)


def test_runs_of_layers_are_found():
    gn = lambda: nn.GroupNorm(2, 8)  # noqa: E731
    layers = [nn.Conv2d(3, 8, 3), nn.Mish(), gn(), nn.MaxPool2d(2), gn(), nn.ReLU(), gn(), nn.ReLU(), nn.MaxPool2d(3)]
    found = [(r.start, r.stop, r.spec.pre, r.spec.post, r.spec.pool) for r in runs(layers)]
    assert found == [(1, 4, "mish", "identity", True), (4, 5, "identity", "identity", False), (5, 8, "relu", "relu", False)]
    layers[2].register_forward_hook(lambda *_: None)
    assert [r.start for r in runs(layers)] == [4, 5]


def test_joined_layers_in_ordinary_training_give_the_ordinary_gradients(forced):
    torch.manual_seed(7)
    model = networks()["plain"]().to(DEVICE).to(memory_format=torch.channels_last)
    x, y = channels_last(4, 3, 16, 16), torch.randint(0, 4, (4,), device=DEVICE)
    F.cross_entropy(model(x), y).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(join(model)(x), y).backward()
    for p, w in zip(model.parameters(), wanted, strict=True):
        close(p.grad, w, 1e-4)
    assert type(copy.deepcopy(model)[1].forward) is types.MethodType


@pytest.mark.parametrize("private", [False, True])
def test_layers_that_are_exchanged_in_a_joined_chain_are_the_ones_that_run(forced, private):
    torch.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU()).to(DEVICE)
    model = model.to(memory_format=torch.channels_last)
    x = channels_last(2, 3, 8, 8)
    if private:
        attach(model, Tape(dict(model.named_parameters()), "sum"))
    else:
        join(model)
    model(x)
    model[1], model[2] = nn.GroupNorm(4, 16).to(DEVICE), nn.Tanh()
    nn.init.normal_(model[1].weight)
    close(model(x), torch.tanh(model[1](model[0](x))), 1e-5)
    model[1].register_forward_hook(lambda module, given, out: out + 1)
    close(model(x), torch.tanh(model[1](model[0](x))), 1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_transposed_convolution_is_not_taken_for_an_ordinary_one(forced, stride):
    """Its gradients are formed by the native kernel, of the same values that are measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(16, 16, 3, stride, 1), nn.Flatten(), nn.LazyLinear(4)).to(DEVICE)
    x, y = channels_last(4, 16, 6, 6), torch.randint(0, 4, (4,), device=DEVICE)
    model(x)
    found = recorded(model, x, y, 1, autocast=True)
    exact = recorded(copy.deepcopy(model).double(), x.double(), y, 1, autocast=False)
    close(found.dense("0.weight"), exact.dense("0.weight"), 0.05)


def test_no_kernel_inverts_a_condition():
    """The interpreter of Triton 3.2, which comes with PyTorch 2.6, has no ``~`` of conditions."""
    trees = [ast.parse(source.read_text()) for source in Path(kernels.__file__).parent.glob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)]
    assert len(jitted) > 20
    assert not [f.name for f in jitted if any(isinstance(node, ast.Invert) for node in ast.walk(f))]
