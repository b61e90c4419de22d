"""A training that begins with a prior: learnt from nothing but the shape of an image, once, and kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from erlangen.cli.main import app
from erlangen.models.public import digest
from erlangen.prior import PriorOptions, kept
from erlangen.prior.kept import MADE_UP, kept_prior
from erlangen.training import TrainConfig
from erlangen.training.run import resume, train

FEW = PriorOptions(steps=2, batch=4, images=8)
CONFIG = TrainConfig(
    data="digits", model="cnn", model_options={"width": 8}, epsilon=None, noise_multiplier=1.0, batch=64, steps=2, weights=MADE_UP
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a prior of two steps."""
    monkeypatch.setattr(kept, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(kept, "kept_prior", lambda *a, **k: kept_prior(*a, **k, options=FEW))
    monkeypatch.setattr("erlangen.training.run.kept_prior", kept.kept_prior)
    return tmp_path / "cache" / "priors"


def test_a_prior_is_learnt_once_for_a_network_and_a_size(cache, monkeypatch):
    shape = (1, 8, 8)
    first = kept.kept_prior("cnn", {"width": 8}, shape, "cpu")
    assert first.parent == cache
    assert first.name.startswith("cnn-1x8x8-")
    values = load_file(str(first))
    again = kept_prior("cnn", {"width": 8}, shape, "cpu", lambda *_: pytest.fail("it is there"), FEW)
    assert again == first
    others = [
        kept_prior("cnn", {"width": 16}, shape, "cpu", options=FEW), kept_prior("cnn", {"width": 8}, (1, 9, 9), "cpu", options=FEW),
        kept_prior("cnn", {"width": 8}, shape, "cpu", options=replace(FEW, seed=1)),
    ]  # fmt: skip
    assert len({first, *others}) == 4
    first.unlink()
    torch.manual_seed(5)  # whatever was seeded before
    state = torch.get_rng_state()
    assert kept.kept_prior("cnn", {"width": 8}, shape, "cpu") == first
    assert torch.equal(state, torch.get_rng_state()), "what the caller draws next is not moved"
    assert all(torch.equal(value, values[name]) for name, value in load_file(str(first)).items())
    with pytest.raises(ValueError, match="1x8x9"):
        kept.kept_prior("cnn", {}, (1, 8, 9), "cpu")


def test_a_kept_file_that_is_broken_is_learnt_again(cache):
    """The error spoke of a file of weights that nobody had given, and said to give another."""
    file = kept.kept_prior("cnn", {"width": 8}, (1, 8, 8), "cpu")
    whole = file.read_bytes()
    for broken in (whole[:100], whole + b"x", b""):
        file.write_bytes(broken)
        assert kept.kept_prior("cnn", {"width": 8}, (1, 8, 8), "cpu") == file
        assert file.read_bytes() == whole


def test_training_begins_with_it_and_says_so(cache, tmp_path):
    seen: list[tuple[int, ...]] = []

    def learn(network, shape, options, device):
        seen.append(shape)
        kept.quietly(network, shape, options, device)

    result = train(CONFIG, tmp_path / "run", learn=learn)
    (file,) = cache.iterdir()
    assert seen == [(1, 8, 8)]
    assert result.session.config.weights == str(file)
    document = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert any(digest(str(file)) in words for words in document["not_covered"])
    told = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert told.exit_code == 0, told.output
    train(CONFIG, tmp_path / "second", learn=lambda *_: pytest.fail("it is kept"))
    finished: list[str] = []
    resume(tmp_path / "run", say=finished.append)
    assert any("is complete" in words for words in finished)


def test_the_first_weights_are_those_of_the_prior(cache):
    result = train(replace(CONFIG, noise_multiplier=0.0, lr=1e-12, momentum=0.0, ema=0.0))
    (file,) = cache.iterdir()
    weights = result.session.model.state_dict()
    for name, value in load_file(str(file)).items():
        torch.testing.assert_close(weights[name], value)


def test_the_command_shows_a_bar_and_refuses_what_excludes_it(cache, tmp_path):
    command = ["train", "--data", "digits", "--prior", "--steps", "2", "--set", "model_options.width=8"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "learning from made-up images" in done.stderr
    again = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "other")])
    assert again.exit_code == 0, again.output
    assert "learning from made-up images" not in again.stderr
    again = CliRunner().invoke(app, ["train", "--data", "digits", "--prior", "--resume", str(tmp_path / "run")])
    assert again.exit_code == 0, again.output
    plain = ["train", "--data", "digits", "--steps", "2", "--set", "model_options.width=8", "--out", str(tmp_path / "plain")]
    assert CliRunner().invoke(app, plain).exit_code == 0
    for words, says in (
        (["--weights", "a.safetensors"], "exclude each other"),
        (["--resume", str(tmp_path / "plain")], "began with fresh weights"),
    ):
        refused = CliRunner().invoke(app, ["train", "--prior", *words])
        assert refused.exit_code == 2
        assert says in refused.stderr
