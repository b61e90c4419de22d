"""`docs/results/audit.md` from the results of `erlangen audit all`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from erlangen.audit.everything import Everything
from erlangen.audit.table import shown
from erlangen.audit.verdict import CONFIDENCE, CONSISTENT, INCONCLUSIVE, VIOLATED, Finding, level

KEY = level(CONFIDENCE)
NUMBERS = ("claim ε", "exact ε", "lower bound", "Gaussian bound", "ceiling")


def page(results: Everything) -> str:
    """The whole page."""
    return (
        "\n".join(
            [
                *_short(results),
                *_mechanisms(results),
                *_runs(results),
                *_static(results),
                *_zoo(results),
                *_trust(results),
                *_opacus(results),
            ]
        )
        + "\n"
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _numbers(f: Finding) -> list[str]:
    bounds = (f.lower_bound.get(KEY), f.gdp_lower_bound.get(KEY), f.ceiling.get(KEY))
    return [shown(value) for value in (f.claim, f.exact, *bounds)]


def _short(results: Everything) -> Iterator[str]:
    """What the tables show, counted from them."""
    yield "# Audit of every mechanism"
    yield ""
    yield "**In short**"
    yield ""
    ours, papers = (
        [row.finding for row in results.rows if (row.entry.claimed_by == "erlangen") is own] for own in (True, False)
    )
    refuted = [f"{f.subject} (ε = {shown(f.claim)})" for f in papers if f.verdict == VIOLATED]
    yield f"- **Claims of Erlangen:** {_consistent(ours)}."
    if papers:
        yield f"- **Claims of papers:** {len(refuted)} of {len(papers)} are refuted{': ' if refuted else ''}{', '.join(refuted)}."
    yield f"- **Training runs:** {_consistent(results.runs)}."
    yield f"- **Static audits:** {_consistent(results.static)}."
    yield f"- **The audit itself:** {_teeth(results)}"
    yield ""
    yield "A passing audit is never proof. Made by `erlangen audit all`; how to read it: [audits](../audit.md)."
    yield ""


def _consistent(findings: Sequence[Finding]) -> str:
    verdicts = Counter(f.verdict for f in findings)
    others = (f"{verdicts[v]} {v}" for v in (VIOLATED, INCONCLUSIVE) if verdicts[v])
    return ", ".join([f"{verdicts[CONSISTENT]} of {len(findings)} are consistent", *others])


def _teeth(results: Everything) -> str:
    broken = [s for s in results.zoo if s["bug"]]
    sound = [s for s in results.zoo if not s["bug"]]
    caught, spared = sum(bool(s["caught_by"]) for s in broken), sum(not s["caught_by"] for s in sound)
    return f"{caught} of {len(broken)} deliberately broken specimens were caught; {spared} of {len(sound)} sound ones passed."


def _mechanisms(results: Everything) -> Iterator[str]:
    yield "## One release"
    yield ""
    yield (
        f"One release of the real code, neighbouring batches that differ in one record, δ = 1e-5, confidence {KEY}, verdicts "
        "corrected for their number (Holm)."
    )
    yield ""
    yield "- *Claim* is what the paper says for a published form, and what Erlangen accounts for a sound one."
    yield "- *Exact* is what Erlangen accounts."
    yield "- *Lower bound* is model-free, *Gaussian bound* holds if the release is Gaussian."
    yield "- *Ceiling* is the largest model-free bound that this many trials could have shown."
    yield ""
    yield from _head("paper", "mechanism", "claim of", *NUMBERS, "trials", "verdict")
    for row in results.rows:
        f = row.finding
        trials = f"{f.trials:,}" if f.trials else "–"
        yield _row(row.entry.paper, f.subject, row.entry.claimed_by, *_numbers(f), trials, f"**{f.verdict}**")
    yield ""
    reasons = [row.finding for row in results.rows if row.finding.verdict != CONSISTENT]
    for f in reasons:
        where = f.facts.get("neighbours")
        yield f"- {f.subject}, ε = {shown(f.claim)}: {f.reason}" + (f"; neighbours: {where}." if where else ".")
    yield ""


def _runs(results: Everything) -> Iterator[str]:
    yield "## Training runs"
    yield ""
    yield (
        "Short runs on the embedded digits, σ = 1, expected batch 128, with canaries in them. *Claim* is ε of one release for "
        "release canaries, of the whole run for the others. *Curve bound* inverts the curve of the composed, subsampled releases; "
        "for release canaries that of one Gaussian release."
    )
    yield ""
    yield "- *Canaries* are gradients chosen by the attacker."
    yield (
        "- *For Clipless* they are records made strong by gradient ascent, which go through network, loss and recorder as every "
        "record does."
    )
    yield "- *Membership* plants mislabelled images (black box, by their loss)."
    yield ""
    yield from _head("run", "audit", "claim ε", "lower bound", "curve bound", "ceiling", "trials", "verdict", "")
    for f in results.runs:
        bounds = (f.lower_bound.get(KEY), f.gdp_lower_bound.get(KEY), f.ceiling.get(KEY))
        cells = [shown(v) for v in (f.claim, *bounds)]
        yield _row(f.subject, f.audit, *cells, f"{f.trials:,}", f"**{f.verdict}**", _note(f))
    yield ""


def _note(f: Finding) -> str:
    notes = []
    if "noise_upper_limit" in f.facts:
        notes.append(f"noise ≤ {f.facts['noise_upper_limit']:.3f} of the stated")
    if "largest_share_of_sensitivity" in f.facts:
        notes.append(f"a record reached {f.facts['largest_share_of_sensitivity']:.2f} of the sensitivity")
    if "right" in f.facts:
        notes.append(f"{f.facts['right']} of {f.facts['guesses']} guesses right")
    return "; ".join(notes)


def _static(results: Everything) -> Iterator[str]:
    yield "## Static audit"
    yield ""
    yield (
        "Everything that is registered: information flow and sensitivity under hostile gradients, through training steps on "
        "hostile records, in whole sessions with options combined pairwise, and in ensembles; full noise covariance; clipping "
        "rules and their extreme constants; noise, samplers, companions and releases before training; restarts; layer rules "
        "against autograd; bounds of Lipschitz layers under gradient ascent."
    )
    yield ""
    yield from _head("audit", "things", "consistent", "violated", "inconclusive")
    for audit in dict.fromkeys(f.audit for f in results.static):
        verdicts = Counter(f.verdict for f in results.static if f.audit == audit)
        counts = [verdicts[v] for v in ("consistent", "violated", "inconclusive")]
        yield _row(audit, str(sum(counts)), *map(str, counts))
    yield ""
    for f in results.static:
        if f.verdict != CONSISTENT:
            yield f"- {f.subject} ({f.audit}): {f.verdict}: {f.reason}"
    yield ""
    yield "Largest sensitivity found, relative to the claim (1 is the claim; rounding may add 1e-4 to it):"
    yield ""
    found: dict[str, dict[str, float]] = {}
    for f in results.static:
        if f.facts.get("sensitivity"):
            of = found.setdefault(f.subject, {})
            of[f.audit] = max(of.get(f.audit, 0.0), f.facts["sensitivity"])
    audits = list(dict.fromkeys(audit for of in found.values() for audit in of))
    yield from _head("mechanism, rule or companion", *audits)
    for subject, of in found.items():
        yield _row(subject, *(f"{of[audit]:.6f}" if audit in of else "" for audit in audits))
    yield ""


def _zoo(results: Everything) -> Iterator[str]:
    yield "## Does it have teeth?"
    yield ""
    yield _teeth(results)
    yield ""
    yield from _head("broken", "kind", "what is wrong", "caught by")
    for s in (s for s in results.zoo if s["bug"]):
        yield _row(s["name"], s["kind"], s["bug"], ", ".join(s["caught_by"]) or "**nothing**")
    yield ""


def _trust(results: Everything) -> Iterator[str]:
    yield "## How much the numbers mean"
    yield ""
    yield "False alarms on what is sound, each audit at 95 %:"
    yield ""
    yield from _head("audit", "stated at most", "measured", "repetitions")
    for alarms in results.false_alarms:
        rates = (f"{alarms[key]:.1%}" for key in ("stated", "measured"))
        yield _row(alarms["audit"], *rates, str(alarms["repetitions"]))
    yield ""
    yield "Median lower bounds at 95 % where the truth is known (1000 runs in each world; one run with 1000 canaries):"
    yield ""
    yield from _head("true ε", "GDP", "one run", "GDP bounds above the truth")
    for p in results.power:
        yield _row(f"{p['epsilon']:g}", f"{p['gdp']:.2f}", f"{p['one_run']:.2f}", f"{p['above_truth']:.1%}")
    yield ""


def _opacus(results: Everything) -> Iterator[str]:
    if not results.opacus:
        return
    yield "## Code that is not ours"
    yield ""
    yield from _head("subject", *NUMBERS, "verdict")
    for f in results.opacus:
        yield _row(f.subject, *_numbers(f), f"**{f.verdict}**")
    yield ""
    yield "A record whose gradient is not finite turns the whole release into NaN there, which shows that it was in the batch."
    yield "Here such a record contributes exactly zero."
