"""Groups against 2×2 matrices: the table, inverses and subgroups are those of the plane."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.equivariant import Element, Group, cyclic, dihedral, group_by_name, o2, so2
from erlangen.equivariant.checks import move_image

finite = st.builds(Group, st.integers(1, 9), st.booleans())
elements = st.builds(Element, st.integers(0, 1), st.floats(-7, 7))


@settings(deadline=None)
@given(elements, elements)
def test_products_and_inverses_are_those_of_matrices(a: Element, b: Element) -> None:
    assert np.allclose((a @ b).matrix(), a.matrix() @ b.matrix(), atol=1e-9)
    assert np.allclose((a @ a.inverse()).matrix(), np.eye(2), atol=1e-9)


@settings(deadline=None)
@given(finite)
def test_table_and_inverses(group: Group) -> None:
    matrices = np.stack([g.matrix() for g in group.elements])
    products = np.einsum("aij,bjk->abik", matrices, matrices)
    assert np.allclose(matrices[group.table], products, atol=1e-9)
    assert np.allclose(matrices[group.inverses], matrices.transpose(0, 2, 1), atol=1e-9)
    assert len({tuple(np.round(m, 6).ravel() + 0.0) for m in matrices}) == group.order


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_subgroups_keep_their_order(n: int, factor: int, reflections: bool, keep: bool) -> None:
    group, subgroup = Group(n * factor, reflections), Group(n, reflections and keep)
    inside = group.subgroup_index(subgroup)
    for position, g in zip(inside, subgroup.elements):
        assert np.allclose(group.elements[position].matrix(), g.matrix(), atol=1e-9)


def test_half_and_names() -> None:
    assert dihedral(4).half() == dihedral(2)
    assert cyclic(16).half() == cyclic(8)
    assert so2().half() == cyclic(1)
    assert [group_by_name(n) for n in ("C8", "D4", "SO(2)", "o2")] == [cyclic(8), dihedral(4), so2(), o2()]
    assert [str(g) for g in (cyclic(8), dihedral(4), so2(), o2())] == ["C8", "D4", "SO(2)", "O(2)"]
    with pytest.raises(ValueError, match=r"odd.*restriction=False"):
        dihedral(3).half()
    with pytest.raises(ValueError, match="unknown group"):
        group_by_name("E8")
    with pytest.raises(ValueError, match="infinitely many"):
        _ = o2().order
    with pytest.raises(ValueError, match="not a subgroup"):
        cyclic(8).subgroup_index(cyclic(3))


def test_images_move_as_points_do() -> None:
    """A single bright pixel at p is at g·p afterwards, on the grid and off it."""
    size = 9
    for g in (*dihedral(4).elements, Element(0, math.pi / 4), Element(1, 0.3)):
        image = torch.zeros(1, 1, size, size)
        image[0, 0, 1, 6] = 1.0  # x = 2 to the right, y = 3 upwards
        moved = move_image(image, g)[0, 0].clamp_min(0)
        axis = torch.arange(size) - 4.0
        centre = torch.stack([(moved * axis).sum(), (moved * -axis[:, None]).sum()]) / moved.sum()
        assert np.allclose(centre, g.matrix() @ np.array([2.0, 3.0]), atol=0.15)
