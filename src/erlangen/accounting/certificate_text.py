"""The certificate as one page for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .words import upper


def markdown(certificate: Mapping[str, Any]) -> str:
    """A one-page rendering; it says nothing that is not in the JSON."""
    c, g = certificate, certificate["guarantee"]
    lines = ["# Privacy certificate", "", f"**{headline(c)}**", ""]
    if g["reasons"]:
        lines += ["Why there is no guarantee:", "", *(f"- {_line(reason)}" for reason in g["reasons"]), ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in _rows(c)), ""]
    lines += ["## What it means", "", *_meaning(c), ""]
    lines += ["## Releases", "", "| count | mechanism | event | sensitivity | noise multiplier | sampling |"]
    lines += ["|---|---|---|---|---|---|", *(_release(r) for r in c["releases"][:20])]
    if len(c["releases"]) > 20:
        lines.append(f"| … | {len(c['releases']) - 20} more kinds, see certificate.json | | | | |")
    lines += ["", "## Not covered", ""]
    lines += [f"- switched on, without any guarantee: **{_line(x)}**" for x in c["non_private"]]
    lines += [f"- {_line(x)}" for x in c["not_covered"]]
    lines += ["", f"Check it: `erlangen verify certificate.json`. {_software(c)}", ""]
    return "\n".join(lines)


def headline(certificate: Mapping[str, Any]) -> str:
    """The guarantee in one sentence."""
    g = certificate["guarantee"]
    if not g["private"]:
        return "No privacy guarantee: ε = ∞."
    use = "" if certificate["randomness"] == "secure" else f" ({_line(certificate['randomness'])})"
    return f"(ε, δ) = ({promised(g['best_epsilon'])}, {promised(certificate['delta'])}) differential privacy{use}."


def certified(certificate: Mapping[str, Any], ledger: bool) -> dict[str, Any]:
    """What was verified, as plain facts; `ledger` says whether the releases were compared with one."""
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
        "signed_by": signature["public_key"] if signature else None,
    }


def in_one_line(facts: Mapping[str, Any]) -> str:
    """The facts of `certified` for somebody who asks what it was that verified."""
    whose = f"for each {_line(facts['unit'])}"
    if facts["private"]:
        parts = [f"ε = {promised(facts['epsilon'])} at δ = {promised(facts['delta'])} {whose}"]
    else:
        why = "; ".join(map(_line, facts["reasons"][:3]))
        parts = [f"consistent, but NO privacy guarantee: ε = ∞ {whose} ({why})"]
    parts += [facts["randomness"], f"{facts['releases']} release{'s' * (facts['releases'] != 1)}"]
    if facts["non_private"]:
        parts.append(f"without any guarantee: {', '.join(map(_line, facts['non_private']))}")
    parts.append("ledger compared" if facts["ledger_compared"] else "no ledger compared")
    parts.append(f"signed by {facts['signed_by'][:16]}" if facts["signed_by"] else "not signed")
    return "; ".join(parts)


def number(value: Any) -> str:
    """Four digits, or the word for it."""
    if value is None:
        return "not available"
    if value == "inf":
        return "∞"
    return f"{value:.4g}" if isinstance(value, (int, float)) else _line(value)


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
        ("randomness", c["randomness"]),
        ("audit", c.get("audit") or "none"),
        ("ledger", "; ".join(c["ledger"]["notes"]) or "intact"),
        ("run", f"{c['run']}, {c['created']}"),
    ]


def _facts(value: Any) -> Any:
    """A mapping as "key: value; …"."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {number(v)}" for key, v in value.items())
    return value or "not stated"


def _meaning(c: Mapping[str, Any]) -> list[str]:
    if not c["guarantee"]["private"]:
        return ["An attacker may find out with certainty whether any given data was used."]
    out = [
        f"An attacker who knows everything but whether one {_line(c['unit'])}'s data was used, and who tests it on the "
        "released result with the best possible method, is right about a member at most"
    ]
    for row in c["guarantee"]["attacker"]:
        tpr, fpr = math.ceil(1000 * row["tpr"]) / 10, 100 * row["fpr"]
        out.append(f"- {tpr:.1f} % of the time if it may be wrong about {fpr:g} % of the others")
    return [out[0], "", *out[1:]]


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
    return (number(value) if isinstance(value, float) else _line(value)).replace("|", "\\|")


def _line(value: Any) -> str:
    """One line of text, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(str(value).split())[:400])
