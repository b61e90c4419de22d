"""Private normalisation: the release has the sensitivity it claims, is in the ledger, and is paid for in training."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from erlangen.accounting import epsilon, gaussian
from erlangen.accounting.certificate_check import check
from erlangen.accounting.ledger import read_ledger
from erlangen.data import DataError, from_arrays, load
from erlangen.experiments.compare import Comparison
from erlangen.sampling import Units
from erlangen.training import TrainConfig, run
from erlangen.training.config import ConfigError
from erlangen.training.folder import stream_id
from erlangen.training.normalise import release_normalisation, sensitivity, unit_statistics
from erlangen.training.session import Session

SMALL = TrainConfig(model="logistic", steps=20, batch=256, seed=3, data_options={"normalise": "private"})


def own(n=60, seed=0, unit=None):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, 5, 5, 3), dtype=np.uint8)
    more = {} if unit is None else {"patient": unit}
    return from_arrays("own", {"x_train": x, "y_train": np.arange(n) % 2, **more}, "patient" if more else None)


@pytest.mark.parametrize("fill", [0, 255, 128])
def test_no_unit_moves_the_sum_by_more_than_the_sensitivity(fill):
    """Each unit's term is within the bound, and extreme images reach it: it is tight."""
    data = own()
    extreme = dataclasses.replace(data, x_train=np.full_like(data.x_train, fill / 127.5 - 1))
    terms = unit_statistics(extreme, Units(len(data))) - 0.5
    norms = np.linalg.norm(terms, axis=1)
    assert norms.max() <= sensitivity(3) * (1 + 1e-6)
    if fill in (0, 255):
        assert norms.max() == pytest.approx(sensitivity(3))
    assert np.linalg.norm(unit_statistics(data, Units(len(data))) - 0.5, axis=1).max() < sensitivity(3)


def test_a_patient_counts_once_however_many_images_they_have():
    owner = np.array([0] * 50 + list(range(1, 11)))
    data = own(unit=owner)
    units = Units(len(data), owner, "patient")
    values = unit_statistics(data, units)
    assert values.shape == (11, 6)
    pixels = data.preprocessing.denormalise(data.x_train[:50])
    np.testing.assert_allclose(values[0, :3], pixels.mean((0, 2, 3)), atol=1e-6)


def test_the_released_constants_are_near_the_truth_and_noisy():
    data = load("digits")
    truth = data.preprocessing.denormalise(data.x_train)
    found = []
    for seed in range(40):
        config = dataclasses.replace(SMALL.settled(len(data)), seed=seed)
        changed, settled, release = release_normalisation(data, Units(len(data)), config, "run")
        found.append((changed.preprocessing.mean[0], changed.preprocessing.std[0]))
        assert settled.data_options["normalise"] == f"{found[-1][0]}/{found[-1][1]}"
    means = np.array(found)[:, 0]
    noise = release.sigma_eff * sensitivity(1) / len(data)
    assert abs(means.mean() - truth.mean()) < 4 * noise / np.sqrt(40) + 1e-4
    assert 0.6 * noise < means.std() < 1.5 * noise
    assert abs(np.array(found)[:, 1].mean() - truth.std()) < 0.02
    np.testing.assert_allclose(changed.preprocessing.denormalise(changed.x_train), truth, atol=1e-5)
    assert changed.fingerprint() == data.fingerprint()


def test_training_pays_for_it():
    plain, private = Session(dataclasses.replace(SMALL, data_options={})), Session(SMALL)
    sigma, more = plain.training.mechanism.noise_multiplier, private.training.mechanism.noise_multiplier
    assert sigma < more < 1.05 * sigma
    pairs = [(private.prior[0].event, 1), (private.training.event(), 20)]
    assert 2.9 < epsilon(pairs, private.config.delta) <= 3.0
    assert private.accountant.steps == 1


def test_a_run_writes_it_down_first_and_a_resumed_run_keeps_it(tmp_path):
    result = run.train(SMALL, tmp_path / "run")
    book = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert [release.mechanism for release in book.releases] == ["pixel-mean-and-spread", "iso"]
    assert book.counts[0] == 1
    config = TrainConfig.from_file(tmp_path / "run" / "config.json")
    assert config.data_options == result.session.config.data_options
    assert "/" in config.data_options["normalise"]
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert check(certificate) == []
    assert certificate["guarantee"]["epsilon"]["pld"] <= 3.0
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    assert card["preprocessing"]["mean"] != [0.5]
    again = run.resume(tmp_path / "run", say=lambda text: None)
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").counts[0] == 1
    assert again.summary["guarantee"]["epsilon"] == result.summary["guarantee"]["epsilon"]


def test_no_noise_is_no_privacy():
    config = TrainConfig(
        model="logistic", steps=2, batch=128, noise_multiplier=1.0, epsilon=None,
        data_options={"normalise": "private", "normalise_sigma": 0.0},
    )  # fmt: skip
    session = Session(config)
    assert session.epsilon() == float("inf")
    truth = load("digits")
    exact = truth.preprocessing.denormalise(truth.x_train)
    assert session.dataset.preprocessing.mean[0] == pytest.approx(exact.mean(), abs=1e-4)


def test_a_given_sigma_is_what_is_accounted():
    session = Session(dataclasses.replace(SMALL, data_options={"normalise": "private", "normalise_sigma": 50.0}))
    assert session.prior[0].event == gaussian(50.0)


def test_floats_without_a_range_are_refused():
    data = from_arrays("own", {"x_train": np.random.default_rng(0).normal(size=(9, 4, 4)), "y_train": np.arange(9) % 2})
    config = dataclasses.replace(SMALL, batch=4)
    with pytest.raises(DataError, match="no bounded sensitivity"):
        Session(config, data)


def test_runs_that_differ_in_who_belongs_together_share_no_noise():
    """The same pixels under other patients are another data set: with the same streams the noise would cancel."""
    owner = np.arange(60) // 2
    other = owner.copy()
    other[1] = 29
    config = dataclasses.replace(SMALL, unit="patient", batch=8)
    assert stream_id(config, own(unit=owner)) == stream_id(config, own(unit=owner))
    assert stream_id(config, own(unit=owner)) != stream_id(config, own(unit=other))


@pytest.mark.parametrize("accounted", [False, True])
def test_comparisons_do_not_share_constants_that_no_run_counts(accounted):
    with pytest.raises(ConfigError, match="normalise is 'private'"):
        Comparison(SMALL, mechanisms=("iso",), epsilons=(3.0,), trials=2, accounted=accounted)
