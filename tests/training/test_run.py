"""Run folders: ledger before use, exact resume, budgets that hold, certificates that verify."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from erlangen.accounting import certificate_check, epsilon
from erlangen.accounting.ledger import LedgerError, read_ledger
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


def test_ctrl_c_leaves_a_run_that_goes_on_exactly(tmp_path):
    whole = run.train(SMALL, tmp_path / "a" / "run")
    interrupted(tmp_path / "b" / "run", 3)
    resumed = run.resume(tmp_path / "b" / "run", max_physical_batch=10)
    a, b = (load_file(tmp_path / k / "run" / "weights.safetensors") for k in "ab")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    assert resumed.summary["guarantee"]["epsilon"] == whole.summary["guarantee"]["epsilon"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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

    monkeypatch.setattr(ledger, "_write_all", full)
    with pytest.raises(LedgerError, match="No space left"):
        run.train(SMALL, tmp_path / "r")
    assert not used


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
    assert result.summary["non_private"] == ["train_loss"]
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert "train_loss" in lines[0]["non_private"]
    assert json.loads((tmp_path / "r" / "certificate.json").read_text())["non_private"] == ["train_loss"]
    assert "train_loss" in (tmp_path / "r" / "certificate.md").read_text()


def test_no_noise_is_certified_as_no_guarantee(tmp_path):
    run.train(dataclasses.replace(SMALL, epsilon=None, noise_multiplier=0.0), tmp_path / "r")
    document = json.loads((tmp_path / "r" / "certificate.json").read_text())
    assert document["guarantee"]["epsilon"]["pld"] == "inf"
    assert "no noise is added" in document["guarantee"]["reasons"][0]


def test_what_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume"):
        run.resume(tmp_path)
    folder = tmp_path / "run"
    interrupted(folder, 4)
    with pytest.raises(ConfigError, match="cannot change"):
        run.resume(folder, lr=1.0)
    other = tmp_path / "elsewhere"
    interrupted(other, 4)
    (folder / "checkpoint.safetensors").write_bytes((other / "checkpoint.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        run.resume(folder)


def test_other_data_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    save = lambda: np.savez(  # noqa: E731
        tmp_path / "d.npz", x_train=rng.normal(size=(200, 4, 4)), y_train=rng.integers(0, 2, 200)
    )
    save()
    folder = tmp_path / "run"
    interrupted(folder, 4, dataclasses.replace(SMALL, data=str(tmp_path / "d.npz")))
    save()
    with pytest.raises(ConfigError, match="fingerprint differs"):
        run.resume(folder)


def test_a_second_writer_is_refused(tmp_path):
    from erlangen.accounting.ledger import Ledger

    folder = tmp_path / "run"
    interrupted(folder, 4)
    with Ledger.open(folder / "ledger.jsonl"), pytest.raises(LedgerError):
        run.resume(folder)
