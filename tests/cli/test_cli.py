"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from erlangen.cli import manners
from erlangen.cli.main import app
from erlangen.training.config import TrainConfig
from tests.starting import cpu_seconds


def run(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "erlangen.cli.main", *args], capture_output=True, text=True, **options)


def said(*args: str) -> str:
    """What a command prints that succeeds, in this process: for tests of its words."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_train_writes_a_run_and_one_json_object(tmp_path):
    out = tmp_path / "run"
    done = run("train", "--epsilon", "2", "--steps", "5", "--model", "mlp", "--seed", "1", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["guarantee"]["epsilon"]["pld"] <= 2
    assert summary["run"] == str(out)
    assert (out / "weights.safetensors").exists()
    again = CliRunner().invoke(app, ["train", "--out", str(out)])
    assert again.exit_code == 2
    assert "holds a run already" in again.stderr


def test_what_the_library_warns_of_is_one_line_for_the_user(tmp_path):
    options = ["--noise-multiplier", "1", "--steps", "1", "--model", "logistic", "--set", "graph=true", "--json"]
    done = run("train", *options, "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "erlangen: note: graph is on, but parts run as usual" in done.stderr
    assert ".py" not in done.stderr
    json.loads(done.stdout)


def test_train_in_plain_words(tmp_path):
    np.savez(tmp_path / "own.npz", x_train=np.zeros((40, 5, 5), np.uint8), y_train=np.arange(40) % 2)
    options = ["--data", str(tmp_path / "own.npz"), "--steps", "2", "--set", "model=logistic", "--out", str(tmp_path / "r")]
    words = said("train", *options)
    assert "No public test set" in words
    assert "ε = 3" in words


def test_a_run_with_hardly_any_noise_says_what_it_is(tmp_path):
    options = ["--noise-multiplier", "0.01", "--steps", "1", "--model", "logistic", "--out", str(tmp_path / "r")]
    words = said("train", *options)
    assert "is at most 10^" in words
    assert "pseudo-random, unseeded: for experiments; train with --secure" in words
    assert "Randomness     secure\n" in said("train", *options, "--secure", "--overwrite")
    none = said("train", "--noise-multiplier", "0", *options[2:], "--overwrite")
    assert "No privacy guarantee: ε = ∞" in none
    assert "--secure" not in none, "no generator makes up for that"


MISUSE = [
    (["train", "--epsilon", "-1"], "epsilon is -1"),
    (["train", "--epsilon", "three"], "Invalid value for '--epsilon': 'three': "),
    (["train", "--steps=many"], "Invalid value for '--steps': 'many': "),
    (["train", "--config", "nowhere.json"], "no file at nowhere.json; give a JSON file of options"),
    (["train", "--delta", "2"], "delta is 2"),
    (["train", "--delta", "soon"], "give a number"),
    (["train", "--data", "nowhere.npz"], "no file at"),
    (["train", "--mechanism", "magic"], "choose one of"),
    (["train", "--device", "banana"], "device is 'banana'"),
    (["train", "--batch", "0"], "batch is 0"),
    (["train", "--steps", "0"], "steps is 0"),
    (["train", "--lr", "0"], "lr is 0"),
    (["train", "--single-copy"], "is for --resume"),
    (["train", "--set", "colour=red"], "unknown option"),
    (["train", "--set", "colour"], "key=value"),
    (["train", "--noise-multiplier", "1", "--epsilon", "2"], "exclude each other"),
    (["train", "--resume", "nowhere"], "cannot be given with --resume"),
    (["reproduce", "table-of-nothing"], "no preset is called"),
    (["reproduce"], "--list"),
    (["reproduce", "gredp-table2", "--set", "lr=0.3"], "would make another table"),
    (["reproduce", "gredp-table2", "--quick", "--jobs", "2"], "--quick runs in one process"),
    (["reproduce", "geodp-fig4", "--set", "pad=true"], "trains nothing"),
    (["validate", "nowhere", "--data", "digits"], "no finished run"),
    (["audit", "mechanism", "a.b:c"], "a.b cannot be imported"),
    (["audit", "mechanism", "iso", "--confidence", "2"], "confidence is 2"),
    (["audit", "mechanism", "iso", "--trials", "0"], "trials is 0"),
    (["audit", "run", "nowhere"], "nowhere is no run folder"),
    (["frobnicate"], "No such command"),
    (["train", "--set", "epsilno=2"], "Did you mean 'epsilon'?"),
    (["train", "--set", "max-grad-norm=2"], "Did you mean 'max_grad_norm'?"),
    (["train", "--mechanism", "spectal"], "Did you mean 'spectral'?"),
    (["train", "--model", "lipshitz-mlp"], "Did you mean 'lipschitz-mlp'"),
    (["train", "--clipping", "adaptiv"], "Did you mean 'adaptive'?"),
    (["train", "--data", "fashion-mnist"], "Did you mean 'fashion_mnist'"),
    (["train", "--set", 'data_options={"normalize": "half"}'], "Did you mean 'normalise'"),
    (["train", "--mechanism", "rep", "--set", 'mechanism_options={"metrik": "x"}'], "Did you mean 'metric'?"),
    (["reproduce", "rep-tabl1"], "Did you mean 'rep-table1'"),
    (["audit", "mechanism", "gredpp"], "Did you mean 'gredp'"),
    (["compare", "--data", "nowhere.npz", "--mechanism", "iso,spectal"], "Did you mean 'spectral'?"),
    (["compare", "--data", "nowhere.npz", "--mechanism", "iso", "--model", "cnnn"], "Did you mean 'cnn'"),
    (["compare", "--data", "nowhere.npz", "--mechanism", "iso,rep", "--model-for", "rep=c8cnn"], "Did you mean 'c8-cnn'"),
    (["train", "--model", "mlp", "--set", "model_options.widht=8"], "Did you mean 'width'?"),
    (["train", "--set", "modle_options.width=8"], "Did you mean 'model_options'"),
    (["train", "--set", "model_options=8"], "it must be an object"),
    (["train", "--set", "epsilon.width=8"], "epsilon is {'width': 8}"),
    (["train", "--plugin"], "--plugin has no value"),
    (["train", "--plugin", "nowhere.py"], "where there is no file"),
    (["train", "--plugin=no.such.module"], "put its folder on PYTHONPATH"),
    (["audit", "static", "--only", "linear"], "Did you mean 'Linear'"),
    (["tan", "--set", "data=nowhere.npz", "--set", "optimizer=adm"], "Did you mean 'adam'"),
]


@pytest.mark.parametrize(("args", "words"), MISUSE)
def test_misuse_exits_2_with_words_and_one_object(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERLANGEN_PLUGINS", "")  # what --plugin adds ends with the test
    done = CliRunner().invoke(app, [*args, *(["--out", "r"] if args[0] == "train" else []), "--json"])
    assert done.exit_code == 2, (done.stdout, done.stderr)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(json.loads(done.stdout)) == ["error"]
    assert words in json.loads(done.stdout)["error"]
    assert not (tmp_path / "r").exists() or not any((tmp_path / "r").iterdir())


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    for out in ("file", "file/run"):
        done = CliRunner().invoke(app, ["train", "--steps", "1", "--out", str(tmp_path / out)])
        assert done.exit_code == 2
        assert f"out is {tmp_path / out}" in done.stderr
    assert (tmp_path / "file").read_text() == "precious"


def test_failures_of_the_work_exit_1_and_bugs_ask_to_be_reported(monkeypatch):
    from erlangen.cli import accounting

    for error, words in ((OSError(28, "No space left on device", "x"), "x: No space left"), (KeyError("k"), "this is a bug")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(accounting.acc, "compose_runs", fail)
        done = CliRunner().invoke(app, ["account", "x", "--json"])
        assert done.exit_code == 1
        assert words in done.stderr
        assert words in json.loads(done.stdout)["error"]


def test_a_data_error_finds_the_screen_empty(tmp_path):
    done = run("train", "--data", "nowhere.npz", "--out", str(tmp_path / "r"))
    assert done.stderr.startswith("erlangen: no file at")


def test_a_file_gives_every_option_and_later_words_win(tmp_path):
    file = tmp_path / "c.json"
    options = dataclasses.asdict(TrainConfig(model="mlp", steps=3, batch=32, seed=5, evaluations=1))
    file.write_text(json.dumps(options))
    assert set(options) == {f.name for f in dataclasses.fields(TrainConfig)}
    args = ["train", "--config", str(file), "--set", 'model_options={"width": 8}', "--set", "momentum=0.5", "--steps", "2",
            "--noise-multiplier", "1.5", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "r")])
    assert done.exit_code == 0, done.stderr
    written = TrainConfig.from_file(tmp_path / "r" / "config.json")
    assert (written.model, written.model_options, written.batch, written.seed) == ("mlp", {"width": 8}, 32, 5)
    assert (written.steps, written.momentum, written.noise_multiplier, written.epsilon) == (2, 0.5, 1.5, None)
    file.write_text('{"noise_multiplier": 1.0}')
    assert TrainConfig.from_file(file).epsilon is None


def test_equal_seeds_give_equal_weights_whatever_the_folder_is_called(tmp_path):
    def weights(name, *more):
        common = ["train", "--model", "mlp", "--noise-multiplier", "1", "--steps", "2", "--batch", "32", "--seed", "3", "--json"]
        done = CliRunner().invoke(app, [*common, "--out", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.stderr
        return (tmp_path / name / "weights.safetensors").read_bytes()

    first = weights("a")
    assert weights("b") == first
    assert weights("c", "--lr", "0.05") != first, "another run draws other noise"


def test_tensorboard_is_optional(tmp_path):
    args = ["train", "--model", "mlp", "--steps", "2", "--batch", "32", "--tensorboard", "--out", str(tmp_path / "r")]
    done = CliRunner().invoke(app, args)
    if importlib.util.find_spec("tensorboard") is None:
        assert done.exit_code == 2
        assert "pip install 'erlangen[tensorboard]'" in done.stderr
        return
    assert done.exit_code == 0, done.stderr
    assert list((tmp_path / "r" / "tensorboard").glob("events*"))


def test_a_dry_run_needs_no_weights_and_says_which_a_run_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    asked = ("reproduce", "gredp-table2", "--only", "CIFAR10 1Conv ε=2 GReDP as published", "--dry-run")
    cells = json.loads(said(*asked, "--json"))["cells"]
    assert [c["claimed_epsilon"] for c in cells] == [2.0, 2.0]
    assert all(2.0 < c["epsilon"]["pld"] < 6 for c in cells)
    words = said(*asked).replace("\n", " ")
    assert "A run needs resnet18-cifar10-first-half.safetensors" in words
    assert "--data cifar10_first_half --model resnet18" in words


def test_reproduce_lists_and_dry_runs():
    listed = json.loads(run("reproduce", "--list", "--json").stdout)
    assert "gredp-table1" in [p["name"] for p in listed["presets"]]
    dry = json.loads(said("reproduce", "gredp-table1", "--only", "LeNet-5 DP-SGD", "--dry-run", "--json"))
    cell = dry["cells"][0]
    assert 0.99 < cell["epsilon"]["pld"] <= 1.0
    assert cell["paper"] == 92.7


def test_a_dry_run_says_which_part_of_a_table_its_rows_are():
    lines = said("reproduce", "eq-table1", "--only", "ε=2", "--dry-run").splitlines()
    assert [k for k, line in enumerate(lines) if "Table 1, CIFAR-10" in line] == [0, 3]
    assert len({line.index("σ = ") for line in lines if "σ = " in line}) == 1, "one column"


def test_start_up_is_quick():
    assert "Usage" in run("--help").stdout
    assert cpu_seconds("import erlangen.cli.main", enough=1.0) < 1.0
    ours = "import torch, gc; gc.freeze()"  # or a collection that happens to fall here looks through all of PyTorch
    assert cpu_seconds("import erlangen; erlangen.PrivacyEngine", enough=0.3, after=ours) < 0.3, "of PyTorch's second"
    loaded = "import sys, erlangen.cli.main; assert 'torch' not in sys.modules and 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded], check=True)


def test_what_trains_or_releases_is_not_done_by_every_process():
    for words in (["tan", "--set", "batch=64"], ["validate", "nowhere"], ["compare"], ["reproduce", "rep-table1"]):
        env = {**os.environ, "WORLD_SIZE": "2", "RANK": "1"}
        done = subprocess.run([sys.executable, "-m", "erlangen", *words], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 2
        assert f"WORLD_SIZE is 2, and {words[0]} is for one process" in done.stderr


@pytest.mark.parametrize(("words", "code", "said"), [(["--version"], 0, "erlangen 0."), (["nosuch"], 2, "nosuch")])
def test_a_worker_ends_without_tearing_the_interpreter_down(words, code, said):
    """Threads of a process group may still live then, and would abort a process whose run is over."""
    start = (
        "import atexit, runpy, sys; atexit.register(print, 'torn down'); "
        f"sys.argv = ['erlangen', *{words}]; runpy.run_module('erlangen', run_name='__main__')"
    )
    for workers in ("1", "2"):
        env = {**os.environ, "WORLD_SIZE": workers, "RANK": "0"}
        done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == code
        assert said in done.stdout + done.stderr
        assert ("torn down" in done.stdout) == (workers == "1")


def test_a_full_disk_gets_a_cure():
    words = manners._words(OSError(errno.ENOSPC, "No space left on device", "run/checkpoint.safetensors"))
    assert words.startswith("run/checkpoint.safetensors: No space left on device; make room")
    assert "--resume" in words
