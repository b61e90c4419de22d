"""The flow audit looks along the directions of which nothing is released."""

from __future__ import annotations

import torch

from erlangen.audit.flow import audit_flow, not_released
from erlangen.audit.verdict import CONSISTENT, VIOLATED
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.clipping import Flat
from tests.mechanisms.test_geometry import BOUND, SHAPE, Projection


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


def test_the_directions_that_are_not_released():
    removed = not_released(build(Projection))
    assert float(Projection().forward("w", removed.view(SHAPE)).norm()) < 1e-6
    assert abs(float(removed.norm()) - 1) < 1e-6
    assert not_released(build(lambda: None)) is None


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
