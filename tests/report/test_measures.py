"""Calibration, confusion, fronts: against other implementations of the same definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix

from erlangen.report import measures
from erlangen.training.metrics import evaluate


def test_the_report_says_what_training_said():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(400, 7), torch.randint(0, 7, (400,))
    known = evaluate(torch.nn.Identity(), logits, labels, 7)
    p = logits.double().softmax(1).numpy()
    bins = measures.reliability(p, labels.numpy())
    assert abs(bins.ece - known["ece"]) < 1e-6
    assert abs(measures.brier(p, labels.numpy()) - known["brier"]) < 1e-7
    assert bins.count.sum() == 400
    table = measures.confusion(p, labels.numpy())
    np.testing.assert_array_equal(table, confusion_matrix(labels, p.argmax(1), labels=range(7)))
    assert np.trace(table) / 400 == np.float64(known["test_accuracy"]).round(6)


def test_a_calibrated_forecaster_is_on_the_diagonal():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 60_000)
    labels = (rng.random((60_000, 1)) > p.cumsum(1)).sum(1)
    bins = measures.reliability(p, labels)
    big = bins.count > 2000
    assert np.abs(bins.accuracy - bins.confidence)[big].max() < 0.03
    sure = np.eye(3)[p.argmax(1)]  # the same answers, always sure: its error is 1 − accuracy
    accuracy = (p.argmax(1) == labels).mean()
    assert abs(measures.reliability(sure, labels).ece - (1 - accuracy)) < 1e-9


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_is_scipys(right, total):
    right = min(right, total)
    known = binomtest(right, total).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(measures.wilson(right, total), (known.low, known.high), atol=1e-6)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1)), min_size=1, max_size=12))
def test_nothing_beats_the_front_and_everything_else_is_beaten(points):
    front = measures.pareto(points)
    for i in front:
        assert not any(e <= points[i][0] and a > points[i][1] for e, a in points)
    for i in set(range(len(points))) - set(front):
        assert any(points[j][0] <= points[i][0] and points[j][1] >= points[i][1] for j in front)


def test_certified_accuracy_starts_at_the_accuracy_and_falls():
    radius, right = np.array([0.0, 0.5, 1.0, 2.0]), np.array([True, True, False, True])
    np.testing.assert_allclose(
        measures.certified_accuracy(radius, right, np.array([0.0, 0.4, 0.6, 3.0])), [0.75, 0.5, 0.25, 0]
    )
