"""Private validation: the release is on its ledger, costs add up, and the noise is there."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from erlangen.accounting import epsilon, gaussian
from erlangen.accounting.ledger import LedgerError, read_ledger
from erlangen.cli.main import app
from erlangen.data import load
from erlangen.report.folder import read
from erlangen.report.privacy import statement
from erlangen.training import TrainConfig, run
from erlangen.training.config import ConfigError
from erlangen.training.validate import validate
from erlangen.ui.runs import Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    run.train(TrainConfig(model="mlp", steps=40, batch=256, seed=0), folder)
    digits = load("digits")
    np.savez(folder.parent / "private.npz", x_train=digits.x_test, y_train=digits.y_test)
    return folder


def test_every_call_is_a_release_on_disk(trained):
    source = trained.parent / "private.npz"
    first = validate(trained, source, 5.0)
    second = validate(trained, source, 5.0)
    assert first["epsilon"] == pytest.approx(epsilon([(gaussian(5.0), 2)], 1e-5))
    assert second["epsilon"] == pytest.approx(epsilon([(gaussian(5.0), 4)], 1e-5))
    assert read_ledger(trained / "validation-ledger.jsonl").steps == 4
    assert first["confusion"] != second["confusion"]
    exact = run.resume(trained).summary["test"]["test_accuracy"]
    assert abs(first["accuracy"] - exact) < 6 * first["accuracy_std"]


def test_records_that_the_run_was_trained_on_pay_for_both(tmp_path, trained):
    """Validation on the training records is one more release on them, not the first."""
    folder = shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("validation*"))
    training = read_ledger(folder / "ledger.jsonl").pairs()
    result = validate(folder, "digits", 5.0)
    assert result["epsilon"] == pytest.approx(epsilon([*training, (gaussian(5.0), 2)], result["delta"]))
    assert result["epsilon"] > max(epsilon(training, result["delta"]), epsilon([(gaussian(5.0), 2)], result["delta"]))
    assert result["trained_on"]


def test_an_accuracy_on_the_training_records_is_called_so(tmp_path, trained):
    for name, source, said in (("new", trained.parent / "private.npz", False), ("old", "digits", True)):
        folder = shutil.copytree(trained, tmp_path / name, ignore=shutil.ignore_patterns("validation*"))
        done = CliRunner().invoke(app, ["validate", str(folder), "--data", str(source)])
        assert done.exit_code == 0, done.output
        assert ("those that the run was trained on" in done.stdout) is said


def test_a_run_that_protects_patients_does_not_count_records_unasked(tmp_path):
    digits = load("digits")
    names = {"x_train": digits.x_train[:200], "y_train": digits.y_train[:200], "patient": np.arange(200) // 4}
    np.savez(tmp_path / "patients.npz", **names)
    config = TrainConfig(data=str(tmp_path / "patients.npz"), unit="patient", model="logistic", steps=2, batch=10, seed=0)
    run.train(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="protects each patient"):
        validate(tmp_path / "run", tmp_path / "patients.npz", 5.0)
    assert not (tmp_path / "run" / "validation-ledger.jsonl").exists()
    result = validate(tmp_path / "run", tmp_path / "patients.npz", 5.0, per_record=True)
    assert result["unit"] == "record"
    assert result["epsilon"] == "inf", "they were trained on, and one of four can turn its patient's gradient by two bounds"
    assert "training protected each patient as a whole" in result["why_if_trained_on"]


def test_patients_of_whom_one_record_is_validated_have_a_finite_epsilon(tmp_path):
    """They move the training's sum by its bound and each count by one, and were told ε = ∞."""
    digits = load("digits")
    patients = {"x_train": digits.x_train[:200], "y_train": digits.y_train[:200], "patient": np.arange(200) // 4}
    np.savez(tmp_path / "patients.npz", **patients)
    np.savez(tmp_path / "one-each.npz", x_train=digits.x_train[:200:4], y_train=digits.y_train[:200:4])
    config = TrainConfig(data=str(tmp_path / "patients.npz"), unit="patient", model="logistic", steps=2, batch=10, seed=0)
    run.train(config, tmp_path / "run", say=lambda text: None)
    given = ["validate", str(tmp_path / "run"), "--data", str(tmp_path / "one-each.npz"), "--per-record"]
    said = CliRunner().invoke(app, given).stdout
    result = validate(tmp_path / "run", tmp_path / "one-each.npz", 5.0, per_record=True)
    paid = [*read_ledger(tmp_path / "run" / "ledger.jsonl").pairs(), (gaussian(5.0), 4)]
    assert result["epsilon_if_one_each"] == pytest.approx(epsilon(paid, result["delta"]))
    assert result["epsilon_if_one_each"] < 4
    assert result["epsilon_if_trained_on"] == "inf", "of a single record nothing is promised"
    assert "for each patient to whom no more than one of these records belongs" in said
    assert validate(tmp_path / "run", tmp_path / "one-each.npz", 0.0, per_record=True)["epsilon_if_one_each"] == "inf"


def test_a_run_that_was_validated_says_so_wherever_its_epsilon_is_shown(tmp_path, trained):
    """Reports, the local page and erlangen inspect said ε = 3 for each record where two counts of them had cost 15.7."""
    folder = shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("validation*"))
    before, runs = read(folder), Runs(tmp_path)
    assert (before.spent, before.validation) == (before.epsilon, None)
    assert next(iter(runs.listing())).epsilon == before.epsilon
    both = validate(folder, "digits", 0.5)["epsilon"]
    found = read(folder)
    assert found.epsilon == before.epsilon < 4 < found.spent < 1.05 * both
    words = statement(found)
    assert "training and validation together" in words.headline
    assert "on the records of the training" in " ".join(words.warnings)
    assert not any("recognise" in sentence for sentence in words.sentences), "rates of training alone"
    assert next(iter(runs.listing())).epsilon == found.spent
    assert "on the same records; add both up" in CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    validate(folder, "digits", 0.0)
    assert statement(read(folder)).tone == "bad"


def test_records_of_which_some_may_have_been_trained_on_are_told_both(tmp_path, trained):
    """A part of the training records has another fingerprint than all of them, and has paid for training all the same."""
    folder = shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("validation*"))
    digits, training = load("digits"), read_ledger(folder / "ledger.jsonl").pairs()
    np.savez(tmp_path / "part.npz", x_train=digits.x_train[:300], y_train=digits.y_train[:300])
    result = validate(folder, tmp_path / "part.npz", 5.0)
    validated = [(gaussian(5.0), 2)]
    assert result["epsilon"] == pytest.approx(epsilon(validated, result["delta"]))
    assert result["epsilon_if_trained_on"] == pytest.approx(epsilon([*training, *validated], result["delta"]))
    for ledger in folder.glob("ledger.jsonl*"):
        ledger.unlink()
    assert validate(folder, tmp_path / "part.npz", 5.0)["epsilon_if_trained_on"] == "inf"


def test_without_noise_it_is_the_plain_matrix_and_epsilon_is_infinite(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("validation*"))
    result = validate(folder, trained.parent / "private.npz", 0.0)
    assert result["epsilon"] == "inf"
    assert sum(map(sum, result["confusion"])) == result["records"]


def test_a_damaged_or_lone_ledger_is_said(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("validation*"))
    source = trained.parent / "private.npz"
    assert validate(folder, source, 5.0)["ledger_notes"] == []
    with (folder / "validation-ledger.jsonl").open("ab") as file:
        file.write(b"[0,")
    again = validate(folder, source, 5.0)
    assert "torn" in again["ledger_notes"][0]
    assert again["releases"] > 4
    (folder / "validation-ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="--single-copy"):
        validate(folder, source, 5.0)
    assert "missing" in validate(folder, source, 5.0, single_copy=True)["ledger_notes"][-1]


def test_mistakes(trained, tmp_path):
    source = trained.parent / "private.npz"
    trained = shutil.copytree(trained, tmp_path / "run")
    validate(trained, source, 1.0)  # from here on the run's validation ledger belongs to these records
    with pytest.raises(ConfigError, match="σ ≥ 0"):
        validate(trained, source, -1.0)
    with pytest.raises(ConfigError, match="delta is 2"):  # before anything is released
        validate(trained, source, 1.0, delta=2.0)
    with pytest.raises(ConfigError, match=r"no summary\.json"):
        validate(tmp_path, source, 1.0)
    np.savez(tmp_path / "other.npz", x_train=np.zeros((4, 8, 8)), y_train=np.arange(4) % 2)
    with pytest.raises(ConfigError, match="other records"):
        validate(trained, tmp_path / "other.npz", 1.0)
    np.savez(tmp_path / "wide.npz", x_train=np.zeros((4, 9, 9)), y_train=np.arange(4) % 2)
    with pytest.raises(ConfigError, match="do not fit"):
        validate(trained, tmp_path / "wide.npz", 1.0)
    np.savez(tmp_path / "many.npz", x_train=np.zeros((4, 8, 8)), y_train=np.array([0, 1, 2, 30]))
    with pytest.raises(ConfigError, match="knows 10 classes"):
        validate(trained, tmp_path / "many.npz", 1.0)


def test_a_run_that_did_not_finish_says_how_to_go_on(tmp_path, trained):
    begun = shutil.copytree(trained, tmp_path / "be gun", ignore=shutil.ignore_patterns("summary*"))
    with pytest.raises(ConfigError, match=r"no summary.json; the run did not finish; go on .* train --resume '.*be gun'"):
        validate(begun, "digits", 5.0)
    with pytest.raises(ConfigError, match="name the folder of a finished run"):
        validate(tmp_path / "nowhere", "digits", 5.0)
