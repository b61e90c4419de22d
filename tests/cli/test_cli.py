"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest


def run(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "erlangen.cli.main", *args], capture_output=True, text=True, **options)


def test_train_writes_a_run_and_one_json_object(tmp_path):
    out = tmp_path / "run"
    done = run("train", "--epsilon", "2", "--steps", "5", "--model", "mlp", "--seed", "1", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["guarantee"]["epsilon"]["pld"] <= 2
    assert summary["run"] == str(out)
    assert (out / "weights.safetensors").exists()
    again = run("train", "--out", str(out))
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def test_train_in_plain_words(tmp_path):
    np.savez(tmp_path / "own.npz", x_train=np.zeros((40, 5, 5), np.uint8), y_train=np.arange(40) % 2)
    done = run(
        "train",
        "--data",
        str(tmp_path / "own.npz"),
        "--steps",
        "2",
        "--out",
        str(tmp_path / "r"),
        "--set",
        "model=logistic",
    )
    assert done.returncode == 0, done.stderr
    assert "No public test set" in done.stdout
    assert "ε = 3" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--epsilon", "-1"], "epsilon is -1"),
        (["train", "--delta", "2"], "delta is 2"),
        (["train", "--delta", "soon"], "give a number"),
        (["train", "--data", "nowhere.npz"], "no file at"),
        (["train", "--mechanism", "magic"], "choose one of"),
        (["train", "--set", "colour=red"], "unknown option"),
        (["train", "--set", "colour"], "key=value"),
        (["train", "--noise-multiplier", "1", "--epsilon", "2"], "exclude each other"),
        (["train", "--config", "nowhere.json"], "cannot be read"),
        (["reproduce", "table-of-nothing"], "no preset is called"),
        (["reproduce"], "--list"),
        (["frobnicate"], "No such command"),
    ],
)
def test_misuse_exits_2_without_a_traceback(args, words, tmp_path):
    done = run(*args, *(["--out", str(tmp_path / "r")] if args[0] == "train" else []))
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_reproduce_lists_and_dry_runs():
    listed = json.loads(run("reproduce", "--list", "--json").stdout)
    assert "gredp-table1-lenet5" in [p["name"] for p in listed["presets"]]
    dry = json.loads(run("reproduce", "gredp-table1-lenet5", "--dry-run", "--json").stdout)
    cell = dry["cells"][0]
    assert 0.99 < cell["epsilon"]["pld"] <= 1.0
    assert cell["paper"] == 92.7


def cpu_seconds(code: str) -> float:
    """Processor time of a fresh interpreter, the best of five: other processes on the machine do not count."""
    measure = (
        f"import resource, os\n{code}\nu = resource.getrusage(resource.RUSAGE_SELF)\nprint(u.ru_utime + u.ru_stime)"
    )
    return min(float(subprocess.run([sys.executable, "-c", measure], check=True, capture_output=True, text=True).stdout.split()[-1])
               for _ in range(5))  # fmt: skip


def test_start_up_is_quick():
    assert "Usage" in run("--help").stdout
    assert cpu_seconds("import erlangen.cli.main") < 1.0
    assert cpu_seconds("import torch, erlangen; erlangen.PrivacyEngine") - cpu_seconds("import torch") < 0.3
    loaded = "import sys, erlangen.cli.main; assert 'torch' not in sys.modules and 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded], check=True)
