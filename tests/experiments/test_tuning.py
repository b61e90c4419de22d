"""Equal effort, records that do not move, and a search that is paid for."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

from erlangen.accounting import epsilon, gaussian, poisson
from erlangen.data import load
from erlangen.experiments import tuning
from erlangen.training import TrainConfig

BASE = TrainConfig(
    model="mlp", model_options={"width": 8}, epsilon=None, noise_multiplier=1.0, steps=4, batch=64, seed=0
)


def test_every_mechanism_has_the_same_places_and_two_numbers_to_choose():
    places = tuning.places(9)
    assert places[0] == (0.5, 0.5)
    assert len(set(places)) == 9
    assert all(0 < u < 1 and 0 < v < 1 for u, v in places)
    for mechanism in ("iso", "rep", "clipless"):
        config = dataclasses.replace(BASE, mechanism=mechanism)
        tried = {tuning.setting(config, place).to_json() for place in places}
        assert len(tried) == 9
    a, b = (tuning.setting(BASE, (u, 0.3)) for u in (0.1, 0.9))
    assert a.max_grad_norm == b.max_grad_norm
    assert a.lr < b.lr
    c = tuning.setting(BASE, (0.1, 0.9))
    assert math.isclose(a.lr * a.max_grad_norm, c.lr * c.max_grad_norm, rel_tol=0.02)  # the rate is in units of C
    usual = dataclasses.replace(BASE, mechanism="clipless").settled(1000)  # its loss has been chosen
    low, high = (tuning.setting(usual, (0.2, v)).mechanism_options["loss"] for v in (0.2, 0.8))
    assert low["name"] == high["name"] == usual.mechanism_options["loss"]["name"]
    assert low != high
    given = dataclasses.replace(usual, mechanism_options={"loss": {"name": "cross-entropy", "temperature": 8.0}})
    assert tuning.setting(given, (0.2, 1.0)).mechanism_options["loss"]["temperature"] == 32.0
    assert (
        tuning.setting(dataclasses.replace(given, mechanism_options={"loss": 1.5}), (0.2, 1.0)).mechanism_options[
            "loss"
        ]
        == 1.5
    )


def test_a_record_more_moves_no_other_across_the_split():
    data = load("digits")
    fewer = dataclasses.replace(data, x_train=data.x_train[:-1], y_train=data.y_train[:-1])
    whole, part = tuning.split(data, 0.2), tuning.split(fewer, 0.2)
    assert abs(len(whole.x_test) / len(data) - 0.2) < 0.04
    assert len(whole) + len(whole.x_test) == len(data)
    assert abs(len(whole) - len(part)) + abs(len(whole.x_test) - len(part.x_test)) == 1
    np.testing.assert_array_equal(whole.x_train[: len(part)], part.x_train)


def test_a_patient_is_held_out_whole():
    data = load("digits")
    patient = np.arange(len(data)) // 7
    grouped = tuning.split(dataclasses.replace(data, unit=patient), 0.3)
    assert len(grouped.unit) == len(grouped)
    held = {tuple(x.ravel()) for x in grouped.x_test}
    for rows in np.split(np.arange(len(data)), np.flatnonzero(np.diff(patient)) + 1):
        inside = {tuple(data.x_train[r].ravel()) in held for r in rows}
        assert len(inside) == 1


def test_a_split_of_almost_nothing_is_refused():
    data = load("digits")
    tiny = dataclasses.replace(data, x_train=data.x_train[:2], y_train=data.y_train[:2])
    with pytest.raises(ValueError, match="--trials 0"):
        tuning.split(tiny, 1e-6)


def test_the_number_of_trials_is_geometric():
    mean = 4.0
    counts = np.array([tuning.number_of_trials(mean, seed) for seed in range(3000)])
    assert counts.min() == 1
    assert abs(counts.mean() - mean) < 5 * math.sqrt(mean * (mean - 1) / 3000)
    assert abs((counts == 1).mean() - 1 / mean) < 0.04
    assert abs((counts > 4).mean() - (1 - 1 / mean) ** 4) < 0.04
    assert {tuning.number_of_trials(1.0, seed) for seed in range(9)} == {1}


def test_a_search_costs_what_repeat_and_select_costs():
    step, steps, delta = poisson(0.05, gaussian(1.2)), 200, 1e-5
    one = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(step, steps), gaussian(tuning.SCORE_NOISE)])
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(one, 6, 1))
    spent = tuning.search_epsilon(step, steps, 6, delta)
    assert math.isclose(spent, accountant.get_epsilon(delta), rel_tol=0.02)
    alone = epsilon([(step, steps), (gaussian(tuning.SCORE_NOISE), 1)], delta, "rdp")
    assert alone < spent < 6 * alone
    assert math.isclose(tuning.search_epsilon(step, steps, 1, delta), alone, rel_tol=1e-9)


def test_calibration_meets_the_target_and_not_much_more():
    make, steps, delta = (lambda sigma: poisson(0.1, gaussian(sigma))), 50, 1e-5
    sigma = tuning.calibrate(make, steps, 4, 3.0, delta)
    assert tuning.search_epsilon(make(sigma), steps, 4, delta) <= 3.0
    assert tuning.search_epsilon(make(0.99 * sigma), steps, 4, delta) > 3.0
    with pytest.raises(ValueError, match="scores alone cost more"):
        tuning.calibrate(make, steps, 1000, 0.05, delta)


def test_a_trial_trains_at_the_planned_rate_and_tells_only_what_is_paid_for(monkeypatch):
    data, seen = load("digits"), []
    plain = tuning.Session.__init__

    def spy(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(tuning.Session, "__init__", spy)
    result = tuning.trial(BASE, data, 0.2, 0, "t", accounted=True)
    assert math.isclose(seen[0].sampler.sample_rate, BASE.batch / len(data), rel_tol=1e-12)
    assert set(result) == {"lr", "max_grad_norm", "mechanism_options", "held_out", "score", "test"}
    noisy = result["score"] * result["held_out"]
    assert math.isclose(noisy, round(noisy), abs_tol=1e-6)
    exact = tuning.trial(BASE, data, 0.2, 0, "t", accounted=False)
    assert "test" not in exact  # the public test set is read by the final runs only
    assert (
        tuning.best([{"score": 0.5, "loss": 1.0}, {"score": 0.5, "loss": 0.9}, exact | {"score": 0.1}])["loss"] == 0.9
    )
