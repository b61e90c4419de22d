"""Events → ε: accounting, calibration, budgets, the write-ahead ledger and the certificate.

Importing this package is cheap; `dp_accounting` is loaded by the first call that needs it. Nothing here imports torch.
"""

from __future__ import annotations

from . import certificate, metrics, signing
from .accountant import Accountant, from_opacus
from .attacker import gdp_mu, tradeoff
from .budget import Budget
from .calibrate import max_steps, noise_multiplier
from .certificate_check import examine, verify
from .compose import Spent, compose_runs, ledger_path, overlapping
from .epsilon import AccountingError, Method, Neighbouring, delta, epsilon
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
from .ledger import Ledger, read_ledger
from .ledger_format import Book, LedgerError, NotALedger, Release
from .protected import Protected

__all__ = [
    "Accountant",
    "AccountingError",
    "Book",
    "Budget",
    "EventError",
    "Ledger",
    "LedgerError",
    "Method",
    "Neighbouring",
    "NotALedger",
    "Protected",
    "Release",
    "Spent",
    "certificate",
    "compose_runs",
    "composed",
    "delta",
    "epsilon",
    "examine",
    "from_json",
    "from_opacus",
    "gaussian",
    "gdp_mu",
    "laplace",
    "ledger_path",
    "max_steps",
    "metrics",
    "no_op",
    "noise_multiplier",
    "non_private",
    "overlapping",
    "poisson",
    "read_ledger",
    "repeat_and_select",
    "sequence",
    "signing",
    "to_json",
    "tradeoff",
    "verify",
]
