"""Rényi divergences of Gaussian releases: those of `dp_accounting`, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from erlangen import accounting
from erlangen.accounting.normal import normalise
from erlangen.accounting.renyi import ORDERS, divergences


@pytest.mark.parametrize("sigma", [1e-3, 0.3, 1.1234, 50.0, 1e7])
@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.1234, 0.5, 0.7, 1 - 1e-12, 1.0])
def test_every_order_is_the_same(sigma, rate):
    theirs = RdpAccountant().compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)))
    assert np.array_equal(theirs.orders, ORDERS)
    assert np.array_equal(theirs.rdp, divergences(sigma, rate))


def test_a_history_costs_what_it_costs_there():
    history = [(PoissonSampledDpEvent(0.02, GaussianDpEvent(0.9)), 70), (GaussianDpEvent(8.0), 2)]
    theirs = RdpAccountant()
    for event, count in normalise(history) or ():
        theirs.compose(event, count)
    assert accounting.epsilon(history, 1e-5, "rdp") == theirs.get_epsilon(1e-5)
    assert accounting.delta(history, 2.0, "rdp") == theirs.get_delta(2.0)
