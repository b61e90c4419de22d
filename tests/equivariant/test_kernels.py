"""Steerable kernels satisfy K(gx) = ρ_out(g) K(x) ρ_in(g)⁻¹, and there are as many as characters predict."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.equivariant import Group, Irrep, KernelGrid, cyclic, dihedral, o2, regular, so2, steerable_basis, trivial
from erlangen.equivariant.basis import kernel_orbits, pixel_basis, tap_permutation
from erlangen.equivariant.kernels import angular_solutions, irrep_kernels
from erlangen.equivariant.representations import irreps_up_to, quotient, spectral

groups = st.one_of(st.builds(Group, st.integers(1, 9), st.booleans()), st.sampled_from([so2(), o2()]))


def draw_irrep(data: st.DataObject, group: Group) -> Irrep:
    return data.draw(st.sampled_from(irreps_up_to(group, (group.rotations or 6) // 2)))


def kernel_at(coefficients: np.ndarray, m: int, angle: float) -> np.ndarray:
    return coefficients[0] * math.cos(m * angle) + coefficients[1] * math.sin(m * angle)


@settings(deadline=None)
@given(groups, st.integers(0, 6), st.data())
def test_constraint_and_dimension(group: Group, m: int, data: st.DataObject) -> None:
    inp, out = draw_irrep(data, group), draw_irrep(data, group)
    solutions = angular_solutions(inp, out, m)
    sample = group.sample(group.rotations or 2 * (m + inp.frequency + out.frequency) + 3)
    for coefficients in solutions:
        for g in sample:
            for angle in (0.1, 1.3, 4.0):
                moved = (-angle if g.flip else angle) + g.angle
                left = kernel_at(coefficients, m, moved)
                right = out.matrix(g) @ kernel_at(coefficients, m, angle) @ inp.matrix(g).T
                assert np.allclose(left, right, atol=1e-9)
    # dim Hom = mean of χ_out χ_in χ_m, with χ_m the character of cos(mφ), sin(mφ)
    harmonic = [1.0 if m == 0 else (0.0 if g.flip else 2 * math.cos(m * g.angle)) for g in sample]
    product = [np.trace(out.matrix(g)) * np.trace(inp.matrix(g)) * h for g, h in zip(sample, harmonic)]
    assert len(solutions) == round(float(np.mean(product)))
    if solutions:
        flat = np.stack(solutions).reshape(len(solutions), -1)
        assert np.allclose(flat @ flat.T, np.eye(len(flat)), atol=1e-9)


def test_a_wrong_kernel_is_caught() -> None:
    """A twin with the rotation reversed fails the same constraint, so the test above can fail."""
    group = cyclic(8)
    inp, out = Irrep(group, 0, 1), Irrep(group, 0, 3)
    broken = angular_solutions(inp, out, 2)[0] * np.array([1.0, -1.0])[:, None, None]
    g = group.elements[1]
    left = kernel_at(broken, 2, 0.3 + g.angle)
    right = out.matrix(g) @ kernel_at(broken, 2, 0.3) @ inp.matrix(g).T
    assert np.abs(left - right).max() > 0.1


@settings(deadline=None)
@given(groups, st.sampled_from([1, 2, 3, 5, 7]), st.data())
def test_normalisation(group: Group, size: int, data: st.DataObject) -> None:
    inp, out = draw_irrep(data, group), draw_irrep(data, group)
    kernels, labels = irrep_kernels(inp, out, KernelGrid.build(size))
    assert len(kernels) == len(labels)
    assert np.allclose(np.square(kernels).sum((1, 2, 3, 4)), out.dim)


@pytest.mark.parametrize("name", ["C4", "D4", "C2", "D2", "D1"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_basis_commutes_with_the_grid(name: str, size: int) -> None:
    """Both bases, sampled, satisfy the constraint on taps exactly, for every pair of representations tried."""
    group = Group(int(name[1:]), name[0] == "D")
    representations = [regular(group), trivial(group), quotient(group, Group(1, group.reflections))]
    for inp in representations:
        for out in representations:
            bases = [steerable_basis(inp, out, KernelGrid.build(size)), pixel_basis(inp, out, size)]
            for basis in bases:
                flat = basis.kernels.reshape(basis.dimension, out.size, inp.size, -1)
                for g in group.elements:
                    moved = flat[..., tap_permutation(g, size)]
                    expected = out.matrix(g) @ flat.transpose(0, 3, 1, 2) @ inp.matrix(g).T
                    assert np.allclose(moved, expected.transpose(0, 2, 3, 1), atol=1e-9)


@pytest.mark.parametrize("name", ["C4", "D4", "C2", "D2"])
def test_pixel_basis_is_complete_and_contains_the_steerable_one(name: str) -> None:
    group = Group(int(name[1:]), name[0] == "D")
    for inp, out in [(regular(group), regular(group)), (trivial(group), regular(group)), (trivial(group),) * 2]:
        pixel = pixel_basis(inp, out, 3)
        # Burnside: the number of orbits is the mean number of fixed entries
        fixed = [
            np.trace(out.matrix(g)) * np.trace(inp.matrix(g)) * np.sum(tap_permutation(g, 3) == np.arange(9))
            for g in group.elements
        ]
        assert pixel.dimension == round(float(np.mean(fixed)))
        flat = pixel.kernels.reshape(pixel.dimension, -1)
        assert np.allclose(flat @ flat.T, out.size * np.eye(pixel.dimension))
        steerable = steerable_basis(inp, out, KernelGrid.build(3)).kernels.reshape(-1, flat.shape[1])
        assert np.allclose(steerable @ flat.T @ flat / out.size, steerable, atol=1e-9)
    rich = steerable_basis(regular(group), regular(group), KernelGrid.build(3, cutoff=4.0))
    assert np.linalg.matrix_rank(rich.kernels.reshape(rich.dimension, -1)) == 9 * group.order


def test_orbit_form_is_the_same_basis() -> None:
    group = dihedral(4)
    for inp, out in [(regular(group), regular(group)), (regular(group), trivial(group))]:
        basis = steerable_basis(inp, out, KernelGrid.build(3))
        assert basis.orbits is not None
        assert basis.mix is not None
        rebuilt = basis.mix[basis.orbits.entry].T
        assert np.allclose(rebuilt, basis.kernels.reshape(basis.dimension, -1), atol=1e-12)
    assert steerable_basis(spectral(so2(), 1), spectral(so2(), 1), KernelGrid.build(3)).orbits is None
    with pytest.raises(ValueError, match="steerable"):
        pixel_basis(regular(cyclic(8)), regular(cyclic(8)), 3)
    with pytest.raises(ValueError, match="pixels"):
        tap_permutation(cyclic(8).elements[1], 3)
    assert kernel_orbits(regular(group), regular(group), 3).entry.max() == 71


def test_band_limits_follow_the_rings() -> None:
    assert KernelGrid.build(3).frequencies == (0, 2)
    assert KernelGrid.build(5).frequencies == (0, 2, 2)
    assert KernelGrid.build(7).frequencies == (0, 2, 3, 2)
    assert KernelGrid.build(3, dilation=2).rings == (0.0, 2.0)
    assert KernelGrid.build(4).rings == (0.5, 1.5)
    assert KernelGrid.build(4).frequencies == (1, 2)
    assert KernelGrid.build(3, cutoff=3.0).frequencies == (0, 3)
    with pytest.raises(ValueError, match="widths"):
        KernelGrid.build(3, widths=(0.5,))
    with pytest.raises(ValueError, match="kernel size"):
        KernelGrid.build(0)
