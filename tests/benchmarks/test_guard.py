"""The regression guard: losses fail, gains and noise pass, figures of other settings are not compared."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).parents[2]
GUARD = ROOT / "benchmarks" / "guard.py"
STORED = json.loads((ROOT / "benchmarks" / "results" / "step-resnet9.json").read_text())


def changed(factor: float, memory: float = 1.0, **settings) -> dict:
    fresh = copy.deepcopy(STORED) | settings
    fresh["methods"]["erlangen"]["ratio"] *= factor
    fresh["methods"]["erlangen"]["peak_mb"] *= memory
    return fresh


def guard(tmp_path: Path, *results: dict, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    paths = []
    for k, result in enumerate(results):
        paths.append(str(tmp_path / f"{k}.json"))
        Path(paths[-1]).write_text(json.dumps(result))
    return subprocess.run([sys.executable, str(GUARD), *paths, *options], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("factor", "memory", "code"), [(1.0, 1.0, 0), (1.14, 1.0, 0), (0.5, 0.5, 0), (1.16, 1.0, 1), (1.0, 1.2, 1)]
)
def test_a_loss_of_more_than_fifteen_percent_fails(tmp_path, factor, memory, code):
    done = guard(tmp_path, changed(factor, memory))
    assert done.returncode == code, done.stdout
    assert ("LOSS" in done.stdout) == bool(code)


@pytest.mark.parametrize("missing", ["ratio", "peak_mb"])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_figure_that_was_not_measured_is_a_loss(tmp_path, missing, value):
    fresh = changed(1.0)
    fresh["methods"]["erlangen"][missing] = value
    done = guard(tmp_path, fresh)
    assert done.returncode == 1, done.stdout
    assert "LOSS" in done.stdout


def test_one_bad_file_among_good_ones_fails(tmp_path):
    assert guard(tmp_path, changed(1.0), changed(1.5)).returncode == 1


def test_other_settings_are_not_compared(tmp_path):
    done = guard(tmp_path, changed(5.0, batch=64))
    assert done.returncode == 0
    assert "none stored" in done.stdout


@pytest.mark.parametrize("setting", ["graph", "separate", "contiguous", "compile", "float32"])
def test_how_a_step_is_run_is_a_setting(tmp_path, setting):
    """Replayed, separate or compiled steps have ratios of their own; an older file that does not say so ran without."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "gpu-resnet9.json").read_text())
    slow = copy.deepcopy(stored)
    slow["methods"]["erlangen"]["ratio"] *= 2
    slow["arguments"].pop("graph", None)
    assert "LOSS" in guard(tmp_path, slow).stdout
    slow["arguments"]["graph"] = False
    assert "LOSS" in guard(tmp_path, slow).stdout
    slow["arguments"][setting] = not slow["arguments"][setting]
    assert "none stored" in guard(tmp_path, slow).stdout


def test_bars_fail_when_asked_for(tmp_path):
    slow = changed(1.1)
    slow["methods"]["erlangen"]["ratio"] = 1.45
    assert "above the bar" in guard(tmp_path, slow).stdout
    assert guard(tmp_path, slow, options=("--bars",)).returncode == 1


def test_ratios_of_another_gpu_are_not_compared(tmp_path):
    stored = json.loads((ROOT / "benchmarks" / "results" / "gpu-resnet9.json").read_text())
    stored["methods"]["erlangen"]["ratio"] *= 2
    assert "LOSS" in guard(tmp_path, stored).stdout
    assert "none stored" in guard(tmp_path, stored | {"device": "another GPU"}).stdout


def test_every_stored_step_and_gpu_result_is_understood():
    """And finds itself; a second measurement of the same thing may be a little above the first, and passes."""
    module, d4 = script("guard"), ("", "-2048", "-before", "-again", "-joined", "-16-bits", "-16-bits-2048")
    again = {f"gpu-eq-resnet9-d4{part}.json" for part in d4}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("benchmark") in ("step", "gpu") and {"plain", "erlangen"} <= set(result["methods"]):
            assert module.ratios(result), path
            losses = {row.what: row.loss for row in module.compare(result)}
            assert all(loss == 0 for loss in losses.values()) or path.name in again, (path, losses)
            assert all(0 <= loss < module.ALLOWED for loss in losses.values()), (path, losses)


def test_what_make_bench_measures_has_a_stored_figure():
    """Without one nothing would be compared, and nothing could fail."""
    module = script("guard")
    commands = re.findall(r"benchmarks/step\.py --model (\S+) --batch (\d+)", (ROOT / "Makefile").read_text())
    assert {model for model, _ in commands} == set(module.BARS)
    for model, batch in commands:
        assert module.stored_like({"benchmark": "step", "model": model, "batch": int(batch), "threads": 2}), model


def test_the_best_of_several_stored_figures_is_the_one_to_keep(tmp_path):
    """One more measurement of the same thing, a slower one, does not lower the bar."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a-slower.json").write_text(json.dumps(changed(1.4)))
    (folder / "b.json").write_text(json.dumps(STORED))
    assert guard(tmp_path, changed(1.2), options=("--results", str(folder))).returncode == 1
    assert guard(tmp_path, changed(1.1), options=("--results", str(folder))).returncode == 0


@pytest.mark.parametrize(("method", "row"), [("erlangen", {"failed": ["…", "out of memory"]}), ("plain", None), ("erlangen", None)])
def test_a_side_that_is_missing_is_a_loss(tmp_path, method, row):
    """Beside a good file, and by its name."""
    broken = copy.deepcopy(STORED)
    broken["methods"].pop(method)
    if row:
        broken["methods"][method] = row
    done = guard(tmp_path, changed(1.0), broken)
    assert done.returncode == 1
    assert f"1.json, {method}: {'out of memory' if row else 'not measured'}" in done.stderr
