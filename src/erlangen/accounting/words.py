"""Promises in few digits: rounded up, so that what holds is never more than what is said."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context


def upper(value: float, digits: int, form: str = "g") -> str:
    """The least number of this many digits that is not below ``value``; ∞ where there is none."""
    if value == math.inf:
        return "∞"
    rounded = float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value))))
    return f"{rounded:.{digits if form == 'g' else digits - 1}{form}}"


def factor(epsilon: float) -> str:
    """e^ε: how many times as likely an event may become; beyond e⁵⁰ as a power of ten."""
    return upper(math.exp(epsilon), 3) if epsilon <= 50 else f"10^{math.ceil(epsilon / math.log(10))}"


def meaning(epsilon: float, delta: float, unit: str, neighbouring: str = "add-or-remove-one") -> str:
    """(ε, δ) as a sentence for somebody who does not know the field."""
    small = upper(delta, 2, "e")
    otherwise = f"with another {unit} in its place" if neighbouring == "replace-one" else "without"
    return (
        "Whatever somebody may conclude from the trained model, even knowing everything about everyone else, is at most "
        f"{factor(epsilon)} times as likely with a given {unit} in the training data as {otherwise}, plus {small}; and the "
        "other way round."
    )
