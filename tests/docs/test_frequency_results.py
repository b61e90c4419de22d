"""Every row of GReDP's and GeoDP's tables follows from the runs in the files beside the pages."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t

from erlangen.experiments.geodp import ROWS_2, ROWS_3
from erlangen.experiments.gredp import NETWORKS, TABLE_2, Network
from erlangen.models import make_model
from tests.docs.test_results import content, page, paired
from tests.scripts import script

tables = script("gredp_geodp_tables")
transfer = script("gredp_transfer")

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results"


@lru_cache(maxsize=8)
def measured(name: str) -> dict[str, Any]:
    return json.loads((MEASURED / f"{name}.json").read_text())


@lru_cache(maxsize=4)
def lines(name: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in page(name).splitlines() if line.startswith("|")]


def rest(name: str, cells: Iterable[str]) -> list[str]:
    """What follows these cells in the one row of a page that begins with them."""
    first = list(cells)
    found = [line for line in lines(name) if line[: len(first)] == first]
    near = [line for line in lines(name) if line[0] == first[0]]
    assert len(found) == 1, f"{first} begins {len(found)} rows; beginning alike: {near}"
    return found[0][len(first) :]


def spread(values: Mapping[int, float], digits: int = 2) -> str:
    return f"{fmean(values.values()):.{digits}f} ± {stdev(values.values()):.{digits}f}"


def spent(name: str, task: str, setting: str, method: str, form: str = ".2f") -> str:
    """True ε, by PLD and by RDP."""
    found = measured(name)["epsilon"][f"{task} | {setting} | {method}"]
    return "∞" if "inf" in found.values() else f"{found['pld']:{form}} / {found['rdp']:{form}}"


def rate(pick: tuple[float, float, float]) -> str:
    length, bound, momentum = pick
    return f"{length / bound * (1 - momentum):.3g}"


# -- GReDP ----------------------------------------------------------------------------------------------------------

#: how the page calls a method, and the place of the paper's number among its DP-SGD, Spectral-DP and GReDP
LABELS: dict[str, tuple[str, int | None]] = {
    "DP-SGD": ("DP-SGD", 0), "AUTO-S": ("AUTO-S", None), "Spectral-DP": ("Spectral-DP", 1), "GReDP": ("GReDP", None),
    "DP-SGD, circulant": ("DP-SGD, circulant", None), "Spectral-DP, circulant": ("Spectral-DP, circulant", None),
    "GReDP, circulant": ("GReDP, circulant", None), "GReDP as published": ("GReDP as published (`complex`)", 2),
    "GReDP as published, circulant": ("the same, circulant", 2),
}  # fmt: skip
TASKS = {"LeNet-5": "gredp-table1", "Model-3": "gredp-model3", "ResNet-20": "gredp-resnet20", "AlexNet": "gredp-alexnet"}


@pytest.mark.parametrize("method", LABELS)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.label)
def test_gredp_from_scratch(network: Network, method: str) -> None:
    """A star marks a learning rate at the edge of those that were tried; of LeNet-5 the text says which."""
    task, (label, paper), setting = TASKS[network.label], LABELS[method], "claimed" if "published" in method else "true"
    found = measured("gredp")
    picks = tables.cells(found["runs"], task, "test_accuracy")[setting, method]
    pick = tables.chosen(found, task, setting, method, picks)
    best, lenet = tables.tuned(found, task, "test_accuracy"), network.model == "lenet"
    tried = [length for length, *_ in tables.tried(found["tuning"], tables.TASKS[task], method, setting)]
    edge = not lenet and pick[0] in (min(tried), max(tried))
    cells = [
        label, spent("gredp", task, setting, method) + (f", claimed {network.epsilon:g}" if setting == "claimed" else ""),
        rate(pick) + "*" * edge, *([f"{pick[1]:g}"] if lenet else []), spread(picks[pick]),
        *("–" if method == rival else paired(picks[pick], best["true", rival]) for rival in ("DP-SGD", "AUTO-S")),
    ]  # fmt: skip
    (theirs,) = rest("gredp.md", cells)
    assert theirs == "–" if paper is None else float(theirs) == network.table1[paper]



def noise_free(name: str, task: str) -> str:
    (values,) = tables.cells(measured(name)["runs"], f"{task}-noise-free", "test_accuracy")["σ=0", "no privacy"].values()
    assert len(values) == 3
    return spread(values)


def test_gredp_without_privacy() -> None:
    cells = ["no privacy (3 seeds, untuned)", "∞", "0.01, momentum 0.9", "–", noise_free("gredp", "gredp-table1")]
    assert rest("gredp.md", cells) == ["–", "–", f"{NETWORKS[0].plain:g}"]


TO_THE_LETTER = {
    "Spectral-DP as published": "Spectral-DP as published, each of five layers clipped at C",
    "GReDP as published, complex": "GReDP as published, each of five layers clipped at C",
    "GReDP as published, real": "the same, real noise (Eq. 11)",
    "GReDP as published, per-sample": "the same, noise on each sample (line 7)",
}


@pytest.mark.parametrize("method", TO_THE_LETTER)
def test_gredp_with_each_layer_clipped(method: str) -> None:
    task = "gredp-table1-layers"
    (values,) = tables.cells(measured("gredp")["runs"], task, "test_accuracy")["claimed", method].values()
    assert len(values) == 3
    cells = [
        TO_THE_LETTER[method], f"{spent('gredp', task, 'claimed', method)}, claimed 1", "0.1, momentum 0.9", "1", spread(values),
    ]  # fmt: skip
    assert rest("gredp.md", cells)[:2] == ["–", "–"]


POOLED = {
    "Spectral-DP - DP-SGD (6 pairs)": ["Spectral-DP", "DP-SGD", "Spectral-DP, circulant", "DP-SGD, circulant"],
    "GReDP - DP-SGD (6 pairs)": ["GReDP", "DP-SGD", "GReDP, circulant", "DP-SGD, circulant"],
    "circulant - dense, the three sound methods (9 pairs)": [
        name for m in ("DP-SGD", "Spectral-DP", "GReDP") for name in (f"{m}, circulant", m)
    ],
}  # fmt: skip


@pytest.mark.parametrize("label", POOLED)
def test_gredp_pairs_of_dense_and_circulant_together(label: str) -> None:
    for found, network in zip(rest("gredp.md", [label]), ("Model-3", "ResNet-20", "AlexNet"), strict=True):
        pooled = tables.pooled(measured("gredp"), TASKS[network], "test_accuracy", POOLED[label])
        assert f"{found} ({label.split('(')[1]}" == pooled


def transferred(convolutions: int, method: str, epsilon: float) -> dict[int, float]:
    """seed → test accuracy in %, at the step length that held-out records chose."""
    found = measured("gredp-transfer")
    best = transfer.best(found, convolutions, method, epsilon)
    return {r["key"][4]: 100 * r["test_accuracy"] for r in found["runs"] if r["key"][:4] == [convolutions, method, epsilon, best]}


@pytest.mark.parametrize(
    ("convolutions", "method"), [(k, m) for k in (0, 1, 2) for m in transfer.METHODS if k or m == "DP-SGD"]
)
def test_gredp_transfer(convolutions: int, method: str) -> None:
    label = {"GReDP as published, circulant": "the same, circulant"}.get(method, method)
    place = transfer.METHODS[method][0]
    theirs = "–"
    if convolutions and place is not None and (not method.endswith("circulant") or "published" in method) and method != "GReDP":
        theirs = ", ".join(f"{rows[place][convolutions - 1]:g}" for rows in TABLE_2["cifar10"].values())
    values = [spread(transferred(convolutions, method, e)) for e in (0.5, 1.0, 2.0)]
    assert rest("gredp.md", [f"{convolutions}Conv, {label}" if convolutions else f"head, {label}", *values]) == [theirs]


def test_gredp_transfer_tells_no_method_from_another() -> None:
    """What the page says of all of them: where they lie, and their largest differences to DP-SGD."""
    means, gaps = [fmean(transferred(0, "DP-SGD", e).values()) for e in (0.5, 1.0, 2.0)], {}
    for k in (1, 2):
        for method in transfer.METHODS:
            for e in (0.5, 1.0, 2.0):
                mine, iso = transferred(k, method, e), transferred(k, "DP-SGD", e)
                means.append(fmean(mine.values()))
                if method != "DP-SGD":
                    gaps[k, method, e] = paired(mine, iso)
    assert f"All lie between {min(means):.1f} % and {max(means):.1f} %" in page("gredp.md")
    assert len(gaps) == 48
    by_size = sorted(gaps.values(), key=lambda gap: float(gap.split(" ")[0]))
    assert [by_size[0].split(" ")[0], by_size[-1].split(" ")[0]] == ["-0.43", "+0.30"]
    assert gaps[1, "Spectral-DP, circulant", 0.5] == "-0.43 ± 0.22"
    assert gaps[2, "Spectral-DP", 2.0] == "+0.30 ± 0.14"


ABLATED = ("DP-SGD", "Spectral-DP", "GReDP", "GReDP as published")
LEVELS = ("ε=0.5", "ε=1", "ε=1.5", "ε=2")


def ablated(task: str, setting: str, method: str, length: float, bound: float = 1.0) -> dict[int, float]:
    kind = "claimed" if "published" in method else "true"
    return tables.cells(measured("gredp")["runs"], task, "test_accuracy")[f"{setting} {kind}", method][length, bound, 0.9]


@pytest.mark.parametrize("bound", [0.1, 1.0])
@pytest.mark.parametrize("method", ABLATED)
def test_gredp_clipping_bounds(method: str, bound: float) -> None:
    values = [spread(ablated("gredp-table3", level, method, 1.0, bound)) for level in LEVELS]
    assert rest("gredp.md", [f"C = {bound:g} {method}", *values]) == []
    theirs = {0.1: NETWORKS[0].small_clip, 1.0: NETWORKS[0].unit_clip}[bound]
    assert [float(cell) for cell in rest("gredp.md", [f"C = {bound:g} paper, GReDP"])] == list(theirs)


@pytest.mark.parametrize(("label", "method", "kind"), [
    ("*true ε of the sound rows (PLD / RDP)*", "DP-SGD", "true"),
    ("*true ε as published, at a claim of the column's*", "GReDP as published", "claimed"),
])  # fmt: skip
def test_gredp_clipping_bounds_at_their_true_epsilon(label: str, method: str, kind: str) -> None:
    true = [spent("gredp", "gredp-table3", f"{level} {kind}", method) for level in LEVELS]
    assert [label, *true] in [[line[0], *(cell.strip("*") for cell in line[1:])] for line in lines("gredp.md")]


def together(method: str, bounds: Iterable[float] = (0.1, 1.0)) -> dict[int, float]:
    values = (v for b in bounds for e in LEVELS for _, v in sorted(ablated("gredp-table3", e, method, 1.0, b).items()))
    return dict(enumerate(values))


def test_gredp_clipping_bounds_make_no_difference() -> None:
    text = page("gredp.md")
    spectral, sound, published = (paired(together(m), together("DP-SGD")) for m in ABLATED[1:])
    assert len(together("GReDP")) == 24
    assert f"Spectral-DP is {spectral} points from\n  DP-SGD and GReDP {sound} (95 %)" in text
    assert f"it is {published}" in text
    c = {m: paired(together(m, [1.0]), together(m, [0.1])) for m in ABLATED}
    assert f"C = 1 is {c['DP-SGD']} points from C = 0.1 with DP-SGD, {c['Spectral-DP']} with\n" in text
    assert f"Spectral-DP, {c['GReDP']} with GReDP and {c['GReDP as published']} as published" in text


@pytest.mark.parametrize("method", ABLATED)
def test_gredp_batch_sizes_and_learning_rates(method: str) -> None:
    sizes, rates = (256, 512, 1024, 2048), (0.001, 0.01, 0.025, 0.05, 0.1)
    by_size = [spread(ablated("gredp-fig4", f"B={b}", method, 1.0), 1) for b in sizes]
    assert rest("gredp.md", [method, *by_size]) == []
    by_rate = [spread(ablated("gredp-fig5", "ε=2", method, lr * 10), 1) for lr in rates]
    label = f"{method} (true ε = 4.35)" if "published" in method else method
    assert rest("gredp.md", [label, *by_rate]) == []
    if "published" in method:
        true = [spent("gredp", "gredp-fig4", f"B={b} claimed", method).split(" ")[0] for b in sizes]
        assert rest("gredp.md", ["its true ε", *true]) == []
        assert spent("gredp", "gredp-fig5", "ε=2 claimed", method).startswith("4.35 /")


# -- GeoDP: figures -------------------------------------------------------------------------------------------------


FIRST = {"DP-SGD": 33.38, "Spectral-DP": 68.78, "GReDP": 78.37, "GReDP as published": 78.37}  # of the paper, "at the beginning"


def welch(ours: list[float], others: list[float]) -> str:
    parts = [(stdev(values) ** 2 / len(values), len(values) - 1) for values in (ours, others)]
    error = sum(part for part, _ in parts)
    freedom = error**2 / sum(part**2 / count for part, count in parts)
    return f"{fmean(ours) - fmean(others):+.2f} ± {t.ppf(0.975, freedom) * error**0.5:.2f}"


@pytest.mark.parametrize("method", ["DP-SGD", "Spectral-DP", "GReDP", "GReDP as published", "AUTO-S", "DP-SGD without momentum"])
def test_gredp_along_training(method: str) -> None:
    cells = content("gredp-fig3-lenet.json")["cells"]
    runs = cells[method]
    assert [[point["step"] for point in run["curve"]] for run in runs] == [list(range(120, 1201, 120))] * 3
    ends = {name: [100 * run["curve"][-1]["test_accuracy"] for run in found] for name, found in cells.items()}
    first = {run["seed"]: 100 * run["curve"][0]["test_accuracy"] for run in runs}
    claim = ", claimed 2" if method.endswith("published") else ""
    assert lines("gredp.md").count([
        method, f"{runs[0]['curve'][0]['epsilon']:.2f}", spread(first, 1), f"{FIRST[method]:.2f}" if method in FIRST else "–",
        f"{runs[0]['epsilon']['pld']:.2f} / {runs[0]['epsilon']['rdp']:.2f}{claim}", spread(dict(enumerate(ends[method]))),
        "–" if method == "DP-SGD" else welch(ends[method], ends["DP-SGD"]),
    ]) == 1  # fmt: skip


def short(value: float) -> str:
    """Two digits, three above ten; powers of ten below a hundredth."""
    if value and abs(value) < 0.00995:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.3g}" if abs(value) >= 9.95 else f"{value:.2g}"


def figure(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["cell"], r["quantity"]): r for r in content(name)["rows"]}


SERIES = (
    "DP", "AUTO-S", "direction", "angles β=0.1", "GeoDP as published β=1", "GeoDP as published β=0.1",
    "GeoDP as published β=0.01",
)  # fmt: skip


@pytest.mark.parametrize(("sigma", "d", "batch"), [
    *((s, 5000, 2048) for s in (0.01, 0.1, 1, 10)), *((8, d, 4096) for d in (500, 2000, 20_000)),
    *((8, 10_000, b) for b in (512, 4096, 16_384)),
])  # fmt: skip
def test_geodp_errors_of_a_release(sigma: float, d: int, batch: int) -> None:
    found, where = figure("geodp-fig3.json"), f"σ={sigma:g} d={d} B={batch}"
    values = [
        f"{short(found[f'{where} {s}', 'direction_mse']['mean'])} / {found[f'{where} {s}', 'cosine']['mean']:.2f}" for s in SERIES
    ]
    true = found[f"{where} DP", "cosine"]["epsilon"]["pld"]
    assert rest("geodp.md", [f"{sigma:g}, {d:,}, {batch:,}", f"{true:.3g}", *values]) == []
    for s in SERIES:
        epsilon = found[f"{where} {s}", "cosine"]["epsilon"]["pld"]
        assert epsilon == "inf" if "published" in s else epsilon == pytest.approx(true)


@pytest.mark.parametrize("d", [20_000, 10_000, 5000])
def test_geodp_bounding_factors(d: int) -> None:
    found = figure("geodp-fig4.json")
    names = ("DP", "direction", *(f"GeoDP as published β={b:g}" for b in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)))
    values = [short(found[f"σ=8 d={d} B=4096 {name}", "direction_mse"]["mean"]) for name in names]
    assert rest("geodp.md", [f"{d:,}", *values]) == []


@pytest.mark.parametrize("name", ["DP", "AUTO-S", "GeoDP as published β=1", "GeoDP as published β=0.1", "direction"])
def test_geodp_theorem_1(name: str) -> None:
    found = figure("geodp-theorem1.json")
    where = ((1, 10), (10, 10), (10, 100))
    rows = [found[f"σ={sigma} step {step} {name}", item] for sigma, step in where for item in ("item_a", "item_b")]
    assert rest("geodp.md", [name, *(f"{short(r['mean'])} ± {short(r['std'])}" for r in rows)]) == []


@pytest.mark.parametrize(("d", "batch"), [
    *((d, 500) for d in (1250, 5000, 20_000, 80_000, 320_000)), *((20_000, b) for b in (1000, 2000, 4000)),
])  # fmt: skip
def test_geodp_runtime(d: int, batch: int) -> None:
    found, where = figure("geodp-fig6.json"), f"d={d} B={batch}"
    names = ("GeoDP as published", "direction", "shrink", "angles")
    ratios = [f"{found[f'{where} {name}', 'ratio']['mean']:.2f}×" for name in names]
    assert rest("geodp.md", [f"{d:,}", f"{batch:,}", f"{1000 * found[f'{where} DP', 'seconds']['mean']:.2g}", *ratios]) == []


@pytest.mark.parametrize("name", ["geodp-fig3", "geodp-fig4", "geodp-fig6", "geodp-theorem1"])
def test_a_figure_was_made_by_the_preset_that_there_is(name: str) -> None:
    from erlangen.experiments.presets import preset

    chosen, made = preset(name), content(f"{name}.json")
    assert made["note"] == chosen.note
    options = {row["cell"]: row["options"] for row in made["rows"]}
    assert options == {point.name: dict(point.options) for point in chosen.cells}


# -- GeoDP: training ------------------------------------------------------------------------------------------------

#: how the page calls what the benchmark calls otherwise
CALLED = {
    "direction": "`direction`", "direction, scaled": '`direction`, `magnitude="scaled"`', "shrink": "`shrink`",
    **{f"direction+{c}": f"`direction`+{c}" for c in ("IS", "SUR", "PSAC")},
}  # fmt: skip
METHODS = {label: method for method, label in CALLED.items()}
Pick = tuple[float, float, float]


def below(name: str, *header: str) -> list[list[str]]:
    """The rows of all tables of a page whose header has these cells."""
    found, inside = [], False
    for line, after in itertools.pairwise([*lines(name), [""]]):
        if after[0].startswith("---"):
            inside = set(header) <= set(line)
        elif inside and not line[0].startswith("---"):
            found.append(line)
    return found


FIGURE_5 = below("geodp.md", "test loss")
LABEL = re.compile(r"(?:B=(\d+) )?(?:σ=(\S+) )?(.+?)(?:, C = (\S+))?(?: \((?:C )?tuned(?:: (\S+))?\))?")


def parts(batch: str | None) -> list[str]:
    """The tasks of a panel: the paper's C, other bounds, longer steps, no noise."""
    name = {None: "geodp-fig5", "2048": "geodp-fig5-b2048", "256": "geodp-fig5c"}[batch]
    return [part for part in (name, f"{name}-bounds", f"{name}-long", f"{name}-noiseless") if part in tables.TASKS]


def held_out(batch: str | None, setting: str, method: str, bound: float | None = None) -> Pick:
    """What held-out images chose, of all bounds or at this one."""
    found: dict[Pick, float] = {}
    for part in parts(batch):
        found |= tables.tried(measured("geodp-fig5")["tuning"], tables.TASKS[part], method, setting)
    return max((pick for pick in found if bound in (None, pick[1])), key=found.__getitem__)


def runs(batch: str | None, setting: str, method: str, pick: Pick, measure: str) -> dict[int, float]:
    cells = (tables.cells(measured("geodp-fig5")["runs"], part, measure).get((setting, method), {}) for part in parts(batch))
    return {seed: value for picks in cells for seed, value in picks.get(pick, {}).items()}


def rounded(value: float) -> str:
    """Three digits, with thousands set apart."""
    if value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e")
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


@pytest.mark.parametrize("line", FIGURE_5, ids=lambda line: line[0])
def test_geodp_logistic_regression(line: list[str]) -> None:
    match = LABEL.fullmatch(line[0])
    assert match is not None
    batch, sigma, label, bound, chosen = match.groups()
    quiet = label == "no noise"
    setting, method = ("σ=0", "DP") if quiet else (f"σ={sigma}", METHODS.get(label, label))
    pick = held_out(batch, setting, method, float(bound or chosen or 0.1))
    if "tuned" in line[0]:
        assert pick == held_out(batch, setting, method)
    loss, accuracy = (runs(batch, setting, method, pick, m) for m in ("test_loss", "test_accuracy"))
    true = next(e for part in parts(batch) if (e := measured("geodp-fig5")["epsilon"].get(f"{part} | {setting} | {method}")))
    iso = held_out(batch, setting, "DP")
    gap = "" if quiet else tables.difference(loss, runs(batch, setting, "DP", iso, "test_loss"), 3)
    assert line[1:6] == [
        "∞" if "inf" in true.values() else " / ".join(map(rounded, true.values())), f"{rate(pick)}, {pick[2]:g}",
        spread(loss, 3), spread(accuracy), "–" if (method, pick) == ("DP", iso) and not quiet else gap,
    ]  # fmt: skip
    assert line[6:] in ([str(len(loss))], [])
    assert line[6:] or len(loss) == 3


@pytest.mark.parametrize("batch", [None, "2048", "256"])
def test_geodp_logistic_regression_shows_every_method_at_its_best(batch: str | None) -> None:
    task = tables.TASKS[parts(batch)[0]]
    for setting in task.settings:
        for method in task.methods:
            best = runs(batch, setting, method, held_out(batch, setting, method), "test_loss")
            label = f"{f'B={batch} ' if batch else ''}{setting} {CALLED.get(method, method)}"
            assert any(line[0].startswith(label) and line[3] == spread(best, 3) for line in FIGURE_5), (label, spread(best, 3))


def row_label(setting: str, method: str) -> str:
    """Of Tables II and III."""
    plain = method.replace("published β", "published, β").replace("β=0.1+", "β=0.1 +").replace(" B=8192", ", B = 8192")
    return f"{setting} {CALLED.get(method, plain)}"


def papers(method: str, rows: Any, column: int) -> str:
    base, _, extras = method.replace(" B=8192", "").partition("+")
    name, _, beta = base.replace("GeoDP as published ", "GeoDP ").partition(" β=")
    batch = 8192 if "B=8192" in method else 16384
    wanted = (f"{name}+{extras}" if extras else name, batch, float(beta) if beta else None)
    return next((f"{both[column]:.2f}" for *key, both in rows if tuple(key) == wanted), "–")


def trained(task: str) -> list[tuple[str, str, Pick, bool]]:
    """(setting, method, pick, whether it is the best without momentum beside a better one) of a table and its companions."""
    result, found = measured("geodp-tables"), []
    for part in (task, f"{task}-companions"):
        for (setting, method), picks in tables.cells(result["runs"], part, "test_accuracy").items():
            best = tables.chosen(result, part, setting, method, picks)
            found += [(setting, method, pick, pick != best) for pick in picks]
    return found


def of_table(task: str, setting: str, method: str, pick: Pick) -> dict[int, float]:
    both = [tables.cells(measured("geodp-tables")["runs"], part, "test_accuracy") for part in (task, f"{task}-companions")]
    return next(found[setting, method][pick] for found in both if (setting, method) in found)


def difference(mine: Mapping[int, float], other: Mapping[int, float]) -> str:
    text = tables.difference(mine, other, 2)
    return text if " ± " in text else f"{float(text):+.1f}"


@pytest.mark.parametrize(("task", "setting", "method", "pick", "still"), [
    (task, *one) for task in ("geodp-table2", "geodp-table3") for one in trained(task)
])  # fmt: skip
def test_geodp_tables(task: str, setting: str, method: str, pick: Pick, still: bool) -> None:
    rivals = {second: p for s, m, p, second in trained(task) if (s, m) == (setting, "DP")}
    values = of_table(task, setting, method, pick)
    part = task if method in tables.TASKS[task].methods else f"{task}-companions"
    true = measured("geodp-tables")["epsilon"][f"{part} | {setting} | {method}"]
    form = "{:.3g}" if task == "geodp-table2" else "{:,.0f}"
    label = row_label(setting, method) + (", no momentum" if still else "") + (" (2 seeds)" if len(values) == 2 else "")
    rows, column = {"geodp-table2": ROWS_2, "geodp-table3": ROWS_3}[task], list(tables.TASKS[task].settings).index(setting)
    assert rest("geodp.md", [
        label, "∞" if "inf" in true.values() else " / ".join(form.format(e) for e in true.values()),
        f"{rate(pick)}, {pick[1]:g}, {pick[2]:g}",
        spread(values) if len(values) > 1 else f"{values[0]:.2f} (1 seed)",
        *("–" if (method, pick) == ("DP", rivals[second]) else difference(values, of_table(task, setting, "DP", rivals[second]))
          for second in (False, True)),
    ]) == [papers(method, rows, column)]  # fmt: skip


def best_of(task: str, setting: str, method: str) -> dict[int, float]:
    pick = next(p for s, m, p, second in trained(task) if (s, m, second) == (setting, method, False))
    return of_table(task, setting, method, pick)


def test_geodp_differences_in_the_text() -> None:
    """Two by two: at the larger σ and at the smaller one."""
    published = "GeoDP as published β=0.1"

    def gaps(task: str, method: str, rival: str) -> list[str]:
        values = [[best_of(task, setting, m) for m in (method, rival)] for setting in tables.TASKS[task].settings]
        both = [dict(enumerate(v for pair in values for v in pair[k].values())) for k in (0, 1)]
        return [tables.difference(mine, other, 1) for mine, other in (*values, both)]

    text = " ".join(page("geodp.md").split())
    for label, method in (("`direction`", "direction"), ("`shrink`", "shrink"), ("as published", published)):
        one, two, _ = gaps("geodp-table2", method, "DP+AUTO-S")
        assert f"{label} {one} and {two}" in text
    one, two, both = gaps("geodp-table2", "direction+IS", "direction")
    assert f"`direction` ({one} and {two}, over both σ {both})" in text
    one, two, _ = gaps("geodp-table2", "DP+IS", "DP")
    assert f"for DP ({one}, {two})" in text
    auto_s, psac = (gaps("geodp-table2", f"{published}+{rule}", published)[1] for rule in ("AUTO-S", "PSAC"))
    assert f"by AUTO-S ({auto_s} at σ = 1) or PSAC ({psac})" in text
    for label, method in (("`direction` has", "direction"), ("with β = 0.1", published)):
        one, two, _ = gaps("geodp-table3", method, "DP+AUTO-S")
        assert f"{label} {one} and {two}" in text


def test_geodp_without_noise() -> None:
    assert f"the network has {noise_free('geodp-tables', 'geodp-table2')} (paper: 99.11)" in " ".join(page("geodp.md").split())


@pytest.mark.parametrize("task", ["geodp-table2", "geodp-table3"])
def test_geodp_tables_have_no_other_rows(task: str) -> None:
    sigmas = tuple(f"{setting} " for setting in tables.TASKS[task].settings)
    shown = [line for line in below("geodp.md", "lr, C, momentum") if line[0].startswith(sigmas)]
    assert len(shown) == len(trained(task))


# -- the pages of the methods ---------------------------------------------------------------------------------------


def method_page(name: str) -> str:
    return page(f"../methods/{name}")


@pytest.mark.parametrize("name", ["lenet", "resnet20", "model3", "alexnet", "resnet18"])
def test_readings_of_the_networks(name: str) -> None:
    model = make_model(name, (1, 28, 28) if name == "lenet" else (3, 32, 32), 10)
    count = f"{sum(p.numel() for p in model.parameters()):,}"
    assert any(line.startswith(f"| `{name}` |") and line.endswith(f"| {count} |") for line in method_page("gredp.md").splitlines())


def test_what_the_methods_pages_say_of_the_tables() -> None:
    def pooled(label: str, network: str) -> str:
        """To one digit."""
        best, names = tables.tuned(measured("gredp"), TASKS[network], "test_accuracy"), POOLED[label]
        one, other = (dict(enumerate(v for m in some for v in best["true", m].values())) for some in (names[::2], names[1::2]))
        return tables.difference(one, other, 1).lstrip("+")

    spectral, _, circulant = POOLED
    text = " ".join(method_page("gredp.md").split())
    for network in ("Model-3", "ResNet-20", "AlexNet"):
        assert f"{pooled(circulant, network)} points on {network}" in text or f"{pooled(circulant, network)} on {network}" in text
    text = " ".join(method_page("spectral-dp.md").split())
    assert f"{pooled(spectral, 'Model-3')} points on Model-3 and {pooled(spectral, 'AlexNet')} on AlexNet" in text
    assert f"nothing on ResNet-20 ({pooled(spectral, 'ResNet-20')} at" in text
