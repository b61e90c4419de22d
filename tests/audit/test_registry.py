"""Nothing escapes: whatever is newly registered is audited, a broken one is caught, and what is not registered is reported."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn

from erlangen.audit import registry, static
from erlangen.audit.broken import clipping as broken_clipping
from erlangen.audit.broken import companions as broken_companions
from erlangen.audit.broken import layers as broken_layers
from erlangen.audit.broken import mechanisms as broken_mechanisms
from erlangen.audit.broken import randomness as broken_randomness
from erlangen.audit.companions import audit_companion
from erlangen.audit.layers import Example
from erlangen.audit.verdict import CONSISTENT, INCONCLUSIVE, VIOLATED
from erlangen.gradients import registry as rules
from erlangen.mechanisms import GaussianMechanism, base, companions
from erlangen.mechanisms.clipping import base as clipping
from erlangen.sampling import register_sampler, samplers


def silent(name: str) -> None:
    pass


def verdicts(findings, subject):
    return {f.audit: f.verdict for f in findings if f.subject.split(",")[0] == subject or f.subject == subject}


@pytest.fixture
def only(monkeypatch):
    """An empty registry in place of a full one, so that the sweep is short; classes that nothing builds are left out."""
    registry.load_all()  # or what is imported later would register itself in the empty one
    monkeypatch.setattr(static, "defined", lambda kind: [])
    monkeypatch.setattr(static, "missing", lambda kind, seen: [])

    def put(module, name, entries):
        monkeypatch.setattr(module, name, dict(entries))

    return put


def test_a_new_broken_mechanism_is_caught_in_release_and_in_training(only):
    only(base, "_MECHANISMS", {})
    base.register_mechanism("brand new")(
        lambda c: broken_mechanisms.OneLayerForgotten(c.noise_multiplier, c.clipping, None, c.noise)
    )
    found = verdicts(static._mechanisms(silent), "brand new")
    assert found == dict.fromkeys(("flow", "covariance", "energy", "training step"), VIOLATED)


def test_a_new_broken_clipping_rule_is_caught(only):
    only(clipping, "_RULES", {})
    clipping.register_clipping("brand new")(broken_clipping.SoftClip)
    assert verdicts(static._clipping(silent), "brand new") == {"clipping": VIOLATED, "constants": VIOLATED}
    assert verdicts(static._clipping(silent), "iso") == {"flow": VIOLATED}


def test_a_new_broken_sampler_is_caught(only):
    only(sys.modules["erlangen.sampling.samplers"], "_SAMPLERS", {})
    register_sampler(type("Fresh", (broken_randomness.RateUnderstated,), {"name": "brand new"}))
    assert list(samplers()) == ["brand new"]
    found = list(static._samplers(silent))
    assert {f.verdict for f in found} == {VIOLATED}
    assert len(found) == 2  # from streams and from the system's generator


@pytest.mark.parametrize(
    "kind", [broken_randomness.SameOnEveryRank, broken_randomness.SameForEveryLayer, broken_randomness.UniformNoise]
)
def test_a_new_broken_noise_source_is_caught(monkeypatch, kind):
    monkeypatch.setattr(static, "defined", lambda base: [kind])
    assert [f.verdict for f in static._noise(silent)] == [VIOLATED]


def test_a_new_broken_layer_rule_is_caught(only, monkeypatch):
    class Fresh(broken_layers.NormWithoutBias):
        audit_example = None

        def __init__(self) -> None:
            super().__init__(5, 3)

        def forward(self, input):
            return nn.functional.linear(input, self.weight, self.bias)

    Fresh.audit_example = Example(Fresh, lambda rows: torch.randn(rows, 4, 5))
    only(rules, "_RULES", {Fresh: broken_layers.forgets_bias})
    monkeypatch.setattr(static, "bounded_examples", dict)
    assert verdicts(static._layers(silent), "Fresh") == {"layer rule": VIOLATED}


@pytest.mark.parametrize("kind", [broken_companions.RejectionsAreFree, broken_companions.RateAboveThePrice])
def test_a_new_broken_companion_is_caught(only, kind):
    only(companions, "_COMPANIONS", {})
    companions.register_companion("brand new")(kind)
    assert VIOLATED in verdicts(static._companions(silent), "brand new").values()


def test_a_companion_of_an_unknown_sort_is_not_a_pass():
    class Oracle:
        def __init__(self, bound: float) -> None: ...

    assert [f.verdict for f in audit_companion("oracle", Oracle)] == [INCONCLUSIVE]


def test_a_companion_that_cannot_be_built_is_not_a_pass():
    class Judge:
        def __init__(self, something_else: int) -> None: ...

        def decide(self, before, after): ...

    assert {f.verdict for f in audit_companion("judge", Judge)} == {INCONCLUSIVE}


def test_registered_companions_are_sound():
    for name, kind in companions.companions().items():
        assert {f.verdict for f in audit_companion(name, kind)} == {CONSISTENT}


def test_what_the_library_defines_without_registering_it_is_reported():
    stray = type("Stray", (GaussianMechanism,), {"__module__": "erlangen.mechanisms.stray"})
    assert stray in registry.missing(base.Mechanism, [GaussianMechanism])
    assert static.unseen(stray, "flow").verdict == INCONCLUSIVE
    assert broken_mechanisms.NanPasses not in registry.defined(base.Mechanism)  # broken on purpose
    del stray
    gc.collect()


def test_a_new_broken_layer_rule_registered_by_name_is_caught(only, monkeypatch):
    """A rule may be registered for a layer whose package is not installed; its stand-in goes through the same rule."""
    from erlangen.gradients.registry import rule
    from erlangen.gradients.rules import interop

    path = "escnn.nn.modules.conv.r2convolution.R2Conv"
    monkeypatch.setattr(static, "bounded_examples", dict)
    monkeypatch.setattr(static, "combinations_of_layers", dict)
    only(rules, "_RULES", {})

    @rule(path)
    def without_bias(module, tape, input):
        kept, module.expand_parameters = module.expand_parameters, lambda: (kept()[0], kept()[1].detach())
        try:
            return interop.escnn_convolution(module, tape, input)
        finally:
            del module.expand_parameters

    kernel, unknown = lambda module, tape, x: x, "a.package.Layer"
    rule(unknown)(kernel)
    found = verdicts(static._layers(silent), path)
    assert found == {"layer rule": VIOLATED}
    assert verdicts(static._layers(silent), unknown) == {"layer rule": INCONCLUSIVE}


def test_a_new_broken_mechanism_is_caught_in_sessions(only):
    """Through model, tape, parts, companions and optimizer."""

    class CountedTwice(GaussianMechanism):
        def accumulate(self, gradients):
            super().accumulate(gradients)
            super().accumulate(gradients)

    only(base, "_MECHANISMS", {})
    base.register_mechanism("brand new")(lambda c: CountedTwice(c.noise_multiplier, c.clipping, None, c.noise))
    assert verdicts(static._sessions(silent), "brand new") == {"session": VIOLATED}
