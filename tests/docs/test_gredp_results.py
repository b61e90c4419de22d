"""Every row of GReDP's tables, and what the pages of the methods say of them, follows from the runs in the files beside them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, stdev

import pytest
from scipy.stats import t

from erlangen.experiments.gredp import NETWORKS, TABLE_2, Network
from erlangen.models import make_model
from erlangen.training.config import TrainConfig
from tests.docs.runs import lines, measured, method_page, noise_free, rate, rest, spent, spread, tables
from tests.docs.test_results import content, page, paired
from tests.scripts import script

transfer = script("gredp_transfer")

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


TUNED = ("DP-SGD", "AUTO-S", "Spectral-DP", "DP-SGD, circulant", "Spectral-DP, circulant")


def all_tuned(network: str) -> str:
    return f"gredp-{network.lower().replace('-', '') if network != 'ResNet-20' else 'resnet20'}-tuned"


@pytest.mark.parametrize("network", ["Model-3", "ResNet-20", "AlexNet"])
@pytest.mark.parametrize("method", TUNED)
def test_with_c_and_momentum_tuned(network: str, method: str) -> None:
    task, found = all_tuned(network), measured("gredp")
    picks = tables.cells(found["runs"], task, "test_accuracy").get(("true", method))
    tried = tables.tried(found["tuning"], tables.TASKS[task], method, "true")
    assert len(tried) == (12 if network == "Model-3" else 8)
    if picks is None:
        assert (network, method) == ("ResNet-20", "Spectral-DP, circulant")
        assert "The filter on circulant layers was tuned, and is not measured yet." in page("gredp.md")
        return
    pick, best = tables.chosen(found, task, "true", method, picks), tables.tuned(found, task, "test_accuracy")
    assert pick == max(tried, key=tried.__getitem__)
    assert len(picks[pick]) == 3
    rivals = ("–" if method == rival else paired(picks[pick], best["true", rival]) for rival in ("DP-SGD", "AUTO-S"))
    cells = [method, spent("gredp", task, "true", method), rate(pick), f"{pick[1]:g}", f"{pick[2]:g}", spread(picks[pick]), *rivals]
    assert rest("gredp.md", cells) == []
    if network == "Model-3":
        at_best = [100 * value for (length, *_), value in tried.items() if length == 1.0 == pick[0]]
        assert max(at_best) - min(at_best) < 2.5


def test_what_tuning_is_worth_on_alexnet_and_resnet_20() -> None:
    """Wherever it is said."""
    found, text = measured("gredp"), " ".join(page("gredp.md").split())
    first, best = (tables.tuned(found, name, "test_accuracy") for name in ("gredp-alexnet", "gredp-alexnet-tuned"))
    sound = {method: fmean(values.values()) for (setting, method), values in first.items() if setting == "true"}
    now = {method: fmean(values.values()) for (_, method), values in best.items()}
    assert max(sound, key=sound.__getitem__) == "Spectral-DP, circulant"
    said = f"bring DP-SGD to {now['DP-SGD']:.1f} %: Table 1, with momentum 0.9 and the step that its trials chose"
    said += f", has {sound['DP-SGD']:.1f}"
    assert f"{said}, and its best sound row, both methods together, {max(sound.values()):.1f}." in text
    half = tables.cells(found["runs"], "gredp-steps-alexnet", "test_accuracy")["ε=2 true", "DP-SGD"][0.5, 1.0, 0.9]
    assert f"Half the step alone makes it [{fmean(half.values()):.1f}]" in text
    assert f"DP-SGD has {now['DP-SGD']:.1f} % on AlexNet where Table 1's grid gave it {sound['DP-SGD']:.1f}" in text
    blocks = paired(best["true", "DP-SGD, circulant"], best["true", "DP-SGD"])
    resnet = tables.tuned(found, "gredp-resnet20-tuned", "test_accuracy")
    gain = paired(resnet["true", "DP-SGD, circulant"], resnet["true", "DP-SGD"])
    assert f"blocks are worth {blocks} points; on ResNet-20, tuned alike, {gain}." in text
    model3 = tables.tuned(found, "gredp-model3-tuned", "test_accuracy")
    third = paired(model3["true", "DP-SGD, circulant"], model3["true", "DP-SGD"])
    told = " ".join(method_page("gredp.md").split())
    assert f"they are worth {third} on Model-3, {gain} on ResNet-20 and {blocks} on AlexNet" in told
    told = " ".join(page("../which-mechanism.md").split())
    assert f"they gain {blocks} on AlexNet, {third} on Model-3 and {gain} on ResNet-20" in told
    said = f"has {sound['DP-SGD']:.1f} % with momentum 0.9 and the step length that short trials chose"
    assert f"{said}, and {now['DP-SGD']:.1f} without momentum at half that length" in told
    assert TrainConfig().momentum == 0.9
    tried = {m: tables.tried(found["tuning"], tables.TASKS["gredp-alexnet-tuned"], m, "true") for m in TUNED}
    gaps = [100 * (of[length, c, 0.0] - of[length, c, 0.9]) for of in tried.values() for length in (0.5, 1.0) for c in (0.1, 1.0)]
    worse = sum(gap > 0 for gap in gaps)
    assert f"Momentum 0.9 is worse in {worse} of the {len(gaps)} pairs of trials, by {fmean(gaps):.1f} points in the mean." in text
    chosen, next_best = sorted(tried["Spectral-DP"].values(), reverse=True)[:2]
    assert f"0.2 points ahead on held-out records ({100 * chosen:.1f} and {100 * next_best:.1f} %)" in text
    assert f"{100 * (chosen - next_best):.1f}" == "0.2"
    still = tables.cells(found["runs"], "gredp-resnet20-tuned", "test_accuracy")["true", "DP-SGD"][1.0, 0.1, 0.0]
    before = tables.tuned(found, "gredp-resnet20", "test_accuracy")["true", "DP-SGD, circulant"]
    assert f"({fmean(before.values()):.2f} above), and the dense one is not ({spread(still)} at its best without)" in text


def test_what_stays_of_model_3s_gains_when_all_is_tuned() -> None:
    dense_then_circulant = ["Spectral-DP", "DP-SGD", "Spectral-DP, circulant", "DP-SGD, circulant"]
    blocks = ["DP-SGD, circulant", "DP-SGD", "Spectral-DP, circulant", "Spectral-DP"]
    filtered, circulant = (
        tables.pooled(measured("gredp"), "gredp-model3-tuned", "test_accuracy", names).removesuffix(" (6 pairs)")
        for names in (dense_then_circulant, blocks)
    )
    text = " ".join(page("gredp.md").split())
    assert f"Spectral-DP - DP-SGD {filtered} over six pairs" in text
    assert f"circulant - dense {circulant}." in text


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


@pytest.mark.parametrize("convolutions", [0, 1, 2])
def test_gredp_transfer_without_privacy(convolutions: int) -> None:
    found = [r for r in measured("gredp-transfer-plain")["runs"] if r["key"][:2] == [convolutions, transfer.PLAIN]]
    theirs = f"{transfer.PAPER_PLAIN[convolutions - 1]:g}" if convolutions else "–"
    label = f"{convolutions}Conv" if convolutions else "head"
    values = spread({r["key"][4]: 100 * r["test_accuracy"] for r in found})
    assert rest("gredp.md", [f"{label}, no privacy", "–", values, "–", theirs]) == []


def of_five(method: str) -> dict[int, float]:
    found = measured("gredp-transfer-five")
    best = transfer.best(found, 1, method, 1.0)
    assert best == 0.3, "the longest of the grid"
    return {r["key"][4]: 100 * r["test_accuracy"] for r in found["runs"] if r["key"][:4] == [1, method, 1.0, best]}


@pytest.mark.parametrize("method", transfer.METHODS)
def test_gredp_transfer_from_half_of_the_classes(method: str) -> None:
    true = " / ".join(f"{e:.2f}" for e in transfer.true_epsilon(method, 1.0))
    gap = "–" if method == "DP-SGD" else paired(of_five(method), of_five("DP-SGD"))
    assert rest("gredp.md", [f"five classes, {method}", true, spread(of_five(method)), gap]) == []


def test_what_private_training_adds_to_half_of_the_classes() -> None:
    public = 100 * measured("gredp-transfer-five")["public_accuracy"]
    text = " ".join(page("gredp.md").split())
    assert f"has {public:.1f} % on all ten classes" in text
    assert f"is worth {fmean(of_five('DP-SGD').values()) - public:.0f} points here" in text


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


def in_blocks(task: str, setting: str, method: str, length: float, bound: float = 1.0) -> float:
    """The one seed with circulant layers."""
    return ablated(f"{task}-circulant", setting, f"{method}, circulant", length, bound)[0]


BLOCKS = [m for m in ABLATED if m != "GReDP"]


@pytest.mark.parametrize("method", BLOCKS)
def test_gredp_ablations_with_circulant_layers(method: str) -> None:
    for bound in (0.1, 1.0):
        cells = [f"{in_blocks('gredp-table3', level, method, 1.0, bound):.2f}" for level in LEVELS]
        assert rest("gredp.md", [f"C = {bound:g} {method}, circulant", *cells]) == []
    by_size = [f"{in_blocks('gredp-fig4', f'B={b}', method, 1.0):.2f}" for b in (256, 512, 1024, 2048)]
    by_rate = [f"{in_blocks('gredp-fig5', 'ε=2', method, lr * 10):.2f}" for lr in (0.001, 0.01, 0.025, 0.05, 0.1)]
    assert rest("gredp.md", [f"{method}, circulant layers", *by_size, *by_rate]) == []


def test_circulant_layers_make_no_difference_on_lenet() -> None:
    """Over the eight cells of Table 3, beside the means of the dense ones."""
    def gap(method: str) -> str:
        cells = [(level, bound) for bound in (0.1, 1.0) for level in LEVELS]
        blocks = {k: in_blocks("gredp-table3", level, method, 1.0, bound) for k, (level, bound) in enumerate(cells)}
        plain = {k: fmean(ablated("gredp-table3", level, method, 1.0, b).values()) for k, (level, b) in enumerate(cells)}
        return paired(blocks, plain)

    said = " ".join(page("gredp.md").split())
    iso, filtered, published = map(gap, BLOCKS)
    assert f"{iso} points from the dense mean with DP-SGD, {filtered} with Spectral-DP and {published} as published" in said


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


def methods_of(*tasks: str) -> set[str]:
    """What the tasks whose names begin so have results of."""
    return {row["key"][1] for row in measured("gredp")["runs"] if str(row["key"][0]).startswith(tasks)}


def test_what_is_not_run() -> None:
    """What the page lists as lacking is lacking in the files; what has been run since must leave the list."""
    first = methods_of("gredp-table1", *TASKS.values())
    assert rest("gredp.md", ["Table 1"]) == ["circulant layers with each layer clipped, and with AUTO-S"]
    assert "AUTO-S, circulant" not in first
    assert not {m for m in first if m.startswith((*TO_THE_LETTER,)) and m.endswith("circulant") and m not in LABELS}

    assert rest("gredp.md", ["Table 2"]) == [
        "CIFAR-100; Spectral-DP as published, and each layer clipped; DP-SGD without momentum and at a second C"
    ]
    assert {row["key"][1] for row in measured("gredp-transfer")["runs"]} == set(LABELS)

    ablations = ("gredp-table3", "gredp-fig3", "gredp-fig4", "gredp-fig5")
    (all_of_them,) = rest("gredp.md", ["Table 3, Figures 3 to 5"])
    assert all_of_them == "each layer clipped; AUTO-S and DP-SGD without momentum, but at ε = 2 in Figure 3"
    blocks = {f"{method}, circulant" for method in BLOCKS}
    assert methods_of("gredp-table3", "gredp-fig4", "gredp-fig5") == {*ABLATED, *blocks}
    (circulant,) = rest("gredp.md", ["Table 3, Figures 3 and 5"])
    assert circulant == (
        "circulant layers on ResNet-20 and AlexNet (but two rates of Figure 5 there), and in LeNet-5's Figure 3"
    )
    in_tasks = {row["key"][0] for row in measured("gredp")["runs"] if row["key"][1] in blocks}
    whole = {f"gredp-{name}{network}-circulant" for name in ("table3", "fig4", "fig5") for network in ("", "-model3")}
    others = {"gredp-fig3-model3-circulant", "gredp-fig4-resnet20-circulant", "gredp-fig4-alexnet-circulant"}
    assert {name for name in in_tasks if name.startswith(ablations)} == {*whole, *others, "gredp-fig5-alexnet-circulant"}
    seen = {row["key"][3] for row in measured("gredp")["runs"] if row["key"][0] == "gredp-fig5-alexnet-circulant"}
    assert seen == {0.5, 1.0}
    assert methods_of(*ablations) == {*ABLATED, *blocks, "AUTO-S", "DP-SGD without momentum"}
    assert {row["key"][2][:4] for row in measured("gredp")["runs"] if row["key"][0].startswith("gredp-fig3")} == {"ε=2 "}
    assert set(content("gredp-fig3-lenet.json")["cells"]) == methods_of("gredp-fig3") - blocks


# -- the pages of the methods ---------------------------------------------------------------------------------------


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


def test_what_gredps_page_says_of_layers_clipped_each() -> None:
    def layered(method: str, form: str = ".3g") -> tuple[str, str]:
        """Mean accuracy, and true ε by PLD."""
        task = "gredp-table1-layers"
        (values,) = tables.cells(measured("gredp")["runs"], task, "test_accuracy")["claimed", method].values()
        return f"{fmean(values.values()):.1f} %", spent("gredp", task, "claimed", method, form).split(" ")[0]

    complex_, at = layered("GReDP as published, complex")
    real, none = layered("GReDP as published, real")
    each, least = layered("GReDP as published, per-sample", ".2g")
    spectral, theirs = layered("Spectral-DP as published")
    once = spent("gredp", "gredp-table1", "claimed", "GReDP as published", ".3g").split(" ")[0]
    text = " ".join(method_page("gredp.md").split())
    assert f"| GReDP, `complex`, clipped once | {once} |" in text
    assert f"| GReDP, `complex`, each of the five layers clipped | {at} | {complex_} |" in text
    assert f"| GReDP, `real` | {none} | {real} |" in text
    assert f"| GReDP, `per-sample` | {least} | {each}: it learns nothing |" in text
    told = "| Spectral-DP, each layer clipped and noised by itself |"
    assert f"{told} {theirs} (18.2 if each of the ten tensors is) | {spectral} |" in text
    assert f"ε = 1 of GReDP's Table 1 is then {theirs}" in " ".join(method_page("spectral-dp.md").split())


def test_what_the_methods_pages_say_of_lenet() -> None:
    best = tables.tuned(measured("gredp"), "gredp-table1", "test_accuracy")
    iso = best["true", "DP-SGD"]
    assert f"({paired(best['true', 'DP-SGD, circulant'], iso)} points for DP-SGD)" in method_page("gredp.md")
    assert f": {paired(best['true', 'Spectral-DP'], iso)} points against a tuned DP-SGD" in method_page("spectral-dp.md")


def test_from_which_size_circulant_layers_are_faster() -> None:
    ratios = {(r["layer"], r["size"], r["block"]): (r["plain"], r["private"]) for r in measured("circulant")["ratios"]}
    text = " ".join(method_page("gredp.md").split())
    for layer, start, far, block in (("linear", 512, 2048, 32), ("conv 3×3", 64, 128, 4), ("conv 3×3", 64, 128, 16)):
        near, there = ratios[layer, start, block], ratios[layer, far, block]
        names = ("linear", "features") if layer == "linear" else ("convolution 3×3", "channels")
        (first, second) = (f"{plain:.2f}×, {private:.2f}×" for plain, private in (near, there))
        assert f"| {names[0]}, {block} | {start} {names[1]} | {first} | {far:,} | {second} |" in text
        assert max(near) < 1
        smaller = [max(pair) for (kind, size, _), pair in ratios.items() if kind == layer and size < start]
        assert min(smaller) > 1
    assert f"smaller layers are slower, up to {max(max(pair) for pair in ratios.values()):.1f}×" in text


def test_what_a_step_costs() -> None:
    """In multiples of an ISO step on the same network, none above 1.3."""
    text, names = method_page("spectral-dp.md"), ("alexnet", "model3", "resnet20", "d1e6", "d1e6-image16")
    for name in names:
        found = measured(f"spectral-{name}")
        spectral, gredp = (found["ratio_to_iso"][method] for method in ("spectral", "gredp"))
        assert f"| {found['d']:,} | {found['batch']} | {spectral:.2f} | {gredp:.2f} |" in text
        assert max(spectral, gredp) <= 1.3
