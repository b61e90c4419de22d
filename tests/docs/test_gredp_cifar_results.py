"""Every row of GReDP's ablations on CIFAR-10 follows from the runs in the file beside them."""

from __future__ import annotations

from statistics import fmean

import pytest

from erlangen.experiments.gredp import NETWORKS, Network
from tests.docs.runs import lines, measured, method_page, noise_free, rest, spent, spread, tables
from tests.docs.test_results import page, paired

CIFAR = tuple(n for n in NETWORKS if n.data == "cifar10")
PAGE = "gredp-cifar.md"
LEVELS = ("ε=0.5", "ε=1", "ε=1.5", "ε=2")
METHODS = ("DP-SGD", "Spectral-DP", "GReDP", "GReDP as published")
ALONG = (*METHODS[:3], "AUTO-S", "DP-SGD without momentum", METHODS[3])
LENGTH = {"model3": 1.0, "resnet20": 3.0, "alexnet": 1.0}
LETTER = {
    "Spectral-DP as published": ("Spectral-DP", 1), "GReDP as published, complex": ("GReDP", 2),
    "GReDP as published, real": ("the same, real noise (Eq. 11)", None),
    "GReDP as published, per-sample": ("the same, noise on each sample (line 7)", None),
}  # fmt: skip


def runs(task: str, setting: str, method: str, length: float, bound: float = 1.0, momentum: float = 0.9) -> dict[int, float]:
    """seed → test accuracy in %"""
    kind = "claimed" if "published" in method else "true"
    found = tables.cells(measured("gredp")["runs"], task, "test_accuracy").get((f"{setting} {kind}", method), {})
    return found.get((length, bound, momentum), {})


def one(values: dict[int, float]) -> str:
    return f"{values[0]:.2f}" if values else "–"


@pytest.mark.parametrize("method", LETTER)
def test_to_the_letter(method: str) -> None:
    label, paper = LETTER[method]
    cells = [label]
    for n in CIFAR:
        task = f"gredp-{n.model}-layers"
        (values,) = tables.cells(measured("gredp")["runs"], task, "test_accuracy")["claimed", method].values()
        assert len(values) == 3
        cells += [spread(values), spent("gredp", task, "claimed", method, ".3g")]
        cells += ["–" if paper is None else f"{n.table1[paper]:g}"]
    assert rest(PAGE, cells) == []


def test_without_privacy() -> None:
    cells = [part for n in CIFAR for part in (noise_free("gredp", f"gredp-{n.model}"), "∞", f"{n.plain:g}")]
    assert rest(PAGE, ["no privacy", *cells]) == []


def along(n: Network, method: str) -> dict[int, float]:
    momentum = 0.0 if method.endswith("without momentum") else 0.9
    return runs(f"gredp-fig3-{n.model}", "ε=2", method, LENGTH[n.model], momentum=momentum)


@pytest.mark.parametrize("method", ALONG)
def test_along_training(method: str) -> None:
    cells = [method, spent("gredp", "gredp-fig3-model3", "ε=2 " + ("claimed" if "published" in method else "true"), method)]
    for n in CIFAR:
        values = along(n, method)
        assert len(values) == 3
        cells += [spread(values), "–" if method == "DP-SGD" else paired(values, along(n, "DP-SGD"))]
    assert rest(PAGE, cells) == []


def test_along_training_nobody_begins_in_front() -> None:
    """After two epochs, and what the page says of it."""
    def first(n: Network, method: str) -> float:
        key = [f"gredp-fig3-{n.model}", method]
        return fmean(100 * row["curve"][0]["test_accuracy"] for row in measured("gredp")["runs"] if row["key"][:2] == key)

    gaps = [first(n, m) - first(n, "DP-SGD") for n in CIFAR for m in ("Spectral-DP", "GReDP")]
    assert f"between {min(gaps):.1f} and {max(gaps):+.1f} points" in page(PAGE)


@pytest.mark.parametrize("network", CIFAR, ids=lambda n: n.label)
@pytest.mark.parametrize("bound", [0.1, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_clipping_bounds_and_levels(network: Network, method: str, bound: float) -> None:
    task = f"gredp-table3-{network.model}"
    values = [one(runs(task, level, method, LENGTH[network.model], bound)) for level in LEVELS]
    if set(values) == {"–"}:
        assert not [line for line in lines(PAGE) if line[0] == f"{network.label}, C = {bound:g}, {method}"]
        return
    assert rest(PAGE, [f"{network.label}, C = {bound:g}, {method}", *values]) == []
    theirs = {0.1: network.small_clip, 1.0: network.unit_clip}[bound]
    assert rest(PAGE, [f"{network.label}, C = {bound:g}, paper's GReDP", *(f"{value:g}" for value in theirs)]) == []


@pytest.mark.parametrize("network", CIFAR, ids=lambda n: n.label)
@pytest.mark.parametrize("method", [m for m in METHODS if m != "GReDP"])
def test_batch_sizes_and_learning_rates(network: Network, method: str) -> None:
    sizes = [one(runs(f"gredp-fig4-{network.model}", f"B={b}", method, 1.0)) for b in (256, 512, 1024, 2048)]
    rates = [one(runs(f"gredp-fig5-{network.model}", "ε=2", method, lr)) for lr in (0.01, 0.1, 0.25, 0.5, 1.0)]
    assert rest(PAGE, [f"{network.label}, {method}", *sizes, *rates]) == []


def test_true_epsilons_of_the_ablations() -> None:
    for label, method, kind in (
        ("*true ε of the sound rows (PLD / RDP)*", "DP-SGD", "true"),
        ("*true ε as published, at a claim of the column's*", "GReDP as published", "claimed"),
    ):
        true = [spent("gredp", "gredp-table3-model3", f"{level} {kind}", method) for level in LEVELS]
        assert [label, *true] in [[line[0], *(cell.strip("*") for cell in line[1:])] for line in lines(PAGE)]
    by_pld = lambda figure, setting: spent("gredp", figure, f"{setting} claimed", "GReDP as published").split(" ")[0]  # noqa: E731
    sizes = [by_pld("gredp-fig4-model3", f"B={b}") for b in (256, 512, 1024, 2048)]
    rate = by_pld("gredp-fig5-model3", "ε=2")
    assert rest(PAGE, ["*true ε as published (PLD)*", *sizes, rate, rate, rate, rate, rate]) == []


def apart(n: Network, method: str) -> str:
    """The mean difference to DP-SGD over the cells of Table 3 in which both learn something, and its 95 % interval."""
    mine: dict[int, float] = {}
    theirs: dict[int, float] = {}
    for bound in (0.1, 1.0):
        for level in LEVELS:
            pair = [runs(f"gredp-table3-{n.model}", level, m, LENGTH[n.model], bound) for m in (method, "DP-SGD")]
            if all(pair) and min(values[0] for values in pair) > 20:
                mine[len(mine)], theirs[len(theirs)] = pair[0][0], pair[1][0]
    return f"{paired(mine, theirs)} ({len(mine)})" if len(mine) > 1 else "–"


@pytest.mark.parametrize("method", METHODS[1:])
def test_differences_over_the_cells_of_table_3(method: str) -> None:
    assert rest(PAGE, [f"{method} - DP-SGD", *(apart(n, method) for n in CIFAR)]) == []


def test_what_the_bound_is_worth_at_a_fixed_step_length() -> None:
    small, large = {}, {}
    for n in CIFAR:
        for method in METHODS:
            for level in LEVELS:
                pair = [runs(f"gredp-table3-{n.model}", level, method, LENGTH[n.model], bound) for bound in (0.1, 1.0)]
                if all(pair) and min(values[0] for values in pair) > 20:
                    small[len(small)], large[len(large)] = pair[0][0], pair[1][0]
    assert f"C = 1 is {paired(large, small)} points from C = 0.1 over {len(small)} cells" in " ".join(page(PAGE).split())


def at_rate(n: str, method: str, lr: float) -> dict[int, float]:
    found = runs(f"gredp-steps-{n}", "ε=2", method, 10 * lr)
    assert len(found) == 5
    return found


@pytest.mark.parametrize("lr", [0.05, 0.1])
@pytest.mark.parametrize("network", ["Model-3", "AlexNet"])
def test_the_filter_at_half_the_rate(network: str, lr: float) -> None:
    iso, filtered = (at_rate(network.lower().replace("-3", "3"), m, lr) for m in METHODS[:2])
    assert rest(PAGE, [network, f"{lr:g}", spread(iso), spread(filtered), paired(filtered, iso)]) == []


def test_what_is_left_of_the_filters_gain_at_the_better_rate() -> None:
    """Wherever it is said."""
    left = {}
    for n in ("model3", "alexnet"):
        filtered, iso = (max((at_rate(n, m, lr) for lr in (0.05, 0.1)), key=lambda v: fmean(v.values())) for m in METHODS[1::-1])
        left[n] = paired(filtered, iso)
    flowing = lambda name: " ".join(page(name).split())  # noqa: E731
    assert f"the filter is worth {left['alexnet']} points there and {left['model3']} on Model-3" in flowing(PAGE)
    assert f"[{left['alexnet']} points]" in flowing("gredp.md")
    assert f"it stays: {left['model3']} (five pairs each)" in flowing("gredp.md")
    said = f"{left['model3']} points on Model-3 and {left['alexnet']} on AlexNet"
    assert said in " ".join(method_page("spectral-dp.md").split())
    half = [runs(f"gredp-fig5-{n.model}", "ε=2", "DP-SGD", 0.5)[0] for n in CIFAR if n.model == "alexnet"]
    assert f"DP-SGD has {half[0]:.1f} % on AlexNet" in page(PAGE)


def in_blocks(n: str, method: str, lr: float) -> dict[int, float]:
    found = runs(f"gredp-steps-{n}-circulant", "ε=2", f"{method}, circulant", 10 * lr)
    assert len(found) == 5
    return found


@pytest.mark.parametrize("lr", [0.05, 0.1])
@pytest.mark.parametrize("network", ["Model-3", "AlexNet"])
def test_circulant_layers_at_half_the_rate(network: str, lr: float) -> None:
    n, cells = network.lower().replace("-3", "3"), []
    for method in METHODS[:2]:
        values = in_blocks(n, method, lr)
        cells += [spread(values), paired(values, at_rate(n, "DP-SGD", lr))]
    assert rest(PAGE, [f"{network}, circulant", f"{lr:g}", *cells]) == []


def test_what_circulant_layers_gain_at_the_better_rate() -> None:
    """Wherever it is told: both sides are at the rate that is better for both."""
    better = {"alexnet": 0.05, "model3": 0.1}
    gains = {}
    for n, lr in better.items():
        for find in (at_rate, in_blocks):
            assert lr == max((0.05, 0.1), key=lambda rate: fmean(find(n, "DP-SGD", rate).values()))
        gains[n] = paired(in_blocks(n, "DP-SGD", lr), at_rate(n, "DP-SGD", lr))
    both, third = (paired(in_blocks(n, "Spectral-DP", lr), at_rate(n, "DP-SGD", lr)) for n, lr in better.items())
    alone, filtered = (paired(at_rate(n, "Spectral-DP", lr), at_rate(n, "DP-SGD", lr)) for n, lr in better.items())
    pages = {name: " ".join(page(name).split()) for name in (PAGE, "gredp.md", "../methods/gredp.md", "../which-mechanism.md")}
    assert f"{gains['alexnet']} points on AlexNet (five pairs at 0.05), {gains['model3']} on Model-3 (at 0.1)" in pages[PAGE]
    said = f"{both} points on AlexNet at the better rate, where the filter alone is worth {alone}"
    assert f"{said}, and {third} on Model-3, where it is worth {filtered}." in pages[PAGE]
    assert f"{gains['alexnet']} points on AlexNet, and {both} together with the filter." in pages["gredp.md"]
    assert f"blocks are worth {gains['alexnet']} points for DP-SGD" in pages["../methods/gredp.md"]
    assert f"they still gain [{gains['alexnet']}]" in pages["../which-mechanism.md"]


SEPARATE = [m for m in METHODS if m != "GReDP"]


def circulant(task: str, setting: str, method: str, length: float, bound: float = 1.0) -> dict[int, float]:
    return runs(f"{task}-circulant", setting, f"{method}, circulant", length, bound)


@pytest.mark.parametrize("bound", [0.1, 1.0])
@pytest.mark.parametrize("method", SEPARATE)
def test_bounds_and_levels_with_circulant_layers(method: str, bound: float) -> None:
    """Of Model-3; of the others a row comes with the runs."""
    for n in CIFAR:
        task = f"gredp-table3-{n.model}"
        cells = [one(circulant(task, level, method, LENGTH[n.model], bound)) for level in LEVELS]
        label = f"{n.label}, circulant, C = {bound:g}, {method}"
        if set(cells) == {"–"}:
            assert n.label != "Model-3"
            assert not [line for line in lines(PAGE) if line[0] == label]
        else:
            assert rest(PAGE, [label, *cells]) == []


@pytest.mark.parametrize("network", CIFAR, ids=lambda n: n.label)
@pytest.mark.parametrize("method", SEPARATE)
def test_batch_sizes_and_rates_with_circulant_layers(network: Network, method: str) -> None:
    sizes = [one(circulant(f"gredp-fig4-{network.model}", f"B={b}", method, 1.0)) for b in (256, 512, 1024, 2048)]
    rates = [one(circulant(f"gredp-fig5-{network.model}", "ε=2", method, lr)) for lr in (0.01, 0.1, 0.25, 0.5, 1.0)]
    assert "–" not in sizes
    assert rest(PAGE, [f"{network.label}, circulant, {method}", *sizes, *rates]) == []


def cells_of(n: Network, find: object, method: str) -> list[float | None]:
    """One accuracy for each cell of Table 3 and Figure 4."""
    table, figure = f"gredp-table3-{n.model}", f"gredp-fig4-{n.model}"
    found = [find(table, level, method, LENGTH[n.model], bound) for bound in (0.1, 1.0) for level in LEVELS]  # type: ignore[operator]
    found += [find(figure, f"B={b}", method, 1.0) for b in (256, 512, 1024, 2048)]  # type: ignore[operator]
    return [one.get(0) for one in found]


def where_both_learn(first: list[float | None], second: list[float | None]) -> str:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None and min(a, b) > 20]
    one, other = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
    return f"{paired(one, other)} ({len(pairs)})"


@pytest.mark.parametrize("method", SEPARATE)
def test_what_circulant_layers_gain_over_cells(method: str) -> None:
    gains = [where_both_learn(cells_of(n, circulant, method), cells_of(n, runs, method)) for n in CIFAR]
    assert rest(PAGE, [f"{method}, circulant - dense", *gains]) == []
    if method == "DP-SGD":
        (resnet,) = [g.removesuffix(" (4)") for n, g in zip(CIFAR, gains, strict=True) if n.label == "ResNet-20"]
        assert f"Circulant layers gain most on ResNet-20: {resnet} points" in page(PAGE)


def test_what_is_said_of_circulant_cells() -> None:
    text = " ".join(page(PAGE).split())
    resnet, model3 = (next(n for n in CIFAR if n.label == label) for label in ("ResNet-20", "Model-3"))
    blocks, dense = (cells_of(resnet, find, "DP-SGD")[8:] for find in (circulant, runs))
    said = f"{min(blocks):.1f} to {max(blocks):.1f} % where the dense network has {min(dense):.1f} to {max(dense):.1f}"  # type: ignore[type-var]
    assert said in text
    filtered = [b - f for b, f in zip(blocks, cells_of(resnet, circulant, "Spectral-DP")[8:], strict=True)]  # type: ignore[operator]
    assert sum(filtered) > 0.5 * sum(b - d for b, d in zip(blocks, dense, strict=True))  # type: ignore[operator]
    gaps = [b - d for b, d in zip(*(cells_of(model3, find, "DP-SGD")[:8] for find in (circulant, runs)), strict=True)]  # type: ignore[operator]
    assert f"gain at ε = 2 ({gaps[7]:+.1f} to {gaps[3]:+.1f} points for DP-SGD) and lose up to {-min(gaps[5:7]):.1f} at" in text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", ["Model-3", "AlexNet"])
def test_shorter_steps(network: str, method: str) -> None:
    task = f"gredp-table3-short-{network.lower().replace('-3', '3')}"
    cells = [one(runs(task, level, method, 0.3, bound)) for level in LEVELS[:2] for bound in (0.1, 1.0)]
    assert rest(PAGE, [f"{network}, shorter steps, {method}", *cells]) == []


def test_what_differs_with_shorter_steps() -> None:
    """Over both networks, both levels and both bounds."""
    def cells(method: str) -> dict[int, float]:
        task = "gredp-table3-short-{}".format
        found = [
            runs(task(n), level, method, 0.3, bound)[0]
            for n in ("model3", "alexnet") for level in LEVELS[:2] for bound in (0.1, 1.0)
        ]  # fmt: skip
        return dict(enumerate(found))

    filtered, sound, published = (paired(cells(m), cells("DP-SGD")) for m in METHODS[1:])
    said = f"Spectral-DP is {filtered} points from DP-SGD, GReDP {sound}, and as published, at more ε than it claims, {published}."
    assert said in " ".join(page(PAGE).split())
    gaps = [cells("Spectral-DP")[k] - cells("DP-SGD")[k] for k in range(8)]
    small, one = [gaps[k] for k in (0, 1, 4, 5)], [gaps[k] for k in (2, 3, 6, 7)]
    said = f"{min(small):+.1f} to {max(small):+.1f} points in the four cells at ε = 0.5, and {min(one):+.1f} to {max(one):+.1f}"
    assert said in " ".join(page(PAGE).split())
