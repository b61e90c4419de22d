"""Representations are homomorphisms, orthogonal, and decompose as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.equivariant import (
    Element,
    Group,
    Irrep,
    Representation,
    cyclic,
    dihedral,
    direct_sum,
    irrep,
    o2,
    quotient,
    regular,
    restrict,
    so2,
    spectral,
    trivial,
)
from erlangen.equivariant.representations import fourier_matrix, irreps_up_to, restrict_irrep

finite = st.builds(Group, st.integers(1, 9), st.booleans())


def sample(group: Group) -> list[Element]:
    return list(group.elements) if group.is_finite else group.sample(7)


def assert_homomorphism(rho: Representation) -> None:
    for a in sample(rho.group):
        assert np.allclose(rho.matrix(a) @ rho.matrix(a).T, np.eye(rho.size), atol=1e-9)
        for b in sample(rho.group):
            assert np.allclose(rho.matrix(a) @ rho.matrix(b), rho.matrix(a @ b), atol=1e-9)


@settings(deadline=None)
@given(finite)
def test_irreps_are_complete_and_orthogonal(group: Group) -> None:
    irreps = irreps_up_to(group)
    assert sum(psi.dim * psi.copies_in_regular for psi in irreps) == group.order
    characters = np.array([[np.trace(psi.matrix(g)) for g in group.elements] for psi in irreps])
    overlaps = characters @ characters.T / group.order
    # ⟨χ, χ⟩ = 1, or 2 where the real irrep splits over the complex numbers
    expected = [psi.dim // psi.copies_in_regular for psi in irreps]
    assert np.allclose(overlaps, np.diag(expected), atol=1e-9)


@settings(deadline=None)
@given(finite)
def test_regular_is_left_translation(group: Group) -> None:
    rho = regular(group)
    assert_homomorphism(rho)
    for a, g in enumerate(group.elements):
        expected = np.zeros((group.order, group.order))
        expected[group.table[a], np.arange(group.order)] = 1
        assert np.array_equal(rho.matrix(g), expected)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_quotients_permute_cosets(n: int, factor: int, reflections: bool, keep: bool) -> None:
    group, subgroup = Group(n * factor, reflections), Group(n, reflections and keep)
    rho = quotient(group, subgroup)
    assert rho.size == group.order // subgroup.order
    assert_homomorphism(rho)
    for g in group.elements:
        matrix = rho.matrix(g)
        assert np.array_equal(np.sort(matrix, axis=0)[-1], np.ones(rho.size))
        assert np.array_equal(np.abs(matrix).sum(0), np.ones(rho.size))
    # permutation and decomposition agree without rounding
    for g in group.elements:
        raw = sum(q @ psi.matrix(g) @ q.T for psi, q in zip(rho.irreps, rho.irrep_columns()))
        assert np.allclose(raw, rho.matrix(g), atol=1e-9)


@pytest.mark.parametrize("group", [so2(), o2()])
def test_spectral_is_the_band_limited_regular_representation(group: Group) -> None:
    rho = spectral(group, 3)
    assert_homomorphism(rho)
    samples = fourier_matrix(group, 3, 8)
    assert np.allclose(samples.T @ samples, np.eye(rho.size), atol=1e-9)
    finite_group = Group(8, group.reflections)
    for g in finite_group.elements:
        # sampling intertwines: translating the samples is acting on the coefficients
        assert np.allclose(regular(finite_group).matrix(g) @ samples, samples @ rho.matrix(g), atol=1e-9)
    with pytest.raises(ValueError, match="alias"):
        fourier_matrix(group, 3, 6)


@settings(deadline=None)
@given(st.sampled_from([cyclic(8), cyclic(12), dihedral(4), dihedral(6), dihedral(12), so2(), o2()]), st.data())
def test_restriction_has_the_same_matrices(group: Group, data: st.DataObject) -> None:
    frequency = data.draw(st.integers(0, 5))
    candidates = irreps_up_to(group, min(frequency, (group.rotations or 99) // 2))
    psi = data.draw(st.sampled_from(candidates))
    divisors = [n for n in range(1, 13) if group.rotations is None or group.rotations % n == 0]
    subgroup = Group(data.draw(st.sampled_from(divisors)), group.reflections and data.draw(st.booleans()))
    parts, q = restrict_irrep(psi, subgroup)
    smaller = Representation(subgroup, "restricted", parts, q)
    for g in subgroup.elements:
        assert np.allclose(smaller.matrix(g), psi.matrix(g), atol=1e-9)


def test_restricting_whole_representations() -> None:
    for rho, subgroup in [
        (regular(dihedral(4)), dihedral(2)),
        (regular(dihedral(6)), cyclic(3)),
        (spectral(o2(), 4), dihedral(4)),
        (spectral(so2(), 4), cyclic(3)),
        (spectral(o2(), 2), so2()),
        (quotient(dihedral(4), dihedral(1)), cyclic(4)),
    ]:
        smaller = restrict(rho, subgroup)
        for g in sample(subgroup):
            assert np.allclose(smaller.matrix(g), rho.matrix(g), atol=1e-9)


def test_equality_direct_sums_and_errors() -> None:
    d4 = dihedral(4)
    both = direct_sum([trivial(d4), irrep(d4, 1)])
    assert_homomorphism(both)
    assert both == direct_sum([irrep(d4, 0), irrep(d4, 1)])
    assert hash(both) == hash(direct_sum([irrep(d4, 0), irrep(d4, 1)]))
    assert regular(d4) != spectral(d4, 2)
    assert both.invariants().shape == (3, 1)
    assert irrep(d4, 1).invariants().shape == (2, 0)
    with pytest.raises(ValueError, match="frequency 5"):
        Irrep(cyclic(8), 0, 5)
    with pytest.raises(ValueError, match="parity"):
        Irrep(cyclic(8), 1, 1)
    with pytest.raises(ValueError, match="orthogonal"):
        Representation(d4, "bad", (Irrep(d4, 1, 1),), 2 * np.eye(2))
    with pytest.raises(ValueError, match="same group"):
        direct_sum([trivial(d4), trivial(cyclic(4))])
