"""The report: one HTML file that needs nothing else. Figures, texts and tables of one run or of several.

Two walls stand between users' names and the reader's browser: everything is escaped, and a content security policy lets
the page run only the two scripts whose hashes it names, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import erlangen
from erlangen.accounting.words import lower, upper
from erlangen.atomic import write_atomically
from erlangen.report import charts, interactive, kernels, noise, overview, pixels
from erlangen.report.chart import Figure, Gallery, small
from erlangen.report.folder import Run
from erlangen.report.privacy import Statement, statement

#: runs that are shown in detail unless asked for more; the others appear in the comparison
DETAILS = 4
#: longest table beside a figure
ROWS = 400


@dataclass(frozen=True)
class Part:
    """A heading with figures, or words about why there are none."""

    key: str
    title: str
    figures: tuple[tuple[str, Figure], ...] = ()
    words: tuple[str, ...] = ()
    non_private: bool = False

    @property
    def short(self) -> str:
        """For the navigation."""
        return self.title.split(" on ")[0].split(" and ")[0]


@dataclass(frozen=True)
class RunPage:
    """One run in detail."""

    key: str
    run: Run
    statement: Statement
    parts: tuple[Part, ...]
    options: tuple[tuple[str, str], ...]
    findings: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """What the page holds: ``overview`` for several runs, details for the first of them."""

    runs: tuple[Run, ...]
    overview: Part | None
    warnings: tuple[str, ...]
    pages: tuple[RunPage, ...]

    @property
    def has_non_private(self) -> bool:
        return any(part.non_private for page in self.pages for part in page.parts)

    def figures(self) -> dict[str, Figure]:
        """Every figure by its name, unique in the report."""
        parts = ([self.overview] if self.overview else []) + [part for page in self.pages for part in page.parts]
        return {key: figure for part in parts for key, figure in part.figures}


def build(runs: Sequence[Run], details: int = DETAILS) -> Report:
    """Gather everything; nothing is drawn yet."""
    several = len(runs) > 1
    together = overview.accuracy_against_epsilon(list(runs)) if several else None
    part = None
    if several:
        words = (
            () if together else ("There are fewer than two settings with a test accuracy and a finite ε to compare.",)
        )
        part = Part("compare", "Comparison", (("pareto", together),) if together else (), words)
    chosen = [runs[k] for k in in_detail(runs, details)]
    pages = tuple(_run_page(run, f"run{k + 1}", several) for k, run in enumerate(chosen))
    notes = list(dict.fromkeys(run.note for run in runs if run.note))
    differences = [*overview.together(list(runs)), *overview.comparability(list(runs))] if several else []
    return Report(tuple(runs), part, (*notes, *differences), pages)


def in_detail(runs: Sequence[Run], count: int) -> list[int]:
    """Places of the runs to show in detail: one of each method first, then of each setting, then the other seeds."""
    names = overview.method_names(list(runs))
    order: list[int] = []
    keys: tuple[Callable[[int], Any], ...] = (lambda k: names[k], lambda k: runs[k].setting, lambda k: k)
    for key in keys:
        seen = {key(k) for k in order}
        for k in range(len(runs)):
            if key(k) not in seen:
                seen.add(key(k))
                order.append(k)
    return sorted(order[:count])


def _run_page(run: Run, key: str, several: bool) -> RunPage:
    curves: list[Callable[[], Any]] = [lambda: charts.training_curves(run)]
    parts = [
        _part(key, "training", "Training", curves + ([] if several else [lambda: charts.spending(run)])),
        _part(key, "attacker", "Attackers", [lambda: charts.attacker(run)]),
        _part(key, "calibration", "Calibration and mistakes", [lambda: charts.calibration(run), lambda: charts.confusion(run)]),
        _part(key, "predictions", "Predictions on public test images", [lambda: charts.predictions(run)]),
        *_network_parts(run, key),
        _part(key, "audit", "Audit", [lambda: charts.audit(run)]) if run.audit else Part(
            f"{key}-section-audit", "Audit", words=("This run was not audited. Try to break it with: erlangen audit run FOLDER",)),
    ]  # fmt: skip
    loss = _part(key, "not-private", "Not private", [lambda: charts.training_loss(run)], non_private=True)
    parts += [loss] if loss and loss.figures else []
    options = tuple((name, _value(value)) for name, value in run.options.items())
    return RunPage(key, run, statement(run), tuple(p for p in parts if p is not None), options, _findings(run))


def _network_parts(run: Run, key: str) -> list[Part | None]:
    """What needs the network itself: noise, kernels, certified radius."""
    try:
        model = run.model()
    except ValueError as error:
        return [Part(f"{key}-section-noise", "Noise geometry", words=(f"Not shown: {error}",))]
    geometry = _part(key, "noise", "Noise geometry", [lambda: noise.figures(run, model)])
    if geometry is None:
        geometry = Part(f"{key}-section-noise", "Noise geometry", words=(
            "This mechanism adds the same noise to every coordinate (isotropic): there is no shape to see.",))  # fmt: skip
    return [
        geometry,
        _part(key, "kernels", "Kernels and their rotations", [lambda: kernels.figures(run, model)]),
        _part(key, "radius", "Certified robustness", [lambda: charts.radius(run, model)]),
    ]


def _part(
    key: str, name: str, title: str, makers: Sequence[Callable[[], Any]], non_private: bool = False
) -> Part | None:
    """A part with the figures that there are; None without any. A figure that cannot be made says why."""
    found: list[Figure] = []
    words: list[str] = []
    for make in makers:
        try:
            made = make()
        except ValueError as error:
            words.append(f"Not shown: {error}")
            continue
        found += made if isinstance(made, list) else [made] if made is not None else []
    if not found and not words:
        return None
    figures = tuple((f"{key}-{figure.key}", figure) for figure in found)
    return Part(f"{key}-section-{name}", title, figures, tuple(words), non_private)


def _findings(run: Run) -> tuple[tuple[str, ...], ...]:
    rows = []
    for f in (run.audit or {}).get("findings", []):
        bound = [b for b in (f.get("lower_bound"), f.get("gdp_lower_bound")) if isinstance(b, (int, float))]
        shown = f"ε ≥ {lower(max(bound), 3)}" if bound else "–"
        claim = upper(f["claim"], 3) if isinstance(f.get("claim"), (int, float)) else "–"
        rows.append((str(f.get("audit")), str(f.get("verdict")), shown, claim, str(f.get("reason", ""))))
    return tuple(rows)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- HTML ----------------------------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """The page as text."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["small"] = small
    environment.filters["upper"] = lambda value: upper(value, 3)
    environment.filters["data_uri"] = lambda p: pixels.data_uri(p.pixels, p.signed)
    charts_only = {key: f for key, f in report.figures().items() if not isinstance(f, Gallery)}
    plotly, script = get_plotlyjs().replace("</script", "<\\/script"), _asset("figures.js") + _asset("page.js")
    values = {
        "report": report,
        "title": f"{report.runs[0].name}: training report" if len(report.runs) == 1 else f"{len(report.runs)} runs",
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": erlangen.__version__,
        "style": jinja2.utils.markupsafe.Markup(_asset("page.css")),
        "plotly": jinja2.utils.markupsafe.Markup(plotly if charts_only else ""),
        "script": jinja2.utils.markupsafe.Markup(script),
        "policy": _policy([plotly, script] if charts_only else [script]),
        "data": jinja2.utils.markupsafe.Markup(embedded({key: interactive.figure(f) for key, f in charts_only.items()})),
        "table": overview.table(list(report.runs)) if len(report.runs) > 1 else None,
        "is_gallery": lambda figure: isinstance(figure, Gallery),
        "rows": ROWS,
    }  # fmt: skip
    return environment.from_string(_asset("page.html")).render(values)


def write(report: Report, path: Path) -> Path:
    """Write the page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(report).encode())
    return path


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "&<>\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(scripts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _asset(name: str) -> str:
    return (resources.files("erlangen.report") / "assets" / name).read_text(encoding="utf-8")
