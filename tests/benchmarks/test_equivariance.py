"""The table of equivariance errors: every row can be made, and a row says the worst of its cases."""

from __future__ import annotations

import sys

import pytest

from erlangen import equivariant as eq
from tests.scripts import script

bench = script("equivariance")


def test_a_row_is_the_worst_of_its_cases(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["equivariance.py", "--only", "nonlinear"])
    bench.main()
    label, value = capsys.readouterr().out.split()
    assert label == "nonlinearities"
    single = [bench.measured([case], None) for case in bench.nonlinearities()]
    assert float(value) == pytest.approx(max(single), abs=5e-4)
    assert min(single) < max(single) < 0.1, "the bound in the page"


def test_what_is_wrong_on_the_grid_is_no_row():
    types = eq.regular_fields(eq.dihedral(4), 1)

    class Broken(eq.SteerableConv2d):
        def forward(self, x):
            return super().forward(x).flip(1)

    with pytest.raises(eq.EquivarianceError):
        bench.measured([lambda: Broken(types, types, 3, padding=1)], None)


def test_every_row_has_cases():
    found = {label: len(cases) for label, cases, _ in bench.rows()}
    assert all(found.values())
    assert len(found) == 28
