"""The calculator says what the accountant says."""

from __future__ import annotations

import math

import pytest

from erlangen.accounting import epsilon, gaussian, poisson
from erlangen.ui import calculator

PLAN = {"sigma": "2", "rate": "0.05", "steps": "200", "delta": "1e-5"}


def test_cost_is_the_accountant_s(client):
    events = [(poisson(0.05, gaussian(2.0)), 200)]
    found = client.json("api/cost", PLAN.items())
    assert found["epsilon"] == epsilon(events, 1e-5)
    quick = client.json("api/cost", [*PLAN.items(), ("method", "rdp")])
    assert quick["epsilon"] == epsilon(events, 1e-5, "rdp") >= found["epsilon"]
    rates = [(a["fpr"], a["tpr"]) for a in found["attacker"]]
    assert all(fpr <= tpr <= min(1, math.exp(found["epsilon"]) * fpr + 1e-5) + 1e-9 for fpr, tpr in rates)


@pytest.mark.parametrize(("change", "tone"), [({}, "good"), ({"sigma": "0.3"}, "careful"),
                                              ({"sigma": "1", "steps": "10000000", "rate": "1"}, "bad")])  # fmt: skip
def test_a_weak_guarantee_is_not_shown_as_a_good_one(client, change, tone):
    assert client.json("api/cost", {**PLAN, **change}.items())["tone"] == tone


def test_noise_reaches_its_target_and_hardly_more(client):
    found = client.json("api/noise", {**PLAN, "target": "1.5"}.items())
    assert found["epsilon"] <= 1.5
    less = epsilon([(poisson(0.05, gaussian(found["sigma"] * 0.995)), 200)], 1e-5)
    assert less > 1.5


@pytest.mark.parametrize(("name", "value"), [("sigma", "0"), ("sigma", "nan"), ("sigma", "inf"), ("rate", "1.5"), ("steps", "1e9"),
                                             ("delta", "0"), ("delta", "-1"), ("sigma", "<script>"), ("steps", ""),
                                             ("method", "guess")])  # fmt: skip
def test_values_that_cannot_be_priced_are_named(client, name, value):
    status, headers, body = client.get("api/cost", {**PLAN, name: value}.items())
    assert status == 400
    assert name in body
    assert headers["content-type"] == "application/json"


def test_so_many_releases_that_nothing_is_left_cost_infinity(client):
    found = client.json("api/cost", {**PLAN, "sigma": "1", "steps": "10000000", "rate": "1"}.items())
    assert found["epsilon"] == "inf"
    assert all(a["tpr"] == 1 for a in found["attacker"])


def test_a_target_that_cannot_be_reached_is_an_answer_too(monkeypatch):
    monkeypatch.setitem(calculator.LIMITS, "target", (1e-9, 1.0))
    with pytest.raises(calculator.BadPlan, match="noise"):
        calculator.noise({**PLAN, "target": "1e-8", "steps": "10000000", "rate": "1", "delta": "1e-12"})
