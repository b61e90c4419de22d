"""Distrust: everything in a certificate that can be recomputed is recomputed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import signing, strict_json
from .certificate import (
    ALWAYS_NOT_COVERED,
    PUBLIC_NUMBERS,
    REPRODUCIBLE,
    SCHEMA,
    SECURE,
    UNSEEDED,
    VERSION,
    guarantee,
    load,
    software,
)
from .certificate_beside import Validation, page_problems, validated, weights_beside
from .certificate_ledger import against_ledger
from .certificate_text import certified
from .epsilon import NEIGHBOURING
from .events import MAX_COUNT, EventError
from .ledger import LedgerError, Release, copy_path, passed_through, read_ledger
from .words import in_json

MAX_RELEASE_KINDS = 2000
_PUBLIC_NUMBERS = (PUBLIC_NUMBERS, "the number of records is treated as public")  # and what earlier certificates say
_SAME_SOFTWARE, _OTHER_SOFTWARE = 1e-6, 2e-3

_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (str,),
    "version": (int,),
    "created": (str,),
    "run": (str,),
    "delta": (float,),
    "neighbouring": (str,),
    "unit": (str,),
    "guarantee": (dict,),
    "releases": (list,),
    "steps": (int,),
    "sampler": (str, dict, type(None)),
    "mechanism": (str, dict, type(None)),
    "expected_batch": (int, float, type(None)),
    "data": (dict,),
    "randomness": (str,),
    "non_private": (list,),
    "not_covered": (list,),
    "audit": (str, dict, list, type(None)),
    "config": (dict, type(None)),
    "software": (dict,),
    "ledger": (dict,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {"weights": (str,)}


@dataclass(frozen=True)
class Verdict:
    """What distrust found: `problems` contradict the certificate; `notes` are damage to its ledger that was made good;
    `remarks` contradict nothing, and whoever relies on it should know them. `certified` are the facts that were verified
    (`certificate_text.certified`): None where there is a problem, so that nobody reads an ε that does not hold."""

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    certified: Mapping[str, Any] | None = None
    validation: Validation | None = None
    """What was released beside the certificate; None where nothing was, or where there is a problem."""


ALONE = (
    "there is no ledger beside the certificate: its releases were not compared with what was written down as they were made "
    "(name one with: erlangen verify --ledger)"
)

UNNAMED = (
    "the certificate names no weights: whether the model in weights.safetensors beside it is the one that it speaks of is not known"
)


def verify(
    path: str | os.PathLike[str],
    public_key: str | None = None,
    ledger: str | os.PathLike[str] | None = None,
    single_copy: bool = False,
    page: bool = True,
) -> list[str]:
    """Problems of the certificate at `path`; an empty list means that every recomputed value agrees.

    With `public_key` (hexadecimal) a valid signature by that key is required. The ledger given, or lying beside the
    certificate, must not count more than the certificate does; with one copy missing that is a problem, too, unless
    `single_copy` accepts it. The page beside it must be its page, unless the caller shows another (`page`).
    """
    return list(examine(path, public_key, ledger, single_copy, page).problems)


def examine(
    path: str | os.PathLike[str],
    public_key: str | None = None,
    ledger: str | os.PathLike[str] | None = None,
    single_copy: bool = False,
    page: bool = True,
) -> Verdict:
    """As `verify`, with what was damaged in the ledger and repaired."""
    try:
        document = load(path)
    except strict_json.DocumentError as error:
        return Verdict((str(error),))
    beside = Path(path).parent / "ledger.jsonl"
    found = Path(ledger) if ledger is not None else beside if beside.exists() or copy_path(beside).exists() else None
    verdict = _judge(document, public_key, found, single_copy)
    if verdict.problems:  # what lies beside a certificate that does not hold is no matter
        return verdict
    compared, others = weights_beside(Path(path), document)
    if problems := [*others, *(page_problems(Path(path), document) if page else [])]:
        return replace(verdict, problems=tuple(problems))
    beyond = validated(Path(path), document, _releases(document["releases"])[0], single_copy)
    unnamed = UNNAMED if compared is None and (Path(path).parent / "weights.safetensors").exists() else None
    remarks = (None if found else ALONE, unnamed, None if beyond is None else beyond.words)
    both = None if beyond is None else in_json(beyond.epsilon)
    facts = {**certified(document, found is not None, compared), "epsilon_with_validation": both}
    return replace(verdict, remarks=tuple(filter(None, remarks)), certified=facts, validation=beyond)


def check(document: Mapping[str, Any], public_key: str | None = None, ledger: Path | None = None) -> list[str]:
    """As `verify`, for a parsed document."""
    return list(_judge(document, public_key, ledger, False).problems)


def _judge(document: Mapping[str, Any], public_key: str | None, ledger: Path | None, single_copy: bool) -> Verdict:
    problems = _shape(document)
    if problems:
        return Verdict(tuple(problems))
    problems += _signature(dict(document), public_key)
    releases, trouble = _releases(document["releases"])
    if trouble:
        return Verdict((*problems, *trouble))
    problems += _consistency(document, releases)
    problems += _recompute(document, releases)
    stated = document["ledger"].get("notes")
    notes = [note for note in stated if isinstance(note, str)] if isinstance(stated, list) else []
    if ledger is None:
        return Verdict(tuple(problems), tuple(notes))
    try:
        book = read_ledger(ledger, single_copy)
        known = bool(book.notes) or passed_through(ledger, document["ledger"].get("head") or {}, single_copy)
    except (LedgerError, ValueError, OSError) as error:
        return Verdict((*problems, f"ledger: {error}"), tuple(notes))
    notes += [note for note in book.notes if note not in notes]
    if not known:
        problems.append("the ledger never stood where the certificate ends: it was rolled back, or is another run's")
    return Verdict((*problems, *against_ledger(document, releases, book)), tuple(notes))


def _shape(document: Mapping[str, Any]) -> list[str]:
    if document.get("schema") != SCHEMA or document.get("version") != VERSION:
        return [f"not a version {VERSION} {SCHEMA} document"]
    missing = sorted(set(_FIELDS) - set(document))
    extra = sorted(set(document) - set(_FIELDS) - set(_OPTIONAL) - {"signature"})
    problems = [f"field {name!r} is missing" for name in missing] + [f"unknown field {name[:40]!r}" for name in extra]
    for name, types in {**_FIELDS, **_OPTIONAL}.items():
        value = document.get(name)
        if name in document and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            problems.append(f"field {name!r} has the wrong type")
    if problems:
        return problems
    if not 0 < document["delta"] < 1:
        problems.append(f"delta = {document['delta']} is not between 0 and 1")
    if document["neighbouring"] not in NEIGHBOURING:
        problems.append("unknown neighbouring relation")
    if document["randomness"] not in (SECURE, UNSEEDED, REPRODUCIBLE):
        problems.append(f"randomness must be {SECURE!r}, {UNSEEDED!r} or {REPRODUCIBLE!r}")
    if len(document["releases"]) > MAX_RELEASE_KINDS:
        problems.append(f"more than {MAX_RELEASE_KINDS} kinds of release")
    return problems


def _signature(document: dict[str, Any], public_key: str | None) -> list[str]:
    if "signature" in document:
        trouble = signing.check(document, public_key)
        return [trouble] if trouble else []
    return ["the certificate is not signed"] if public_key is not None else []


def _releases(rows: list[Any]) -> tuple[list[tuple[Release, int]], list[str]]:
    out: list[tuple[Release, int]] = []
    problems = []
    for index, row in enumerate(rows):
        count = row.get("count") if isinstance(row, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_COUNT:
            problems.append(f"release {index}: the count is not a whole number above 0")
            continue
        try:
            out.append((Release.from_json(row), count))
        except EventError as error:
            problems.append(f"release {index}: {error}")
    return out, problems


def _consistency(document: Mapping[str, Any], releases: list[tuple[Release, int]]) -> list[str]:
    problems = []
    steps = sum(count for _, count in releases)
    if document["steps"] != steps:
        problems.append(f"steps = {document['steps']}, but the releases add up to {steps}")
    for index, (release, _) in enumerate(releases):
        if release.neighbouring != document["neighbouring"]:
            problems.append(f"release {index} was made under {release.neighbouring}, the certificate says otherwise")
        sigma, q = _claims(release)
        if release.sigma_eff is not None and sigma is not None and not _close(release.sigma_eff, sigma, 1e-9):
            problems.append(f"release {index}: sigma_eff = {release.sigma_eff}, but its event has {sigma}")
        if release.sample_rate is not None and q is not None and not _close(release.sample_rate, q, 1e-9):
            problems.append(f"release {index}: q = {release.sample_rate}, but its event has {q}")
    units = sorted({release.unit for release, _ in releases})
    if units and document["unit"] != ", ".join(units):
        problems.append(f"unit = {document['unit']!r}, but the releases protect {', '.join(units)!r}")
    return [*problems, *_randomness(document), *_sampling(document, releases), *_sizes(document), *_said(document)]


def _randomness(document: Mapping[str, Any]) -> list[str]:
    """What is said of the generators, by all who say something: none may be weaker than the whole."""
    claimed = document["randomness"]
    if claimed == REPRODUCIBLE:
        return []
    source = claimed.removesuffix(": not for release")
    wanted = [("config", "seed", None), ("mechanism", "noise_source", source)]
    if claimed == SECURE:
        wanted += [("config", "secure", True), ("sampler", "secure", True)]
    problems = []
    for part, name, value in wanted:
        stated = _inside(document, part).get(name, value)
        if stated != value:
            problems.append(f"randomness = {claimed!r}, but the {part} has {name} = {stated!r:.40}")
    return problems


def _sampling(document: Mapping[str, Any], releases: list[tuple[Release, int]]) -> list[str]:
    """The sampler's rate is that of a release."""
    stated = _inside(document, "sampler").get("sample_rate")
    rates = [release.sample_rate for release, _ in releases if release.sample_rate is not None]
    if stated is None or not rates or any(isinstance(stated, (int, float)) and _close(stated, q, 1e-9) for q in rates):
        return []
    return [f"the sampler's sample_rate = {stated!r:.40}, but the releases have {', '.join(f'{q:g}' for q in rates[:3])}"]


def _sizes(document: Mapping[str, Any]) -> list[str]:
    """How many there are, by all who say something: a rate says little of a data set that is larger than it was.

    The sampling rate is that of the releases (`_sampling`), and a run's ledger keeps its batch: both together fix the units.
    """
    sampler, size, unit = _inside(document, "sampler"), document["data"].get("size"), document["unit"]
    rate, units, drawn = (sampler.get(name) for name in ("sample_rate", "units", "expected_batch"))
    batches = {
        "sampler.expected_batch": drawn,
        "expected_batch": document["expected_batch"],
        "config.batch": (document["config"] or {}).get("batch") or None,  # 0: to be chosen by the number of units
    }
    stated = {name: value for name, value in batches.items() if value is not None}
    for name, value in {**stated, "data.size": size, "sampler.units": units, "sampler.sample_rate": rate}.items():
        if value is not None and not _positive(value):
            return [f"{name} = {str(value)[:40]} is not a number above 0"]
    problems = []
    first, batch = next(iter(stated.items()), ("", None))
    for name, value in stated.items():
        if not _close(value, stated[first], 1e-9):
            problems.append(f"{name} = {value:g}, but {first} = {batch:g}")
    if batch is not None and rate is not None and units is not None and not _close(rate * units, batch, 1e-9):
        problems.append(f"sampler.units = {units}, but its rate and batch are those of {batch / rate:.6g} units")
    if size is not None and units is not None and (size != units if unit == "record" else size < units):
        problems.append(f"data.size = {size} records, but the sampler draws from {units} units of privacy ({unit:.40})")
    return problems


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**63


def _said(document: Mapping[str, Any]) -> list[str]:
    """What has to be said where it is so, and what has to be said always."""
    config, delta = document["config"] or {}, document["delta"]
    problems = [
        f"not_covered leaves out what every certificate says: {words!r}"
        for words in ALWAYS_NOT_COVERED
        if words not in document["not_covered"]
    ]
    if document["data"].get("note") not in _PUBLIC_NUMBERS:
        problems.append(f"data.note does not say that {PUBLIC_NUMBERS}")
    if config.get("non_private") and not document["non_private"]:
        problems.append("non_private is empty, but the run's configuration turned statistics without a guarantee on")
    if config.get("delta", delta) not in (delta, None):
        problems.append(f"delta = {delta}, but the run's configuration has {config['delta']!r:.40}")
    units = _inside(document, "sampler").get("units", document["data"].get("size"))
    said = any(isinstance(words, str) and words.startswith("delta is ") for words in document["not_covered"])
    if isinstance(units, (int, float)) and delta * units > 1 and not said:
        problems.append(f"delta = {delta} is above 1/{units:g}, and not_covered does not say what that allows")
    return problems


def _claims(release: Release) -> tuple[float | None, float | None]:
    """(noise multiplier, sampling probability) that the event itself states."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    event, q = release.event, 1.0
    if isinstance(event, PoissonSampledDpEvent):
        q, event = event.sampling_probability, event.event
    return (event.noise_multiplier, q) if isinstance(event, GaussianDpEvent) else (None, None)


def _recompute(document: Mapping[str, Any], releases: list[tuple[Release, int]]) -> list[str]:
    claimed = document["guarantee"]
    pairs = [(release.event, count) for release, count in releases]
    try:
        true = guarantee(pairs, document["delta"], document["neighbouring"])
    except (ValueError, ArithmeticError, MemoryError, RuntimeError) as error:
        return [f"the guarantee cannot be recomputed: {str(error)[:200]}"]
    unknown = sorted({*claimed, *_inside(claimed, "epsilon")} - {*true, *true["epsilon"]})
    if unknown:
        return [f"the guarantee has a field {unknown[0][:40]!r} that nothing gives"]
    same = document["software"].get("dp-accounting") == software().get("dp-accounting")
    tolerance = _SAME_SOFTWARE if same else _OTHER_SOFTWARE
    problems = []
    stated = _inside(claimed, "epsilon")
    for name in ("pld", "rdp"):
        problems += _compare(f"epsilon ({name.upper()})", stated.get(name, "missing"), true["epsilon"][name], tolerance)
    for name in ("best_epsilon", "gdp_mu"):
        problems += _compare(name, claimed.get(name, "missing"), true[name], tolerance)
    if claimed.get("private") is not true["private"]:
        problems.append(f"private = {claimed.get('private')!r}, recomputed {true['private']}")
    if not isinstance(claimed.get("reasons"), list) or bool(claimed["reasons"]) == true["private"]:
        problems.append("reasons for a missing guarantee must be given exactly when it is missing")
    if same and claimed.get("notes") != true["notes"]:
        problems.append("the guarantee's notes are not those of the accountants")
    rows = claimed.get("attacker")
    if not isinstance(rows, list) or len(rows) != len(true["attacker"]):
        return [*problems, "the attacker's rates are missing"]
    for row, expected in zip(rows, true["attacker"]):
        if not isinstance(row, dict) or row.get("fpr") != expected["fpr"]:
            problems.append("the attacker's false-positive rates are not the documented ones")
            continue
        label = f"attacker's true-positive rate at {expected['fpr']:g}"
        problems += _compare(label, row.get("tpr", "missing"), expected["tpr"], max(tolerance, 1e-5))
    return problems


def _inside(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part that should be an object; nothing where it is none."""
    part = document.get(name)
    return part if isinstance(part, Mapping) else {}


def _compare(name: str, stated: Any, true: Any, tolerance: float) -> list[str]:
    if stated is None or true is None or isinstance(stated, (str, bool)) or isinstance(true, str):
        agree = type(stated) is type(true) and stated == true
    else:
        agree = isinstance(stated, (int, float)) and _close(stated, true, tolerance)
    return [] if agree else [f"{name} = {str(stated)[:40]}, recomputed {true}"]


def _close(a: float, b: float, tolerance: float) -> bool:
    try:
        return math.isfinite(a) and abs(a - b) <= tolerance * max(abs(a), abs(b))
    except OverflowError:  # an integer beyond every float
        return False
