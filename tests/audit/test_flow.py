"""The flow audit looks along the directions of which nothing is released."""

from __future__ import annotations

import pytest
import torch

from erlangen.audit.flow import audit_flow, unseen
from erlangen.audit.verdict import CONSISTENT, VIOLATED
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.clipping import Flat
from tests.mechanisms import test_geometry as geometries
from tests.mechanisms.test_geometry import BOUND, SHAPE, Projection, Squashed


class Unguarded(Projection):
    """The broken twin: it says that its weight counts what it removes."""

    guarded = True


def build(geometry):
    made = GaussianMechanism(1.0, BOUND, geometry())
    made.bind({"w": torch.zeros(SHAPE)})
    return made


def test_a_projection_that_does_not_measure_what_it_removes_is_caught():
    shapes = {"w": SHAPE}
    found = audit_flow("unguarded", lambda: build(Unguarded), shapes, BOUND)
    assert found.verdict == VIOLATED
    assert "not released" in found.reason
    assert audit_flow("guarded", lambda: build(Projection), shapes, BOUND).verdict == CONSISTENT


def test_the_directions_that_a_mechanism_sees_too_little_of():
    *silent, (widest, _) = list(unseen(build(Projection), 1.0))
    assert all("not released" in name for name, _ in silent)
    assert "noised most" in widest
    for (_, canary), size in zip(silent, (1e8, 1e20), strict=True):
        assert float(Projection().forward("w", canary.double().view(SHAPE)).norm()) < 1e-6 * size
        assert abs(float(canary.double().norm()) / size - 1) < 1e-6
    ((_, canary),) = unseen(build(lambda: None), 1.0)
    assert abs(float(canary.norm()) / BOUND - 0.999) < 1e-6
    ((name, canary),) = unseen(build(lambda: Squashed(1e3)), 1.0)
    assert "noised most" in name
    assert abs(float(Squashed(1e3).forward("w", canary.double().view(SHAPE)).norm()) / BOUND - 0.999) < 1e-3


@pytest.mark.parametrize("stretch", [1e7, 1e9])
def test_a_squashed_direction_that_nobody_watches_is_caught(stretch):
    found = audit_flow("unguarded", lambda: build(lambda: geometries.Unguarded(stretch)), {"w": SHAPE}, BOUND)
    assert found.verdict == VIOLATED
    assert audit_flow("guarded", lambda: build(lambda: Squashed(stretch)), {"w": SHAPE}, BOUND).verdict == CONSISTENT


class KeepsTheLongest(Flat):
    """Clips each record to the bound, and leaves out the shorter half of the batch: one record more can push another out."""

    def weights(self, norms):
        return super().weights(norms) * (norms >= norms.median())


def test_a_rule_whose_weights_depend_on_the_others_is_caught():
    def build(rule):
        made = GaussianMechanism(1.0, rule(BOUND))
        made.bind({"w": torch.zeros(SHAPE)})
        return made

    found = audit_flow("longest half", lambda: build(KeepsTheLongest), {"w": SHAPE}, BOUND)
    assert found.verdict == VIOLATED
    assert "as many lengths" in found.reason
    assert audit_flow("flat", lambda: build(Flat), {"w": SHAPE}, BOUND).verdict == CONSISTENT
