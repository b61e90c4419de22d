"""The static audit as it runs in CI: everything that is registered passes, and nothing escapes."""

from __future__ import annotations

import math

import pytest
import torch

from erlangen.audit import Subject, audit_registered, covariance, recipes, static
from erlangen.audit.flow import adversarial
from erlangen.audit.verdict import CONSISTENT, corrected, overall
from erlangen.gradients.registry import registered, registered_by_name
from erlangen.mechanisms import GaussianMechanism, mechanisms
from erlangen.mechanisms.clipping import clipping_rules
from erlangen.mechanisms.companions import companions
from erlangen.sampling import samplers

FOUND: dict[str, list] = {}


@pytest.mark.parametrize("part", range(len(static.PARTS)), ids=[part.__name__.strip("_") for part in static.PARTS])
def test_everything_registered_passes(part):
    """An inconclusive finding is a registered thing that was not audited."""
    findings = corrected(static.audit_part(part))
    FOUND[static.PARTS[part].__name__.strip("_")] = findings
    assert overall(findings) == CONSISTENT, [
        (f.subject, f.audit, f.verdict, f.reason) for f in findings if f.verdict != CONSISTENT
    ]


def test_nothing_escapes():
    if len(FOUND) < len(static.PARTS):
        pytest.skip("needs the findings of every part: run the whole file")
    subjects = {audit: {f.subject for part in FOUND.values() for f in part if f.audit == audit} for audit in AUDITS}
    named = lambda audit: {subject.split(" ")[0].rstrip(",") for subject in subjects[audit]}  # noqa: E731
    for audit in ("flow", "session"):
        assert set(mechanisms()) <= named(audit), audit
    for audit in ("clipping", "constants"):
        assert set(clipping_rules()) <= subjects[audit]
    assert {f"{name} sampler" for name in samplers()} <= subjects["sampler"]
    assert set(companions()) <= subjects["companion"]
    assert {kind.__name__ for kind in registered()} | set(registered_by_name()) <= subjects["layer rule"]


AUDITS = ("flow", "session", "clipping", "constants", "sampler", "companion", "layer rule")


def test_hostile_gradients_are_of_every_kind():
    """What each mechanism meets: NaN, ±∞, denormal, huge and exactly C, alone and among others, in three precisions."""
    shapes, bound = {"w": torch.Size([3, 2]), "b": torch.Size([3])}, 0.7
    pairs = list(adversarial(shapes, bound))
    canaries = [(torch.cat([g.flatten() for g in p.canary.values()]), len(p.others["w"])) for p in pairs]
    finite = [(v, float(v.double().norm()), others) for v, others in canaries if bool(v.isfinite().all())]
    tiny = torch.finfo(torch.float32).tiny
    assert any(bool(v.isnan().any()) for v, _ in canaries)
    assert {float(v[v.isinf()][0]) for v, _ in canaries if bool(v.isinf().any())} == {math.inf, -math.inf}
    assert any(0 < float(v.abs().max()) < tiny for v, _, _ in finite)
    assert any(size >= 1e18 for _, size, _ in finite)
    assert any(v.dtype == torch.float32 and abs(size - bound) < 1e-6 for v, size, _ in finite)
    assert {v.dtype for v, _ in canaries} == {torch.float32, torch.float64, torch.bfloat16}
    assert any(v.dtype == torch.bfloat16 and bool(v.isnan().any()) for v, _ in canaries)
    assert {others for _, others in canaries} >= {0, 5, 40}


class Louder(GaussianMechanism):
    """States twice the noise on every coordinate that its covariance has."""

    def noise_std(self, name):
        return 2 * super().noise_std(name)


def test_noise_that_is_stated_in_two_ways_is_stated_alike():
    def build(kind):
        mechanism = kind(1.0, 0.7)
        mechanism.bind({"w": torch.zeros(3, 2)}, recipes.BATCH)
        return mechanism

    shapes = {"w": torch.Size((3, 2))}
    assert covariance.audit_covariance(Subject("sound", lambda: build(GaussianMechanism), shapes)).verdict == CONSISTENT
    found = covariance.audit_covariance(Subject("louder", lambda: build(Louder), shapes))
    assert found.verdict == "violated"
    assert "noise_std" in found.reason


class QuietWhenLarge(GaussianMechanism):
    """States one noise and adds less, where nobody looks at all of it."""

    @property
    def std(self):
        return super().std * (0.8 if sum(shape.numel() for shape in self.shapes.values()) > 5000 else 1.0)

    def noise_std(self, name):
        return super().std


@pytest.mark.parametrize(("kind", "verdict"), [(GaussianMechanism, CONSISTENT), (QuietWhenLarge, "violated")])
def test_a_large_release_is_as_noisy_as_stated(kind, verdict):
    def build(count):
        mechanism = kind(1.0, 0.7)
        mechanism.bind({"w": torch.zeros(count), "bias": torch.zeros(3)}, recipes.BATCH)
        return mechanism

    small, large = ({"w": torch.Size((count,)), "bias": torch.Size((3,))} for count in (6, 9000))
    assert covariance.audit_covariance(Subject("small", lambda: build(6), small)).verdict == CONSISTENT
    found = covariance.audit_energy(Subject("large", lambda: build(9000), large))
    assert found.verdict == verdict
    if verdict == "violated":
        assert "'w' of 9000 coordinates has 0.6" in found.reason


def test_one_registered_thing_alone():
    assert {f.audit for f in audit_registered("iso")} == {"flow", "covariance", "energy", "training step", "session"}
    assert {f.audit for f in audit_registered("psac")} == {"clipping", "constants", "flow"}
    assert [f.subject for f in audit_registered("GroupNorm")] == ["GroupNorm"]
    with pytest.raises(ValueError, match="Did you mean 'GroupNorm'"):
        audit_registered("groupnrm")
