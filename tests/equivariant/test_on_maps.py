"""Kernels of band-limited fields against their twins and the layers' own code: on a GPU as compiled, elsewhere interpreted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.equivariant import (
    EquivariantSequential,
    FieldInstanceNorm,
    FourierNonlinearity,
    SpatialAvgPool,
    SteerableConv2d,
    fields,
    irrep,
    o2,
    so2,
    spectral,
    trivial_fields,
)
from erlangen.gradients import RowMap, Tape, attach, detach, kernels
from erlangen.gradients.joined import faster, join
from erlangen.gradients.kernels import fourier, lines
from tests.gradients.reference import seeded_loss
from tests.kernels import DEVICE, HALF, channels_last, close

#: of products of 16-bit values that are rounded to 16 bits on the way
ROUNDED = 4 * torch.finfo(HALF).eps


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(kernels, "FORCED", True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("function", ["mish", "relu", "silu"])
@pytest.mark.parametrize(("group", "frequency", "count"), [(so2(), 1, 3), (so2(), 2, 6), (o2(), 2, 2), (so2(), 4, 1)])
def test_fourier_is_its_twin(group, frequency, count, function, dtype):
    torch.manual_seed(frequency)
    layer = FourierNonlinearity(group, frequency, count, nn.Mish()).to(DEVICE)
    up, down = layer.samples * layer.gain, layer.samples / layer.gain
    x = channels_last(3, layer.in_type.size, 5, 6, dtype=dtype)
    wide = [t.double() for t in (x, up, down)]
    z = fourier.forward(x, up, down, function)
    assert z.is_contiguous(memory_format=torch.channels_last)
    tolerance = 1e-5 if dtype == torch.float32 else ROUNDED
    close(z, fourier.reference(*wide, function), tolerance)
    d = torch.randn_like(z)
    found, want = fourier.backward(x, d, up, down, function), fourier.reference_backward(wide[0], d.double(), *wide[1:], function)
    close(found, want, tolerance if function != "relu" or dtype == torch.float32 else 0.05)  # a sample near 0 may change its side


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(3, 5, 4, 5), (2, 200, 9, 9), (1, 130, 1, 1)])
def test_sums_and_lines_are_their_twins(shape, dtype):
    torch.manual_seed(0)
    u, v = channels_last(*shape, dtype=dtype), channels_last(*shape, dtype=dtype)
    for found, want in zip(lines.sums(u, v), lines.reference_sums(u.double(), v.double()), strict=True):
        close(found, want, 1e-4)
    a, b, c = (torch.randn(*shape[:2], device=DEVICE) for _ in range(3))
    close(lines.line(u, a, c), lines.reference_line(u, a, c), torch.finfo(dtype).eps)
    close(lines.line(u, a, c, v, b), lines.reference_line(u, a, c, v, b), torch.finfo(dtype).eps)


def test_more_rows_than_a_launch_has(monkeypatch):
    u, v = channels_last(7, 5, 3, 2), channels_last(7, 5, 3, 2)
    a, b, c = (torch.randn(7, 5, device=DEVICE) for _ in range(3))
    whole = (*lines.sums(u, v), lines.line(u, a, c), lines.line(u, a, c, v, b))
    monkeypatch.setattr(lines, "ROWS", 3)
    parts = (*lines.sums(u, v), lines.line(u, a, c), lines.line(u, a, c, v, b))
    assert all(map(torch.equal, whole, parts))


MIXED = fields(spectral(so2(), 2), 3) + trivial_fields(so2(), 2) + fields(irrep(so2(), 1), 2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [fields(spectral(so2(), 2), 6), fields(spectral(o2(), 1), 2), fields(irrep(so2(), 1), 3), MIXED])
def test_the_norm_of_fields_is_the_layers_own(kind, affine, forced):
    """Values and gradients, of invariants with a mean, fields without any, and of both."""
    torch.manual_seed(1)
    norm = join(randomised(FieldInstanceNorm(kind, affine=affine)).to(DEVICE))
    x = (channels_last(4, kind.size, 5, 6) + 1).requires_grad_()
    assert "forward" in norm.__dict__
    exact, wide = copy.deepcopy(norm).double(), x.detach().double().contiguous().requires_grad_()
    out, want = norm(x), exact(wide)
    cotangent = torch.randn_like(out)
    close(out, want, 1e-5)
    found = torch.autograd.grad(out, [x, *norm.parameters()], cotangent)
    wanted = torch.autograd.grad(want, [wide, *exact.parameters()], cotangent.double())
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-4)


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def network() -> EquivariantSequential:
    kind = fields(spectral(so2(), 1), 4)
    conv = SteerableConv2d(trivial_fields(so2(), 2), kind, 3, padding=1, bias=False)
    chain = EquivariantSequential(conv, FourierNonlinearity(so2(), 1, 4, nn.Mish()), FieldInstanceNorm(kind))
    return randomised(chain).to(DEVICE)  # type: ignore[return-value]


def recorded(module: nn.Module, x: Tensor, rows: RowMap) -> dict[str, Tensor]:
    tape = Tape(dict(module.named_parameters()))
    attach(module, tape)
    tape.rows = rows
    seeded_loss(module(x)).mean().backward()
    detach(module)
    gradients = tape.gradients()
    return {name: gradients.dense(name) for name in gradients.names}


def test_private_gradients_are_those_without_kernels(monkeypatch):
    """Of every owner, with two views each, and of nobody."""
    torch.manual_seed(2)
    module = network()
    x, rows = channels_last(6, 2, 6, 6), RowMap.regular(3, 2)
    want = recorded(module, x, rows)
    monkeypatch.setattr(kernels, "FORCED", True)
    assert faster(module[1]) is not None
    used = []
    monkeypatch.setattr(fourier, "backward", lambda *given, plain=fourier.backward: used.append("fourier") or plain(*given))
    monkeypatch.setattr(lines, "sums", lambda *given, plain=lines.sums: used.append("sums") or plain(*given))
    found = recorded(module, x, rows)
    assert used.count("sums") == 2
    assert "fourier" in used
    for name, g in want.items():
        close(found[name], g, 1e-4)
    assert all(g.shape[0] == 0 for g in recorded(module, x[:0], RowMap.regular(0, 2)).values())


def test_hooks_inside_are_called(forced):
    """A function that somebody watches is called as it is."""
    layer = join(FourierNonlinearity(so2(), 1, 2, nn.Mish()).to(DEVICE))
    seen: list[int] = []
    layer.function.register_forward_hook(lambda *_: seen.append(1))
    layer(channels_last(2, layer.in_type.size, 4, 4))
    assert seen == [1]


class Scaled(nn.Module):
    """A parameter of its own takes all layers inside into the functional fallback, where tensors have no order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.ones(1)), network()
        self.average, self.pool = nn.AvgPool2d(2), SpatialAvgPool(self.inside.out_type, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.inside(self.average(x))) * self.scale


def test_layers_inside_the_functional_fallback(monkeypatch):
    torch.manual_seed(3)
    module = Scaled().to(DEVICE)
    x, rows = channels_last(6, 2, 8, 8), RowMap.regular(3, 2)
    want = recorded(module, x, rows)
    monkeypatch.setattr(kernels, "FORCED", True)
    found = recorded(module, x, rows)
    assert set(found) == set(want)
    for name, g in want.items():
        close(found[name], g, 1e-5)


@pytest.mark.parametrize("kind", ["average", "pool", "fourier", "norm"])
def test_layers_inside_torch_func(kind, forced):
    """Joined layers of a model that somebody differentiates by torch.func: no kernel is launched on tensors without memory."""
    torch.manual_seed(4)
    fields_ = fields(spectral(so2(), 1), 4)
    plain = {
        "average": nn.AvgPool2d(2), "pool": SpatialAvgPool(fields_, 2), "norm": FieldInstanceNorm(fields_),
        "fourier": FourierNonlinearity(so2(), 1, 4, nn.Mish()),
    }[kind].to(DEVICE)  # fmt: skip
    fast = join(copy.deepcopy(plain))
    x = torch.randn(3, 1, 4, 4, fields_.size, device=DEVICE).permute(0, 1, 4, 2, 3)  # each channels-last
    for transform in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(lambda a: f(a).square().sum()))):
        close(transform(fast)(x), transform(plain)(x), 1e-5)
