"""`erlangen audit mechanism | run | static | all`: parse, call `erlangen.audit`, print.

Exit code 0 when nothing was refuted, 1 when a claim is violated, 3 when the audit could not decide, 2 for misuse. `--json`
prints exactly one JSON object on stdout; progress goes to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from erlangen.cli.settings import assigned

if TYPE_CHECKING:
    from erlangen.audit.verdict import Finding

JSON = typer.Option(False, "--json", help="Print one JSON object on stdout.")
SEED = typer.Option(0, help="Seed of the attack and of the noise under attack.")
EXIT = {"consistent": 0, "violated": 1, "inconclusive": 3}
FLAG = "yes"

app = typer.Typer(help="Try to break a mechanism, a run or everything; report lower bounds on ε.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    """Add the audit commands to the application."""
    root.add_typer(app, name="audit")


class _OptionalValue(TyperCommand):
    """Lets ``--as-published`` stand alone or name a reading."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        out: list[str] = []
        for k, arg in enumerate(args):
            out.append(arg)
            if arg == "--as-published" and (k + 1 == len(args) or args[k + 1].startswith("-")):
                out.append(FLAG)
        return super().parse_args(ctx, out)


@app.command("mechanism", cls=_OptionalValue)
def mechanism(
    name: str = typer.Argument(..., help="A registered mechanism, 'opacus', or package.module:factory."),
    as_published: str | None = typer.Option(
        None, "--as-published", help="The paper's form; GReDP: complex, real or per-sample."
    ),
    claim_epsilon: float | None = typer.Option(None, help="ε claimed for one release: σ is calibrated to it."),
    sigma: float | None = typer.Option(None, help="Noise multiplier σ (instead of --claim-epsilon)."),
    delta: float = typer.Option(1e-5, help="δ of the claim and of the bounds."),
    trials: int | None = typer.Option(None, help="Releases in each world (default: what about a minute allows)."),
    d: int | None = typer.Option(None, help="Number of parameters (default: a small network)."),
    batch: float = typer.Option(4.0, help="Expected batch size."),
    bound: float | None = typer.Option(None, help="Clipping bound C."),
    beta: float | None = typer.Option(None, help="GeoDP's bounding factor β."),
    clipping: str = typer.Option("flat", help="Clipping rule."),
    set_: list[str] = typer.Option([], "--set", help="Any other option of the mechanism, as key=value (JSON)."),
    confidence: float = typer.Option(0.999, help="Confidence of the verdict."),
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """Monte Carlo on one release: worst-case neighbours, Clopper–Pearson and Gaussian-DP lower bounds."""
    _check_numbers(confidence, delta, trials=(trials, 1), d=(d, 1))
    if batch <= 0 or (bound is not None and bound <= 0):
        raise typer.BadParameter(f"batch is {batch} and bound is {bound}; both must be above 0")
    options: dict[str, Any] = assigned({}, set_)
    if as_published is not None:
        options["as_published"] = True if as_published == FLAG else as_published
    if beta is not None:
        options["beta"] = beta
    if bound is None:
        bound = 0.1 if name == "geodp" and as_published else 1.0
    with bar(f"auditing {name}", as_json) as tick:
        if name == "opacus" or ":" in name:
            found = _foreign(name, sigma, claim_epsilon, delta, bound, trials, seed, confidence, tick)
        else:
            from erlangen.audit.named import audit_named

            found = audit_named(
                name, options, sigma=sigma, claim_epsilon=claim_epsilon, delta=delta, bound=bound, batch=batch, d=d, trials=trials,
                seed=seed, clipping=clipping, confidence=confidence, progress=tick,
            )  # fmt: skip
    _finish([found], found.verdict, found.to_json(), as_json)


def _foreign(name: str, sigma: float | None, claim: float | None, delta: float, bound: float, trials: int | None, seed: int,
             confidence: float, tick: Any) -> Finding:  # fmt: skip
    from erlangen import accounting
    from erlangen.audit import foreign
    from erlangen.audit.montecarlo import audit_releases

    if name == "opacus":
        if claim is not None:
            sigma = accounting.noise_multiplier(claim, delta, 1.0, 1)
        subject = foreign.opacus_subject(1.0 if sigma is None else sigma, bound, seed)
    else:
        subject = foreign.imported_subject(name)
    return audit_releases(subject, trials or 12_000, delta=delta, seed=seed, confidence=confidence, progress=tick)


@app.command("run")
def run(
    subject: str = typer.Argument(
        ..., metavar="RUN", help="Run folder, or package.module:train of your own (x, y) -> model."
    ),
    canaries: int = typer.Option(1000, help="Gradient canaries of the whole run; 0 leaves that out."),
    records: int = typer.Option(200, help="Mislabelled records (black-box membership inference); 0 leaves that out."),
    claim_epsilon: float | None = typer.Option(None, help="What your own training function claims."),
    delta: float = typer.Option(1e-5, help="δ that your own training function claims."),
    data: str = typer.Option("digits", help="Data for your own training function."),
    confidence: float = typer.Option(0.999, help="Confidence of the verdict."),
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """Replay a run with canaries in it: white-box, one-run and black-box bounds. Stored in RUN/audit.json."""
    from erlangen.audit import runs

    _check_numbers(confidence, delta, canaries=(canaries, 0), records=(records, 0))
    if ":" not in subject and not Path(subject).is_dir():
        raise typer.BadParameter(
            f"{subject} is no run folder; give the folder that training wrote, or package.module:train"
        )
    if ":" not in subject:
        print(
            "erlangen: note: the run is trained again on its private records, with canaries among them; what is found is a "
            "statistic of that training, which no ledger counts: keep it to yourself",
            file=sys.stderr,
        )
    with bar("replaying the run", as_json) as tick:
        if ":" in subject and not Path(subject).exists():
            if claim_epsilon is None:
                raise typer.BadParameter("your own training function needs its claim: --claim-epsilon")
            findings = [runs.audit_function(subject, data, claim_epsilon, delta, records or 200, seed, confidence)]
        else:
            findings = runs.audit_folder(Path(subject), canaries, records, seed, confidence, tick)
    verdict = runs.verdict(findings)
    result = {"run": subject, "verdict": verdict, "findings": [f.to_json() for f in findings]}
    if Path(subject).is_dir():
        runs.store(Path(subject), findings)
        result["stored"] = str(Path(subject) / runs.FILE)
    _finish(findings, verdict, result, as_json)


@app.command("static")
def static(
    only: str | None = typer.Option(None, help="Only this mechanism, clipping rule or layer, in seconds."),
    as_json: bool = JSON,
) -> None:
    """Everything that is registered, in about a minute: sensitivity, information flow, covariance, noise, samplers, layers."""
    from erlangen.audit.single import audit_registered
    from erlangen.audit.static import static_audit
    from erlangen.audit.verdict import overall

    with bar("static audit", as_json) as tick:
        show = lambda name: tick(0, 1, name)  # noqa: E731
        findings = static_audit(show) if only is None else audit_registered(only, show)
    verdict = overall(findings)
    _finish(findings, verdict, {"verdict": verdict, "findings": [f.to_json() for f in findings]}, as_json)


@app.command("all")
def everything(
    out: Path | None = typer.Option(None, help="Also write the page (docs/results/audit.md) here."),
    scale: float = typer.Option(1.0, help="Fraction of the default number of trials."),
    jobs: int = typer.Option(1, help="Processes that share the work; the result does not depend on it."),
    keep: Path | None = typer.Option(None, help="Keep finished parts in this file, and go on from what is in it."),
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """The table of every mechanism: claim, exact value, lower bound, ceiling, verdict; and the zoo of broken ones."""
    from erlangen.audit.everything import audit_everything
    from erlangen.audit.markdown import page

    if not 0 < scale <= 10:
        raise typer.BadParameter(f"scale is {scale}; give a fraction of the default number of trials, e.g. 0.1")
    if jobs < 1:
        raise typer.BadParameter(f"jobs is {jobs}; give the number of processes, at least 1")
    with bar("auditing everything", as_json) as tick:
        results = audit_everything(scale, seed, lambda what, done, total: tick(done, total, what), jobs, keep)
    text, result = page(results), results.to_json()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    typer.echo(json.dumps(result, allow_nan=False) if as_json else text)
    raise typer.Exit(EXIT[result["verdict"]])


def _check_numbers(confidence: float, delta: float, **counts: tuple[int | None, int]) -> None:
    """Refuse what no audit could work with, before anything is built."""
    if not 0.5 <= confidence < 1:
        raise typer.BadParameter(f"confidence is {confidence}; give a number from 0.5 to below 1, e.g. 0.999")
    if not 0 <= delta < 1:
        raise typer.BadParameter(f"delta is {delta}; give 0 ≤ δ < 1")
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise typer.BadParameter(f"{name} is {value}; give at least {least}")


# --- printing --------------------------------------------------------------------------------------------------------


def _finish(findings: Sequence[Finding], verdict: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    else:
        for finding in findings:
            typer.echo(_words(finding))
        typer.echo(f"verdict: {verdict}")
    raise typer.Exit(EXIT[verdict])


def _words(f: Finding) -> str:
    from erlangen.audit.table import shown

    line = f"{f.subject} ({f.audit}): {f.verdict}: {f.reason}"
    if f.claim is None:
        return line
    exact = f", exact {shown(f.exact)}" if f.exact is not None else ""
    lines = [line, f"  claim ε = {shown(f.claim)} at δ = {f.delta:g}{exact}"]
    for level, bound in f.lower_bound.items():
        gaussian = f", Gaussian {shown(f.gdp_lower_bound[level])}" if level in f.gdp_lower_bound else ""
        lines.append(f"  at {level}: ε ≥ {shown(bound)} (ceiling {shown(f.ceiling.get(level))}){gaussian}")
    if "releases_per_second" in f.facts:
        speed = f"{f.facts['releases']:,} releases at {f.facts['releases_per_second']:,} a second"
        lines.append(f"  {speed}; neighbours: {f.facts['neighbours']}")
    return "\n".join(lines)


@contextmanager
def bar(what: str, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr: ``tick(done, total, note)``."""
    from erlangen.terminal import bars

    quiet = quiet and not sys.stderr.isatty()
    with bars("{task.description}", "{task.fields[note]}", quiet=quiet, transient=True) as progress:
        task = progress.add_task(what, total=None, note="")
        yield lambda done, total, note="": progress.update(task, completed=done, total=total, note=note)
