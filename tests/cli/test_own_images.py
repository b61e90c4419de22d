"""From a folder of images to a certificate, predictions and an exported model, as a user types it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from erlangen.cli.main import app
from tests.deploy.test_predict import write_digits


def erlangen(*args, cwd=None):
    """The command line in this process (starting a new one costs two seconds): exit code and both outputs."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.chdir(cwd or before)
        try:
            app([str(a) for a in args])
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with ``scans`` in it and a trained run called ``first``."""
    root = tmp_path_factory.mktemp("user")
    write_digits(root / "scans", 400)
    for path in (root / "scans" / "test").rglob("*.png"):  # no patient on both sides
        path.rename(path.with_name("q" + path.name[1:]))
    done = erlangen(
        "train", "--data", "scans", "--epsilon", "3", "--unit", "patient", "--unit-pattern", r"^([pq]\d+)_", "--steps", "30",
        "--normalise", "private", "--image-size", "8", "--out", "first", cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (root / "said.txt").write_text(done.stdout + done.stderr)
    return root


def test_training_says_what_it_read_and_what_it_guarantees(place):
    said = (place / "said.txt").read_text()
    assert "320 training images of 8×8, greyscale, 80 for the public test" in said
    assert "for each patient (all their records together)" in said
    certificate = json.loads((place / "first" / "certificate.json").read_text())
    assert certificate["unit"] == "patient"
    assert 2.5 < certificate["guarantee"]["epsilon"]["pld"] <= 3.0
    assert [row["mechanism"] for row in certificate["releases"]] == ["pixel-mean-and-spread", "iso"]
    assert str(place) not in json.dumps(certificate)  # where the owner keeps the data is nobody's business
    assert erlangen("report", "first", cwd=place).returncode == 0
    assert str(place) not in (place / "first" / "report.html").read_text()
    verified = erlangen("verify", "first/certificate.json", cwd=place)
    assert verified.returncode == 0, verified.stderr


def test_predictions_as_csv_json_and_files(place):
    command = [sys.executable, "-m", "erlangen.cli.main", "predict", "first", "scans/test"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(rows) == 80
    assert all(row["class"].startswith("class ") for row in rows)
    answer = json.loads(erlangen("predict", "first", "scans/test", "--json", cwd=place).stdout)
    assert [p["class"] for p in answer["predictions"]] == [row["class"] for row in rows]
    done = erlangen("predict", "first", "scans/test", "--out", "answers/all.csv", "--json", cwd=place)
    assert json.loads(done.stdout)["predictions"] == 80
    assert (place / "answers" / "all.csv").read_text().count("\n") == 81


def test_export_as_plain_torch(place):
    done = json.loads(erlangen("export", "first", "--json", cwd=place).stdout)
    assert done["difference"] <= 1e-5
    assert "class Model(nn.Module)" in (place / "first" / "export" / "model.py").read_text()


def test_data_is_checked_before_training(place):
    done = erlangen("data", "check", "scans", "--unit", "patient", "--unit-pattern", r"^([pq]\d+)_", cwd=place)
    assert "patient(s) own 320 training records" in done.stdout
    facts = json.loads(erlangen("data", "check", "scans", "--json", cwd=place).stdout)
    assert facts["input_shape"] == [1, 8, 8]
    assert sum(facts["counts"]["test"]) == 80
    listed = json.loads(erlangen("data", "list", "--json").stdout)
    assert {"digits", "mnist", "rotated_mnist", "cifar100", "imagenette"} <= {row["name"] for row in listed["datasets"]}


def broken(place):
    folder = place / "broken"
    if not folder.exists():
        for name in ("cat", "dog"):
            (folder / name).mkdir(parents=True)
            for k in range(3):
                Image.new("L", (5 + k, 5)).save(folder / name / f"{k}.png")
        (folder / "cat" / "bad.png").write_text("no image")
    return folder


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--data", "broken"], "cat/bad.png"),
        (["train", "--data", "broken", "--skip-bad"], "Give --image-size N"),
        (["train", "--data", "broken", "--image-size", "huge"], "--image-size is 'huge'"),
        (["train", "--data", "scans", "--unit", "patient"], "--unit-pattern"),
        (["train", "--data", "scans", "--normalise", "loud"], "MEAN/STD"),
        (["train", "--data", "digits", "--image-size", "4"], "comes in one format"),
        (["predict", "nowhere", "scans"], "no folder at nowhere"),
        (["predict", "scans", "scans"], "no model.json"),
        (["predict", "first", "nothing.png"], "nothing.png: does not exist"),
        (["predict", "first", "scans/test", "--out", "x.txt"], ".csv or .json"),
        (["export", "first", "--format", "tflite"], "torch or onnx"),
        (["data", "get", "digits"], "not a data set to download"),
        (["data", "check", "nowhere"], "folder of class folders"),
    ],
)
def test_mistakes_are_named(place, args, words):
    broken(place)
    done = erlangen(*args, *(["--out", "never"] if args[0] == "train" else []), "--json", cwd=place)
    assert done.returncode == 2, done.stderr
    assert words in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr
    assert not (place / "never").exists()


def test_what_is_left_out_is_said(place):
    folder = broken(place)
    done = erlangen(
        "train", "--data", folder, "--skip-bad", "--image-size", "4", "--steps", "1", "--batch", "2", "--model", "logistic",
        "--out", "mended", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 image(s) were left out (--skip-bad)" in done.stderr
    assert "cat/bad.png" in done.stderr
