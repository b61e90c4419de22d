"""Run folders: ledger before use, exact resume, budgets that hold, certificates that verify."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from erlangen.accounting import certificate_check, epsilon
from erlangen.accounting.ledger import Ledger, LedgerError, read_ledger
from erlangen.training import TrainConfig, run
from erlangen.training.config import ConfigError
from erlangen.training.session import Session

SMALL = TrainConfig(
    model="mlp", model_options={"width": 16}, steps=8, batch=64, seed=0, evaluations=4, optimizer="adam"
)


def interrupted(folder, after: int, config=SMALL):
    """Train with Ctrl-C after step ``after``."""

    def watch(session: Session, _metrics) -> None:
        if session.step_count == after:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(run.Interrupted, match="--resume"):
        run.train(config, folder, watch=watch)


def test_a_wrong_device_is_said_before_the_records_are_read(tmp_path, monkeypatch):
    run.train(SMALL, tmp_path / "run")
    monkeypatch.setattr(run, "load_data", lambda config: pytest.fail("reading can take minutes"))
    wrong = {"device": "gpu"}
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        run.train(dataclasses.replace(SMALL, **wrong))
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        run.resume(tmp_path / "run", **wrong)


def test_ctrl_c_leaves_a_run_that_goes_on_exactly(tmp_path):
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests themselves run in the background
    whole = run.train(SMALL, tmp_path / "a" / "run")
    interrupted(tmp_path / "b" / "run", 3)
    resumed = run.resume(tmp_path / "b" / "run", max_physical_batch=10)
    a, b = (load_file(tmp_path / k / "run" / "weights.safetensors") for k in "ab")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    assert resumed.summary["guarantee"]["epsilon"] == whole.summary["guarantee"]["epsilon"]
    assert signal.getsignal(signal.SIGINT) is before


def test_checkpoints_need_no_look_at_the_test_set(tmp_path, monkeypatch):
    """A run that evaluates once at its end still goes on, after a crash, where its last checkpoint was written."""
    looks, plain = [], Session.evaluate
    monkeypatch.setattr(Session, "evaluate", lambda self: looks.append(self.step_count) or plain(self))
    once = dataclasses.replace(SMALL, epsilon=None, noise_multiplier=1.0, evaluations=1, checkpoints=4)

    def crash(session: Session, _metrics) -> None:
        if session.step_count == 5:
            raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        run.train(once, tmp_path / "a", watch=crash)
    assert looks == []
    steps: list[int] = []
    run.resume(tmp_path / "a", watch=lambda session, _metrics: steps.append(session.step_count))
    assert (steps[0], steps[-1]) == (5, 8)  # step 4 was the last that was kept
    assert looks == [8]
    run.train(dataclasses.replace(once, checkpoints=0), tmp_path / "b" / "run")
    a, b = (load_file(folder / "weights.safetensors") for folder in (tmp_path / "a", tmp_path / "b" / "run"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_the_ledger_is_written_before_the_gradient_is_used(tmp_path, monkeypatch):
    seen = []
    plain = Session._private

    def spying(self):
        training = plain(self)
        finish = training.mechanism.finish

        def checked(batch):
            seen.append((read_ledger(tmp_path / "r" / "ledger.jsonl").steps, len(seen) + 1))
            return finish(batch)

        training.mechanism.finish = checked
        return training

    monkeypatch.setattr(Session, "_private", spying)
    run.train(SMALL, tmp_path / "r")
    assert len(seen) == 8
    assert all(on_disk >= used for on_disk, used in seen)
    assert read_ledger(tmp_path / "r" / "ledger.jsonl").steps == 8


def test_a_ledger_that_cannot_be_written_stops_training(tmp_path, monkeypatch):
    from erlangen.accounting import ledger

    used = []
    monkeypatch.setattr(Session, "step", lambda self: (self.training.before_release[0](None), used.append(1)))

    def full(*_):
        raise OSError(28, "No space left on device")

    for written in ("write_atomically", "_write_all"):
        monkeypatch.setattr(ledger, written, full)
    with pytest.raises(LedgerError, match="No space left"):
        run.train(SMALL, tmp_path / "r")
    assert not used


def another_run(folder):
    shutil.rmtree(folder)
    run.train(dataclasses.replace(SMALL, steps=2, epsilon=0.5), folder)


def a_copy_of_itself(folder):
    for name in ("ledger.jsonl", "ledger.jsonl.copy"):
        shutil.copy(folder / name, folder / "new")
        (folder / "new").replace(folder / name)


@pytest.mark.parametrize("change", [another_run, a_copy_of_itself, lambda folder: (folder / "ledger.jsonl.copy").unlink()])
def test_a_ledger_that_is_gone_from_its_place_stops_training(change, tmp_path):
    """Its file was still written to, where nobody can read it: of 200 releases the folder's ledger counted 5, and 6, and the
    weights beside it had been given all 200."""
    folder = tmp_path / "run"

    def watch(session, metrics):
        if session.step_count == 3:
            change(folder)

    long = dataclasses.replace(SMALL, steps=100, seed=None, evaluations=2)
    with pytest.raises(LedgerError, match=r"was deleted or replaced while this run was writing it.*not private"):
        run.train(long, folder, watch=watch)
    assert not (folder / "weights.safetensors").exists() or change is another_run
    if change is another_run:
        assert certificate_check.verify(folder / "certificate.json") == [], "its files are its own"


def test_resuming_an_old_checkpoint_counts_twice_and_stops_before_the_budget(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder, 4, dataclasses.replace(SMALL, seed=None))
    old = (folder / "checkpoint.safetensors").read_bytes()
    run.resume(folder)
    first = read_ledger(folder / "ledger.jsonl")
    assert first.steps == 8
    (folder / "checkpoint.safetensors").write_bytes(old)
    again = run.resume(folder)
    book = read_ledger(folder / "ledger.jsonl")
    assert book.steps >= first.steps
    assert epsilon(book.pairs(), again.session.config.delta) <= 3.0
    assert again.summary["steps"] < again.summary["planned_steps"], "the budget was spent: the run had to stop early"


def test_without_a_target_a_second_resume_costs_what_it_costs(tmp_path):
    folder = tmp_path / "run"
    config = dataclasses.replace(SMALL, epsilon=None, noise_multiplier=1.0)
    interrupted(folder, 4, config)
    old = (folder / "checkpoint.safetensors").read_bytes()
    one = run.resume(folder).summary["guarantee"]["epsilon"]["pld"]
    (folder / "checkpoint.safetensors").write_bytes(old)
    two = run.resume(folder).summary["guarantee"]["epsilon"]["pld"]
    assert read_ledger(folder / "ledger.jsonl").steps == 12
    assert two > one


def test_certificates_verify_and_tampering_shows(tmp_path):
    run.train(SMALL, tmp_path / "r")
    path = tmp_path / "r" / "certificate.json"
    assert certificate_check.verify(path) == []
    assert "add-or-remove-one" in (tmp_path / "r" / "certificate.md").read_text()
    document = json.loads(path.read_text())
    document["guarantee"]["epsilon"]["pld"] = 0.5
    path.write_text(json.dumps(document))
    assert certificate_check.verify(path)


def test_what_is_not_private_is_listed(tmp_path):
    result = run.train(dataclasses.replace(SMALL, non_private=True), tmp_path / "r")
    errors = ["direction_mse", "magnitude_mse", "gradient_mse", "cosine", "item_a"]
    listed = ["train_loss", "small_gradients", *errors, "item_b"]
    assert result.summary["non_private"] == listed
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # once per evaluation; item B needs to be told the optimum
        assert set(line["non_private"]) == {"train_loss", "small_gradients", *errors}
        assert not set(line) & set(listed)
    assert 0 <= lines[0]["non_private"]["small_gradients"] <= 1
    assert json.loads((tmp_path / "r" / "certificate.json").read_text())["non_private"] == listed
    assert "train_loss" in (tmp_path / "r" / "certificate.md").read_text()


def test_no_noise_is_certified_as_no_guarantee(tmp_path):
    run.train(dataclasses.replace(SMALL, epsilon=None, noise_multiplier=0.0), tmp_path / "r")
    document = json.loads((tmp_path / "r" / "certificate.json").read_text())
    assert document["guarantee"]["epsilon"]["pld"] == "inf"
    assert "no noise is added" in document["guarantee"]["reasons"][0]


def test_a_command_may_be_repeated_to_resume(tmp_path):
    """Its own options changed nothing and were refused as changes, without saying what they had been."""
    folder = tmp_path / "run"
    interrupted(folder, 4)
    kept = TrainConfig.from_file(folder / "config.json")
    result = run.resume(folder, epsilon=kept.epsilon, model=kept.model, batch=kept.batch, data=kept.data)
    assert result.session.config == kept


def test_what_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run to resume: there is no config\.json; name the folder of a run"):
        run.resume(tmp_path)
    folder = tmp_path / "run"
    interrupted(folder, 4)
    with pytest.raises(ConfigError, match=r"keeps its options, and these differ: lr \(\S+ in this run, 1\.5 now\)\. Give --resume"):
        run.resume(folder, lr=1.5)
    with pytest.raises(ConfigError, match="no_such: no option of a run"):
        run.resume(folder, no_such=1)
    other = tmp_path / "elsewhere"
    interrupted(other, 4)
    (folder / "checkpoint.safetensors").write_bytes((other / "checkpoint.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        run.resume(folder)


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"mechanism": "geodp", "mechanism_options": {"as_published": True, "beta": 0.1}}, "as_published"),
        ({"mechanism": "geodp", "mechanism_options": {"as_published": True, "beta": 0.1}}, "mechanism_options"),
        ({"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}, "as_published"),
        ({"mechanism": "spectral", "clipping": "per-layer", "mechanism_options": {"as_published": True}}, "clipping"),
    ],
)
def test_a_configuration_that_lost_its_words_is_named_as_the_reason(tmp_path, options, lost):
    """A published mechanism cannot go on as a sound one, nor is the missing word's fallout the error."""
    folder = tmp_path / "run"
    interrupted(folder, 4, dataclasses.replace(SMALL, epsilon=None, noise_multiplier=1.0, **options))
    kept = (folder / "config.json").read_text()
    values = json.loads(kept)
    (values if lost in values else values["mechanism_options"]).pop(lost)
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="was changed after the run began"):
        run.resume(folder)
    (folder / "config.json").write_text(kept)
    assert run.resume(folder).summary["steps"] == 8


@pytest.mark.parametrize(
    ("began", "change"),
    [
        ({"seed": 3}, {"seed": None}),
        ({"seed": 3}, {"seed": None, "secure": True}),
        ({"non_private": True}, {"non_private": False}),
        ({}, {"delta": 0.3}),
        ({}, {"data_options": {"normalise": "private"}}),
    ],
)
def test_what_a_certificate_says_of_a_run_holds_from_its_first_step(tmp_path, began, change):
    """Noise that a seed draws again, losses without noise, another δ, a release that no ledger has: none begins or ends later."""
    folder = tmp_path / "run"
    interrupted(folder, 4, dataclasses.replace(SMALL, **began))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=rf"was changed after the run began: {sorted(change)[0] if len(change) == 1 else 's'}"):
        run.resume(folder)
    (folder / "config.json").write_text(json.dumps(values))
    assert run.resume(folder).summary["steps"] == 8


def test_other_data_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    save = lambda: np.savez(  # noqa: E731
        tmp_path / "d.npz", x_train=rng.normal(size=(200, 4, 4)), y_train=rng.integers(0, 2, 200)
    )
    save()
    folder = tmp_path / "run"
    interrupted(folder, 4, dataclasses.replace(SMALL, data=str(tmp_path / "d.npz")))
    save()
    with pytest.raises(ConfigError, match=r"fingerprint differs; give its records \(--data\)"):
        run.resume(folder)


def test_a_second_writer_is_refused(tmp_path):
    from erlangen.accounting.ledger import Ledger

    folder = tmp_path / "run"
    interrupted(folder, 4)
    with Ledger.open(folder / "ledger.jsonl"), pytest.raises(LedgerError):
        run.resume(folder)


# --- resuming, said aloud ------------------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_said_and_its_releases_stay_spent(tmp_path):
    folder, said = tmp_path / "run", []
    interrupted(folder, 4, dataclasses.replace(SMALL, epsilon=None, noise_multiplier=1.0))
    (folder / "checkpoint.safetensors").unlink()
    result = run.resume(folder, say=said.append)
    assert "no checkpoint" in said[0]
    assert "4 releases" in said[0]
    assert result.summary["steps"] == 8
    assert read_ledger(folder / "ledger.jsonl").steps == 12


def test_a_finished_run_is_complete_and_stays_as_it_is(tmp_path):
    folder, said = tmp_path / "run", []
    done = run.train(SMALL, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if "ledger" not in path.name}
    again = run.resume(folder, say=said.append)
    assert said == [f"{folder} is complete: all 8 steps are done; nothing was trained"]
    assert again.summary == {**done.summary, "complete": True}
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if "ledger" not in path.name}
    assert read_ledger(folder / "ledger.jsonl").steps == 8
    (folder / "certificate.json").unlink()  # killed between the weights and the certificate
    run.resume(folder, say=said.append)
    assert certificate_check.verify(folder / "certificate.json") == []
    assert len(said) == 1


@pytest.mark.parametrize("forged", ["summary.json", "certificate.json", "weights.safetensors"])
def test_a_finished_run_does_not_repeat_what_its_ledger_contradicts(forged, tmp_path):
    """Who resumed a finished run was told ε = 0.1 by an edited summary.json."""
    folder = tmp_path / "run"
    done = run.train(SMALL, folder)
    if forged.endswith(".json"):
        document = json.loads((folder / forged).read_text())
        document["guarantee"]["epsilon"] = {"pld": 0.1, "rdp": 0.1}
        (folder / forged).write_text(json.dumps(document))
    else:
        (folder / forged).write_bytes(b"another model")
    assert run.resume(folder).summary["guarantee"] == done.summary["guarantee"]
    assert json.loads((folder / "summary.json").read_text())["guarantee"] == done.summary["guarantee"]
    assert certificate_check.verify(folder / "certificate.json") == []
    assert read_ledger(folder / "ledger.jsonl").steps == 8


def test_damage_to_the_ledger_is_said_counted_and_certified(tmp_path):
    folder, said = tmp_path / "run", []
    interrupted(folder, 4, dataclasses.replace(SMALL, epsilon=None, noise_multiplier=1.0))
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b"[0,3")
    summary = run.resume(folder, say=said.append).summary
    assert "was damaged and has been repaired" in said[0]
    assert "torn" in summary["ledger_notes"][0]
    assert read_ledger(folder / "ledger.jsonl").steps > 8
    assert certificate_check.examine(folder / "certificate.json").notes
    assert "torn" in (folder / "certificate.md").read_text()


def test_a_lone_copy_is_refused_until_accepted(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder, 4)
    (folder / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="--single-copy"):
        run.resume(folder)
    said = []
    assert run.resume(folder, say=said.append, single_copy=True).summary["steps"] == 8
    assert "missing" in said[0]


def test_a_lost_ledger_is_no_fresh_start(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder, 4)
    for name in ("ledger.jsonl", "ledger.jsonl.copy"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="cannot be known"):
        run.resume(folder)
    for name in ("checkpoint.safetensors", "metrics.jsonl"):  # killed before the ledger existed: nothing had left memory
        (folder / name).unlink()
    assert run.resume(folder, say=lambda _: None).summary["guarantee"]["releases"] == 8


def test_a_run_that_ended_before_its_configuration_can_be_started_again(tmp_path):
    folder = tmp_path / "run"
    run.train(SMALL, folder)
    for path in folder.iterdir():
        if "ledger" not in path.name:
            path.unlink()
    with pytest.raises(ConfigError, match="start it again with"):
        run.resume(folder)
    assert run.train(SMALL, folder, overwrite=True).summary["steps"] == 8


def test_a_run_under_way_is_not_overwritten(tmp_path):
    """Its ledger would go on in a file that nobody can read."""
    folder = tmp_path / "run"
    run.train(SMALL, folder)
    with Ledger.open(folder / "ledger.jsonl"), pytest.raises(ConfigError, match="training at this moment"):
        run.train(SMALL, folder, overwrite=True)
    assert run.train(SMALL, folder, overwrite=True).summary["steps"] == 8


def test_moved_data_is_found_by_its_fingerprint(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(200, 4, 4)), "y_train": rng.integers(0, 2, 200)}
    np.savez(tmp_path / "d.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    interrupted(tmp_path / "run", 4, dataclasses.replace(SMALL, data="d.npz"))
    monkeypatch.chdir("/")  # the path was stored absolute
    (tmp_path / "d.npz").rename(tmp_path / "moved.npz")
    with pytest.raises(ConfigError, match="say where: --data"):
        run.resume(tmp_path / "run")
    np.savez(tmp_path / "other.npz", **{**arrays, "y_train": arrays["y_train"][::-1]})
    with pytest.raises(ConfigError, match="fingerprint differs"):
        run.resume(tmp_path / "run", data=str(tmp_path / "other.npz"))
    assert run.resume(tmp_path / "run", data=str(tmp_path / "moved.npz")).summary["steps"] == 8
    assert TrainConfig.from_file(tmp_path / "run" / "config.json").data == str(tmp_path / "moved.npz")
    certified = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert str(tmp_path) not in json.dumps(certified), "where the owner keeps the data is nobody's business"


def test_a_second_ctrl_c_does_not_wait_and_counts_what_was_reserved(tmp_path, monkeypatch):
    folder, plain = tmp_path / "run", Session.step

    def step(self):
        if self.step_count == 3:
            self.training.before_release[0](self.training.event())  # accounted, not yet used
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        plain(self)

    monkeypatch.setattr(Session, "step", step)
    with pytest.raises(run.Interrupted, match=r"in the middle of step 4 of 8: ε = .* --resume"):
        run.train(SMALL, folder)
    monkeypatch.undo()
    assert read_ledger(folder / "ledger.jsonl").steps == 4
    assert run.resume(folder).summary["guarantee"]["epsilon"]["pld"] <= 3.0


def test_a_write_that_is_interrupted_leaves_a_ledger_that_opens(tmp_path, monkeypatch):
    """Ctrl-C between the two copies: nothing may be appended to uneven files."""
    from erlangen.accounting import ledger as module

    folder, plain, calls = tmp_path / "run", module._write_all, []

    def interrupt(file, data):
        calls.append(1)
        plain(file, data)
        if len(calls) == 5:  # the first copy of the first reservation
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_all", interrupt)
    with pytest.raises((KeyboardInterrupt, run.Interrupted)):
        run.train(SMALL, folder)
    monkeypatch.undo()
    book = read_ledger(folder / "ledger.jsonl")
    assert book.notes
    result = run.resume(folder, say=lambda _: None)
    assert epsilon(read_ledger(folder / "ledger.jsonl").pairs(), result.session.config.delta) <= 3.0


def test_classes_that_only_the_test_set_has_are_said(tmp_path):
    rng, said = np.random.default_rng(0), []
    arrays = {"x_train": rng.normal(size=(80, 4, 4)), "y_train": rng.integers(0, 2, 80)}
    np.savez(tmp_path / "d.npz", **arrays, x_test=rng.normal(size=(10, 4, 4)), y_test=np.arange(10) % 4)
    config = dataclasses.replace(
        SMALL, data=str(tmp_path / "d.npz"), batch=20, steps=1, delta=0.1, epsilon=None, noise_multiplier=1.0
    )
    run.train(config, tmp_path / "run", say=said.append)
    assert any("delta is 0.1, above 1/80" in text for text in said)
    assert any("never occur in y_train (2, 3): 40.0%" in text for text in said)


def test_a_damaged_checkpoint_is_a_clear_error(tmp_path):
    from erlangen.training import checkpoint

    folder = tmp_path / "run"
    interrupted(folder, 4)
    saved = folder / "checkpoint.safetensors"
    whole = saved.read_bytes()
    saved.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        run.resume(folder)
    saved.write_bytes(whole)
    state = checkpoint.load(saved)
    del state["optimizer"]
    checkpoint.save(saved, state)
    with pytest.raises(checkpoint.CheckpointError, match="does not fit this run"):
        run.resume(folder)
    assert read_ledger(folder / "ledger.jsonl").steps == 4


def test_a_read_only_folder_is_a_clear_error(tmp_path, monkeypatch):
    """As root, permissions do not bite: the system call is made to fail as a read-only file system does."""
    from erlangen.accounting import ledger as module

    folder = tmp_path / "run"
    interrupted(folder, 4)

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.os, "open", refuse)
    with pytest.raises(LedgerError, match="Read-only file system"):
        run.resume(folder)
    monkeypatch.undo()
    assert read_ledger(folder / "ledger.jsonl").steps == 4
