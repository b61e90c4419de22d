"""θ → kernel is linear, its pullback is the adjoint, and standardisation is what it says with the right Jacobian."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.equivariant import (
    FieldType,
    KernelExpansion,
    KernelGrid,
    cyclic,
    dihedral,
    fields,
    group_by_name,
    irrep,
    o2,
    quotient,
    regular,
    so2,
    spectral,
    trivial,
)


def type_strategy(data: st.DataObject, name: str) -> FieldType:
    group = {"C4": cyclic(4), "D4": dihedral(4), "C8": cyclic(8), "D3": dihedral(3), "SO2": so2(), "O2": o2()}[name]
    kinds = [trivial(group), irrep(group, 1), spectral(group, 1)]
    if group.is_finite:
        kinds += [regular(group), quotient(group, cyclic(1) if not group.reflections else dihedral(1))]
    return fields(data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)))


def build(data: st.DataObject, name: str) -> KernelExpansion:
    size = data.draw(st.sampled_from([2, 3, 5]))
    return KernelExpansion(type_strategy(data, name), type_strategy(data, name), KernelGrid.build(size)).double()


names = st.sampled_from(["C4", "D4", "C8", "D3", "SO2", "O2"])


@settings(max_examples=40, deadline=None)
@given(names, st.data())
def test_pullback_is_the_adjoint_of_expand(name: str, data: st.DataObject) -> None:
    expansion = build(data, name)
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(expansion.dimension, generator=generator, dtype=torch.float64)
    kernel = expansion.expand(theta)
    assert kernel.shape == (expansion.out_type.size, expansion.in_type.size, expansion.grid.size, expansion.grid.size)
    gradient = torch.randn(3, 2, *kernel.shape, generator=generator, dtype=torch.float64)
    pulled = expansion.pullback(gradient)
    assert pulled.shape == (3, 2, expansion.dimension)
    assert torch.allclose((gradient * kernel).sum((-4, -3, -2, -1)), pulled @ theta, atol=1e-9)
    ones = expansion.expand(torch.ones_like(theta))
    assert torch.allclose(expansion.expand(2 * theta - 1), 2 * kernel - ones, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(names, st.data())
def test_channels_may_lie_innermost(name: str, data: st.DataObject) -> None:
    """As a channels-last network stores gradients of its kernels: the same numbers, copied by whole fields."""
    expansion = build(data, name)
    shape = expansion.expand(torch.zeros(expansion.dimension, dtype=torch.float64)).shape
    gradient = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    laid = gradient.movedim(2, -1).contiguous().movedim(-1, 2)
    assert torch.allclose(expansion.pullback(laid), expansion.pullback(gradient), atol=1e-9)


@pytest.mark.parametrize("name", ["C8", "D16", "SO2", "C4"])
@pytest.mark.parametrize("beginning", [0, 1])
def test_16_bits_are_copied_in_fours(name: str, beginning: int) -> None:
    """Where as many lie together, and begin at a multiple of eight bytes: to the last bit what copying them one by one gives."""
    group = group_by_name(name)
    kind = fields(regular(group) if group.is_finite else spectral(group, 2), 2)
    expansion = KernelExpansion(kind, kind, KernelGrid.build(3))
    size = kind.size
    stored = torch.randn(beginning + 3 * size * 9 * size).bfloat16()[beginning:]
    gradient = stored.view(3, size, 3, 3, size).movedim(-1, 2)
    found = expansion.pullback(gradient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("erlangen.equivariant.expansion._flat", lambda t: t.flatten(-3))
        assert torch.equal(found, expansion.pullback(gradient))


@settings(max_examples=30, deadline=None)
@given(names, st.data(), st.booleans())
def test_16_bit_products_of_any_size_are_those_of_64(name: str, data: st.DataObject, innermost: bool) -> None:
    """Sizes that are no multiples of eight are padded; what is not finite stays with its owner."""
    expansion = build(data, name)
    shape = expansion.expand(torch.zeros(expansion.dimension, dtype=torch.float64)).shape
    gradient = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradient[1, 0, 0, 0, 0] = torch.nan
    if innermost:
        gradient = gradient.movedim(2, -1).contiguous().movedim(-1, 2)
    found, exact = expansion.pullback(gradient), expansion.pullback(gradient.double())
    assert found.dtype == torch.bfloat16
    finite = torch.tensor([True, False, True, True])
    assert torch.equal(found.isfinite().all(1), finite)
    size = exact[finite].norm() + 1
    assert float((found[finite].double() - exact[finite]).norm()) <= 0.02 * float(size)
    assert torch.equal(torch.vmap(expansion.pullback)(gradient)[finite], found[finite])


@settings(max_examples=40, deadline=None)
@given(names, st.data(), st.integers(1, 3))
def test_contraction_is_the_pullback_of_the_kernel_gradient(name: str, data: st.DataObject, tokens: int) -> None:
    expansion = build(data, name)
    if any(block.dense is None for block in expansion.blocks.values()):
        assert not expansion.contraction_is_cheaper(1)
        return
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    a, c = draw(4, tokens, expansion.fan_in), draw(4, tokens, expansion.out_type.size)
    size = expansion.grid.size
    kernels = torch.einsum("nto,nti->noi", c, a).unflatten(2, (-1, size, size))
    assert torch.allclose(expansion.contract(a, c), expansion.pullback(kernels), atol=1e-9)


def test_contraction_is_chosen_where_positions_are_few() -> None:
    c8 = fields([regular(cyclic(8))] * 8)
    expansion = KernelExpansion(c8, c8, KernelGrid.build(4))
    assert expansion.contraction_is_cheaper(1)
    assert not expansion.contraction_is_cheaper(196)


@settings(max_examples=40, deadline=None)
@given(names, st.data())
def test_standardised_kernels_and_their_jacobian(name: str, data: st.DataObject) -> None:
    expansion = build(data, name)
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(expansion.dimension, generator=generator, dtype=torch.float64, requires_grad=True)
    unit = expansion.standardise(theta, eps=1e-12)
    kernel = expansion.expand(unit)
    for start, rho in zip(expansion.out_type.starts, expansion.out_type.representations):
        energy = kernel[start : start + rho.size].detach().square().sum()
        assert float(energy) == pytest.approx(rho.size, rel=1e-6) or float(energy) < 1e-6
    # no response of an invariant output to a constant invariant input
    ones = torch.as_tensor(expansion.in_type.invariants() @ expansion.in_type.invariants().T).sum(1)
    invariants = torch.as_tensor(expansion.out_type.invariants())
    assert torch.allclose(torch.einsum("oiyx,i,ou->u", kernel, ones, invariants), torch.zeros(1).double(), atol=1e-8)
    cotangents = torch.randn(4, expansion.dimension, generator=generator, dtype=torch.float64)
    expected = torch.stack([torch.autograd.grad(unit, theta, v, retain_graph=True)[0] for v in cotangents])
    assert torch.allclose(expansion.standardise_vjp(theta.detach(), cotangents, eps=1e-12), expected, atol=1e-8)


def test_standardisation_of_regular_fields_is_the_ordinary_one() -> None:
    """For the pixel basis it equals subtracting the mean and dividing by the deviation of every output channel."""
    group = dihedral(4)
    two, three = fields(regular(group), 2), fields(regular(group), 3)
    expansion = KernelExpansion(two, three, KernelGrid.build(3), "pixel").double()
    theta = torch.randn(expansion.dimension, dtype=torch.float64)
    raw = expansion.expand(theta).flatten(1)
    centred = raw - raw.mean(1, keepdim=True)
    expected = centred / (centred.square().mean(1, keepdim=True) * raw.shape[1]).sqrt()
    assert torch.allclose(expansion.expand(expansion.standardise(theta, eps=0.0)).flatten(1), expected, atol=1e-10)


def test_fast_and_dense_paths_agree() -> None:
    """The gather of grid symmetries gives the kernels that the dense basis gives."""
    group = dihedral(4)
    for basis in ("steerable", "pixel"):
        two, three = fields(regular(group), 2), fields(regular(group), 3)
        expansion = KernelExpansion(two, three, KernelGrid.build(3), basis).double()
        block = expansion.blocks["0_0"]
        kernels = torch.as_tensor(expansion._bases[0, 0].kernels)
        theta = torch.randn(expansion.dimension, dtype=torch.float64)
        dense = torch.einsum("oin,nabyx->oaibyx", theta.view(3, 2, -1), kernels).reshape(24, 16, 3, 3)
        assert torch.allclose(expansion.expand(theta), dense, atol=1e-10)
        assert block.members is not None


def test_paper_scale_is_the_energy_of_white_noise() -> None:
    """E‖B∗x‖² estimated by convolving white noise, against the closed form."""
    group = dihedral(4)
    expansion = KernelExpansion(fields(trivial(group), 1), fields(regular(group), 1), KernelGrid.build(3)).double()
    x = torch.randn(1, 1, 400, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for b, m in enumerate(expansion.paper_scale()):
        unit = torch.zeros(expansion.dimension, dtype=torch.float64)
        unit[b] = 1
        energy = torch.nn.functional.conv2d(x, expansion.expand(unit)).square().sum(1).mean()
        assert float(m) == pytest.approx(float((2 / (9 * energy)).sqrt()), rel=0.02)
    assert len(np.unique(np.round(expansion.paper_scale().numpy(), 6))) == 2


def test_copies_share_the_basis_and_maps_vmap() -> None:
    group = cyclic(8)
    expansion = KernelExpansion(fields(regular(group), 2), fields(regular(group), 2), KernelGrid.build(3))
    twin = copy.deepcopy(expansion)
    assert twin._bases[0, 0] is expansion._bases[0, 0]
    assert not expansion.state_dict()
    thetas = torch.randn(5, expansion.dimension)
    stacked = torch.vmap(lambda t: expansion.expand(expansion.standardise(t)))(thetas)
    assert torch.allclose(stacked[3], expansion.expand(expansion.standardise(thetas[3])), atol=1e-5)


def test_impossible_kernels_are_refused() -> None:
    group = so2()
    with pytest.raises(ValueError, match="no equivariant 1×1 kernel"):
        KernelExpansion(fields(irrep(group, 1)), fields(irrep(group, 2)), KernelGrid.build(1))
    with pytest.raises(ValueError, match="unknown basis"):
        KernelExpansion(fields(irrep(group, 1)), fields(irrep(group, 2)), KernelGrid.build(3), "fourier")
