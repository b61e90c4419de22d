"""Promises as they are written: in few digits, rounded up, so that what holds is never more than what is said."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def upper(value: float, digits: int, form: str = "g") -> str:
    """The least number of this many digits that is not below ``value``; ∞ where there is none."""
    return _rounded(value, digits, form, ROUND_CEILING)


def lower(value: float, digits: int, form: str = "g") -> str:
    """The greatest number of this many digits that is not above ``value``: for what was shown *at least*."""
    return _rounded(value, digits, form, ROUND_FLOOR)


def in_json(value: float) -> float | str:
    """As it is; ∞, which JSON has not, is "inf"."""
    return value if math.isfinite(value) else "inf"


def _rounded(value: float, digits: int, form: str, direction: str) -> str:
    if value == math.inf:
        return "∞"
    rounded = float(Context(prec=digits, rounding=direction).create_decimal(repr(float(value))))
    return f"{rounded:.{digits if form == 'g' else digits - 1}{form}}"


def upper_share(value: float) -> str:
    """A bound on a probability as per cent with one decimal, rounded up."""
    return f"{100 * Decimal(repr(float(value))).quantize(Decimal('0.001'), ROUND_CEILING):.1f} %"


#: above this ε a guarantee is said to be weak: e^10 is 22,000, and who may hold evidence 22,000 times as likely if somebody took
#: part as if not is as good as certain
WEAK = 10.0


def is_weak(epsilon: float) -> bool:
    """A guarantee, but hardly a protection; ε = ∞ is no guarantee and is said in other words."""
    return WEAK < epsilon < math.inf


def factor(epsilon: float) -> str:
    """e^ε: how many times as likely an event may become; beyond e⁵⁰ as a power of ten."""
    if epsilon > 50:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    rounded = upper(math.exp(epsilon), 3)
    return f"{float(rounded):,.0f}" if 1000 <= float(rounded) < 1e6 else rounded


def why_none(*guarantees: str | None) -> str:
    """Why ε = ∞, from what mechanism and sampler say of themselves: what is sound at its true cost is no reason."""
    return next((said for said in guarantees if said and not said.startswith("sound")), "no noise was added (σ = 0)")


def meaning(epsilon: float, delta: float, unit: str, neighbouring: str = "add-or-remove-one") -> str:
    """(ε, δ) as a sentence for somebody who does not know the field."""
    small = upper(delta, 2, "e")
    otherwise = f"with another {unit} in its place" if neighbouring == "replace-one" else "without"
    return (
        "Whatever somebody may conclude from the trained model, even knowing everything about everyone else, is at most "
        f"{factor(epsilon)} times as likely with a given {unit} in the training data as {otherwise}, plus {small}; and the "
        "other way round."
    )
