"""Every row of GeoDP's tables, and what the pages of the methods say of them, follows from the runs in the files beside them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest

from erlangen.experiments.geodp import ROWS_2, ROWS_3
from tests.docs.runs import lines, measured, method_page, noise_free, rate, rest, spread, tables
from tests.docs.test_results import content, page

# -- figures --------------------------------------------------------------------------------------------------------


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


def test_geodp_errors_in_the_text() -> None:
    """How far the published form and the sound ones are from DP, over all of Figure 3."""
    found = figure("geodp-fig3.json")
    cells = {cell.removesuffix(" DP") for cell, _ in found if cell.endswith(" DP")}
    value = lambda where, name, what: found[f"{where} {name}", what]["mean"]  # noqa: E731
    text = " ".join(page("geodp.md").split())

    low = [w for w in cells if w.endswith("d=5000 B=2048") and float(w.split(" ")[0].removeprefix("σ=")) <= 1]
    ratios = {
        b: sorted(value(w, f"GeoDP as published β={b}", "direction_mse") / value(w, "DP", "direction_mse") for w in low)
        for b in ("1", "0.1")
    }
    assert f"{ratios['1'][0]:.0f} to {ratios['1'][-1]:.0f} times smaller up to σ = 1" in text
    assert f"the error is {1 / ratios['0.1'][-1]:.1f} to {1 / ratios['0.1'][0]:.1f} times below DP's up to σ = 1" in text

    alike = ("DP", "AUTO-S", "direction")
    high = [w for w in cells if float(w.split(" ")[0].removeprefix("σ=")) >= 1]
    cosines = max(max(v) - min(v) for v in ([value(w, m, "cosine") for m in alike] for w in high))
    gaps = max(abs(value(w, m, "direction_mse") / value(w, "DP", "direction_mse") - 1) for w in high for m in alike)
    assert (f"{cosines:.3f}", math.ceil(100 * gaps)) == ("0.012", 4)
    assert "(cosines within 0.012, direction errors within 4 % of DP's)" in text


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


# -- training -------------------------------------------------------------------------------------------------------

#: how the page calls what the benchmark calls otherwise
CALLED = {
    "direction": "`direction`", "direction, scaled": '`direction`, `magnitude="scaled"`', "shrink": "`shrink`",
    "angles β=0.1": "`angles`, β = 0.1",
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
    """The tasks of a panel: the paper's C, other bounds, longer steps, angles, no noise."""
    name = {None: "geodp-fig5", "2048": "geodp-fig5-b2048", "256": "geodp-fig5c"}[batch]
    extras = ("", "-bounds", "-long", "-angles", "-noiseless")
    return [part for extra in extras if (part := f"{name}{extra}") in tables.TASKS]


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
    methods = {method for part in parts(batch) for method in tables.TASKS[part].methods}
    for setting in task.settings:
        for method in methods:
            best = runs(batch, setting, method, held_out(batch, setting, method), "test_loss")
            label = f"{f'B={batch} ' if batch else ''}{setting} {CALLED.get(method, method)}"
            assert any(line[0].startswith(label) and line[3] == spread(best, 3) for line in FIGURE_5), (label, spread(best, 3))


def test_angles_of_a_logistic_regression_in_the_text() -> None:
    sound = [m for part in parts(None) for m in tables.TASKS[part].methods if "published" not in m and m != "angles β=0.1"]
    mean = lambda setting, method, measure: fmean(  # noqa: E731
        runs(None, setting, method, held_out(None, setting, method, 0.1), measure).values()
    )
    text = " ".join(page("geodp.md").split())
    for setting in ("σ=10", "σ=1"):
        assert mean(setting, "angles β=0.1", "test_loss") > max(mean(setting, m, "test_loss") for m in {*sound})
    loud, quiet = (mean(setting, "angles β=0.1", "test_accuracy") for setting in ("σ=10", "σ=1"))
    assert loud < min(mean("σ=10", m, "test_accuracy") for m in {*sound})
    assert quiet > mean("σ=1", "direction", "test_accuracy")
    assert f"by accuracy too ({loud:.1f} %). At σ = 1 they have {quiet:.1f} %, more than `direction`" in text


def test_geodp_logistic_regression_at_three_bounds() -> None:
    def losses(method: str) -> list[str]:
        tried = [tables.tried(measured("geodp-fig5")["tuning"], tables.TASKS[part], method, "σ=10") for part in parts(None)]
        found = {pick: score for each in tried for pick, score in each.items()}
        return [f"{-max(score for pick, score in found.items() if pick[1] == bound):.2f}" for bound in (0.1, 1.0, 10.0)]

    one, two, three = losses("direction")
    best = losses("DP")
    text = " ".join(page("geodp.md").split())
    assert f"(held out, {one}, {two} and {three} with C = 0.1, 1 and 10, where DP has {best[0]}, {best[1]} and {best[2]})" in text


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
    assert len(values) in (1, 3)
    part = task if method in tables.TASKS[task].methods else f"{task}-companions"
    true = measured("geodp-tables")["epsilon"][f"{part} | {setting} | {method}"]
    form = "{:.3g}" if task == "geodp-table2" else "{:,.0f}"
    label = row_label(setting, method) + (", no momentum" if still else "")
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
    (loud, quiet, _), (loud_psac, quiet_psac, _) = (
        gaps("geodp-table3", f"{published}+{rule}", published) for rule in ("AUTO-S", "PSAC")
    )
    assert f"({loud} and {loud_psac} points at σ = 0.1, {quiet} and {quiet_psac} at σ = 0.01)" in text


def test_geodp_with_twice_the_steps_on_cifar() -> None:
    plain, halved, published = (
        best_of("geodp-table3", "σ=0.1", m) for m in ("DP", "DP B=8192", "GeoDP as published β=1 B=8192")
    )
    text = " ".join(page("geodp.md").split())
    more = tables.difference(halved, plain, 1).lstrip("+")
    quiet = fmean(best_of("geodp-table3", "σ=0.01", "DP B=8192").values())
    said = f"DP has {fmean(halved.values()):.1f} % at σ = 0.1, {more} more than with B = 16,384, and {quiet:.1f} % at σ = 0.01"
    assert said in text
    behind = fmean(halved.values()) - fmean(published.values())
    assert f"gains nothing by them, {fmean(published.values()):.1f} %, {behind:.1f} behind DP" in text
    theirs = fmean(best_of("geodp-table3", "σ=0.01", "GeoDP as published β=1 B=8192").values())
    assert f"At σ = 0.01 it has {theirs:.1f} % with them, {quiet - theirs:.1f} behind DP" in text


def test_geodp_without_noise() -> None:
    text = " ".join(page("geodp.md").split())
    assert f"the network has {noise_free('geodp-tables', 'geodp-table2')} (paper: 99.11)" in text
    assert f"(1,953 steps), ours has {noise_free('geodp-tables', 'geodp-table3', seeds=1)} % (one seed," in text
    assert tables.TASKS["geodp-table3-noise-free"].common["steps"] == 1953


@pytest.mark.parametrize("task", ["geodp-table2", "geodp-table3"])
def test_geodp_tables_have_no_other_rows(task: str) -> None:
    sigmas = tuple(f"{setting} " for setting in tables.TASKS[task].settings)
    shown = [line for line in below("geodp.md", "lr, C, momentum") if line[0].startswith(sigmas)]
    assert len(shown) == len(trained(task))


# -- the pages of the methods ---------------------------------------------------------------------------------------


def test_what_geodps_page_says_of_speed_and_precision() -> None:
    text = " ".join(method_page("geodp.md").split())
    large, small = (measured(name)["ratio_to_iso"] for name in ("geodp-d1e6", "geodp-d1e6-image16"))
    assert {f"{large[f'geodp {form}']:.2f}" for form in ("direction", "shrink")} == {"0.99"}
    assert "they cost what ISO costs: 0.99× on a convolutional network" in text
    assert f"{large['geodp angles']:.2f}× there, and {small['geodp angles']:.1f}× with `--image 16`" in text
    assert max(large["geodp direction"], large["geodp shrink"]) <= 1.1
    assert max(large["geodp angles"], small["geodp angles"]) <= 1.5
    error = {name: f"{value:.0e}".replace("e-0", "e-") for name, value in measured("geodp-check-d1e7")["relative_error"].items()}
    assert f"relative error of {error['normal']}, {error['×1e30']} at 1e30 and {error['×1e-30']} at 1e-30" in text


def test_what_geodps_page_says_of_training() -> None:
    text = " ".join(method_page("geodp.md").split())
    iso = held_out(None, "σ=10", "DP")
    assert iso[1] == 10.0
    loss = {
        m: f"{fmean(runs(None, 'σ=10', m, held_out(None, 'σ=10', m), 'test_loss').values()):.2f}"
        for m in ("DP", "DP+PSAC", "DP+AUTO-S", "direction")
    }
    assert f"a loss of {loss['DP']} with DP-SGD at C = 10, {loss['DP+PSAC']} with PSAC, {loss['DP+AUTO-S']} with AUTO-S" in text
    assert f"and {loss['direction']} with `direction`, each tuned" in text
    names = ("DP", "DP+AUTO-S", "DP+PSAC", "direction", "GeoDP as published β=0.1")
    plain, auto_s, psac, direction, published = (f"{fmean(best_of('geodp-table2', 'σ=10', m).values()):.1f}" for m in names)
    assert auto_s == plain
    assert f"has {plain} % with DP-SGD and with AUTO-S, {psac} with PSAC, {direction} with `direction`, and" in text
    assert f"{published} with GeoDP as published" in text
    first = " ".join(page("geodp.md").split())
    reported = "The paper reports 93.58 for GeoDP; as published it has"
    assert f"plain DP-SGD with a fitting step has {plain} %. {reported} {published}" in first


def test_what_the_companions_page_says_of_training() -> None:
    iso = best_of("geodp-table2", "σ=10", "DP")
    gaps = {m: tables.difference(best_of("geodp-table2", "σ=10", f"DP+{m}"), iso, 1) for m in ("PSAC", "AUTO-S", "IS")}
    sur = tables.difference(best_of("geodp-table2", "σ=10", "DP+SUR"), iso, 0)
    assert gaps["AUTO-S"].startswith("+0.0 ")
    text = " ".join(method_page("companions.md").split())
    assert f"PSAC is {gaps['PSAC'].split(' ')[0]} points and AUTO-S even with DP-SGD, IS {gaps['IS']}, SUR {sur}:" in text
