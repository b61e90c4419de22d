"""The certificate: what a run guarantees, recomputable by anyone from the events it lists.

The schema is documented in docs/certificate-schema.md. Every number in `guarantee` follows from `releases`, `delta`
and `neighbouring`; `erlangen.accounting.verify` recomputes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erlangen.atomic import write_atomically

from . import strict_json
from .attacker import gdp_mu, tradeoff
from .epsilon import AccountingError, Neighbouring, epsilon
from .events import EventError
from .ledger_format import Book
from .normal import normalise

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SCHEMA = "erlangen-certificate"
VERSION = 1
FALSE_POSITIVE_RATES = (0.01, 0.1)
REPRODUCIBLE = "reproducible: not for release"
UNSEEDED = "pseudo-random, unseeded: not for release"
SECURE = "secure"

PUBLIC_NUMBERS = (
    "the number of records, and the number of units of privacy (patients, say), which sets the sampling rate, are treated as public"
)

FACTS = (
    "sampler", "mechanism", "data_size", "secure", "non_private", "not_covered", "audit", "expected_batch", "config",
    "weights"
)  # fmt: skip
"""Keys of the run facts that `build` understands; each is optional."""

ALWAYS_NOT_COVERED = (
    "anything computed from the private data outside the listed releases (choice of architecture, hyper-parameters "
    "tuned on the same data, looking at the data)",
    "what the other records say about a person: differential privacy bounds the effect of one unit only",
    "the fingerprint of the data: whoever holds all other records can test a guess of the last one against it; show it to "
    "those who add up budgets, not to the public",
    "flaws of the hardware, the operating system and the libraries below, and timing",
)


def build(book: Book, delta: float, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The certificate of the run whose ledger is `book`, at `delta`.

    `facts` are plain JSON data about the run (`FACTS`); unknown keys are refused, so that a misspelt one is noticed.
    A ledger that is still open counts its whole reservation.
    """
    told = dict(facts or {})
    unknown = set(told) - set(FACTS)
    if unknown:
        raise ValueError(f"unknown facts {sorted(unknown)}; known: {', '.join(FACTS)}")
    releases = [
        {**release.to_json(), "count": count} for release, count in zip(book.releases, book.counts) if count
    ]
    units = sorted({release.unit for release, count in zip(book.releases, book.counts) if count})
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "run": book.run,
        "delta": float(delta),
        "neighbouring": book.neighbouring,
        "unit": units[0] if len(units) == 1 else ", ".join(units) or str(book.header.get("unit", "record")),
        "guarantee": guarantee(book.pairs(), delta, book.neighbouring, _reasons(book)),
        "releases": releases,
        "steps": book.steps,
        "sampler": told.get("sampler"),
        "mechanism": told.get("mechanism"),
        "expected_batch": told.get("expected_batch"),
        "data": {
            "fingerprint": book.data,
            "size": told.get("data_size"),
            "note": PUBLIC_NUMBERS,
        },
        "randomness": _randomness(told),
        "non_private": list(told.get("non_private") or []),
        "not_covered": [*(told.get("not_covered") or []), *ALWAYS_NOT_COVERED],
        "audit": told.get("audit"),
        "config": told.get("config"),
        "software": software(),
        "ledger": {"head": book.head, "settled": book.settled, "notes": list(book.notes)},
        **({"weights": told["weights"]} if told.get("weights") else {}),
    }


def _randomness(told: Mapping[str, Any]) -> str:
    """Reproducible unless the opposite is known: whoever knows a seed can take the noise off."""
    if told.get("secure") is True:
        return SECURE
    mechanism = told.get("mechanism")
    source = mechanism.get("noise_source") if isinstance(mechanism, Mapping) else None
    return UNSEEDED if source == "pseudo-random, unseeded" else REPRODUCIBLE


def guarantee(
    pairs: Sequence[tuple[DpEvent, int]], delta: float, neighbouring: Neighbouring, reasons: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that is computed from the events. ∞ is written "inf"; null means the accountant cannot price it."""
    by: dict[str, float | None] = {}
    notes: list[str] = []
    for method in ("pld", "rdp"):
        try:
            by[method] = epsilon(pairs, delta, method, neighbouring)  # type: ignore[arg-type]
        except (AccountingError, EventError) as error:
            by[method] = None
            notes.append(f"{method}: {error}")
    if by["pld"] is None and by["rdp"] is None:
        by = {"pld": math.inf, "rdp": math.inf}
        notes.append("no accountant can price these releases, so nothing is guaranteed")
    known = [value for value in by.values() if value is not None]
    private = all(value < math.inf for value in known)
    mu = gdp_mu(pairs, delta, neighbouring) if by["pld"] is not None and private else None
    return {
        "private": private,
        "epsilon": {method: _json(value) for method, value in by.items()},
        "best_epsilon": _json(min(known)),
        "gdp_mu": _json(mu if private else math.inf),
        "attacker": [
            {"fpr": fpr, "tpr": _power(pairs, fpr, delta, neighbouring, by)} for fpr in FALSE_POSITIVE_RATES
        ],
        "reasons": [] if private else sorted(set(reasons)) or ["a release has no valid guarantee"],
        "notes": notes,
    }


def _power(
    pairs: Sequence[tuple[DpEvent, int]],
    fpr: float,
    delta: float,
    neighbouring: Neighbouring,
    by: Mapping[str, float | None],
) -> float:
    """The best attacker's true-positive rate: from the PLD curve, or from (ε, δ) alone where there is none."""
    if by["pld"] is not None and by["pld"] < math.inf:
        return tradeoff(pairs, fpr, neighbouring)
    eps = by["rdp"] if by["pld"] is None else by["pld"]
    if eps is None or eps == math.inf:
        return 1.0
    return min(1.0, math.exp(min(eps, 700.0)) * fpr + delta, 1 - math.exp(-eps) * (1 - delta - fpr))


def _reasons(book: Book) -> list[str]:
    """Why the counted releases without a guarantee have none."""
    out = []
    for release, count in zip(book.releases, book.counts):
        if count and normalise(release.event) is None:
            out.append(release.reason or f"{release.mechanism or 'a mechanism'} releases without a valid guarantee")
    return out


def software() -> dict[str, str]:
    """Versions of what computed and what accounted."""
    import platform
    from importlib import metadata

    out = {"python": platform.python_version()}
    for name in ("erlangen", "dp-accounting", "torch", "numpy", "scipy"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "erlangen" not in out:
        from erlangen import __version__

        out["erlangen"] = __version__
    return out


def save(certificate: Mapping[str, Any], folder: str | os.PathLike[str], name: str = "certificate.json") -> Path:
    """Write `certificate.json` and, for people, `certificate.md` into `folder`; returns the path of the first."""
    import json

    from .certificate_text import markdown

    target = Path(folder) / name
    text = json.dumps(certificate, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(target, text.encode())
    write_atomically(target.with_suffix(".md"), markdown(certificate).encode())
    return target


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The certificate at `path`, parsed but not believed: `verify` it."""
    document = strict_json.read(Path(path), "certificate")
    if not isinstance(document, dict):
        raise strict_json.DocumentError(f"certificate {path} is not a JSON object")
    return document


def _json(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else value
