"""The benchmark of ensembles runs every case it has, at a size for a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scripts import script

ensembles = script("ensembles")


@pytest.mark.parametrize("name", ["rep", "lenet", "geodp-cnn", "resnet3", "resnet20-spectral", "model3-circulant"])
def test_a_step_of_every_kind_can_be_measured(name):
    case = ensembles.cases()[name]
    few = [replace(c, batch=4, device="cpu") for c in case.configs[:2]]
    found = ensembles.measure(replace(case, configs=few, steps=1, rows=8), records=50)
    assert found["members"] == 2
    assert found["us_row"] == pytest.approx(1e3 * found["ms"] / 8)


def test_members_are_those_of_the_tables():
    assert {c.mechanism for c in ensembles.cases()["rep"].configs} == {"iso", "shuffle", "rep"}
    for name, task in (("alexnet", "gredp-alexnet"), ("resnet20", "gredp-resnet20"), ("model3", "gredp-model3")):
        assert {c.model for c in ensembles.cases()[name].configs} == {ensembles.TASKS[task].common["model"]}
    for name, case in ensembles.cases().items():
        assert {c.mechanism == "spectral" for c in case.configs} == {"spectral" in name}
        assert {"circulant" in c.model_options for c in case.configs} == {"circulant" in name}
