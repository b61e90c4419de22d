"""The privacy statement in plain words, from the certificate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from erlangen.accounting.words import factor, is_weak, upper, upper_share, why_none
from erlangen.report.chart import small
from erlangen.report.folder import Run


@dataclass(frozen=True)
class Statement:
    """``tone`` is good, careful or bad; ``facts`` are (name, value); the lists are sentences."""

    tone: str
    headline: str
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    not_covered: tuple[str, ...]


def statement(run: Run) -> Statement:
    """What is guaranteed to whom, what that means, what was checked, what is not covered."""
    warnings = _warnings(run)
    finite = math.isfinite(run.spent)
    tone = "careful" if warnings and finite else tone_of(run.spent)
    not_covered = tuple(str(x) for x in (run.certificate or {}).get("not_covered", []))
    return Statement(
        tone, _headline(run), _meaning(run) if finite else _no_guarantee(run), warnings, _facts(run), not_covered
    )


def tone_of(epsilon: float) -> str:
    """As far as ε alone decides it."""
    return "bad" if not math.isfinite(epsilon) else "careful" if is_weak(epsilon) else "good"


def _unit(run: Run) -> str:
    return str((run.certificate or run.guarantee).get("unit") or "record")


def _headline(run: Run) -> str:
    if run.problems:
        return "The certificate of this run does not hold."
    if not math.isfinite(run.epsilon):
        return "This model has no privacy guarantee."
    both = ", training and validation together" if run.spent > run.epsilon else ""
    if not math.isfinite(run.spent):
        return "Nothing is guaranteed any more: with what validation on the same private records released, no finite ε holds."
    amount = f"ε = {upper(run.spent, 3)} at δ = {small(run.delta)}{both}"
    if is_weak(run.spent):
        return f"A weak guarantee for each {_unit(run)}: {amount}, and eᵋ is {factor(run.spent)}."
    if _allowed_by_delta(run):
        return f"A weak guarantee for each {_unit(run)}: {amount}, and δ is above one over their number."
    return f"Each {_unit(run)} is protected: {amount}."


def _allowed_by_delta(run: Run) -> str:
    """What the certificate says of a δ above 1/N; empty where it is below."""
    said = (run.certificate or {}).get("not_covered", [])
    return next((words for words in said if isinstance(words, str) and words.startswith("delta is ")), "")


def _meaning(run: Run) -> tuple[str, ...]:
    unit, delta = _unit(run), run.delta
    whole = "" if unit == "record" else f" All records of one {unit} are protected together."
    came = "training and validation" if run.spent > run.epsilon else "training"
    out = [
        f"Whatever came out of {came} could also have come out without any one {unit}: nothing is more than "
        f"{factor(run.spent)} times (eᵋ) as likely with its data as without, plus δ = {small(delta)}, nor the other way "
        f"round.{whole}"
    ]
    rows = (run.certificate or {}).get("guarantee", {}).get("attacker", [])
    if rows and run.spent == run.epsilon:  # they are those of training alone
        limits = "; ".join(
            f"{'if they may accuse' if k == 0 else 'if'} {100 * r['fpr']:g} % of the others wrongly, at most "
            f"{upper_share(r['tpr'])}"
            for k, r in enumerate(rows)
        )
        out.append(
            f"Suppose somebody knows everything except whether one {unit} took part, and tests that as well as anyone can. Of "
            f"those who took part they recognise, {limits}."
        )
    return tuple(out)


def _no_guarantee(run: Run) -> tuple[str, ...]:
    if run.problems:
        return tuple(f"Found when it was recomputed: {problem}" for problem in run.problems[:5])
    if math.isfinite(run.epsilon) and run.validation is not None:
        return (f"By training alone ε = {upper(run.epsilon, 3)} at δ = {small(run.delta)}.",)
    said = (run.guarantee.get(who, {}).get("guarantee") for who in ("mechanism", "sampler"))
    reasons = (run.certificate or {}).get("guarantee", {}).get("reasons") or [why_none(*said)]
    why = tuple(f"Why: {reason}." for reason in reasons)
    return ("ε = ∞: an attacker may find out with certainty whether given data was used.", *why)


def _warnings(run: Run) -> tuple[str, ...]:
    out = []
    if run.certificate is None and not run.problems:
        out.append("There is no certificate: the figures are those of summary.json and were not recomputed.")
    elif run.certificate is not None and run.certificate["randomness"] != "secure" and run.certificate["guarantee"]["private"]:
        seeded = "reproducible" in str(run.summary.get("randomness", ""))
        why = "can be drawn again by whoever knows the seed" if seeded else "comes from an ordinary generator, which can be guessed"
        out.append(
            f"The noise {why}: good for experiments, not for release. Train with --secure before giving the model away."
        )
    if allowed := _allowed_by_delta(run):
        out.append(f"{allowed[0].upper()}{allowed[1:]}. Train with a smaller --delta.")
    out += [f"{words[0].upper()}{words[1:]}." for words in run.unchecked]
    if run.validation is not None:
        out.append(
            f"Private validation cost more than training: {run.validation.words}. Figures of attackers and of the ε spent speak of "
            "training alone."
        )
    if run.non_private:
        out.append(
            f"Computed from private records without noise, and not covered by ε: {', '.join(run.non_private)}. "
            "Do not publish what is marked NOT PRIVATE below."
        )
    return tuple(out)


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    mechanism, data, c = run.guarantee["mechanism"], run.summary["data"], run.certificate
    spent = run.guarantee["epsilon"]
    facts = [
        ("ε by PLD / by RDP", f"{_number(spent.get('pld'))} / {_number(spent.get('rdp'))}"),
        ("δ", small(run.delta)),
        ("neighbouring data sets", str(run.guarantee.get("neighbouring", "–"))),
        ("unit of privacy", _unit(run)),
        ("mechanism", f"{run.config.mechanism}, σ = {_number(mechanism.get('noise_multiplier'))}, "
                      f"sensitivity {_number(mechanism.get('sensitivity'))}"),
        ("releases", f"{run.guarantee.get('releases', run.summary.get('steps', '–'))}"),
        ("data", f"{data.get('name', '–')}: {data.get('records', '–')} records (treated as public)"),
        ("network", f"{run.config.model}, {run.summary.get('parameters', 0):,} parameters"),
        ("randomness", str(run.summary.get("randomness", "–"))),
    ]  # fmt: skip
    if c is not None:
        state = "recomputed from its releases: every number agrees" if not run.problems else "does not verify"
        facts.append(("certificate", state))
        facts.append(("Gaussian equivalent μ", _number(c.get("guarantee", {}).get("gdp_mu"))))
    return tuple(facts)


def _number(value: object) -> str:
    if isinstance(value, (int, float)):
        return upper(float(value), 4)
    return "∞" if value == "inf" else "–"
