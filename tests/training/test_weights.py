"""Training from public weights: they are what training begins with, they are named, and other weights never share noise."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from erlangen.accounting import certificate_check
from erlangen.deploy.card import load_run
from erlangen.models import make_model
from erlangen.training import TrainConfig, run
from erlangen.training.built import load_data
from erlangen.training.config import ConfigError
from erlangen.training.ensemble import Ensemble
from erlangen.training.folder import stream_id
from erlangen.training.session import Session
from tests.training.test_run import interrupted

SMALL = TrainConfig(
    model="mlp", model_options={"width": 8}, steps=3, batch=64, seed=0, epsilon=None, noise_multiplier=1.0, evaluations=1
)


def weights(folder, seed: int = 1, name: str = "public") -> str:
    torch.manual_seed(seed)
    path = folder / f"{name}.safetensors"
    save_file(make_model("mlp", (1, 8, 8), 10, width=8).state_dict(), str(path))
    return str(path)


def begun(folder, **changes) -> TrainConfig:
    return dataclasses.replace(SMALL, weights=weights(folder), **changes)


def test_training_begins_with_them_in_sessions_and_ensembles(tmp_path):
    config, wanted = begun(tmp_path), load_file(weights(tmp_path))
    session = Session(config)
    assert all(torch.equal(session.model.state_dict()[n], t) for n, t in wanted.items())
    assert all(torch.equal(session.ema.average[n], t) for n, t in wanted.items())
    ensemble = Ensemble([config, dataclasses.replace(config, seed=1)])
    flat = torch.cat([wanted[name].flatten() for name, _ in session.model.named_parameters()])
    assert torch.equal(ensemble.weights().cpu(), flat.expand(2, -1))


def test_the_certificate_and_the_ledger_name_them(tmp_path):
    config = begun(tmp_path)
    run.train(config, tmp_path / "run")
    digest = hashlib.sha256((tmp_path / "public.safetensors").read_bytes()).hexdigest()
    document = json.loads((tmp_path / "run" / "certificate.json").read_text())
    (said,) = [words for words in document["not_covered"] if "began with" in words]
    assert digest in said
    assert "public.safetensors" in said
    assert str(tmp_path) not in json.dumps(document), "where the owner keeps files is nobody's business"
    assert not certificate_check.verify(tmp_path / "run" / "certificate.json")
    document["not_covered"].remove(said)
    (tmp_path / "run" / "certificate.json").write_text(json.dumps(document))
    assert any("began with" in problem for problem in certificate_check.verify(tmp_path / "run" / "certificate.json"))


def test_seeded_runs_from_other_weights_in_a_file_of_the_same_name_draw_other_noise(tmp_path):
    """The difference of two released models would otherwise be without noise."""
    config, data = begun(tmp_path), load_data(SMALL)
    first = stream_id(config, data)
    assert stream_id(config, data) == first
    weights(tmp_path, seed=2)
    assert stream_id(config, data) != first
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    weights(tmp_path, seed=1)
    assert stream_id(dataclasses.replace(config, weights=weights(elsewhere)), data) == first, "the place does not matter"


def test_a_run_goes_on_with_its_own_weights_only(tmp_path):
    interrupted(tmp_path / "run", 2, begun(tmp_path, steps=4))
    weights(tmp_path, seed=2)
    with pytest.raises(ConfigError, match="began with other weights"):
        run.resume(tmp_path / "run")
    weights(tmp_path, seed=1)
    assert run.resume(tmp_path / "run").summary["steps"] == 4
    assert not certificate_check.verify(tmp_path / "run" / "certificate.json")


def test_predictions_need_the_file_no_more(tmp_path):
    run.train(begun(tmp_path), tmp_path / "run")
    (tmp_path / "public.safetensors").unlink()
    model, _ = load_run(tmp_path / "run")
    own = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())


def test_the_head_may_have_other_classes_and_nothing_else_may_differ(tmp_path):
    torch.manual_seed(0)
    save_file(make_model("mlp", (1, 8, 8), 2, width=8).state_dict(), str(tmp_path / "two.safetensors"))
    session = Session(dataclasses.replace(SMALL, weights=str(tmp_path / "two.safetensors")))
    theirs = load_file(tmp_path / "two.safetensors")
    own = session.model.state_dict()
    assert [n for n in own if own[n].shape == theirs[n].shape and torch.equal(own[n], theirs[n])] == ["1.weight", "1.bias"]
    save_file(make_model("mlp", (1, 8, 8), 10, width=9).state_dict(), str(tmp_path / "wide.safetensors"))
    with pytest.raises(ValueError, match=r"does not fit the model: 1\.bias, 1\.weight"):
        Session(dataclasses.replace(SMALL, weights=str(tmp_path / "wide.safetensors")))


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x80\x04N.", b"PK\x03\x04"])
@pytest.mark.parametrize("name", ["bad.safetensors", "bad.pt"])
def test_files_that_are_none_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*cannot be read"):
        Session(dataclasses.replace(SMALL, weights=str(tmp_path / name)))


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    torch.save({"1.weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        Session(dataclasses.replace(SMALL, weights=str(tmp_path / "evil.pt")))


def test_missing_files_and_old_places_of_the_option_get_a_cure(tmp_path):
    with pytest.raises(ValueError, match=r"no such file.*erlangen prior"):
        Session(dataclasses.replace(SMALL, weights=str(tmp_path / "none.safetensors")))
    with pytest.raises(ConfigError, match="--weights FILE"):
        dataclasses.replace(SMALL, model_options={"weights": "x"})


def test_weights_that_a_run_learnt_from_the_same_records_are_not_public(tmp_path):
    """A run without noise to speak of, and one from its weights whose certificate would have said ε < 1."""
    loud = dataclasses.replace(SMALL, noise_multiplier=0.01, epsilon=None, seed=None)
    run.train(loud, tmp_path / "loud")
    quiet = dataclasses.replace(loud, noise_multiplier=20.0, weights=str(tmp_path / "loud" / "weights.safetensors"))
    for train in (lambda: run.train(quiet, tmp_path / "quiet"), lambda: Ensemble([quiet])):
        with pytest.raises(ConfigError, match=r"the run 'loud' learnt from the records of digits.*not public"):
            train()
    assert not (tmp_path / "quiet").exists()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "loud" / "weights.safetensors")
    with pytest.raises(ConfigError, match="not public"):
        Session(dataclasses.replace(quiet, weights=str(tmp_path / "link.safetensors")))
    for copy in ("ledger.jsonl", "ledger.jsonl.copy"):
        (tmp_path / "loud" / copy).write_text("?")
    with pytest.raises(ConfigError, match="ledger cannot be read"):
        Session(quiet)


def test_weights_of_a_run_on_other_records_may_be_public(tmp_path):
    """Or those records are private, too, and the ledger beside the weights is all that says so: it was passed over in silence."""
    data, said = load_data(SMALL), []
    half = dataclasses.replace(data, x_train=data.x_train[::2], y_train=data.y_train[::2], source=None)
    run.train(SMALL, tmp_path / "half", dataset=half)
    alone = shutil.copy(tmp_path / "half" / "weights.safetensors", tmp_path / "alone.safetensors")
    for name, file in (("beside", tmp_path / "half" / "weights.safetensors"), ("without", alone)):
        run.train(dataclasses.replace(SMALL, weights=str(file)), tmp_path / name, say=said.append)
        document = json.loads((tmp_path / name / "certificate.json").read_text())
        (words,) = [words for words in document["not_covered"] if "began with" in words]
        assert ("whoever is among both has spent both ε" in words) is (name == "beside")
    assert len([words for words in said if "a run's ledger lies beside them" in words]) == 1
