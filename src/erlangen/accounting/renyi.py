"""The Rényi divergences of a Gaussian release, sampled or not: those of `dp_accounting`, to the last bit, in less time.

The terms of each sum are computed on arrays and added up one by one in the order of `dp_accounting`; binomial coefficients, which
depend on the order alone, are kept. A calibration begins with some dozen of these curves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy.special import gammaln, log_ndtr

ORDERS = np.array(DEFAULT_RDP_ORDERS)
_MOST_TERMS = 1000
_BLOCKS = [slice(low, high) for low, high in ((0, 64), (64, 256), (256, _MOST_TERMS))]


@lru_cache(maxsize=64)
def divergences(sigma: float, sampling: float) -> np.ndarray:
    """At each of `ORDERS`, of one release with noise σ from records that were drawn with probability q."""
    if sampling == 1.0:
        found = ORDERS / (2 * sigma**2)
    else:
        log_a = (_whole if order.is_integer() else _fractional for order in ORDERS)
        with np.errstate(all="ignore"):
            found = np.array([log(sampling, sigma, float(order)) / (order - 1) for log, order in zip(log_a, ORDERS)])
    found.flags.writeable = False
    return found


def _whole(q: float, sigma: float, order: float) -> float:
    """log A of an order that is an integer: a binomial sum (Mironov, Talwar and Zhang 2019, section 3.3)."""
    i = np.arange(int(order) + 1.0)
    terms = _coefficients(order)[: len(i)] + i * math.log(q) + (order - i) * math.log1p(-q) + (i * i - i) / (2 * sigma**2)
    return _sum(terms.tolist())


def _fractional(q: float, sigma: float, order: float) -> float:
    """log A of any other order: two series, until their terms fall and are e^-30 of the sum; ∞ where that takes too long."""
    first = second = -math.inf
    last = (-math.inf, -math.inf)
    for term in _terms(q, sigma, order):
        first, second = _add(first, term[0]), _add(second, term[1])
        total = _add(first, second)
        if term[0] < last[0] and term[1] < last[1] and max(term) < total - 30:
            return total
        last = term
    return math.inf


def _terms(q: float, sigma: float, order: float) -> Iterator[tuple[float, float]]:
    z, log_q, log_rest = sigma**2 * math.log(1 / q - 1) + 0.5, math.log(q), math.log1p(-q)
    for block in _BLOCKS:
        i = np.arange(float(block.start), float(block.stop))
        j = order - i
        coefficient = _coefficients(order)[block]
        below = math.log(0.5) + (math.log(2) + log_ndtr(-((i - z) / (math.sqrt(2) * sigma)) * 2**0.5))
        above = math.log(0.5) + (math.log(2) + log_ndtr(-((z - j) / (math.sqrt(2) * sigma)) * 2**0.5))
        first = coefficient + i * log_q + j * log_rest + (i * i - i) / (2 * sigma**2) + below
        second = coefficient + j * log_q + i * log_rest + (j * j - j) / (2 * sigma**2) + above
        yield from zip(first.tolist(), second.tolist())


@lru_cache(maxsize=256)
def _coefficients(order: float) -> np.ndarray:
    """The logarithms of the binomial coefficients of an order, as many as are ever needed."""
    i = np.arange(order + 1 if order.is_integer() else float(_MOST_TERMS))
    return gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)


def _sum(logarithms: Iterable[float]) -> float:
    total = -math.inf
    for term in logarithms:
        total = _add(total, term)
    return total


def _add(x: float, y: float) -> float:
    """log(e^x + e^y)"""
    low, high = (y if y < x else x), (y if y > x else x)
    return high if low == -math.inf else math.log1p(math.exp(low - high)) + high
