"""`erlangen account`, `calibrate`, `verify`, `inspect`, `sign`: parse, call `erlangen.accounting`, print.

`--json` prints exactly one JSON object on stdout; how commands end is in `manners`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from erlangen import accounting as acc
from erlangen.accounting.certificate_text import in_one_line, printable
from erlangen.accounting.compose import refuse_rolled_back
from erlangen.accounting.words import upper
from erlangen.cli.manners import Misuse

JSON = typer.Option(False, "--json", help="Print one JSON object on stdout.")
DELTA = typer.Option(1e-5, "--delta", help="Target δ; below 1/(number of records) is usual.")
SINGLE = typer.Option(False, "--single-copy", help="Accept a ledger whose second copy is missing.")


def register(app: typer.Typer) -> None:
    """Add the accounting commands to the application."""
    app.command("account")(account)
    app.command("calibrate")(calibrate)
    app.command("verify")(verify)
    app.command("inspect")(inspect)
    app.command("sign")(sign)


def account(
    runs: list[Path] | None = typer.Argument(None, help="Run folders or ledgers to add up, per data fingerprint."),
    sample_rate: float | None = typer.Option(None, help="Poisson sampling probability q."),
    noise_multiplier: float | None = typer.Option(None, help="Noise std / sensitivity σ."),
    steps: int | None = typer.Option(None, help="Number of releases."),
    delta: float | None = typer.Option(None, help="Target δ; default the least of the runs' own, else 1e-5."),
    neighbouring: str | None = typer.Option(
        None, help="add-or-remove-one (default) or replace-one; the ledgers of runs say it themselves."
    ),
    repeat_mean: float | None = typer.Option(
        None, help="Best of a random number of such trainings with this mean (hyper-parameter search; RDP only)."
    ),
    repeat_shape: float = typer.Option(1.0, help="Its distribution: 1 geometric, 0 logarithmic, inf Poisson."),
    opacus_history: Path | None = typer.Option(
        None, help="JSON file with an Opacus accountant history [[noise multiplier, sample rate, steps], …]."
    ),
    single_copy: bool = SINGLE,
    as_json: bool = JSON,
) -> None:
    """What has been spent: by parameters, by runs, or by an Opacus history."""
    given = {"--sample-rate": sample_rate, "--noise-multiplier": noise_multiplier, "--steps": steps}
    present = [name for name, value in given.items() if value is not None]
    if bool(runs) + bool(present) + (opacus_history is not None) != 1:
        raise Misuse("name run folders, or give --sample-rate, --noise-multiplier and --steps, or --opacus-history")
    if runs:
        if repeat_mean is not None:
            raise Misuse("--repeat-mean prices a search that is still to be run; the ledgers of runs are added up")
        if neighbouring is not None:
            raise Misuse(
                f"--neighbouring {neighbouring} is for parameters; a run's releases are priced under the relation that its ledger "
                "states, under which its noise was made: leave it out"
            )
        delta = min(map(_delta_of, runs)) if delta is None else delta
        _print(_account_runs(runs, delta, single_copy), as_json, _show_runs)
        return
    delta = 1e-5 if delta is None else delta
    if opacus_history is not None:
        pairs = list(acc.from_opacus(_opacus(opacus_history)).history)
    else:
        if len(present) < 3:
            raise Misuse(f"missing {', '.join(name for name in given if name not in present)}")
        assert sample_rate is not None
        assert noise_multiplier is not None
        assert steps is not None
        pairs = [(acc.composed(acc.poisson(sample_rate, acc.gaussian(noise_multiplier)), steps), 1)]
    if repeat_mean is not None:
        once = acc.sequence([acc.composed(event, count) for event, count in pairs])
        pairs = [(acc.repeat_and_select(once, repeat_mean, repeat_shape), 1)]
    result = _priced(pairs, delta, neighbouring or "add-or-remove-one")
    if opacus_history is None:
        result |= {"sample_rate": sample_rate, "noise_multiplier": noise_multiplier, "steps": steps}
    _print(result, as_json, _show_price)


def calibrate(
    epsilon: float = typer.Option(..., help="Target ε."),
    delta: float = DELTA,
    sample_rate: float = typer.Option(..., help="Poisson sampling probability q."),
    steps: int | None = typer.Option(None, help="Number of releases: find the noise."),
    noise_multiplier: float | None = typer.Option(None, help="Noise σ: find the number of steps."),
    method: str = typer.Option("pld", help="pld or rdp."),
    as_json: bool = JSON,
) -> None:
    """The noise that reaches a target ε, or the steps that fit under it."""
    if (steps is None) == (noise_multiplier is None):
        raise Misuse("give --steps (to find the noise) or --noise-multiplier (to find the steps)")
    by: Any = method
    if steps is not None:
        noise_multiplier = acc.noise_multiplier(epsilon, delta, sample_rate, steps, by)
        answer = "noise_multiplier"
    else:
        assert noise_multiplier is not None
        steps = acc.max_steps(epsilon, delta, sample_rate, noise_multiplier, by)
        answer = "steps"
    result = {"answer": answer, "noise_multiplier": noise_multiplier, "steps": steps, "sample_rate": sample_rate}
    pairs = [(acc.poisson(sample_rate, acc.gaussian(noise_multiplier)), steps)]
    result |= {"target_epsilon": epsilon, "method": method, **_priced(pairs, delta, "add-or-remove-one")}
    if steps == 0:
        one = _priced([(pairs[0][0], 1)], delta, "add-or-remove-one")["epsilon"][method]
        result["why"] = (
            f"one step alone costs ε = {_eps(one)} at σ = {noise_multiplier:g} and q = {sample_rate:g}; "
            "use more noise, a smaller sample rate or a larger ε"
        )
    _print(result, as_json, _show_calibration)


def verify(
    file: Path = typer.Argument(..., help="certificate.json, or the folder of its run."),
    public_key: str | None = typer.Option(None, help="Require a signature by this Ed25519 key (hexadecimal)."),
    ledger: Path | None = typer.Option(None, help="Compare with this ledger (default: the one beside the file)."),
    single_copy: bool = SINGLE,
    as_json: bool = JSON,
) -> None:
    """Recompute a certificate from its events; exit 1 on any inconsistency."""
    file = _certificate_file(file)
    _certificate(file)
    if ledger is not None:
        ledger = acc.ledger_path(ledger)
    found = acc.examine(file, public_key, ledger, single_copy)
    lists = {name: list(getattr(found, name)) for name in ("problems", "notes", "remarks")}
    if as_json:
        print(json.dumps({"file": str(file), "valid": not found.problems, **lists, "certified": found.certified}))
    elif found.certified is not None:
        print(f"{file}: every recomputed value agrees")
        _show_certified(found.certified, found.remarks)
    for problem in found.problems:
        print(f"erlangen: {file}: {problem}", file=sys.stderr)
    for note in found.notes:
        print(f"erlangen: {file}: the ledger was damaged and repaired: {note}", file=sys.stderr)
    if found.problems:
        raise typer.Exit(1)


def _certificate_file(path: Path) -> Path:
    """The file itself, or the certificate in the folder of a run."""
    if not path.is_dir():
        return path
    if not (path / "certificate.json").exists():
        from erlangen.training.folder import how_to_finish

        raise Misuse(f"{path} holds no certificate: there is no certificate.json; {how_to_finish(path)}")
    return path / "certificate.json"


def _certificate(file: Path) -> dict[str, Any]:
    """The certificate in a file that at least looks like one."""
    if not file.exists():
        raise Misuse(f"no file at {file}; give the certificate.json of a finished run")
    try:
        document = acc.certificate.load(file)
    except acc.certificate.strict_json.DocumentError as error:
        raise Misuse(f"{file} is not a certificate: {error}") from None
    if "schema" not in document:
        raise Misuse(f"{file} is not a certificate: it has no field 'schema'; give the certificate.json of a finished run")
    return document


def inspect(
    run: Path = typer.Argument(..., help="Run folder, ledger or certificate.json."),
    delta: float | None = typer.Option(None, help="δ for the reported ε; default the run's own, else 1e-5."),
    single_copy: bool = SINGLE,
    as_json: bool = JSON,
) -> None:
    """What a run's ledger (or a certificate) says, in words."""
    if run.suffix == ".json" and run.is_file():
        certificate = _certificate(run)
        problems = acc.verify(run, single_copy=single_copy, page=False)  # it prints the page
        if problems:
            raise acc.LedgerError(f"{run} does not verify: {problems[0]}; see erlangen verify")
        _print(certificate, as_json, _show_certificate)
        return
    if not run.exists():
        raise Misuse(f"nothing at {run}; name the folder of a run, its ledger.jsonl or its certificate.json")
    book = acc.read_ledger(acc.ledger_path(run), single_copy)
    refuse_rolled_back(acc.ledger_path(run), book, single_copy)
    delta = _delta_of(run) if delta is None else delta
    result = {
        "run": book.run,
        "data": book.data,
        "releases": [{**r.to_json(), "count": n} for r, n in zip(book.releases, book.counts)],
        "settled": book.settled,
        "notes": list(book.notes),
        **_priced(book.pairs(), delta, book.neighbouring),
        "steps": book.steps,
        "unit": book.units,
    }
    result["accountant_notes"] += _beside(run, book, single_copy)
    _print(result, as_json, _show_ledger)


def _beside(run: Path, book: acc.Book, single_copy: bool) -> list[str]:
    """What else the folder of a run has spent: its training's ledger says nothing of validation."""
    from erlangen.accounting.compose import ledgers_of

    notes = []
    for path in ledgers_of(run)[1:] if run.is_dir() else ():
        validated = acc.read_ledger(path, single_copy)
        which = "the same records" if validated.data == book.data else "other records"
        notes.append(
            f"this is training alone: {path.name} counts {validated.steps} releases more, on {which}; add both up with: "
            f"erlangen account {quote(str(run))}"
        )
    return notes


def _delta_of(run: Path) -> float:
    """The δ that the run was trained for, where its configuration says so."""
    from erlangen.accounting import strict_json

    beside = (run if run.is_dir() else run.parent) / "config.json"
    try:
        delta = strict_json.read(beside, "configuration").get("delta") if beside.is_file() else None
    except (ValueError, AttributeError):
        delta = None
    return float(delta) if isinstance(delta, float) and 0 < delta < 1 else 1e-5


def sign(
    file: Path = typer.Argument(..., help="certificate.json, or the folder of its run."),
    key: Path = typer.Option(..., help="Ed25519 private key (PEM)."),
    new_key: bool = typer.Option(False, "--new-key", help="Make the key first; an existing file is never replaced."),
    as_json: bool = JSON,
) -> None:
    """Sign a certificate that verifies, so that later changes can be detected."""
    file = _certificate_file(file)
    _certificate(file)
    if new_key and key.exists():
        raise Misuse(f"there is a key at {key} already, and it is never replaced; leave --new-key out, or name another file")
    if not new_key and not key.is_file():
        raise Misuse(f"no key at {key}; give the file of an Ed25519 private key, or make one with --new-key")
    found = acc.examine(file)
    if found.certified is None:
        raise acc.LedgerError(f"{file} does not verify, so it is not signed: {found.problems[0]}")
    if new_key:
        acc.signing.generate_key(key)
    signed = acc.signing.sign(acc.certificate.load(file), key)
    acc.certificate.save(signed, file.parent, file.name)
    public = signed["signature"]["public_key"]
    facts = {**found.certified, "signed_by": public}
    _print({"file": str(file), "public_key": public, "certified": facts, "remarks": list(found.remarks)}, as_json, _show_signed)


# --- results -------------------------------------------------------------------------------------------------------


def _priced(pairs: list[Any], delta: float, neighbouring: Any) -> dict[str, Any]:
    """ε by both accountants; an accountant that cannot price the events is null, and says why in `notes`."""
    epsilon: dict[str, Any] = {}
    notes = []
    for method in ("pld", "rdp"):
        try:
            value = acc.epsilon(pairs, delta, method, neighbouring)  # type: ignore[arg-type]
            epsilon[method] = "inf" if value == math.inf else value
        except acc.AccountingError as error:
            epsilon[method] = None
            notes.append(str(error))
    if all(value is None for value in epsilon.values()):
        raise acc.AccountingError(notes[0])
    return {"epsilon": epsilon, "delta": delta, "neighbouring": neighbouring, "accountant_notes": notes}


def _account_runs(runs: list[Path], delta: float, single_copy: bool) -> dict[str, Any]:
    groups = acc.compose_runs(runs, single_copy)
    spent = [_account_group(group, delta) for group in groups]
    if len(spent) == 1:
        return {"data_sets": spent, "delta": delta, "epsilon": spent[0]["epsilon"]}
    return {"data_sets": spent, "delta": delta, "in_all": _account_all(groups, delta)}


def _account_all(groups: list[acc.Spent], delta: float) -> dict[str, Any]:
    """What whoever is in all of these data sets has spent; ∞ where that does not add up."""
    try:
        return _account_group(acc.overlapping(groups), delta)
    except (acc.LedgerError, acc.AccountingError) as error:
        return {"epsilon": {"pld": "inf", "rdp": "inf"}, "delta": delta, "accountant_notes": [str(error)]}


def _account_group(group: acc.Spent, delta: float) -> dict[str, Any]:
    price = _priced(group.pairs(), delta, group.neighbouring)
    notes = [note for book in group.books for note in book.notes]
    notes += [f"run {book.run} is not settled: its last reservation counts in full" for book in group.books if not book.settled]
    if group.mixed:
        price["epsilon"] = dict.fromkeys(price["epsilon"], "inf")
        notes.append(group.mixed)
    facts = {"data": group.fingerprint, "runs": group.runs, "steps": group.steps, "unit": group.units}
    return {**facts, **price, "notes": notes}


def _opacus(path: Path) -> list[Any]:
    from erlangen.accounting import strict_json

    history = strict_json.read(path, "Opacus history")
    if isinstance(history, dict):  # what an Opacus accountant's state_dict() holds
        history = history.get("history")
    if not isinstance(history, list):
        raise ValueError(f"{path} is not an Opacus history [[noise multiplier, sample rate, steps], …]")
    return history


# --- words ---------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        show(result)


def _eps(value: Any) -> str:
    return {"inf": "∞", None: "not available"}.get(value) or upper(value, 7)


def _show_price(result: dict[str, Any]) -> None:
    epsilon, units = result["epsilon"], result.get("unit", [])
    whose = f", for each {printable(units[0])}" if len(units) == 1 else ""
    print(f"ε = {_eps(epsilon['pld'])} by PLD, {_eps(epsilon['rdp'])} by RDP, at δ = {result['delta']:g}{whose}")
    for note in result["accountant_notes"]:
        print(f"note: {note}")


def _show_runs(result: dict[str, Any]) -> None:
    for group in result["data_sets"]:
        print(f"data {group['data']}: {len(group['runs'])} run(s), {group['steps']} releases")
        _show_price(group)
        for note in group["notes"]:
            print(f"note: {note}")
    if "in_all" in result:
        print(f"whoever is in all {len(result['data_sets'])} data sets (other fingerprints do not mean other people):")
        _show_price(result["in_all"])
        for note in result["in_all"].get("notes", []):
            print(f"note: {note}")


def _show_calibration(result: dict[str, Any]) -> None:
    if result["answer"] == "steps":
        print(f"{result['steps']} steps fit under ε = {result['target_epsilon']:g}")
        if result["steps"] == 0:
            print(f"why: {result['why']}")
            return
    else:
        print(f"noise multiplier {upper(result['noise_multiplier'], 6)} reaches ε = {result['target_epsilon']:g}")
    _show_price(result)


def _show_ledger(result: dict[str, Any]) -> None:
    print(f"run {result['run']}, data {result['data'] or 'unknown'}, {result['steps']} releases")
    for release in result["releases"]:
        print(f"  {release['count']} × {_in_words(release['event'])}" + _reason(release))
    if not result["settled"]:
        print("not settled: the run is still going on, or it crashed and its last reservation counts in full")
    for note in result["notes"]:
        print(f"note: {note}")
    _show_price(result)


def _in_words(event: dict[str, Any]) -> str:
    """The events of training as a sentence; any other as the JSON that it is."""
    inner = event.get("event", event)
    if event["type"] == "PoissonSampledDpEvent" and inner.get("type") == "GaussianDpEvent":
        sampled = f", Poisson sampling with rate q = {event['sampling_probability']:.6g}"
    elif event["type"] == "GaussianDpEvent":
        sampled = ""
    else:
        return json.dumps(event)
    return f"Gaussian noise with multiplier σ = {inner['noise_multiplier']:.6g}{sampled}"


def _reason(release: dict[str, Any]) -> str:
    return f" ({release['reason']})" if release.get("reason") else ""


def _show_signed(result: dict[str, Any]) -> None:
    """Whoever signs should see what, with what the certificate does not say."""
    print(f"{result['file']}: signed by {result['public_key']}")
    _show_certified(result["certified"], result["remarks"])


def _show_certified(facts: Mapping[str, Any], remarks: Sequence[str]) -> None:
    print(in_one_line(facts))
    for remark in remarks:
        print(f"note: {remark}")


def _show_certificate(certificate: dict[str, Any]) -> None:
    from erlangen.accounting.certificate_text import markdown

    print(markdown(certificate))
