"""What a run says before it begins: what was spent where it is written, and values that cannot work."""

from __future__ import annotations

import dataclasses

import pytest

from erlangen.accounting.ledger import Ledger
from erlangen.training import run
from erlangen.training.config import ConfigError
from erlangen.training.validate import validate
from tests.training.test_run import SMALL


def test_what_a_replaced_run_spent_is_said(tmp_path):
    said: list[str] = []
    first = run.train(SMALL, tmp_path / "run", say=said.append)
    assert not any("replaced" in words for words in said)
    run.train(SMALL, tmp_path / "run", overwrite=True, say=said.append)
    (words,) = [words for words in said if "replaced" in words]
    spent = first.summary["guarantee"]["epsilon"]["pld"]
    shown = float(words.split("ε = ")[1].split(" ")[0])
    assert spent <= shown < 1.001 * spent


def test_what_validation_of_a_replaced_run_spent_is_said_with_it(tmp_path):
    """ε = 2.999 was said of a folder whose two ledgers had 15.63; and nothing at all where they could not be read."""
    said: list[str] = []
    folder = tmp_path / "run"
    run.train(SMALL, folder, say=said.append)
    both = validate(folder, "digits", 0.5)["epsilon"]
    run.train(SMALL, folder, overwrite=True, say=said.append)
    assert 0.99 * both <= float(said[-1].split("ε = ")[1].split(" ")[0])
    for ledger in folder.glob("ledger.jsonl*"):
        ledger.write_bytes(ledger.read_bytes() + b"x\n")
    run.train(SMALL, folder, overwrite=True, say=said.append)
    assert "ε = ∞ (its ledger cannot be read)" in said[-1]


def test_an_infinite_target_is_named_before_the_records_are_read():
    with pytest.raises(ConfigError, match="epsilon is inf; give a finite"):
        dataclasses.replace(SMALL, epsilon=float("inf"))


def test_steps_that_a_killed_process_made_are_said(tmp_path):
    """The run stopped short of its steps for a budget that nobody had seen spent."""
    said: list[str] = []
    run.train(SMALL, tmp_path / "run", say=said.append)
    run.resume(tmp_path / "run", say=said.append)
    assert not any("stay spent" in words for words in said)
    with Ledger.open(tmp_path / "run" / "ledger.jsonl") as ledger:
        ledger.spend(ledger.book.releases[0], 3)
    run.resume(tmp_path / "run", say=said.append)
    (words,) = [words for words in said if "stay spent" in words]
    assert "goes on from step 8: 3 steps more were made or reserved" in words
