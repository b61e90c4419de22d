"""Rules of equivariant layers against one sample at a time: every group, basis, geometry, view and precision."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from erlangen.equivariant import (
    EquivariantGroupNorm,
    EquivariantSequential,
    FieldInstanceNorm,
    FourierNonlinearity,
    NormNonlinearity,
    Pointwise,
    SteerableConv2d,
    cyclic,
    dihedral,
    fields,
    irrep,
    o2,
    regular_fields,
    so2,
    spectral,
    trivial_fields,
)
from erlangen.gradients import RowMap, Tape, attach, detach
from erlangen.gradients.attach import plan
from erlangen.gradients.fallback import functional
from erlangen.gradients.registry import find_rule
from erlangen.gradients.rules.steerable import Steerable
from erlangen.gradients.tracing import followed
from erlangen.models.equivariant import c8_steerable_cnn, equivariant_resnet9
from tests.gradients.reference import assert_same, one_by_one, recorded

STRATEGIES = ("auto", "materialise", "norms-first")


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter away from its special initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def mixed(group, frequency: int = 2):
    """A type whose kinds of fields interleave, so that channels are not sorted by kind."""
    a, b = spectral(group, 1), spectral(group, frequency)
    return fields(a, 1) + fields(b, 1) + fields(a, 1)


G4, D4, C8 = cyclic(4), dihedral(4), cyclic(8)
CASES = {
    "C4 regular": lambda: (regular_fields(G4, 2), SteerableConv2d(regular_fields(G4, 2), regular_fields(G4, 3), 3)),
    "C8 5x5 padded": lambda: (
        regular_fields(C8, 1), SteerableConv2d(regular_fields(C8, 1), regular_fields(C8, 2), 5, padding=2)
    ),
    "C8 one position": lambda: (
        regular_fields(C8, 3), SteerableConv2d(regular_fields(C8, 3), regular_fields(C8, 4), 7, standardise=True)
    ),
    "SO(2) one position": lambda: (mixed(so2()), SteerableConv2d(mixed(so2()), mixed(so2(), 3), 7)),
    "D4 standardised": lambda: (
        regular_fields(D4, 2),
        SteerableConv2d(regular_fields(D4, 2), regular_fields(D4, 1), 3, padding=1, standardise=True, cutoff=3.0),
    ),
    "D4 pixel": lambda: (
        regular_fields(D4, 1),
        SteerableConv2d(regular_fields(D4, 1), regular_fields(D4, 2), 3, basis="pixel", standardise=True),
    ),
    "many fields": lambda: (
        regular_fields(D4, 2), SteerableConv2d(regular_fields(D4, 2), regular_fields(D4, 9), 3, padding=1, standardise=True)
    ),
    "many fields, pixel": lambda: (
        trivial_fields(G4, 3), SteerableConv2d(trivial_fields(G4, 3), regular_fields(G4, 8), 3, stride=2, basis="pixel")
    ),
    "strided, dilated": lambda: (
        trivial_fields(G4, 2), SteerableConv2d(trivial_fields(G4, 2), regular_fields(G4, 1), 3, stride=2, dilation=2)
    ),
    "grouped": lambda: (
        regular_fields(G4, 4), SteerableConv2d(regular_fields(G4, 4), regular_fields(G4, 2), 3, groups=2)
    ),
    "circular padding": lambda: (
        trivial_fields(G4, 2),
        SteerableConv2d(trivial_fields(G4, 2), regular_fields(G4, 2), 3, padding=1, padding_mode="circular"),
    ),
    "SO(2) interleaved": lambda: (mixed(so2()), SteerableConv2d(mixed(so2()), mixed(so2(), 3), 5)),
    "O(2)": lambda: (mixed(o2()), SteerableConv2d(mixed(o2()), mixed(o2()), 3, bias=False)),
    "group norm": lambda: (regular_fields(C8, 4), EquivariantGroupNorm(regular_fields(C8, 4), 2)),
    "group norm per element": lambda: (
        regular_fields(G4, 4), EquivariantGroupNorm(regular_fields(G4, 4), 2, per_element=True)
    ),
    "instance norm": lambda: (mixed(so2()), FieldInstanceNorm(mixed(so2()))),
    "instance norm without invariants": lambda: (
        fields(irrep(so2(), 1), 2), FieldInstanceNorm(fields(irrep(so2(), 1), 2))
    ),
    "norm relu": lambda: (mixed(so2()), NormNonlinearity(mixed(so2()))),
    "norm sigmoid": lambda: (mixed(o2()), NormNonlinearity(mixed(o2()), "sigmoid")),
    "Fourier": lambda: (
        fields(spectral(so2(), 2), 1),
        EquivariantSequential(
            SteerableConv2d(fields(spectral(so2(), 2), 1), fields(spectral(so2(), 2), 1), 3),
            FourierNonlinearity(so2(), 2, 1, nn.Mish()),
        ),
    ),
}  # fmt: skip


def build(case: str, dtype: torch.dtype, rows: int = 3, size: int = 7):
    torch.manual_seed(0)
    in_type, module = CASES[case]()
    return randomise(module.to(dtype)), torch.randn(rows, in_type.size, size, size, dtype=dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rules_agree_with_one_sample_at_a_time(case, strategy):
    module, x = build(case, torch.float64)
    assert all(rule is not functional for _, _, rule in plan(module)), "the fallback would hide a missing rule"
    assert_same(recorded(module, (x,), strategy=strategy), one_by_one(module, (x,)))


@pytest.mark.parametrize("case", CASES)
def test_single_precision(case):
    module, x = build(case, torch.float32)
    assert_same(recorded(module, (x,)), one_by_one(module, (x,)), torch.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["auto", "norms-first"])
def test_views_of_an_owner_are_averaged_before_anything_else(case, strategy):
    module, x = build(case, torch.float64, rows=6)
    alone = one_by_one(module, (x,))
    want = {name: g.unflatten(0, (2, 3)).mean(1) for name, g in alone.items()}
    assert_same(recorded(module, (x,), rows=RowMap.regular(2, 3), strategy=strategy), want)
    owner = torch.tensor([4, 9, -1, 4, 9, 4])
    want = {name: torch.stack([g[owner == k].mean(0) for k in (4, 9)]) for name, g in alone.items()}
    assert_same(recorded(module, (x,), rows=RowMap.of(owner), strategy=strategy), want)


@settings(max_examples=20, deadline=None)
@given(
    order=st.integers(1, 6),
    flip=st.booleans(),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    standardise=st.booleans(),
    rows=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_shape(order, flip, counts, size, stride, padding, standardise, rows, seed):
    torch.manual_seed(seed)
    group = dihedral(order) if flip else cyclic(order)
    types = [regular_fields(group, count) for count in counts]
    conv = SteerableConv2d(*types, size, stride=stride, padding=padding, standardise=standardise).double()
    x = torch.randn(rows, types[0].size, 6, 6, dtype=torch.float64)
    got = recorded(randomise(conv, seed), (x,))
    assert got.owners == rows
    if rows:
        assert_same(got, one_by_one(conv, (x,)))
    else:
        assert got.weighted_sum({n: torch.zeros(0) for n in got.names})["weight"].abs().max() == 0


@pytest.mark.parametrize("network", ["c8", "d4", "so2"])
def test_whole_networks(network):
    torch.manual_seed(1)
    module = {
        "c8": lambda: c8_steerable_cnn(field_counts=(1, 2), kernel_size=3),
        "d4": lambda: equivariant_resnet9(in_channels=1, layout=(4, 4, 8), scale_norm=True),
        "so2": lambda: equivariant_resnet9(in_channels=1, group="SO2", layout=(2, 2, 2), frequency=1),
    }[network]()
    module = randomise(module.double())
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    assert all(rule is not functional for _, _, rule in plan(module))
    assert_same(recorded(module, (x,)), one_by_one(module, (x,)))


def test_a_pullback_without_the_standardisation_is_caught():
    """The broken twin: the adjoint of the expansion alone, as if the kernel were linear in θ."""
    module, x = build("D4 standardised", torch.float64)
    want = one_by_one(module, (x,))
    module.coefficient_gradient = module.expansion.pullback
    with pytest.raises(AssertionError):
        assert_same(recorded(module, (x,)), want)


def test_pieces_stay_factored_and_chunks_join():
    module, x = build("C8 5x5 padded", torch.float64, rows=5)
    piece = recorded(module, (x,), strategy="norms-first")._pieces["weight"]
    assert isinstance(piece, Steerable)
    piece.conv.chunks = lambda: [
        piece.conv.__class__(a, d, 1, piece.conv.shape, piece.conv.geometry)
        for a, d in zip(piece.conv.x.split(2), piece.conv.d.split(2), strict=True)
    ]
    assert len(piece.chunks()) == 3
    torch.testing.assert_close(piece.dense() * 5, one_by_one(module, (x,))["weight"], rtol=1e-10, atol=1e-10)


def test_an_owner_set_to_zero_contributes_nothing():
    module, x = build("C4 regular", torch.float64)
    x[1] = float("nan")
    clean = recorded(module, (x,), strategy="norms-first").without(torch.tensor([False, True, False]))
    assert torch.isfinite(clean.dense("weight")).all()
    assert clean.norms_squared()["weight"][1] == 0


@pytest.mark.parametrize("case", CASES)
def test_half_precision_activations_give_gradients_in_the_precision_of_the_parameters(case):
    """As a training in 16 bits has them: the layers around return what they like, and rules run without autocast."""
    module, x = build(case, torch.float32)
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(module(x).shape[1:], generator=generator)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return (out.float() * c + 0.1 * out.float().square()).flatten(1).sum(1)

    want = {name: [] for name, _ in module.named_parameters()}
    for row in x.split(1):
        grads = torch.autograd.grad(loss(module(row)).sum(), list(module.parameters()))
        for name, g in zip(want, grads, strict=True):
            want[name].append(g)
    tape = Tape(dict(module.named_parameters()), "sum")
    attach(module, tape)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x.bfloat16())
    loss(out).sum().backward()
    got = tape.gradients()
    detach(module)
    for name, rows in want.items():
        assert got.dense(name).dtype == torch.float32
        g = torch.stack(rows)
        assert (got.dense(name) - g).norm() / g.norm() < 0.05, name
    if isinstance(module, (SteerableConv2d, FieldInstanceNorm)):
        assert out.dtype == torch.bfloat16, "maps stay as narrow as they were"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [name for name in CASES if "norm" not in name])
def test_products_with_the_basis_in_16_bits_are_measured_as_they_are_summed(case, strategy):
    """As on a GPU: a clipped owner alone is never longer than the norm it was measured at, also with terms that cancel."""
    module, x = build(case, torch.float32)
    for rows in (x, torch.cat([1e4 * x[:1], -1e4 * x[:1] + x[1:2]])):
        owners = RowMap.regular(1, len(rows))
        tape = Tape(dict(module.named_parameters()), "sum", strategy)
        attach(module, tape)
        tape.rows = owners
        try:
            with followed():
                with torch.autocast("cpu", torch.bfloat16):
                    out = module(rows.bfloat16())
                out.float().square().sum().backward()
                got = tape.gradients()
                norms, sums = got.norms_squared(), got.weighted_sum({name: torch.ones(1) for name in got.names})
        finally:
            detach(module)
        for name, total in sums.items():
            assert float(total.double().norm()) <= float(norms[name].double().sqrt()) * (1 + 1e-6), name


def test_the_engine_does_not_load_the_equivariant_package():
    code = (
        "import sys, torch, erlangen, erlangen.engine; from erlangen.gradients.registry import find_rule;"
        "assert find_rule(torch.nn.Linear(1, 1)) is not None;"
        "assert not [m for m in sys.modules if m.startswith('erlangen.equivariant')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pointwise_parameters_have_the_rule_of_their_function():
    field_type = trivial_fields(G4, 3)
    module = Pointwise(field_type, nn.PReLU(3)).double()
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    assert find_rule(module) is None
    assert_same(recorded(module, (x,)), one_by_one(module, (x,)))


class Typed:
    """What an escnn layer is called with: a tensor that carries its type."""

    def __init__(self, tensor, type_) -> None:
        self.tensor, self.type = tensor, type_


class R2Conv(nn.Module):
    """A stand-in with the interface of escnn's layer: the kernel is computed from coefficients."""

    def __init__(self, padding_mode: str = "zeros") -> None:
        super().__init__()
        self.weights, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(2))
        self.register_buffer("basis", torch.randn(6, 4, 2, 3, 3))
        self.stride, self.padding, self.dilation, self.groups, self.out_type = 1, 1, 1, 1, "out"
        self.padding_mode, self._reversed_padding_repeated_twice = padding_mode, (1, 1, 1, 1)

    def expand_parameters(self):
        return torch.einsum("n,noikl->oikl", self.weights.tanh(), self.basis), self.bias.repeat_interleave(2)

    def forward(self, input):
        kernel, bias = self.expand_parameters()
        x, padding = input.tensor, self.padding
        if self.padding_mode != "zeros":
            x, padding = nn.functional.pad(x, self._reversed_padding_repeated_twice, self.padding_mode), 0
        return Typed(nn.functional.conv2d(x, kernel, bias, self.stride, padding), self.out_type)


R2Conv.__module__ = "escnn.nn.modules.conv.r2convolution"


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_layers_of_other_packages_are_found_by_name(padding_mode):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = R2Conv(padding_mode)

        def forward(self, x):
            return self.conv(Typed(x, "in")).tensor

    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(3, 2, 5, 5, dtype=torch.float64)
    assert find_rule(net.conv) is not None
    assert_same(recorded(net, (x,)), one_by_one(net, (x,)))
