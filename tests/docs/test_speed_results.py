"""Figures of speed on the pages follow from the raw timings in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from erlangen.models import make_model
from tests.scripts import script

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """The text of a page in one line, without bold type."""
    return " ".join((ROOT / "docs" / name).read_text().replace("**", "").split())


def content(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def milliseconds(name: str, method: str) -> float:
    """The median of a method's raw timings, which is the figure that its file gives."""
    row = content(name)["methods"][method]
    assert row["ms_logical"] == pytest.approx(median(row["ms"]))
    return row["ms_logical"]


def gibibytes(name: str, method: str) -> float:
    return content(name)["methods"][method]["peak_mb"] / 2**10


@pytest.mark.parametrize(("name", "start"), [
    ("gpu-eq-resnet9-d4", "D4 Equivariant-ResNet-9 (7, 14, 28) | 8192 × 4"),
    ("gpu-eq-resnet9-d4-2048", "the same, twice as much at a time | 8192 × 4"),
    ("gpu-resnet9", "ResNet-9 (64, 128, 256) | 4096 × 1"),
    ("gpu-wrn-16-4", "WRN-16-4 with weight standardisation | 4096 × 1"),
])  # fmt: skip
def test_private_over_plain(name: str, start: str) -> None:
    plain, private = (milliseconds(name, method) for method in ("plain", "erlangen"))
    memory = [f"{gibibytes(name, method):.1f}" for method in ("plain", "erlangen")]
    row = f"| {start} | {plain:.1f} ms | {private:.1f} ms | {private / plain:.2f} | {' → '.join(memory)} GiB |"
    assert row in page("results/speed.md")
    asked = content(name)["arguments"]
    command = f"--model {asked['model']} --batch {asked['batch']} " + f"--views {asked['views']} " * (asked["views"] > 1)
    command += f"--physical {asked['physical']} --repeats {asked['repeats']} --warmup {asked['warmup']} --profile --json"
    assert f"python benchmarks/gpu.py {command}" in page("results/speed.md")
    assert len(content(name)["methods"]["erlangen"]["ms"]) == asked["repeats"]


@pytest.mark.parametrize(("name", "bar"), [
    ("gpu-eq-resnet9-d4", 1.3), ("gpu-eq-resnet9-d4-2048", 1.3), ("gpu-resnet9", 1.5), ("gpu-wrn-16-4", 1.5),
])  # fmt: skip
def test_bars_of_private_over_plain(name: str, bar: float) -> None:
    assert milliseconds(name, "erlangen") <= bar * milliseconds(name, "plain")
    assert content(name)["arguments"]["compile"] is False, "on neither side"


STEPS = ("resnet9", "opacus-cnn", "lenet", "eq-resnet9")
METHODS = {
    "plain": "plain SGD", "erlangen": "Erlangen", "functional": "`torch.func` over the whole network",
    "opacus-hooks": "Opacus, hooks", "opacus-functorch": "Opacus, functorch", "opacus-ew": "Opacus, expanded weights",
    "opacus-ghost": "Opacus, ghost",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_the_price_of_privacy_on_a_cpu(method: str) -> None:
    rows = [content(f"step-{model}")["methods"].get(method) for model in STEPS]
    cells = ["–" if row is None else f"{row['ratio']:.2f}× · {row['peak_mb']} MB" for row in rows]
    assert f"| {METHODS[method]} | {' | '.join(cells)} |" in (ROOT / "README.md").read_text().replace("**", "")


def test_the_readme_begins_with_the_ends_of_its_table() -> None:
    ratios = [(method, row["ratio"]) for model in STEPS for method, row in content(f"step-{model}")["methods"].items()]
    ours = [ratio for method, ratio in ratios if method == "erlangen"]
    theirs = [ratio for method, ratio in ratios if method.startswith("opacus")]
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes {min(ours):.2f} to {max(ours):.2f} times as long as a plain SGD step" in said
    assert f"Opacus takes {min(theirs):.2f} to {max(theirs):.2f} times" in said


@pytest.mark.parametrize("model", STEPS)
def test_bars_on_a_cpu(model: str) -> None:
    assert content(f"step-{model}")["methods"]["erlangen"]["ratio"] <= script("guard").BARS[model]


@pytest.mark.parametrize(("batch", "method", "start"), [
    (512, "clipless", "Clipless VGG, 130 thousand parameters, float32"), (4096, "clipless", "the same"),
    (20000, "clipless", "the same"), (4096, "iso", "the same, clipped (ISO)"),
    (4096, "opacus ghost", "the same, Opacus ghost clipping"),
])  # fmt: skip
def test_clipless(batch: int, method: str, start: str) -> None:
    found = content("clipless-gpu-20000" if batch == 20000 else "clipless-gpu")
    rows = found["batches"][str(batch)]
    seconds = {name: median(row["times"]) for name, row in rows.items()}
    ratio, memory = seconds[method] / seconds["plain"], rows[method]["peak_bytes"] / rows["plain"]["peak_bytes"]
    times = [f"{1e3 * seconds[name]:.1f} ms" for name in ("plain", method)]
    assert f"| {start} | {batch} | {' | '.join(times)} | {ratio:.2f} | {memory:.2f}× |" in page("results/speed.md")
    assert round(found["parameters"], -4) == 130_000


def test_beside_opacus() -> None:
    name, methods = "gpu-resnet9-opacus", ("plain", "erlangen", "opacus-hooks", "opacus-ghost")
    time = {method: milliseconds(name, method) for method in methods}
    memory = {method: gibibytes(name, method) for method in methods}
    said = page("results/speed.md")
    assert f"| a step | {' | '.join(f'{t:.1f} ms' for t in time.values())} |" in said
    assert f"| memory | {' | '.join(f'{m:.1f} GiB' for m in memory.values())} |" in said
    faster = [f"{time[m] / time['erlangen']:.1f}" for m in methods[2:]]
    assert f"Erlangen is {' and '.join(faster)} times as fast, with less than a third of the memory" in said
    assert 3 * memory["erlangen"] < min(memory[m] for m in methods[2:])
    assert f"a private ResNet-9 step is {' and '.join(faster)} times as fast" in said, "its first lines"


def test_beside_a_compiled_step() -> None:
    compiled, private = milliseconds("gpu-compile-resnet9", "plain"), milliseconds("gpu-resnet9", "erlangen")
    memory = [gibibytes("gpu-resnet9", "erlangen"), gibibytes("gpu-compile-resnet9", "plain")]
    said = page("results/speed.md")
    assert f"compiled, takes {compiled:.1f} ms" in said
    assert f"{compiled / private:.2f} times as fast as the compiled step without privacy" in said
    assert f"in less memory ({memory[0]:.1f} GiB against {memory[1]:.1f})" in said
    assert f"a private step is {compiled / private:.2f} times as fast as a compiled step without privacy" in said, "its first lines"
    assert f"takes {compiled:.1f} ms" in page("design-notes.md")


def test_replayed_steps() -> None:
    one_by_one, replayed = (
        [milliseconds(name, method) for method in ("plain", "erlangen")] for name in ("gpu-lenet", "gpu-lenet-graph")
    )
    for start, (plain, private) in (("launched one by one", one_by_one), ("replayed, both sides", replayed)):
        assert f"| {start} | {plain:.2f} ms | {private:.2f} ms | {private / plain:.1f} |" in page("results/speed.md")
    assert f"and {one_by_one[1] / replayed[1]:.0f} times since" in page("results/speed.md")
    commits = " and ".join(content(name)["commit"] for name in ("gpu-lenet", "gpu-lenet-graph"))
    assert f"commits {commits}" in page("results/speed.md")
    assert f"commits {commits}" in page("scale.md")


@pytest.mark.parametrize("name", ["gpu-eq-resnet9-d4", "gpu-resnet9", "gpu-wrn-16-4", "gpu-eq-resnet9", "gpu-compile-resnet9"])
def test_the_page_names_the_commit_of_a_figure(name: str) -> None:
    assert content(name)["commit"] in page("results/speed.md")


def test_what_privacy_costs_beside_the_same_pooling() -> None:
    """Medians over rounds, in each of which all methods had their turn."""
    def beside(model: str) -> str:
        ours, joined = (content(f"step-{model}")["methods"][method]["times"] for method in ("erlangen", "joined"))
        return f"{median(a / b for a, b in zip(ours, joined, strict=True)):.2f}×"

    first, second, third, fourth = map(beside, STEPS)
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"privacy costs {first}, {second}, {third} and {fourth} (medians over rounds)" in said


@pytest.mark.parametrize(("name", "repeats"), [("before", 7), ("again", 5), ("joined", 7)])
def test_the_first_row_before(name: str, repeats: int) -> None:
    plain, private = (milliseconds(f"gpu-eq-resnet9-d4-{name}", method) for method in ("plain", "erlangen"))
    before, now = content(f"gpu-eq-resnet9-d4-{name}"), content("gpu-eq-resnet9-d4")
    same = {"repeats": repeats, "graph": None}
    assert {**before["arguments"], **same} == {**now["arguments"], **same}
    row = f"| {before['commit']} | {plain:.1f} ms | {private:.1f} ms | {private / plain:.2f} | [{name}]"
    assert row in page("results/speed.md")


def test_the_readmes_price_of_a_private_step() -> None:
    plain, private = (milliseconds("gpu-eq-resnet9-d4", method) for method in ("plain", "erlangen"))
    assert f"takes {private / 1e3:.2f} s, {private / plain:.2f}× a plain" in (ROOT / "README.md").read_text()


def test_steps_of_whole_runs() -> None:
    runs = json.loads((ROOT / "docs/results/cifar-d4-prior.json").read_text())["cells"]["ε=6"]
    seconds = median(run["seconds"] / run["config"]["steps"] for run in runs)
    assert {run["config"]["max_physical_batch"] for run in runs} == {2112}
    assert f"with parts of 2,112 records a step took {seconds:.3f} s" in page("results/speed.md")


def test_a_compiled_private_step() -> None:
    name = "gpu-compile-private-resnet9"
    said = f"takes {milliseconds(name, 'erlangen'):.1f} ms and {gibibytes(name, 'erlangen'):.1f} GiB"
    assert said in page("results/speed.md")
    assert said.partition(" and ")[0] in page("scale.md")


def test_runs_side_by_side_on_one_gpu() -> None:
    runs = json.loads((ROOT / "docs/results/cifar-d4-prior.json").read_text())["cells"]["ε=8"]
    seconds = max(run["seconds"] for run in runs)
    said = f"took {seconds:.0f} s by their clocks, {seconds / sum(run['config']['steps'] for run in runs):.3f} s for every step"
    assert said in page("results/speed.md")


def test_a_whole_run_and_its_steps() -> None:
    said = page("results/speed.md")
    first, second = (2160 * milliseconds(f"gpu-eq-resnet9-d4{part}", "erlangen") / 6e4 for part in ("", "-2048"))
    assert f"2160 steps of the first row take {first:.1f} minutes, of the second {second:.1f}" in said
    (run,) = json.loads((ROOT / "docs/results/cifar-d4.json").read_text())["cells"]["the paper's 2160 steps, ε 8"]
    assert f"took {run['seconds'] / 60:.1f} minutes on a GPU of its own ({run['seconds']:.0f} s by the run's clock" in said
    assert f"{run['seconds'] / run['config']['steps']:.3f} s a step" in said
    assert run["commit"] in said
    assert f"takes {milliseconds('gpu-eq-resnet9', 'erlangen'):.0f} ms" in said


LAYERS = [  # the rate is that of the sum: 2·k²·T·C·O flops a record, T positions
    ("256 → 256, 3×3 on 4×4", 18 * 16 * 256 * 256), ("256 → 256, 3×3 on 8×8", 18 * 64 * 256 * 256),
    ("the same, standardised filters", 18 * 64 * 256 * 256), ("128 → 256, 3×3 to 8×8, standardised", 18 * 64 * 128 * 256),
    ("128 → 256, 1×1 to 8×8, standardised", 2 * 64 * 128 * 256),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(LAYERS)), ids=[name for name, _ in LAYERS])
def test_gradients_that_are_not_stored(k: int) -> None:
    name, flops = LAYERS[k]
    found = content("kernels-h200")
    layer = found["layers"][k]
    norms, weighed = (min(row["ms"] for row in layer[kind]) for kind in ("norms", "sums"))
    assert layer["unformed_ms"] == pytest.approx(norms + weighed)
    rate = found["owners"] * flops / weighed / 1e9
    cells = [layer["stored_ms"], layer["float32_ms"], norms, weighed, layer["unformed_ms"]]
    assert f"| {name} | {' | '.join(f'{c:.2f}' for c in cells)} | {float(f'{rate:.2g}'):.0f} TF/s |" in page("results/speed.md")
    assert layer["rounding"] < 0.01


def test_other_tiles_of_stored_gradients() -> None:
    gains = {name: 1 - min(tiles.values()) / tiles["None"] for name, tiles in content("kernels-h200")["stored"].items()}
    narrow = [gain for name, gain in gains.items() if ": 64 to" in name]
    wide = [gain for name, gain in gains.items() if ": 128 to" in name]
    said = f"gain {100 * min(wide):.0f} to {100 * max(wide):.0f} % at 128 channels and less than 2 % at 64"
    assert said in page("results/speed.md")
    assert max(narrow) < 0.02


ENSEMBLES = {
    "rep": ("C8 steerable CNN (REP's table)", 64, "bf16"), "lenet": ("LeNet-5 (GReDP's tables)", 500, "float32"),
    "geodp-cnn": ("GeoDP's CNN", 16384, "float32"), "model3": ("Model-3", 500, "bf16"), "resnet20": ("ResNet-20", 500, "bf16"),
    "alexnet": ("AlexNet", 500, "bf16"), "resnet3": ("GeoDP's ResNet", 16384, "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensembles(name: str) -> None:
    before, now = (measured["cases"][name] for measured in content("ensembles-h200")["measured"])
    title, batch, precision = ENSEMBLES[name]
    times = [f"{case['ms']:.0f} ms" if before["ms"] > 200 else f"{case['ms']:.1f} ms" for case in (before, now)]
    cells = [title, f"{now['members']} × {batch:,}", precision, *times, f"{before['ms'] / now['ms']:.1f}×"]
    assert f"| {' | '.join(cells)} | {1e3 * now['ms'] / now['members'] / batch:.1f} µs |" in page("results/speed.md")


def test_ensembles_with_filters_and_blocks() -> None:
    cases = content("ensembles-h200-cifar")["cases"]
    took = {name: f"{case['ms']:.1f} ms" for name, case in cases.items()}
    for name, title in (("model3", "Model-3"), ("resnet20", "ResNet-20"), ("alexnet", "AlexNet")):
        others = (took.get(f"{name}-{kind}", "–") for kind in ("spectral", "circulant"))
        assert f"| {title}, {cases[name]['members']} | {took[name]} | {' | '.join(others)} |" in page("results/speed.md")
        assert {case["batch"] for case in cases.values()} == {500}
    plain, filtered = (cases[name]["ms"] for name in ("alexnet", "alexnet-spectral"))
    said = f"takes {filtered:.1f} ms a step, {filtered / plain:.2f} times DP-SGD's {plain:.1f}"
    assert said in " ".join(page("methods/spectral-dp.md").split())


def test_steps_with_coefficients_in_16_bits() -> None:
    names = ("gpu-eq-resnet9-d4-16-bits", "gpu-eq-resnet9-d4-16-bits-2048")
    (p1, e1), (p2, e2) = ((milliseconds(name, "plain"), milliseconds(name, "erlangen")) for name in names)
    said = " ".join(page("results/speed.md").split())
    assert f"{p1:.1f} ms plain and {e1:.1f} ms private in parts of 1024 ({e1 / p1:.2f})" in said
    assert f"{p2:.1f} and {e2:.1f} ms in parts of 2048 ({e2 / p2:.2f})" in said
    steps = [t for name in names for t in content(name)["methods"]["erlangen"]["ms"]]
    assert f"single steps between {min(steps):.0f} and {max(steps):.0f} ms" in said
    assert f"({e1 / p1:.2f}× on another machine)" in (ROOT / "README.md").read_text()
    assert f"the D4 network costs [{e1 / p1:.2f} and {e2 / p2:.2f} times](" in said


@pytest.mark.parametrize("group", ["D16", "SO(2)"])
def test_groups_beyond_the_grids_symmetries(group: str) -> None:
    name = f"gpu-eq-resnet9-{group.lower().replace('(', '').replace(')', '')}"
    arguments, (plain, private) = content(name)["arguments"], (milliseconds(name, method) for method in ("plain", "erlangen"))
    part = arguments["physical"]
    step = -(-8192 // part) * private / 1000
    cells = [f"{part:,} × 4 views", f"{plain:.1f} ms", f"{private:.1f} ms", f"{private / plain:.2f}", f"{step:.2f} s"]
    label = {"D16": "D16, 904 million multiply-adds a view", "SO(2)": "SO(2), band-limited fields"}[group]
    assert f"| {label} | {' | '.join(cells)} (" in page("results/speed.md")
    assert arguments["batch"] == part
    assert f"{private / plain:.2f}" in page("results/speed.md").partition("## ")[0], "the summary names what costs more, too"
    config = json.loads((ROOT / "docs/results/cifar-groups.json").read_text())["cells"][group][0]["config"]
    named = {option: value for option, value in config["model_options"].items() if value is not None}
    assert (arguments["options"], part) == (named, config["max_physical_batch"])


# --- what a step moves and computes ------------------------------------------------------------------------------------

RECORDS, VIEWS = 8192, 8192 * 4
#: flops and bytes a second that the machine reaches
FLOPS, BYTES = 790e12, 4.8e12


class Convolutions(TorchDispatchMode):
    """Entries of all feature maps and of all kernels."""

    maps = kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default:
            self.maps, self.kernels = self.maps + out.numel(), self.kernels + args[1].numel()
        return out


def test_roofline_of_the_d4_network() -> None:
    """Flops and bytes are counted on the network itself; the time that they take is compared with the one measured."""
    torch.manual_seed(0)
    model = make_model("eq-resnet9-tuned", (3, 32, 32), 10)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), FlopCounterMode(display=False) as forwards, Convolutions() as seen:
        model(x)
    with FlopCounterMode(display=False) as both:
        model(x).sum().backward()
    forward, total = forwards.get_total_flops() / 1e9, both.get_total_flops() / 1e9
    said = page("results/speed.md")
    work = 1e9 * total * VIEWS
    assert f"{1e3 * forward / 2:.0f} million multiply-adds, {forward:.2f} GF forwards and {total:.2f} GF in all" in said
    assert f"{work / 1e12:.0f} TF for 8192 × 4 views: {1e3 * work / FLOPS:.0f} ms at the 790 TF/s" in said
    moved = 10 * 2 * seen.maps * VIEWS
    assert f"{seen.maps / 1e3:.0f} thousand entries a view in bf16, cross memory about ten times ({moved / 1e9:.0f} GB, " in said
    coefficients = sum(p.numel() for p in model.parameters())
    kept = 2 * RECORDS * (2 * seen.kernels + 4 * coefficients)
    assert f"{seen.kernels / 1e6:.2f} million entries" in said
    assert f"({kept / 1e9:.0f} GB, {1e3 * kept / BYTES:.0f} ms)" in said
    took = milliseconds("gpu-eq-resnet9-d4", "erlangen")
    limit = 1e3 * (work / FLOPS + (moved + kept) / BYTES)
    rates = [work / took / 1e9, (moved + kept) / took / 1e9]
    assert f"{limit:.0f} ms, the limit of a machine that overlaps nothing; we are at {took:.0f} ms, {limit / took:.0%} of it" in (
        said.replace(" %", "%")
    )
    shares = [1e12 * rates[0] / FLOPS, 1e12 * rates[1] / BYTES]
    assert f"{rates[0]:.0f} TF/s and {rates[1]:.1f} TB/s, {100 * shares[0]:.0f} and {100 * shares[1]:.0f} % of what each" in said
    part = 1024 * 4 / VIEWS
    crossing = part * moved / 10 / BYTES
    by_kernels = [
        part * VIEWS * 1e9 * (total - forward) / FLOPS, 5 * crossing,
        part * VIEWS * 1e9 * forward / FLOPS + part * RECORDS * 2 * seen.kernels / BYTES,
    ]  # fmt: skip
    for took_there, least in zip(("7.4 ms", "5.7 ms", "5.0 ms"), by_kernels, strict=True):
        assert f"| {took_there} | {1e3 * least:.1f} ms |" in said


# --- dry runs ----------------------------------------------------------------------------------------------------------


def test_dry_runs_predict_the_real_one() -> None:
    kept = content("tan-digits")
    real, dry = kept["real"], kept["dry"]
    accuracy = lambda run: f"{100 * fmean(run['accuracies']):.1f} ± {100 * stdev(run['accuracies']):.1f} %"  # noqa: E731
    assert f"| the real run | 512 | – | {accuracy(real)} | {real['epsilon']:.1f} |" in page("scale.md")
    for k, run in dry.items():
        spent = f"{run['small_epsilon']:.{1 if run['small_epsilon'] < 10 else 0}f}"
        assert f"| k = {k} | {512 // int(k)} | {run['dominance']:.0f} | {accuracy(run)} | {spent} |" in page("scale.md")
        assert abs(fmean(run["accuracies"]) - fmean(real["accuracies"])) < stdev(real["accuracies"])


# --- growth ------------------------------------------------------------------------------------------------------------

AXES = {
    "batch": "records in the batch", "width": "parameters", "image": "pixels", "views": "views of a record",
    "order": "order of the group",
}  # fmt: skip


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("name", "unit", "digits"), [("growth-cpu", 2**20, 0), ("growth-cuda", 2**30, 1)])
def test_growth(name: str, unit: int, digits: int, axis: str) -> None:
    private = content(name)["series"][axis]["private"]
    first, *_, last = private["points"]
    cells = [
        AXES[axis], f"{first['x']:,} – {last['x']:,}", f"{1e3 * first['seconds']:.0f} – {1e3 * last['seconds']:.0f}",
        f"{private['seconds']['r2']:.3f}", f"{first['bytes'] / unit:.{digits}f} – {last['bytes'] / unit:.{digits}f}",
        f"{private['bytes']['r2']:.3f}",
    ]  # fmt: skip
    assert f"| {' | '.join(cells)} |" in page("scale.md")
    assert all(point["seconds"] == pytest.approx(median(point["times"])) for point in private["points"])


def test_growth_on_a_gpu_in_words() -> None:
    series = content("growth-cuda")["series"]
    seconds = {axis: [[p["seconds"] for p in row[side]["points"]] for side in ("plain", "private")] for axis, row in series.items()}
    ratios = sorted(private / plain for axis in seconds for plain, private in zip(*seconds[axis], strict=True))
    said = f"the price of privacy is {ratios[0]:.1f} to {ratios[-1]:.1f} there, {median(ratios):.1f} in the median"
    assert said in page("scale.md")
    eight, sixteen = seconds["order"][1][-2:]
    assert 2.5 < sixteen / eight < 3.5, "from 8 to 16 it triples"


def test_memory_of_a_large_logical_batch() -> None:
    peak = content("gpu-eq-resnet9-d4")["methods"]["erlangen"]["peak_mb"] / 2**10
    assert peak < 6
    assert f"in parts of 1,024 take {peak:.1f} GiB, under a budget of 6 GiB" in page("scale.md")
