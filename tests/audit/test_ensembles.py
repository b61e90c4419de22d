"""Ensembles and releases before training under attack: sound ones reach their bound, broken twins are caught."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from erlangen.audit import ensembles, prior, static
from erlangen.audit.ensembles import Process, audit_ensemble
from erlangen.audit.prior import audit_normalisation
from erlangen.audit.randomness import audit_sampler
from erlangen.audit.verdict import CONSISTENT, INCONCLUSIVE, VIOLATED
from erlangen.training import normalise
from erlangen.training.padding import PoissonProcess
from erlangen.training.stacked_release import StackedGaussian, StackedRelease
from erlangen.training.stacked_rows import norms


def published(*split, **options):
    reading = {"as_published": "complex", **({"split": split} if split else {})}
    return {"mechanism": "gredp", "mechanism_options": reading, **options}


@pytest.mark.parametrize(("options", "reached"), [
    ({}, 0.99), ({"mechanism": "rep"}, 0.99), ({"mechanism": "spectral"}, 0.99), ({"mechanism": "geodp"}, 0.99),
    ({"clipping": "per-layer"}, 0.8), (published(clipping="per-layer"), 0.8),  # no record is clipped in every layer
    (published(0.8, 0.6), 0.75),  # where a gradient is odd it has the whole of it
])  # fmt: skip
def test_sound_ensembles_reach_their_bound(options, reached):
    found = audit_ensemble("ensemble", options)
    assert found.verdict == CONSISTENT, found.reason
    assert reached < found.facts["sensitivity"] <= 1 + 1e-4


def test_what_no_ensemble_has_is_not_audited_there():
    assert audit_ensemble("clipless", {"mechanism": "clipless"}) is None


def test_a_record_that_is_not_finite_must_not_pass(monkeypatch):
    def add(self, gradients, present, total):
        found = norms(list(self.energies(gradients).values()), total.dtype)
        weights = self.weights(found, self.bounds[0])
        total.add_((self.stack.dense(gradients) * weights[..., None] * present[..., None]).sum(1))

    monkeypatch.setattr(StackedRelease, "add", add)
    assert audit_ensemble("broken", {}).verdict == VIOLATED


def test_passes_that_are_clipped_again_are_caught(monkeypatch):
    """Two passes of one step are one sum; a row that counts in both would count twice."""
    plain = StackedRelease.add
    monkeypatch.setattr(StackedRelease, "add", lambda self, *args: (plain(self, *args), plain(self, *args)))
    found = audit_ensemble("broken", {})
    assert found.verdict == VIOLATED
    assert "2 times" in found.reason


@pytest.mark.parametrize("noise", [
    lambda self, like, generator: torch.empty_like(like).normal_(generator=generator) * 0.9,
    lambda self, like, generator: torch.empty_like(like[:1]).normal_(generator=generator).expand_as(like),
    lambda self, like, generator: torch.empty_like(like).normal_(generator=torch.Generator().manual_seed(1)),
])  # fmt: skip
def test_too_little_noise_and_noise_used_twice_are_caught(monkeypatch, noise):
    monkeypatch.setattr(StackedRelease, "noise", noise)
    assert audit_ensemble("broken", {}).verdict == VIOLATED


def test_noise_that_is_left_out_is_caught(monkeypatch):
    monkeypatch.setattr(StackedGaussian, "release", lambda self, total, batch, generator: (
        self.noise(total, generator), total.div_(batch))[1])  # fmt: skip
    assert audit_ensemble("broken", {}).verdict == VIOLATED


def test_the_poisson_process_of_ensembles():
    assert audit_sampler("process", Process).verdict == CONSISTENT


def test_a_process_that_repeats_its_blocks_is_caught(monkeypatch):
    plain = PoissonProcess._block
    monkeypatch.setattr(PoissonProcess, "_block", lambda self, block: plain(self, 0))
    assert audit_sampler("process", Process).verdict == VIOLATED


def test_a_release_class_that_nothing_builds_is_reported():
    stray = type("Stray", (StackedGaussian,), {"__module__": "erlangen.training.stray"})
    try:
        assert static.unseen(stray, "ensemble").verdict == INCONCLUSIVE
        assert stray in static.missing(StackedRelease, [StackedGaussian])
    finally:
        del stray


# --- before training -------------------------------------------------------------------------------------------------


def test_private_normalisation_is_sound_and_the_attack_reaches_its_bound():
    found = audit_normalisation("normalisation")
    assert found.verdict == CONSISTENT, found.reason
    assert found.facts["sensitivity"] == pytest.approx(1.0, abs=1e-6)


def test_statistics_that_are_not_cut_to_the_range_are_caught(monkeypatch):
    monkeypatch.setattr(normalise.np, "clip", lambda x, low, high: x)
    assert audit_normalisation("broken").verdict == VIOLATED


def test_images_of_a_patient_that_count_one_by_one_are_caught(monkeypatch):
    plain = normalise.unit_statistics

    monkeypatch.setattr(normalise, "unit_statistics", lambda data, units: plain(data, prior.Units(len(data))))
    found = audit_normalisation("broken")
    assert found.verdict == VIOLATED
    assert "patients" in found.reason


def test_noise_for_one_channel_only_is_caught(monkeypatch):
    monkeypatch.setattr(normalise, "sensitivity", lambda channels: 0.5)
    assert audit_normalisation("broken").verdict == VIOLATED


def test_a_price_that_depends_on_the_unit_is_caught(monkeypatch):
    plain = prior.release_normalisation

    def dearer(dataset, units, config, run_id, noise):
        data, settled, release = plain(dataset, units, config, run_id, noise)
        return data, settled, dataclasses.replace(release, sigma_eff=float(len(dataset)))

    monkeypatch.setattr(prior, "release_normalisation", dearer)
    assert audit_normalisation("broken").verdict == VIOLATED


def test_ensembles_are_audited_by_real_steps():
    ensemble = ensembles.summed(ensembles.built({}, ensembles.records(torch.ones(1, 8, 8), 6)))
    assert ensemble.batches.rows < len(ensemble.dataset)  # more than one pass
    assert bool(ensemble.total.abs().sum() > 0)
