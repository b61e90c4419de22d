"""A run promises no more than it keeps: whom it protects, and what private records decide beside the releases."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from erlangen.accounting import certificate
from erlangen.accounting.certificate_check import examine, verify
from erlangen.accounting.certificate_text import in_one_line
from erlangen.data import from_torch, load
from erlangen.data.arrays import from_arrays
from erlangen.data.base import Dataset
from erlangen.gradients.rows import RowMap
from erlangen.mechanisms import GaussianMechanism
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.run import Interrupted, resume, train
from erlangen.training.validate import validate

CONFIG = TrainConfig(epsilon=None, noise_multiplier=1.0, batch=8, steps=1, model="mlp", device="cpu")


def arrays(largest: int = 2, **more: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 40)
    y[0] = largest
    return {"x_train": rng.integers(0, 255, (40, 8, 8), dtype=np.uint8), "y_train": y, **more}


def certified(dataset: Dataset, folder, **options) -> dict:
    train(dataclasses.replace(CONFIG, **options), folder / "run", dataset=dataset, say=lambda text: None)
    return json.loads((folder / "run" / "certificate.json").read_text())


def test_a_unit_that_the_data_does_not_know_is_not_promised(tmp_path):
    """The certificate of such a run named patients, and its units of privacy were single records."""
    pairs = TensorDataset(torch.rand(12, 1, 8, 8), torch.arange(12) % 2)
    with pytest.raises(ConfigError, match="'patient'"):
        certified(from_torch(pairs), tmp_path, unit="patient")
    found = certified(from_torch(pairs, unit=[k // 3 for k in range(12)]), tmp_path, unit="patient", batch=2)
    assert (found["unit"], found["sampler"]["units"]) == ("patient", 4)


def test_a_run_does_not_go_on_with_records_that_changed_hands(tmp_path):
    """The fingerprint is of pixels and labels: a patient whose record was given to another would be in two units."""
    x, y, patients = torch.rand(12, 1, 8, 8), torch.arange(12) % 2, [k // 3 for k in range(12)]
    same, moved = (from_torch(TensorDataset(x, y), unit=unit) for unit in (patients, [*patients[:2], 1, 0, *patients[4:]]))
    assert same.fingerprint() == moved.fingerprint()
    certified(same, tmp_path, unit="patient", batch=2)
    resume(tmp_path / "run", say=lambda text: None, dataset=same)
    with pytest.raises(ConfigError, match="grouped otherwise"):
        resume(tmp_path / "run", say=lambda text: None, dataset=moved)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, True),
        ({"class_names": np.array(["a", "b", "c"])}, False),
        ({"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.array([0, 2])}, False),
        ({"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.array([0, 1])}, True),
    ],
    ids=["labels", "names", "public", "public but fewer"],
)
def test_a_number_of_classes_that_one_record_decides_is_said(more, said, tmp_path):
    """Without the record of class 2 the released weights have another shape: no noise hides that."""
    dataset = from_arrays("own", arrays(**more))
    assert dataset.classes_from_labels is said
    assert any("private labels" in note for note in dataset.notes) is said
    lines = certified(dataset, tmp_path)["not_covered"]
    assert any("number of classes" in line for line in lines) is said


@pytest.mark.parametrize("shared", [0, 3, 20])
def test_private_images_do_not_pass_for_public_ones(shared):
    """What a run says of its test set, and images of it, are stored as they are."""
    own = arrays()
    test = np.random.default_rng(1).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    test[:shared] = own["x_train"][5 : 5 + shared]
    own |= {"x_test": test, "y_test": np.arange(20) % 3}
    if shared == 20:
        with pytest.raises(ValueError, match="20 of the 20 images of x_test"):
            from_arrays("own", own)
    else:
        assert any(f"{shared} of the 20" in note for note in from_arrays("own", own).notes) is (shared > 0)


def test_whoever_is_in_the_test_set_is_not_promised_anything(tmp_path):
    """A person may be among the training records and in the public test set: then nothing hides them, whatever ε is."""
    alone = certified(from_arrays("own", arrays()), tmp_path / "alone")
    assert not any("test set" in line for line in alone["not_covered"])
    public = {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.array([0, 1])}
    tested = certified(from_arrays("own", arrays(**public)), tmp_path / "tested")
    (line,) = [line for line in tested["not_covered"] if "test set" in line]
    assert "stored with the run" in line
    assert "without noise" in line
    assert (tmp_path / "tested" / "run" / "public.safetensors").is_file()
    assert line in (tmp_path / "tested" / "run" / "certificate.md").read_text()


def test_what_a_certificate_does_not_cover_cannot_be_taken_out_of_it(tmp_path):
    """Without the sentence on the test set, page rewritten, it verified: the ledger keeps what was known when the run began."""
    public = {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.array([0, 1])}
    document = certified(from_arrays("own", arrays(**public)), tmp_path)
    path = tmp_path / "run" / "certificate.json"
    assert not verify(path)
    (sentence,) = [words for words in document["not_covered"] if "test set" in words]
    document["not_covered"].remove(sentence)
    certificate.save(document, path.parent)
    assert verify(path) == [f"not_covered leaves out what the ledger says: {sentence!r:.160}"]


def test_a_resumed_run_still_says_what_its_beginning_did_not_cover(tmp_path):
    """The first half was evaluated on a public test set, the second has none: the images of the first are still stored."""
    public = {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.array([0, 1])}
    tested, alone = from_arrays("own", arrays(**public)), from_arrays("own", arrays())

    def stop(session, metrics):
        if session.step_count == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        train(dataclasses.replace(CONFIG, steps=2), tmp_path / "run", dataset=tested, watch=stop, say=lambda text: None)
    resume(tmp_path / "run", dataset=alone, say=lambda text: None)
    document = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert any("test set" in words for words in document["not_covered"])
    assert not verify(tmp_path / "run" / "certificate.json")


def test_records_that_are_protected_as_groups_are_not_promised_to_be_protected_one_by_one(tmp_path):
    """Records of a group are averaged, and the average is clipped: adding one record turned it around and moved the sum by two
    bounds, where the certificate had said one bound for each record."""
    pairs = TensorDataset(torch.rand(12, 1, 8, 8), torch.arange(12) % 2)
    grouped = from_torch(pairs, unit=[k // 3 for k in range(12)])
    found = certified(grouped, tmp_path, batch=2)
    assert (found["unit"], found["sampler"]["units"], found["config"]["unit"]) == ("group", 4, "group")
    assert verify(tmp_path / "run" / "certificate.json") == []
    resume(tmp_path / "run", say=lambda text: None, dataset=grouped)
    with pytest.raises(ConfigError, match="protects each group"):
        validate(tmp_path / "run", tmp_path / "other.npz", 1.0)

    one = GaussianMechanism(0.0, 1.0)
    sums = []
    for rows in ([[1.0, 0.0]], [[1.0, 0.0], [-9.0, 0.0]]):
        mean = RowMap.of(torch.zeros(len(rows), dtype=torch.long)).sum_rows(torch.tensor(rows) / len(rows))
        sums.append(one.release({"w": mean}, 1.0)["w"])
    assert float((sums[0] - sums[1]).norm()) > 1.99


def test_an_ensemble_does_not_pass_over_whose_records_are(tmp_path):
    """It sampled and clipped the three records of a patient one by one: together they moved the sum by three bounds."""
    pairs = TensorDataset(torch.rand(12, 1, 8, 8), torch.arange(12) % 2)
    with pytest.raises(ConfigError, match="says whose each record is"):
        Ensemble([CONFIG], from_torch(pairs, unit=[k // 3 for k in range(12)]))
    Ensemble([CONFIG], from_torch(pairs))


@pytest.mark.parametrize(
    ("options", "public", "said"),
    [({}, None, True), ({"channels": "grey"}, None, False), ({}, "L", True), ({}, "RGB", False)],
    ids=["private alone", "given", "public grey", "public colour"],
)
def test_colours_that_one_private_image_decides_are_said(options, public, said, tmp_path):
    """Among grey images one in colour makes the first weights three times as many: no noise hides that."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(("cat", "dog")):
        for i in range(10):
            path = tmp_path / "images" / "train" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
        if public is not None:
            (tmp_path / "images" / "test" / name).mkdir(parents=True)
            Image.new(public, (8, 8), k).save(tmp_path / "images" / "test" / name / "a.png")
    dataset = load(tmp_path / "images", **options)
    assert any("read off the private images" in note for note in dataset.notes) is said
    lines = certified(dataset, tmp_path)["not_covered"]
    assert any("sees colours" in line for line in lines) is said


def test_a_delta_that_allows_to_publish_a_record_is_in_the_certificate(tmp_path):
    for delta, said in ((1e-5, 0), (0.01, 1)):
        folder = tmp_path / str(delta)
        remarks: list[str] = []
        train(dataclasses.replace(CONFIG, model="logistic", batch=64, seed=0, delta=delta), folder, say=remarks.append)
        written = json.loads((folder / "certificate.json").read_text())["not_covered"]
        assert sum("above 1/1438" in line for line in written) == said
        assert sum("above 1/1438" in line for line in remarks) == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": 500.0}, "ε = 500 is a weak guarantee: what comes out may be 10^218 times"),
        ({"epsilon": None, "noise_multiplier": 0.4, "steps": 4}, "is a weak guarantee"),
        ({"epsilon": 10.0}, None),
        ({"epsilon": None, "noise_multiplier": 0.0}, None),  # no guarantee at all: said in other words
    ],
    ids=["target", "noise", "as much as may be", "none"],
)
def test_a_weak_guarantee_is_said_once_before_it_is_spent(options, said, tmp_path):
    remarks: list[str] = []
    train(TrainConfig(**{"model": "logistic", "steps": 2, "batch": 64, "seed": 0, **options}), tmp_path / "run", say=remarks.append)
    found = [remark for remark in remarks if "weak guarantee" in remark]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert not any("\n" in remark for remark in found)


def test_the_certificate_names_its_weights_and_no_others_verify(tmp_path):
    """A model that was trained elsewhere, without noise, say, could be handed on beside the certificate of this one."""
    for name in "ab":
        train(CONFIG, tmp_path / name, dataset=from_arrays("arrays", arrays(1)), say=lambda text: None)
    path, weights = tmp_path / "a" / "certificate.json", tmp_path / "a" / "weights.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert json.loads(path.read_text())["weights"] == digest
    assert digest in path.with_suffix(".md").read_text()
    facts = examine(path).certified
    assert facts is not None
    assert facts["weights_compared"] is True
    shutil.copy(tmp_path / "b" / "weights.safetensors", weights)
    (problem,) = verify(path)
    assert "weights.safetensors is not the model of this certificate" in problem
    assert digest in problem
    weights.unlink()
    alone = examine(path)
    assert not alone.problems
    assert alone.certified is not None
    assert alone.certified["weights_compared"] is False
    assert "; no weights compared; " in in_one_line(alone.certified)


def test_what_a_certificate_leaves_out_is_a_problem(tmp_path):
    """Without its digest any other model verified beside it, and without its sampler any number of records."""
    train(CONFIG, tmp_path, dataset=from_arrays("arrays", arrays(1)), say=lambda text: None)
    path = tmp_path / "certificate.json"
    whole = certificate.load(path)
    assert examine(path).remarks == ()
    (tmp_path / "weights.safetensors").write_bytes(b"another model")
    for name, other in (("weights", None), ("sampler", None), ("sampler", "all"), ("mechanism", None), ("expected_batch", None)):
        left = {key: value for key, value in whole.items() if key != name}
        certificate.save(left if name == "weights" else {**left, name: other}, tmp_path)
        assert f"{name} is left out, which every certificate of this run states" in verify(path)
    for ledger in tmp_path.glob("ledger.jsonl*"):
        ledger.unlink()
    certificate.save({key: value for key, value in whole.items() if key != "weights"}, tmp_path)
    assert [remark[:40] for remark in examine(path).remarks[1:]] == ["the certificate names no weights: whethe"]
