"""Promises in few digits: rounded up, so that what holds is never more than what is said."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context


def upper(value: float, digits: int, form: str = "g") -> str:
    """The least number of this many digits that is not below ``value``."""
    rounded = float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value))))
    return f"{rounded:.{digits if form == 'g' else digits - 1}{form}}"
