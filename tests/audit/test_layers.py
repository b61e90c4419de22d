"""The audit of layer rules: row maps, metrics, hostile rows among others, and fused kernels under Triton's interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from erlangen.audit.examples import combinations_of_layers, examples, named_examples
from erlangen.audit.layers import Example, audit_layer, row_maps
from erlangen.audit.verdict import CONSISTENT, VIOLATED
from erlangen.gradients import kernels
from erlangen.gradients.pieces import Dense
from erlangen.gradients.registry import _RULES, find_rule, registered, registered_by_name


def test_stand_ins_are_served_by_the_rules_they_stand_for():
    for path, example in named_examples().items():
        layers = [m for m in example.build().modules() if find_rule(m) is registered_by_name()[path]]
        assert len(layers) == 1, path


def test_row_maps_hold_views_and_padding():
    maps = row_maps(6)
    assert maps["views"].views == 2
    assert int((maps["owners"].owner == -1).sum()) == 1


def broken(rule, kind=nn.Linear):
    class Layer(kind):
        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    _RULES[Layer] = rule
    return Example(
        lambda: Layer(5, 3), lambda rows: torch.randn(rows, 4, 5, generator=torch.Generator().manual_seed(rows))
    )


@pytest.fixture(autouse=True)
def _same_registry():
    registered()  # all families, or those that are loaded in the test would be forgotten with it
    before = dict(_RULES)
    yield
    _RULES.clear()
    _RULES.update(before)


def linear(a, d, weight, bias):
    yield weight, Dense(torch.einsum("nto,nti->noi", d, a))
    yield bias, Dense(d.sum(1))


def tapped(pieces):
    def rule(module, tape, x):
        out = nn.functional.linear(x, module.weight.detach(), module.bias.detach())
        return tape.tap(out, (x,), (module.weight, module.bias), pieces(module))

    return rule


def test_a_rule_that_forgets_views_is_not_a_pass():
    def pieces(module):
        return lambda saved, d, views: linear(saved[0], d, module.weight, module.bias)

    with pytest.raises(
        RuntimeError
    ):  # as many gradients as rows, where owners have two each: in the sweep inconclusive
        audit_layer("views", broken(tapped(pieces)))


def test_a_row_that_spoils_the_others_is_caught():
    """0·NaN is NaN: a product over the whole batch lets one bad row into everybody's gradient."""

    def pieces(module):
        def of(saved, d, views):
            a, d = (t.unflatten(0, (-1, views)).flatten(1, 2) for t in (saved[0], d))
            spoiled = a + 0.0 * a.sum()
            yield from linear(spoiled, d, module.weight, module.bias)

        return of

    found = audit_layer("spoiled", broken(tapped(pieces)))
    assert found.verdict == VIOLATED


@pytest.mark.parametrize("name", ["a layer without a rule", "a weight used twice", "a computed weight"])
def test_what_no_single_rule_is(name):
    found = audit_layer(name, combinations_of_layers()[name])
    assert found.verdict == CONSISTENT, found.reason


@pytest.mark.skipif(not kernels.INTERPRETED, reason="kernels on the CPU need Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("Linear", None), pytest.param("GroupNorm, ReLU", "norm_act.forward", marks=pytest.mark.slow),
        pytest.param("FourierNonlinearity, FieldInstanceNorm, pool", "fourier.backward", marks=pytest.mark.slow),
        ("FieldInstanceNorm", "lines.sums"),
    ],
)  # fmt: skip
def test_fused_kernels_under_hostile_rows(monkeypatch, name, kernel):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "FORCED", True)
    launched = []
    if kernel is not None:
        file, function = kernel.split(".")
        place = importlib.import_module(f"erlangen.gradients.kernels.{file}")
        plain = getattr(place, function)
        monkeypatch.setattr(place, function, lambda *args: (launched.append(1), plain(*args))[1])
    known = {kind.__name__: example for kind, example in examples().items()} | combinations_of_layers()
    found = audit_layer(name, known[name])
    assert found.verdict == CONSISTENT, found.reason
    assert bool(launched) == (kernel is not None)


@pytest.mark.skipif(not kernels.INTERPRETED, reason="kernels on the CPU need Triton's interpreter (TRITON_INTERPRET=1)")
def test_a_kernel_that_reads_rows_of_weight_zero_is_caught(monkeypatch):
    pytest.importorskip("triton")
    from erlangen.gradients.kernels import row_sum

    monkeypatch.setattr(kernels, "FORCED", True)
    monkeypatch.setattr(row_sum, "row_sum", lambda w, g: w @ g.float())
    assert audit_layer("Linear", examples()[nn.Linear]).verdict == VIOLATED
