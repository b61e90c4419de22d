"""The figures of one run."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from torch import nn

from erlangen.accounting import events
from erlangen.accounting.attacker import tradeoff
from erlangen.accounting.epsilon import AccountingError
from erlangen.accounting.words import lower, upper, upper_share
from erlangen.lipschitz.bounds import lipschitz_constant
from erlangen.lipschitz.radius import certified_radius, is_certifiable
from erlangen.report import measures
from erlangen.report.chart import Axis, Bound, Chart, Gallery, Heat, Picture, Series, floats, small
from erlangen.report.folder import Run, finite_or_inf

#: classes in a confusion matrix that can be read, and that a page can hold
MOST_CLASSES = 60
ACCURACY = Axis("accuracy on the public test set", percent=True)


def training_curves(run: Run) -> Chart | None:
    """Public test accuracy and the ε spent, by step."""
    rows = run.history
    scored = [r for r in rows if isinstance(r.get("test_accuracy"), (int, float))]
    spent = [r for r in rows if math.isfinite(finite_or_inf(r.get("epsilon")))]
    if len(rows) < 2:
        return None
    series = []
    if scored:
        accuracy = floats([r["test_accuracy"] for r in scored])
        series.append(Series("test accuracy", floats([r["step"] for r in scored]), accuracy, colour="c0"))
    if spent:
        steps, used = floats([r["step"] for r in spent]), floats([r["epsilon"] for r in spent])
        series.append(Series("ε spent", steps, used, colour="c1", dash=True, right=bool(scored)))
    if not series:
        return None
    last = rows[-1]
    ends = f"after {last['step']} steps: " + ", ".join(
        ([f"accuracy {scored[-1]['test_accuracy']:.1%}"] if scored else [])
        + ([f"ε = {upper(spent[-1]['epsilon'], 3)}"] if spent else ["no finite ε"])
    )
    used_axis = Axis("ε spent", bound="upper")
    what = "The privacy spent so far; without a public test set there is no accuracy to show."
    if scored:
        also = ", and the privacy spent so far (dashed, right axis)" if spent else ""
        what = f"Accuracy of the averaged weights on the public test set{also}."
    return Chart(
        "training",
        "Training",
        f"{what} Nothing here was computed from private records outside the mechanism.",
        f"By training step: {' and '.join(s.name for s in series)}; {ends}.",
        Axis("step"),
        ACCURACY if scored else used_axis,
        tuple(series),
        right=used_axis if scored and spent else None,
    )


def spending(run: Run) -> Chart | None:
    """Accuracy against the ε spent so far: what stopping earlier would have cost."""
    rows = [
        r for r in run.history
        if isinstance(r.get("test_accuracy"), (int, float)) and math.isfinite(finite_or_inf(r.get("epsilon")))
    ]  # fmt: skip
    if len(rows) < 2:
        return None
    x, y = floats([r["epsilon"] for r in rows]), floats([r["test_accuracy"] for r in rows])
    return Chart(
        "spending",
        "Accuracy against ε",
        "The same run, read as what it paid for what it got: each point is the model after more steps. A run planned for a "
        "smaller ε from the start would use more noise and other settings; give several runs to see that trade-off.",
        f"Accuracy rises from {y[0]:.1%} at ε = {upper(x[0], 3)} to {y[-1]:.1%} at ε = {upper(x[-1], 3)}.",
        Axis(f"ε spent (δ = {small(run.delta)})", bound="upper"),
        ACCURACY,
        (Series(run.name, x, y, colour="c0"),),
    )


def attacker(run: Run) -> Chart | None:
    """The most that any membership attack can achieve, from the events of the certificate."""
    if run.certificate is None or run.problems or not math.isfinite(run.epsilon):
        return None
    try:
        pairs = [(events.from_json(r["event"]), int(r["count"])) for r in run.certificate["releases"]]
        fpr = np.concatenate([[0.001, 0.01, 0.03, 0.06], np.linspace(0.1, 1.0, 10)])
        tpr = [tradeoff(pairs, float(f), run.certificate["neighbouring"]) for f in fpr]
    except (AccountingError, events.EventError):
        return None
    at = dict(zip(fpr.round(3), tpr))
    unit = run.certificate["unit"]
    return Chart(
        "attacker",
        "What an attacker can do",
        f"Somebody tests whether one {unit}'s data was used, knowing everything else. However clever the test, its hits "
        "(members recognised) stay below the line, at each rate of false alarms (others wrongly taken for members). On the dashed "
        "line it is guessing.",
        f"At 1 % false alarms no attack finds more than {upper_share(at[0.01])} of the members; at 10 %, no more than "
        f"{upper_share(at[0.1])}.",
        Axis("false alarms", (0.0, 1.0), percent=True),
        Axis("hits", (0.0, 1.0), percent=True, bound="upper"),
        (
            Series("the best possible attack", floats(fpr), floats(tpr), colour="c4"),
            Series("guessing", (0.0, 1.0), (0.0, 1.0), colour="c6", dash=True),
        ),
        height=400,
        square=True,
    )


def calibration(run: Run) -> Chart | None:
    """The reliability diagram."""
    if run.public is None:
        return None
    p, labels = run.public.probabilities, run.public.labels.numpy()
    bins, score = measures.reliability(p, labels), measures.brier(p, labels)
    ends = [measures.wilson(round(a * n), int(n)) for a, n in zip(bins.accuracy, bins.count)]
    share = bins.count / bins.count.sum()
    return Chart(
        "calibration",
        "Calibration",
        "When the network says 80 %, is it right 80 % of the time? Points on the diagonal: yes. Below: it is too sure of "
        f"itself. Bars: share of images with that confidence; whiskers: 95 % intervals. Brier score {score:.4f} (mean over "
        f"classes and images), expected calibration error {bins.ece:.4f} ({measures.BINS} bins), on {len(labels):,} public "
        "test images.",
        f"Reliability diagram; Brier score {score:.4f}, expected calibration error {bins.ece:.4f}.",
        Axis("confidence", (0.0, 1.0), percent=True),
        Axis("accuracy", (0.0, 1.0), percent=True),
        (
            Series("share of images", floats(bins.confidence), floats(share), "bars", colour="soft", width=0.9 / measures.BINS),
            Series("perfectly calibrated", (0.0, 1.0), (0.0, 1.0), colour="c6", dash=True),
            Series("this model", floats(bins.confidence), floats(bins.accuracy), "points",
                   floats([e[0] for e in ends]), floats([e[1] for e in ends]), "c0"),
        ),
        height=400,
        square=True,
    )  # fmt: skip


def confusion(run: Run) -> Heat | None:
    if run.public is None:
        return None
    counts = measures.confusion(run.public.probabilities, run.public.labels.numpy())
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    off = counts - np.diag(np.diag(counts))
    kept, left_out = list(range(len(counts))), ""
    if len(counts) > MOST_CLASSES:
        worst = np.argsort(-(off.sum(0) + off.sum(1)), kind="stable")[:MOST_CLASSES]
        kept, left_out = (
            sorted(worst.tolist()),
            f" The {MOST_CLASSES} most confused of {len(counts)} classes are shown.",
        )
    counts, shares, off = (m[np.ix_(kept, kept)] for m in (counts, shares, off))
    names = tuple(run.class_name(c) for c in kept)
    actual, said = np.unravel_index(off.argmax(), off.shape)
    alt = (
        f"Most often {names[actual]} is taken for {names[said]} ({off[actual, said]} times)."
        if off.any()
        else "No image is misclassified."
    )
    return Heat(
        "confusion",
        "Confusion matrix",
        "Rows: what the image is. Columns: what the network says. Colour: share of the row; numbers: images of the public "
        f"test set.{left_out}",
        alt,
        shares, names, names, "predicted", "actual", "share of row", span=(0.0, 1.0),
        texts=tuple(tuple(str(n) for n in row) for row in counts), height=min(760, 170 + 30 * len(names)), square=True,
    )  # fmt: skip


def predictions(run: Run) -> Gallery | None:
    """Public test images: one of each class, then the mistakes of which the network was most sure."""
    public = run.public
    if public is None or not len(public.images):
        return None
    p, labels = public.probabilities, public.labels.numpy()
    low, high = float(public.images.min()), float(public.images.max())
    pictures = []
    for image, place in zip(public.images.numpy(), public.shown.tolist()):
        said, actual, sure = int(p[place].argmax()), int(labels[place]), float(p[place].max())
        scaled = (image - low) / max(high - low, 1e-12)
        pixels = scaled.transpose(1, 2, 0) if image.shape[0] == 3 else scaled[0]
        name, truth = run.class_name(said), run.class_name(actual)
        second = "" if said == actual else f"is {truth}"
        alt = f"test image {place}: {truth}, predicted {name} with {sure:.0%} confidence"
        pictures.append(Picture(pixels, f"{name} {sure:.0%}", alt, mark="bad" if second else "good", second=second))
    wrong = sum(p.mark == "bad" for p in pictures)
    return Gallery(
        "predictions",
        "Predictions on public test images",
        "One image of each class, then the mistakes of which the network was most sure. They are images of the public test set, as "
        "its owner declared it; no other image is in this report. Whoever is in that set is not protected by ε.",
        f"{len(pictures)} public test images with predictions, {wrong} of them wrong.",
        tuple(pictures),
    )


def radius(run: Run, model: nn.Module) -> Chart | None:
    """Certified accuracy against the size of a change, for networks with a Lipschitz constant."""
    if run.public is None or run.config.average_views or not is_certifiable(model):  # the constant is that of one view
        return None
    found = certified_radius(model, run.public.logits).numpy()
    right = (run.public.logits.argmax(1) == run.public.labels).numpy()
    top = float(np.quantile(found[right], 0.995)) if right.any() else 0.0
    if not top > 0:
        return None
    grid = np.linspace(0.0, 1.05 * top, 80)
    share, middle = measures.certified_accuracy(found, right, grid), float(np.median(found[right]))
    return Chart(
        "radius",
        "Certified robustness",
        "The share of public test images that are classified correctly and provably stay so under every change of at most "
        f"this L2 norm (in the network's input scale). The network's Lipschitz constant is at most "
        f"{upper(lipschitz_constant(model), 3)}; no attack was run, none can do better.",
        f"Half of the correctly classified images are certified up to radius {lower(middle, 3)}.",
        Axis("L2 norm of the change", (0.0, float(grid[-1])), bound="lower"),
        Axis("certified accuracy", (0.0, 1.0), percent=True),
        (Series("certified accuracy", floats(grid), floats(share), colour="c2"),),
    )


def audit(run: Run) -> Chart | None:
    """Per audit: the claim, what was shown, what could have been shown at most."""
    findings = [f for f in (run.audit or {}).get("findings", []) if math.isfinite(finite_or_inf(f.get("claim")))]
    if not findings:
        return None
    names = tuple(str(f["audit"]) for f in findings)
    series = []
    parts: tuple[tuple[str, tuple[str, ...], str, Literal["bars", "points"], Bound], ...] = (
        ("shown by the attack: ε ≥", ("lower_bound", "gdp_lower_bound"), "c1", "bars", "lower"),
        ("the most this audit could show", ("ceiling", "gdp_ceiling"), "c6", "points", "upper"),
        ("claimed ε", ("claim",), "c0", "points", "upper"),
    )
    for label, keys, colour, kind, bound in parts:
        values = [
            max((finite_or_inf(f.get(k)) for k in keys if isinstance(f.get(k), (int, float))), default=0.0)
            for f in findings
        ]
        series.append(Series(label, floats(range(len(names))), floats(values), kind, colour=colour, bound=bound))
    verdict = str((run.audit or {}).get("verdict"))
    return Chart(
        "audit",
        "Audit",
        "The run's configuration was replayed with canaries and attacked. An attack above the claim would refute it. A passing "
        "audit is never proof: it can show at most the grey mark (above the chart where it is missing; see the data).",
        f"Verdict: {verdict}. " + "; ".join(f"{n}: at least {lower(s, 4)} shown" for n, s in zip(names, series[0].y)),
        Axis("audit", categories=names),
        Axis("ε", (0.0, 1.6 * max(*series[0].y, *series[2].y, 1e-9))),
        tuple(series),
        height=340,
    )  # fmt: skip


def training_loss(run: Run) -> Chart | None:
    """NOT PRIVATE: the loss on private batches, where a run was told to record it."""
    rows = [r for r in run.history if isinstance((r.get("non_private") or {}).get("train_loss"), (int, float))]
    if not rows or not run.non_private:
        return None
    loss = floats([r["non_private"]["train_loss"] for r in rows])
    return Chart(
        "training-loss",
        "Training loss (not private)",
        "Computed from private records without noise. ε does not cover this curve: do not publish it.",
        f"Training loss from {loss[0]:.3g} to {loss[-1]:.3g}.",
        Axis("step"),
        Axis("loss on private batches"),
        (Series("training loss", floats([r["step"] for r in rows]), loss, colour="bad"),),
        height=320,
    )
