"""Nonlinearities, pooling, dropout, restriction and chains: equivariance, export, and the twins that must fail."""

import copy
import math

import pytest
import torch
from torch import nn

from erlangen.equivariant import (
    Disentangle,
    EquivarianceError,
    EquivariantModule,
    EquivariantSequential,
    FieldDropout,
    FieldType,
    FourierNonlinearity,
    GatedNonlinearity,
    Group,
    GroupPool,
    NormNonlinearity,
    Pointwise,
    Restrict,
    SpatialAvgPool,
    SpatialMaxPool,
    SteerableConv2d,
    check_equivariance,
    cyclic,
    dihedral,
    export,
    fields,
    irrep,
    o2,
    quotient,
    regular,
    regular_fields,
    so2,
    spectral,
    transform,
    trivial_fields,
)

D4, C8 = dihedral(4), cyclic(8)
REGULAR = regular_fields(D4, 3)

LAYERS: list[EquivariantModule] = [
    Pointwise(REGULAR, nn.Mish()),
    Pointwise(fields(quotient(D4, dihedral(1)), 2), nn.ReLU()),
    NormNonlinearity(fields([irrep(so2(), 1), irrep(so2(), 2)])),
    NormNonlinearity(fields([irrep(D4, 1), irrep(D4, 0, 1)]), "sigmoid"),
    GatedNonlinearity(fields([irrep(C8, 1), irrep(C8, 3)])),
    FourierNonlinearity(so2(), 2, 3, nn.Mish()),
    FourierNonlinearity(o2(), 2, 2, nn.ReLU(), rotations=16),
    SpatialAvgPool(REGULAR, 3),
    SpatialMaxPool(REGULAR, 3),
    SpatialMaxPool(REGULAR, 3, stride=1, padding=1),
    GroupPool(REGULAR),
    GroupPool(REGULAR, "mean"),
    GroupPool(fields([irrep(so2(), 1), irrep(so2(), 2)]), "norm"),
    FieldDropout(REGULAR, 0.3),
    Restrict(REGULAR, dihedral(2)),
    Restrict(REGULAR, cyclic(4)),
    Restrict(REGULAR, dihedral(1)),
    Restrict(regular_fields(cyclic(16), 2), C8),
    Restrict(fields(spectral(o2(), 2), 2), D4),
    Restrict(fields(spectral(so2(), 2), 2), cyclic(1)),
    Disentangle(REGULAR),
    Disentangle(regular_fields(C8, 2)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: f"{type(m).__name__}-{m.in_type}")
def test_equivariance_and_export(layer: EquivariantModule) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    layer.check_equivariance()
    plain = export(layer).eval()
    assert not any(isinstance(m, EquivariantModule) for m in plain.modules())
    x = torch.randn(2, layer.in_type.size, 9, 9)
    assert torch.allclose(plain(x), layer.eval()(x), atol=1e-5)
    assert layer(x).shape[1] == layer.out_type.size


@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: f"{type(m).__name__}-{m.in_type}")
def test_in_double_precision_too(layer: EquivariantModule) -> None:
    """A layer of integers alone has a dtype as well: that of the maps it is used with."""
    precise = copy.deepcopy(layer).double().eval()
    precise.check_equivariance(tolerance=1e-12)
    x = torch.randn(2, layer.in_type.size, 9, 9, dtype=torch.float64)
    for plain in (precise.export().eval(), export(precise).eval()):
        assert (plain(x) - precise(x)).abs().max() < 1e-12


def test_a_chain_is_held_to_the_bounds_of_its_layers() -> None:
    torch.manual_seed(0)
    images, hidden = trivial_fields(C8, 2), regular_fields(C8, 2)
    conv, pool = SteerableConv2d(images, hidden, 3, padding=1), SpatialMaxPool(hidden, 3)
    chain = EquivariantSequential(conv, EquivariantSequential(Pointwise(hidden, nn.Mish()), pool), nn.Identity())
    assert chain.off_grid_bound == pytest.approx(0.1 + 0.1 + pool.off_grid_bound)
    assert 0.1 < chain.check_equivariance().off_grid < chain.off_grid_bound
    with pytest.raises(EquivarianceError):
        chain.check_equivariance(off_grid_tolerance=0.1)
    beyond = SteerableConv2d(hidden, hidden, 3, padding=1, cutoff=3.0)  # frequencies without a promise
    assert EquivariantSequential(conv, beyond).off_grid_bound == math.inf


def test_restriction_splits_regular_fields() -> None:
    assert Restrict(REGULAR, dihedral(2)).out_type == regular_fields(dihedral(2), 6)
    assert Restrict(REGULAR, cyclic(4)).out_type == regular_fields(cyclic(4), 6)
    assert Restrict(REGULAR, cyclic(1)).out_type == trivial_fields(cyclic(1), 24)
    assert len(Disentangle(fields(regular(D4))).out_type) == 6
    x = torch.randn(2, 24, 3, 3)
    assert torch.allclose(Disentangle(REGULAR)(x).norm(), x.norm(), rtol=1e-5)


def test_fourier_nonlinearity_is_exact_on_its_samples() -> None:
    """Rotations by multiples of 2π/M are exact; more samples make other angles better."""
    errors = []
    for rotations in (6, 48):
        layer = FourierNonlinearity(so2(), 2, 1, nn.ReLU(), rotations=rotations)
        x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
        exact, other = so2().sample(rotations)[1], so2().sample(7)[1]
        x4 = x[..., None, None]
        for g, keep in ((exact, False), (other, True)):
            error = (layer(transform(x4, layer.in_type, g)) - transform(layer(x4), layer.out_type, g)).abs().max()
            if keep:
                errors.append(float(error))
            else:
                assert float(error) < 1e-5
    assert errors[1] < errors[0] / 4
    linear = FourierNonlinearity(so2(), 2, 3, nn.Identity())
    y = torch.randn(2, 15, 3, 3)
    assert torch.allclose(linear(y), y, atol=1e-5)


def test_dropout_drops_whole_fields() -> None:
    torch.manual_seed(0)
    layer = FieldDropout(REGULAR, 0.5)
    out = layer(torch.ones(64, 24, 2, 2)).view(64, 3, 8, 4)
    per_field = out.flatten(2)
    assert torch.equal(per_field.amin(-1), per_field.amax(-1))
    assert set(per_field.unique().tolist()) == {0.0, 2.0}
    assert 0.35 < float((per_field[..., 0] == 0).float().mean()) < 0.65


def test_wrong_layers_are_caught() -> None:
    vectors = fields(irrep(D4, 1), 2)
    with pytest.raises(EquivarianceError):
        check_equivariance(nn.ReLU(), vectors, vectors)
    with pytest.raises(EquivarianceError):  # the right channels in the wrong order
        check_equivariance(nn.Identity(), REGULAR, Restrict(REGULAR, dihedral(2)).out_type)
    with pytest.raises(EquivarianceError, match="even sizes"):
        SpatialMaxPool(REGULAR, 2).check_equivariance(size=9)
    SpatialMaxPool(REGULAR, 2).check_equivariance(size=8)


@pytest.mark.parametrize(
    "layer",
    [
        SpatialMaxPool(REGULAR, 2),
        SpatialAvgPool(REGULAR, 4),
        SpatialAvgPool(REGULAR, 5),
        SteerableConv2d(REGULAR, REGULAR, 4, stride=2, basis="pixel"),
        SteerableConv2d(REGULAR, REGULAR, 3, stride=3, padding=1),
        EquivariantSequential(SpatialMaxPool(REGULAR, 2), Pointwise(REGULAR, nn.Mish()), SpatialMaxPool(REGULAR, 2)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_exact_layers_pass_their_check_without_a_word_about_sizes(layer) -> None:
    assert layer.check_equivariance().on_grid < 1e-5


def test_a_layer_that_is_wrong_at_every_size_is_caught() -> None:
    broken = SpatialMaxPool(REGULAR, 2)
    broken.forward = lambda x: nn.functional.max_pool2d(x, 2)[..., :-1, :]  # type: ignore[method-assign]
    with pytest.raises((EquivarianceError, RuntimeError)):
        broken.check_equivariance()
    with pytest.raises(EquivarianceError):
        check_equivariance(nn.ReLU(), fields(irrep(D4, 1), 2), fields(irrep(D4, 1), 2))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: f"{type(m).__name__}-{m.in_type}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_zeros_and_exports_are_finite(layer: EquivariantModule, dtype: torch.dtype) -> None:
    small = copy.deepcopy(layer).eval().to(dtype)
    x = torch.zeros(1, layer.in_type.size, 6, 6, dtype=dtype, requires_grad=True)
    for module in (small, export(small)):
        out = module(x)
        assert bool(out.isfinite().all())
        (grad,) = torch.autograd.grad(out.float().sum(), x, allow_unused=True)
        assert grad is None or bool(grad.isfinite().all())


@pytest.mark.parametrize(("kernel", "stride", "size"), [(2, 2, 32), (3, 1, 33), (3, 2, 33), (3, 3, 33), (4, 4, 32), (5, 3, 35)])
@pytest.mark.parametrize("group", [cyclic(5), C8, dihedral(3)], ids=str)
def test_pooling_keeps_its_bound_between_the_angles_of_the_grid(group: Group, kernel: int, stride: int, size: int) -> None:
    """The largest of a window grows worse with the window, its mean with the distance between windows only."""
    largest, mean = (kind(regular_fields(group, 2), kernel, stride) for kind in (SpatialMaxPool, SpatialAvgPool))
    assert largest.off_grid_bound == pytest.approx(0.1 * max(1, kernel**2 / 4))
    assert mean.off_grid_bound == pytest.approx(0.1 * max(1, stride**2 / 4))
    assert mean.check_equivariance(size).off_grid < largest.check_equivariance(size).off_grid
    if stride > 1 and group != cyclic(5):  # whose only exact symmetry is the identity
        with pytest.raises(EquivarianceError, match="strides on even sizes"):
            largest.check_equivariance(size + 1)


def test_refusals_name_the_cure() -> None:
    vectors = fields(irrep(so2(), 1), 2)
    with pytest.raises(ValueError, match="Fourier nonlinearity"):
        Pointwise(vectors, nn.ReLU())
    with pytest.raises(ValueError, match="permutation"):
        GroupPool(vectors)
    with pytest.raises(ValueError, match="unknown group pooling"):
        GroupPool(REGULAR, "median")
    with pytest.raises(ValueError, match="unknown norm nonlinearity"):
        NormNonlinearity(vectors, "tanh")
    with pytest.raises(ValueError, match="dropout probability"):
        FieldDropout(REGULAR, 1.0)
    with pytest.raises(ValueError, match="in_type and out_type"):
        check_equivariance(nn.ReLU())
    for group in (cyclic(4), D4):
        FourierNonlinearity(group, 1, 2, nn.Mish()).check_equivariance()
        with pytest.raises(ValueError, match="frequency of at most 1"):
            FourierNonlinearity(group, 2, 2, nn.Mish())
    with pytest.raises(ValueError, match="at least one representation"):
        fields([])
    wrongs = ({"padding": "same"}, {"padding": (1, 1)}, {"kernel_size": (3, 3)}, {"groups": 0}, {"stride": 0}, {"dilation": True})
    for wrong in wrongs:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*whole number"):
            SteerableConv2d(REGULAR, REGULAR, **{"kernel_size": 3, **wrong})
    with pytest.raises(ValueError, match="has 24 channels"):
        transform(torch.zeros(1, 3, 4, 4), REGULAR, D4.elements[0])


def test_chains_check_their_types() -> None:
    torch.manual_seed(0)
    images = trivial_fields(D4, 3)
    chain = EquivariantSequential(
        SteerableConv2d(images, REGULAR, 3, padding=1), Pointwise(REGULAR, nn.ReLU()), Restrict(REGULAR, cyclic(4))
    )
    assert (chain.in_type, chain.out_type) == (images, regular_fields(cyclic(4), 6))
    chain.check_equivariance()
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(export(chain)(x), chain(x), atol=1e-5)
    assert torch.allclose(copy.deepcopy(chain)(x), chain(x))
    with pytest.raises(ValueError, match="layer 0 gives"):
        EquivariantSequential(SteerableConv2d(images, REGULAR, 3), Pointwise(images, nn.ReLU()))
    with pytest.raises(ValueError, match="at least one layer"):
        EquivariantSequential(nn.ReLU())


def test_field_types() -> None:
    mixed = FieldType(D4, (regular(D4), irrep(D4, 1), regular(D4)))
    assert mixed.size == 18
    assert mixed.channels_of(regular(D4)).tolist() == [list(range(8)), list(range(10, 18))]
    assert mixed.field_of_channel.tolist() == [0] * 8 + [1] * 2 + [2] * 8
    assert "2×regular" in repr(mixed)
    assert mixed.invariants().shape == (18, 2)
    with pytest.raises(ValueError, match="at least one field"):
        FieldType(D4, ())


def test_a_restriction_permutes_cotangents_back():
    layer, x = Restrict(REGULAR, dihedral(2)), torch.randn(3, REGULAR.size, 4, 4, requires_grad=True)
    layer, x = layer.double(), x.double().detach().requires_grad_()
    assert torch.equal(layer(x), x.index_select(1, layer.order))
    assert torch.equal(layer.order[layer.inverse], torch.arange(REGULAR.size))
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    weights = torch.randn_like(x)
    ours, theirs = (torch.autograd.grad((f(x) * weights).sum(), x)[0] for f in (layer, lambda v: v[:, layer.order]))
    assert torch.equal(ours, theirs)
    rows = torch.func.vmap(torch.func.grad(lambda r, w: (layer(r[None])[0] * w).sum()))(x.detach(), weights)
    assert torch.equal(rows, ours)
