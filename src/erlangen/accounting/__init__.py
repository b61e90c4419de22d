"""Events → ε: accounting, calibration, budgets, the write-ahead ledger and the certificate.

Importing this package is cheap; `dp_accounting` is loaded by the first call that needs it. Nothing here imports torch.
"""

from __future__ import annotations

from .accountant import Accountant, from_opacus
from .budget import Budget
from .calibrate import max_steps, noise_multiplier
from .epsilon import AccountingError, Method, Neighbouring, delta, epsilon, gdp_mu, tradeoff
from .events import (
    EventError,
    composed,
    from_json,
    gaussian,
    laplace,
    no_op,
    non_private,
    poisson,
    repeat_and_select,
    sequence,
    to_json,
)

__all__ = [
    "Accountant",
    "AccountingError",
    "Budget",
    "EventError",
    "Method",
    "Neighbouring",
    "composed",
    "delta",
    "epsilon",
    "from_json",
    "from_opacus",
    "gaussian",
    "gdp_mu",
    "laplace",
    "max_steps",
    "no_op",
    "noise_multiplier",
    "non_private",
    "poisson",
    "repeat_and_select",
    "sequence",
    "to_json",
    "tradeoff",
]
