"""What an audit says: the claim, the evidence, the most that the evidence could have shown, and a verdict.

`violated`      the claim is refuted at the stated confidence (after Holm's correction when many audits stand together);
`consistent`    it is not refuted, although this many trials could have refuted it;
`inconclusive`  the trials could not have refuted it whatever they showed, or the audit could not run.

A passing audit is never proof.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from erlangen import accounting
from erlangen.audit.curve import Curve
from erlangen.audit.intervals import Counts, epsilon_lower, gdp_lower, gdp_refuted, holm, p_value, upper_limit

CONSISTENT, VIOLATED, INCONCLUSIVE = "consistent", "violated", "inconclusive"
CONFIDENCES = (0.95, 0.999)
#: what a single audit needs to say `violated`
CONFIDENCE = 0.999


@dataclass(frozen=True)
class Claim:
    """What is claimed: a privacy event (the whole trade-off curve), or one (ε, δ). ``sigma`` names a Gaussian claim."""

    epsilon: float
    delta: float
    event: Any = None
    sigma: float | None = None

    @classmethod
    def of(cls, event: Any, delta: float) -> Claim:
        """An event, or pairs (event, count)."""
        sigma = getattr(event, "noise_multiplier", None) if type(event).__name__ == "GaussianDpEvent" else None
        return cls(accounting.epsilon(event, delta), delta, event, sigma)

    @property
    def empty(self) -> bool:
        """ε = ∞ claims nothing and cannot be violated."""
        return math.isinf(self.epsilon)

    @cached_property
    def curve(self) -> Curve:
        return Curve.of(self.event)

    def refuted(self, counts: Counts, alpha: float) -> bool:
        """Whether counts refute the claim at confidence 1 − α. An event is refuted by any point above its curve."""
        if self.empty:
            return False
        if self.sigma is not None:
            return gdp_refuted(counts, 1.0 / self.sigma, alpha)
        if self.event is None:
            return epsilon_lower(counts, self.delta, alpha) > self.epsilon
        fpr, fnr = (
            upper_limit(counts.fp, counts.without, alpha / 2),
            upper_limit(counts.fn, counts.with_record, alpha / 2),
        )
        return not self.curve.allows(fpr, fnr)


@dataclass(frozen=True)
class Finding:
    """One audit of one thing. ``lower_bound`` is model-free, ``gdp_lower_bound`` holds if the release is Gaussian."""

    subject: str
    audit: str
    verdict: str
    claim: float | None = None
    delta: float | None = None
    exact: float | None = None
    lower_bound: dict[str, float] = field(default_factory=dict)
    gdp_lower_bound: dict[str, float] = field(default_factory=dict)
    ceiling: dict[str, float] = field(default_factory=dict)
    gdp_ceiling: dict[str, float] = field(default_factory=dict)
    p_value: float | None = None
    trials: int = 0
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    confidence: float = CONFIDENCE

    def to_json(self) -> dict[str, Any]:
        """Bounds as numbers at the confidence that decided, and beside them (plural) at every confidence."""
        out = dataclasses.asdict(self)
        for name in ("lower_bound", "gdp_lower_bound", "ceiling", "gdp_ceiling"):
            every = out[name]
            out[name], out[f"{name}s"] = every.get(level(self.confidence)), every
        return jsonable(out)


def jsonable(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, Mapping):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    return ("inf" if value > 0 else "-inf") if isinstance(value, float) and math.isinf(value) else value


def level(confidence: float) -> str:
    return f"{100 * confidence:g}%"


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at δ of μ-GDP."""
    return accounting.epsilon(accounting.gaussian(1.0 / mu), delta) if mu > 0 else 0.0


@dataclass(frozen=True)
class Evidence:
    """Counts at two thresholds: balanced errors (best for Gaussian scores) and a tail (best for ε at a small δ)."""

    balanced: Counts
    tail: Counts


def conclude(
    subject: str, audit: str, evidence: Evidence, claim: Claim, *, exact: float | None = None, trials: int = 0,
    facts: Mapping[str, Any] | None = None, confidence: float = CONFIDENCE,
) -> Finding:  # fmt: skip
    """All bounds, ceilings, the p-value of the claim (twice the smaller of two tests, Bonferroni), and the verdict."""
    bounds: dict[str, dict[str, float]] = {"lower_bound": {}, "gdp_lower_bound": {}, "ceiling": {}, "gdp_ceiling": {}}
    perfect = evidence.tail.perfect
    for c in sorted({*CONFIDENCES, confidence}):
        bounds["lower_bound"][level(c)] = epsilon_lower(evidence.tail, claim.delta, 1 - c)
        bounds["gdp_lower_bound"][level(c)] = gaussian_epsilon(gdp_lower(evidence.balanced, 1 - c), claim.delta)
        bounds["ceiling"][level(c)] = epsilon_lower(perfect, claim.delta, 1 - c)
        bounds["gdp_ceiling"][level(c)] = gaussian_epsilon(gdp_lower(perfect, 1 - c), claim.delta)
    both = {evidence.balanced, evidence.tail}
    p = min(1.0, len(both) * min(p_value(lambda alpha, n=n: claim.refuted(n, alpha)) for n in both))  # type: ignore[misc]
    able = claim.empty or claim.refuted(perfect, (1 - confidence) / len(both))
    verdict = VIOLATED if p <= 1 - confidence else CONSISTENT if able else INCONCLUSIVE
    reason = {
        VIOLATED: f"the claim is refuted at {level(confidence)} (p = {p:.2g})",
        CONSISTENT: "nothing is claimed (ε = ∞)" if claim.empty else "the attack did not refute the claim",
        INCONCLUSIVE: "this many trials cannot refute the claim whatever they show: give more trials",
    }[verdict]
    counts = {"balanced": dataclasses.asdict(evidence.balanced), "tail": dataclasses.asdict(evidence.tail)}
    return Finding(
        subject, audit, verdict, claim.epsilon, claim.delta, exact, p_value=p, trials=trials, reason=reason,
        facts={**(facts or {}), "counts": counts}, confidence=confidence, **bounds,
    )  # fmt: skip


def passed(
    subject: str, audit: str, trials: int = 0, facts: Mapping[str, Any] | None = None, p: float | None = None
) -> Finding:
    return Finding(
        subject, audit, CONSISTENT, p_value=p, trials=trials, reason="nothing found", facts=dict(facts or {})
    )


def failed(subject: str, audit: str, reason: str, trials: int = 0, facts: Mapping[str, Any] | None = None,
           p: float | None = None) -> Finding:  # fmt: skip
    return Finding(subject, audit, VIOLATED, p_value=p, trials=trials, reason=reason, facts=dict(facts or {}))


def unable(subject: str, audit: str, reason: str) -> Finding:
    return Finding(subject, audit, INCONCLUSIVE, reason=reason)


def corrected(findings: Sequence[Finding], confidence: float = CONFIDENCE) -> list[Finding]:
    """The same findings with verdicts by Holm-adjusted p-values: one false alarm in the whole table has probability ≤ α.

    Deterministic findings (no p-value) stand as they are.
    """
    index = [i for i, f in enumerate(findings) if f.p_value is not None]
    adjusted = dict(zip(index, holm([findings[i].p_value for i in index])))  # type: ignore[misc]
    out = []
    for i, finding in enumerate(findings):
        if i in adjusted:
            facts = {**finding.facts, "holm_p_value": adjusted[i]}
            finding = dataclasses.replace(finding, facts=facts)
            if finding.verdict == VIOLATED and adjusted[i] > 1 - confidence:
                reason = f"not refuted once corrected for {len(index)} audits (p = {adjusted[i]:.2g})"
                finding = dataclasses.replace(finding, verdict=CONSISTENT, reason=reason)
        out.append(finding)
    return out


def overall(findings: Sequence[Finding]) -> str:
    """One violation is enough; without one, anything inconclusive makes the whole inconclusive."""
    verdicts = {f.verdict for f in findings}
    if VIOLATED in verdicts:
        return VIOLATED
    return INCONCLUSIVE if INCONCLUSIVE in verdicts or not verdicts else CONSISTENT
