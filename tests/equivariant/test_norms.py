"""Norms: equivariance, per-sample statistics, the moments they promise, and their twins in plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F

from erlangen.equivariant import (
    EquivarianceError,
    EquivariantGroupNorm,
    FieldInstanceNorm,
    check_equivariance,
    cyclic,
    dihedral,
    export,
    fields,
    irrep,
    regular_fields,
    so2,
    spectral,
    trivial,
    trivial_fields,
)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


NORMS = [
    EquivariantGroupNorm(regular_fields(dihedral(4), 4)),
    EquivariantGroupNorm(regular_fields(dihedral(4), 4), 2),
    EquivariantGroupNorm(regular_fields(dihedral(4), 4), 1, per_element=True),
    EquivariantGroupNorm(regular_fields(cyclic(8), 4), 2, per_element=True),
    EquivariantGroupNorm(trivial_fields(cyclic(4), 4), 2),
    EquivariantGroupNorm(regular_fields(cyclic(4), 4), 2, affine=False),
    EquivariantGroupNorm(regular_fields(cyclic(4), 4), 2, affine=False, per_element=True),
    FieldInstanceNorm(fields(spectral(so2(), 2), 3)),
    FieldInstanceNorm(fields([irrep(so2(), 1), trivial(so2()), irrep(so2(), 3)], 2)),
    FieldInstanceNorm(fields(irrep(dihedral(4), 1), 3)),
    FieldInstanceNorm(regular_fields(dihedral(4), 2), affine=False),
]


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_equivariance_export_and_independence_of_samples(norm: EquivariantGroupNorm | FieldInstanceNorm) -> None:
    torch.manual_seed(0)
    randomised(norm)
    norm.check_equivariance()
    x = torch.randn(3, norm.in_type.size, 6, 6)
    assert torch.allclose(export(norm)(x), norm(x), atol=1e-5)
    assert torch.allclose(norm(x)[1:2], norm(x[1:2]), atol=1e-5)  # per-sample statistics
    assert set(norm.init_std()) == {name for name, _ in norm.named_parameters()}
    precise = copy.deepcopy(norm).double()
    precise.check_equivariance(tolerance=1e-12)
    for plain in (precise.export(), export(precise)):
        assert (plain(x.double()) - precise(x.double())).abs().max() < 1e-12


def test_pooled_statistics_and_shared_affine() -> None:
    torch.manual_seed(0)
    norm = EquivariantGroupNorm(regular_fields(dihedral(4), 6), 3)
    y = norm(torch.randn(2, 48, 5, 5) * 3 + 1).view(2, 3, -1)
    assert torch.allclose(y.mean(-1), torch.zeros(2, 3), atol=1e-5)
    assert torch.allclose(y.var(-1, unbiased=False), torch.ones(2, 3), atol=1e-3)
    gradient = torch.randn(7, 48)
    assert torch.allclose(norm.field_gradient(gradient), gradient.view(7, 6, 8).sum(-1))
    weight, bias = norm.dense_affine()
    assert weight is not None
    assert bias is not None
    assert weight.shape == bias.shape == (48,)


def test_per_element_statistics() -> None:
    """Each (group of fields, group element) has mean 0 and variance 1."""
    torch.manual_seed(0)
    norm = EquivariantGroupNorm(regular_fields(cyclic(4), 6), 2, per_element=True)
    y = norm(torch.randn(2, 24, 5, 5) * 3 + 1).view(2, 2, 3, 4, 25).transpose(2, 3).flatten(3)
    assert torch.allclose(y.mean(-1), torch.zeros(2, 2, 4), atol=1e-5)
    assert torch.allclose(y.var(-1, unbiased=False), torch.ones(2, 2, 4), atol=1e-3)


def test_instance_norm_moments() -> None:
    """E‖y‖²/d = 1 for every field, the mean removed from trivial irreps and from nothing else."""
    torch.manual_seed(0)
    group = so2()
    norm = FieldInstanceNorm(fields([trivial(group), irrep(group, 1)], 2), affine=False)
    x = torch.randn(2, 6, 16, 16) + 2.0
    y = norm(x)
    for start, size in ((0, 1), (1, 2), (3, 1), (4, 2)):
        energy = y[:, start : start + size].square().sum(1).mean((1, 2)) / size
        assert torch.allclose(energy, torch.ones(2), atol=1e-3)
    assert y[:, [0, 3]].mean((2, 3)).abs().max() < 1e-5
    assert y[:, [1, 2, 4, 5]].mean((2, 3)).abs().min() > 0.5
    single = norm(torch.randn(1, 6, 1, 1))
    assert torch.isfinite(single).all()


def test_gradients_flow_through_the_statistics() -> None:
    torch.manual_seed(0)
    for norm in (FieldInstanceNorm(fields(spectral(so2(), 1), 2)), EquivariantGroupNorm(regular_fields(cyclic(3), 2))):
        norm = randomised(norm.double())
        x = torch.randn(2, 6, 3, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(norm, (x,), fast_mode=True)
        # scaling the input does not change the output, so the gradient along x itself vanishes
        direction = torch.autograd.grad((norm(x) * torch.randn(2, 6, 3, 3, dtype=torch.float64)).sum(), x)[0]
        assert abs(float((direction * x).sum().detach())) < 1e-3


def test_a_plain_group_norm_across_fields_is_caught() -> None:
    """Per-channel affine parameters break the group: the twin must fail where ours passes."""
    torch.manual_seed(0)
    field_type = regular_fields(dihedral(4), 2)
    with pytest.raises(EquivarianceError):
        check_equivariance(randomised(torch.nn.GroupNorm(2, 16)), field_type, field_type)
    check_equivariance(torch.nn.GroupNorm(2, 16), field_type, field_type)
    x = torch.randn(2, 16, 4, 4)
    assert torch.allclose(EquivariantGroupNorm(field_type, 2)(x), F.group_norm(x, 2), atol=1e-6)


def test_errors() -> None:
    with pytest.raises(ValueError, match="choose a divisor"):
        EquivariantGroupNorm(regular_fields(cyclic(4), 5), 2)
    with pytest.raises(ValueError, match="permutation representations"):
        EquivariantGroupNorm(fields(irrep(so2(), 1), 2))
    with pytest.raises(ValueError, match="fields of one kind"):
        EquivariantGroupNorm(regular_fields(cyclic(4), 1) + trivial_fields(cyclic(4), 1))


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_an_empty_batch_passes(norm):
    """Poisson draws nobody now and then, and that step is noise alone."""
    x = torch.zeros(0, norm.in_type.size, 5, 5, requires_grad=True)
    out = norm(x)
    assert out.shape == x.shape
    out.sum().backward()
