"""What lies in a folder is read with distrust."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest

from erlangen.accounting.certificate_beside import Validation
from erlangen.accounting.words import upper
from erlangen.report import ReportError, build, collect, read, render
from erlangen.report.privacy import statement


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_sound_run(trained):
    run = read(trained)
    assert run.problems == ()
    assert run.epsilon == run.certificate["guarantee"]["best_epsilon"]
    said = statement(run)
    assert said.tone == "careful"  # seeded noise
    assert f"ε = {upper(run.epsilon, 3)}" in said.headline
    assert f"{math.ceil(1000 * run.certificate['guarantee']['attacker'][0]['tpr']) / 10:.1f} %" in " ".join(said.sentences)
    assert ("certificate", "recomputed from its releases: every number agrees") in said.facts


@pytest.mark.parametrize(
    ("randomness", "said"), [("reproducible: not for release", "knows the seed"), ("pseudo-random, unseeded", "ordinary generator")]
)
def test_noise_that_is_not_secure_is_said_to_be_so(copy, randomness, said):
    edit(copy / "summary.json", lambda s: s.update(randomness=randomness))
    [warning] = [w for w in statement(read(copy)).warnings if "--secure" in w]
    assert said in warning


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["guarantee"].update(delta=1e-9),
        lambda s: s["guarantee"].update(unit="patient"),
        lambda s: s["guarantee"]["epsilon"].update(rdp=0.1),
        lambda s: s.update(randomness="secure"),
        lambda s: s.update(non_private=["train_loss"]),
        lambda s: s["guarantee"]["mechanism"].update(noise_multiplier=29.0),
        lambda s: s["guarantee"]["sampler"].update(sample_rate=0.001),
        lambda s: s["guarantee"].update(releases=2),
        lambda s: s["data"].update(records=10**6),
    ],
)
def test_a_summary_that_contradicts_its_certificate_is_not_believed(copy, change):
    """A page takes ε from the certificate and the words beside it from the summary: both must speak of the same promise."""
    edit(copy / "summary.json", change)
    run = read(copy)
    assert run.epsilon == math.inf
    assert "in summary.json" in statement(run).sentences[0]


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_what_validation_on_the_records_of_the_training_spent_is_in_what_a_run_spent(trained, unit):
    """Of patients it was said that each is protected with the ε of training alone, where all of their records were validated."""
    run = read(trained)
    assert run.certificate is not None
    of_units = dataclasses.replace(run, certificate={**run.certificate, "unit": unit})
    for beyond in (20.0, math.inf):  # with_training: ∞ where units are not records
        spent = dataclasses.replace(of_units, validation=Validation(beyond, True, "two releases more"))
        assert spent.spent == beyond
        said = statement(spent)
        assert ("no finite ε holds" in said.headline) == (beyond == math.inf)
        assert f"By training alone ε = {upper(run.epsilon, 3)}" in " ".join(said.sentences) or beyond < math.inf
    assert dataclasses.replace(of_units, validation=Validation(math.inf, False, "on others")).spent == run.epsilon


def test_validation_that_cannot_be_read_is_not_taken_for_none(copy):
    (copy / "validation-ledger.jsonl").write_text("torn")
    assert read(copy).problems == ()
    assert read(copy).spent == math.inf


@pytest.mark.parametrize("change", [{"mechanism": "iso"}, {"secure": True, "seed": None}, {"max_grad_norm": 0.01}])
def test_options_that_contradict_the_certificate_are_not_believed(copy, change):
    """A page said "iso" and "secure" of a run that was neither: it shows the options of config.json, which nobody compared."""
    edit(copy / "config.json", lambda c: c.update(change))
    run = read(copy)
    assert run.epsilon == math.inf
    assert "in config.json, and" in statement(run).sentences[0]


def test_an_unfinished_run_is_not_reported_on(copy):
    (copy / "summary.json").unlink()
    with pytest.raises(ReportError, match=r"has not finished.*erlangen ui .*erlangen train --resume"):
        read(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ReportError, match=r"no config\.json"):
        read(copy)


def test_a_forged_certificate_is_no_guarantee(copy):
    edit(copy / "certificate.json", lambda c: c["guarantee"].update(best_epsilon=0.01))
    run = read(copy)
    assert run.epsilon == math.inf
    said = statement(run)
    assert said.tone == "bad"
    assert "does not hold" in said.headline
    assert not any(p.key.endswith("attacker") for p in build([run]).pages[0].parts)


def test_without_a_certificate_it_says_so(copy):
    (copy / "certificate.json").unlink()
    assert any("no certificate" in warning for warning in statement(read(copy)).warnings)


def test_no_guarantee_is_said_in_words(copy):
    (copy / "certificate.json").unlink()
    edit(copy / "summary.json", lambda s: s["guarantee"]["epsilon"].update(pld="inf", rdp="inf"))
    said = statement(read(copy))
    assert said.headline == "This model has no privacy guarantee."
    assert said.tone == "bad"


def test_history_takes_the_last_of_a_step_and_leaves_torn_lines(copy):
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "epsilon": 0.5, "test_accuracy": 0.125}\n{"step": 9, "epsi')
    rows = read(copy).history
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["test_accuracy"] == 0.125


def test_what_is_no_run_is_named(tmp_path, copy):
    with pytest.raises(ReportError, match=r"no config\.json"):
        read(tmp_path)
    (copy / "summary.json").unlink()
    with pytest.raises(ReportError, match="--resume"):
        read(copy)


def test_a_network_that_does_not_fit_leaves_a_word(copy):
    (copy / "weights.safetensors").unlink()
    page = build([read(copy)]).pages[0]
    assert any("weights.safetensors" in word for part in page.parts for word in part.words)


def test_a_comparison_stands_for_its_runs(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "a")
    (tmp_path / "comparison.json").write_text(
        json.dumps({"runs": ["runs/a", "runs/unfinished"], "covers": "not <all>"})
    )
    runs = collect([tmp_path])
    assert [run.name for run in runs] == ["a"]
    assert build(runs).warnings == ("not <all>",)
    assert "not &lt;all&gt;" in render(build(runs))
