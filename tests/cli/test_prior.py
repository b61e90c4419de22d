"""``erlangen prior`` and a training that begins with what it wrote."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from erlangen.cli.main import app

FEW = ["--steps", "2", "--batch", "4", "--images", "8", "--device", "cpu"]


def test_a_prior_is_learnt_written_and_begun_with(tmp_path):
    file, out = tmp_path / "prior.safetensors", tmp_path / "run"
    command = ["prior", "--shape", "1x8x8", "--set", "model_options.width=8", "--out", str(file), *FEW]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["weights"] == str(file)
    assert told["guessing"] == pytest.approx(1.9459, abs=1e-3)
    assert "is there already" in CliRunner().invoke(app, command).stderr
    again = CliRunner().invoke(app, [*command, "--overwrite"])
    assert "no data was read" in again.stdout
    train = ["train", "--data", "digits", "--weights", str(file), "--set", "model_options.width=8", "--steps", "2"]
    done = CliRunner().invoke(app, [*train, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads((out / "certificate.json").read_text())["not_covered"]
    assert any("prior.safetensors" in words for words in said)
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0


def test_a_prior_for_other_images_says_what_it_is_for(tmp_path):
    file = tmp_path / "prior.safetensors"
    assert CliRunner().invoke(app, ["prior", "--shape", "1x16x16", "--out", str(file), *FEW]).exit_code == 0
    train = ["train", "--data", "digits", "--weights", str(file), "--steps", "1"]
    done = CliRunner().invoke(app, [*train, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "a prior for cnn on images of 1x16x16" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_written_is_said_before_anything_is_learnt(tmp_path, monkeypatch):
    monkeypatch.setattr("erlangen.prior.learn.learn_prior", lambda *_, **__: pytest.fail("minutes of learning are lost"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "old.safetensors").touch()
    for out, says in (
        ("file/p.safetensors", "cannot be made"), ("folder.safetensors", "is a folder"), ("old.safetensors", "--overwrite"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["prior", "--shape", "1x8x8", "--out", str(tmp_path / out), *FEW])
        assert done.exit_code == 2, done.output
        assert says in done.stderr
    monkeypatch.setattr("os.access", lambda *_: False)
    done = CliRunner().invoke(app, ["prior", "--shape", "1x8x8", "--out", str(tmp_path / "p.safetensors"), *FEW])
    assert "cannot be written to" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shape", "big"], "shape is 'big'"),
        (["--shape", "1x8x9"], "1x8x9"),
        (["--shape", "1x8x8", "--steps", "0"], "steps is 0"),
        (["--shape", "1x8x8", "--model", "cnm"], "cnn"),
        (["--shape", "1x8x8", "--set", "lr=2"], "--set lr"),
        (["--shape", "1x8x8", "--out", "prior.pt"], "ends in .safetensors"),
    ],
)
def test_mistakes_are_named(tmp_path, words, says):
    given = ["prior", *FEW, "--out", str(tmp_path / "p.safetensors"), *words]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert says in done.stderr
    assert not list(tmp_path.iterdir())
