"""The certificate as one page for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from .words import meaning, upper


def markdown(certificate: Mapping[str, Any]) -> str:
    """A one-page rendering; it says nothing that is not in the JSON."""
    c, g = certificate, certificate["guarantee"]
    lines = ["# Privacy certificate", "", f"**{headline(c)}**", ""]
    if g["reasons"]:
        lines += ["Why there is no guarantee:", "", *(f"- {printable(reason)}" for reason in g["reasons"]), ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in _rows(c)), ""]
    lines += ["## What it means", "", *_meaning(c), ""]
    lines += ["## Releases", "", "| count | mechanism | event | sensitivity | noise multiplier | sampling |"]
    lines += ["|---|---|---|---|---|---|", *(_release(r) for r in c["releases"][:20])]
    if len(c["releases"]) > 20:
        lines.append(f"| … | {len(c['releases']) - 20} more kinds, see certificate.json | | | | |")
    lines += ["", "## Not covered", ""]
    lines += [f"- switched on, without any guarantee: **{printable(x)}**" for x in c["non_private"]]
    lines += [f"- {printable(x)}" for x in c["not_covered"]]
    lines += ["", f"Check it: `erlangen verify certificate.json`. {_software(c)}", ""]
    return "\n".join(lines)


def headline(certificate: Mapping[str, Any]) -> str:
    """The guarantee in one sentence."""
    g = certificate["guarantee"]
    if not g["private"]:
        return "No privacy guarantee: ε = ∞."
    use = "" if certificate["randomness"] == "secure" else f" ({printable(certificate['randomness'])})"
    return f"(ε, δ) = ({promised(g['best_epsilon'])}, {promised(certificate['delta'])}) differential privacy{use}."


def certified(certificate: Mapping[str, Any], ledger: bool, weights: bool | None) -> dict[str, Any]:
    """What was verified, as plain facts; `ledger` and `weights` say whether these were compared (None: none are named)."""
    g, signature = certificate["guarantee"], certificate.get("signature")
    return {
        "private": g["private"],
        "epsilon": g["best_epsilon"],
        "delta": certificate["delta"],
        "unit": certificate["unit"],
        "reasons": list(g["reasons"]),
        "randomness": certificate["randomness"],
        "releases": certificate["steps"],
        "non_private": list(certificate["non_private"]),
        "ledger_compared": ledger,
        "weights_compared": weights,
        "signed_by": signature["public_key"] if signature else None,
    }


def in_one_line(facts: Mapping[str, Any]) -> str:
    """The facts of `certified` for somebody who asks what it was that verified."""
    whose = f"for each {printable(facts['unit'])}"
    if facts["private"]:
        parts = [f"ε = {promised(facts['epsilon'])} at δ = {promised(facts['delta'])} {whose}"]
    else:
        why = "; ".join(map(printable, facts["reasons"][:3]))
        parts = [f"consistent, but NO privacy guarantee: ε = ∞ {whose} ({why})"]
    parts += [facts["randomness"], f"{facts['releases']} release{'s' * (facts['releases'] != 1)}"]
    if facts["non_private"]:
        parts.append(f"without any guarantee: {', '.join(map(printable, facts['non_private']))}")
    parts.append("ledger compared" if facts["ledger_compared"] else "no ledger compared")
    if facts["weights_compared"] is not None:
        parts.append("weights compared" if facts["weights_compared"] else "no weights compared")
    parts.append(f"signed by {facts['signed_by'][:16]}" if facts["signed_by"] else "not signed")
    return "; ".join(parts)


def number(value: Any) -> str:
    """Four digits, or the word for it."""
    if value is None:
        return "not available"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == "inf":
        return "∞"
    return f"{value:.4g}" if isinstance(value, (int, float)) else printable(value)


def promised(value: Any) -> str:
    """As `number`, and never less than it is."""
    return upper(value, 4) if isinstance(value, (int, float)) else number(value)


def _rows(c: Mapping[str, Any]) -> list[tuple[str, Any]]:
    g = c["guarantee"]
    return [
        ("ε by PLD / by RDP", f"{promised(g['epsilon']['pld'])} / {promised(g['epsilon']['rdp'])}"),
        ("δ", promised(c["delta"])),
        ("Gaussian equivalent μ", promised(g["gdp_mu"])),
        ("neighbouring data sets", c["neighbouring"]),
        ("unit of privacy", c["unit"]),
        ("sampler", _facts(c.get("sampler"))),
        ("mechanism", _facts(c.get("mechanism"))),
        ("releases", c["steps"]),
        ("data", f"{c['data']['size'] or 'unknown'} records, fingerprint {c['data']['fingerprint'] or 'unknown'}"),
        ("treated as public", c["data"]["note"]),
        *([("weights", f"weights.safetensors, SHA-256 {c['weights']}")] if "weights" in c else []),
        ("randomness", c["randomness"]),
        ("audit", _facts(c.get("audit") or "none")),
        ("ledger", "; ".join(c["ledger"]["notes"]) or "intact"),
        ("run", f"{c['run']}, {c['created']}"),
    ]


def _facts(value: Any) -> Any:
    """A mapping as "key: value; …", in words."""
    return "; ".join(_fact_list(value)) if isinstance(value, Mapping) else value or "not stated"


def _fact_list(facts: Mapping[str, Any]) -> list[str]:
    out = []
    for name, value in facts.items():
        if name == "geometry" and value == "Geometry":  # noise of the same size in every direction, as the covariance says
            continue
        if isinstance(value, Mapping):
            said = f"({', '.join(_fact_list(value))})"
        elif name in ("clipping", "geometry"):  # named by their classes: PerLayer
            said = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", number(value)).lower()
        else:
            said = number(value)
        out.append(f"{str(name).replace('_', ' ')}: {said}")
    return out


def _meaning(c: Mapping[str, Any]) -> list[str]:
    if not c["guarantee"]["private"]:
        return ["An attacker may find out with certainty whether any given data was used."]
    g, unit = c["guarantee"], printable(c["unit"])
    whole = "" if unit == "record" else f" All records of one {unit} are protected together."
    attacker = (
        f"An attacker who knows everything but whether one {unit}'s data was used, and who tests it on the released result "
        "with the best possible method, is right about a member at most"
    )
    rates = [(math.ceil(1000 * row["tpr"]) / 10, 100 * row["fpr"]) for row in g["attacker"]]
    limits = [f"- {tpr:.1f} % of the time if it may be wrong about {fpr:g} % of the others" for tpr, fpr in rates]
    return [meaning(g["best_epsilon"], c["delta"], unit, c["neighbouring"]) + whole, "", attacker, "", *limits]


def _release(r: Mapping[str, Any]) -> str:
    cells = [r["count"], r.get("mechanism") or "", _event(r["event"]), r["sensitivity"], r["sigma_eff"], r["q"]]
    return "| " + " | ".join(_cell("" if cell is None else cell) for cell in cells) + " |"


def _event(event: Mapping[str, Any]) -> str:
    name = str(event["type"]).removesuffix("DpEvent")
    inner = event.get("event")
    return f"{name}({_event(inner)})" if isinstance(inner, Mapping) else name


def _software(c: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in c["software"].items())


def _cell(value: Any) -> str:
    return (number(value) if isinstance(value, float) else printable(value)).replace("|", "\\|")


def printable(value: Any) -> str:
    """One line of text, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(str(value).split())[:400])
