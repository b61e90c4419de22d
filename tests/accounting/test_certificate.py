"""Certificates: what they say, that they can be recomputed, and that no lie survives the recomputation."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import erlangen.accounting as acc
from erlangen.accounting import certificate as cert
from erlangen.accounting import ledger_format as fmt
from erlangen.accounting import signing
from erlangen.accounting.certificate_check import check, verify
from erlangen.accounting.certificate_text import markdown
from erlangen.accounting.ledger import Ledger, Release, read_ledger
from erlangen.cli.main import app
from erlangen.mechanisms import StreamNoise

STEP = Release(acc.poisson(0.01, acc.gaussian(1.0)), 1.0, 1.0, 0.01, mechanism="iso")
FACTS = {
    "sampler": "Poisson",
    "mechanism": {"name": "iso", "sensitivity": 1.0, "covariance": "σ²C²I"},
    "data_size": 60000,
    "secure": True,
    "non_private": ["training loss"],
    "audit": {"lower_bound": 0.4},
}


def run(folder: Path, steps: int = 1000, release: Release = STEP, data: str = "digits:1") -> Path:
    with Ledger.create(folder / "ledger.jsonl", data=data, run=folder.name) as ledger:
        ledger.spend(release, steps)
    return folder


@pytest.fixture(scope="module")
def certified(tmp_path_factory) -> Path:
    folder = run(tmp_path_factory.mktemp("certified") / "run1")
    return cert.save(cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5, FACTS), folder)


@pytest.fixture
def document(certified) -> dict:
    return copy.deepcopy(cert.load(certified))


def test_a_certificate_says_what_was_done_and_verifies(certified, document):
    assert verify(certified) == []
    g = document["guarantee"]
    assert g["epsilon"]["pld"] == pytest.approx(1.8282, abs=1e-4)
    assert g["epsilon"]["rdp"] == pytest.approx(2.101367, abs=1e-6)
    assert g["best_epsilon"] == g["epsilon"]["pld"]
    assert acc.epsilon(acc.gaussian(1 / g["gdp_mu"]), 1e-5) == pytest.approx(g["epsilon"]["pld"], rel=1e-6)
    assert [row["fpr"] for row in g["attacker"]] == [0.01, 0.1]
    assert all(row["fpr"] < row["tpr"] < 1 for row in g["attacker"])
    assert document["data"] | {"note": ""} == {"fingerprint": "digits:1", "size": 60000, "note": ""}
    assert document["steps"] == 1000
    assert {"python", "dp-accounting", "numpy"} <= set(document["software"])
    page = (certified.parent / "certificate.md").read_text()
    for words in ("1.829", "training loss", "add-or-remove-one", "Poisson", "60000 records", "attacker"):
        assert words in page
    assert page.count("\n") < 70


def test_seeded_runs_are_marked(tmp_path):
    book = read_ledger(run(tmp_path / "r", 5) / "ledger.jsonl")
    assert cert.build(book, 1e-5)["randomness"] == "reproducible: not for release"
    with pytest.raises(ValueError, match="unknown facts"):
        cert.build(book, 1e-5, {"sceure": True})


def test_unseeded_runs_are_neither_reproducible_nor_secure(tmp_path):
    book = read_ledger(run(tmp_path / "r", 5) / "ledger.jsonl")
    made = {
        source: cert.build(book, 1e-5, {"mechanism": {"noise_source": source}})["randomness"]
        for source in (StreamNoise().description, StreamNoise(seed=1).description, "something else")
    }
    assert list(made.values()) == [cert.UNSEEDED, cert.REPRODUCIBLE, cert.REPRODUCIBLE]
    secure = {"mechanism": {"noise_source": StreamNoise().description}, "secure": True}
    assert cert.build(book, 1e-5, secure)["randomness"] == "secure"


def test_no_guarantee_is_infinite_and_says_why(tmp_path):
    release = Release(acc.non_private("x"), mechanism="gredp-real", reason="the odd part is released exactly")
    folder = run(tmp_path / "r", 3, release)
    document = cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5)
    assert document["guarantee"]["epsilon"] == {"pld": "inf", "rdp": "inf"}
    assert document["guarantee"]["reasons"] == ["the odd part is released exactly"]
    assert not document["guarantee"]["private"]
    assert check(document) == []
    assert "ε = ∞" in markdown(document)
    assert "odd part" in markdown(document)
    path = cert.save(document, folder)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_repeat_and_select_is_certified_by_rdp_alone(tmp_path):
    search = acc.repeat_and_select(acc.composed(STEP.event, 100), 5.0)
    folder = run(tmp_path / "r", 1, Release(search))
    document = cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5)
    g = document["guarantee"]
    assert g["epsilon"]["pld"] is None
    assert g["best_epsilon"] == g["epsilon"]["rdp"]
    assert any("RDP only" in note for note in g["notes"])
    assert check(document) == []


LIES = {
    "smaller epsilon": lambda d: d["guarantee"]["epsilon"].update(pld=1.8),
    "smaller rdp": lambda d: d["guarantee"]["epsilon"].update(rdp=2.0),
    "smaller best": lambda d: d["guarantee"].update(best_epsilon=1.0),
    "infinite epsilon": lambda d: d["guarantee"]["epsilon"].update(pld="inf"),
    "no epsilon": lambda d: d["guarantee"].pop("epsilon"),
    "null epsilon": lambda d: d["guarantee"]["epsilon"].update(pld=None),
    "weaker attacker": lambda d: d["guarantee"]["attacker"][0].update(tpr=0.02),
    "other rates": lambda d: d["guarantee"]["attacker"][0].update(fpr=0.001),
    "no attacker": lambda d: d["guarantee"].update(attacker=[]),
    "smaller mu": lambda d: d["guarantee"].update(gdp_mu=0.1),
    "fewer steps": lambda d: d.update(steps=999),
    "fewer counted": lambda d: (d["releases"][0].update(count=500), d.update(steps=500)),
    "no releases": lambda d: d.update(releases=[], steps=0),
    "more noise": lambda d: d["releases"][0]["event"]["event"].update(noise_multiplier=2.0),
    "noise beside the event": lambda d: d["releases"][0].update(sigma_eff=2.0),
    "rate beside the event": lambda d: d["releases"][0].update(q=0.001),
    "larger delta": lambda d: d.update(delta=1e-4),
    "no delta": lambda d: d.update(delta=0.0),
    "other relation": lambda d: d.update(neighbouring="replace-one"),
    "unknown relation": lambda d: d.update(neighbouring="none"),
    "other unit": lambda d: d.update(unit="patient"),
    "hand-made event": lambda d: d["releases"][0].update(event={"type": "FreeLunch"}),
    "reasons that are none": lambda d: d["guarantee"].update(reasons=None),
    "reasons without need": lambda d: d["guarantee"].update(reasons=["x"]),
    "other run": lambda d: d.update(run="run2"),
    "other data": lambda d: d["data"].update(fingerprint="digits:2"),
    "unknown field": lambda d: d.update(note="trust me"),
    "missing field": lambda d: d.pop("non_private"),
    "secure enough": lambda d: d.update(randomness="quite secure"),
    "wrong type": lambda d: d.update(steps="1000"),
    "version": lambda d: d.update(version=2),
    "not private": lambda d: d["guarantee"].update(private=False),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_survives(certified, document, lie, tmp_path):
    LIES[lie](document)
    assert check(document, ledger=certified.parent / "ledger.jsonl"), lie


OPTIONS = {"delta": 1e-5, "seed": 3, "secure": False, "non_private": True}
FALSE_WORDS = {
    "unseeded": lambda d: d.update(randomness=cert.UNSEEDED),
    "unseeded throughout": lambda d: (d.update(randomness=cert.UNSEEDED), d["config"].update(seed=None)),
    "secure throughout": lambda d: (d.update(randomness=cert.SECURE), d["config"].update(seed=None, secure=True)),
    "secure, and no configuration": lambda d: d.update(randomness=cert.SECURE, config=None),
    "nothing shown": lambda d: (d.update(non_private=[]), d["config"].update(non_private=False)),
    "something else shown": lambda d: d.update(non_private=["nothing of interest"]),
    "configuration at another delta": lambda d: d["config"].update(delta=1e-9),
    "other rate": lambda d: d["sampler"].update(sample_rate=1e-4),
    "one more epsilon": lambda d: d["guarantee"]["epsilon"].update(best=0.01),
    "one more promise": lambda d: d["guarantee"].update(pure_epsilon=0.01),
    "a note": lambda d: d["guarantee"].update(notes=["the true ε is 0.01"]),
    "no place in the ledger": lambda d: d["ledger"].update(head={}),
}


@pytest.mark.parametrize("words", FALSE_WORDS)
def test_words_beside_the_numbers_are_held_against_the_ledger(words, tmp_path):
    """Whoever knows a seed takes the noise off, whatever ε is: the numbers alone are not the promise."""
    header = {"options": OPTIONS, "non_private": ["train_loss"]}
    with Ledger.create(tmp_path / "ledger.jsonl", header, data="digits:1", run="r") as ledger:
        ledger.spend(STEP, 5)
    facts = {"config": OPTIONS, "non_private": ["train_loss"], "sampler": {"sample_rate": 0.01}, "mechanism": {}}
    document = cert.build(read_ledger(tmp_path / "ledger.jsonl"), 1e-5, copy.deepcopy(facts))
    assert check(document, ledger=tmp_path / "ledger.jsonl") == []
    FALSE_WORDS[words](document)
    assert check(document, ledger=tmp_path / "ledger.jsonl"), words


def test_generous_deltas_are_said(tmp_path):
    book = read_ledger(run(tmp_path / "r", 5) / "ledger.jsonl")
    assert any("above 1/1000" in p for p in check(cert.build(book, 0.01, {"data_size": 1000})))
    said = {"data_size": 1000, "not_covered": ["delta is 0.01, above 1/1000: that allows to publish a record outright"]}
    assert check(cert.build(book, 0.01, said)) == []


def test_a_ledger_that_was_rolled_back_is_noticed(tmp_path):
    """Both copies cut at a line's end are a valid ledger of fewer releases: what goes on from it would be paid for once too few."""
    folder = run(tmp_path / "r", 10)
    path = cert.save(cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5), folder)
    other = tmp_path / "elsewhere" / "ledger.jsonl"
    with Ledger.create(other, {"streams": "other"}, data="digits:1", run="r") as ledger:
        ledger.spend(STEP, 10)
    for copied in ("ledger.jsonl", "ledger.jsonl.copy"):
        lines = (folder / copied).read_bytes().splitlines(keepends=True)
        (folder / copied).write_bytes(b"".join(lines[:2]))
    assert any("rolled back" in problem for problem in verify(path))
    assert any("another run's" in problem for problem in verify(path, ledger=other))


def test_a_certificate_must_not_lag_behind_its_ledger(tmp_path):
    folder = run(tmp_path / "r", 10)
    path = cert.save(cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5), folder)
    assert verify(path) == []
    with Ledger.open(folder / "ledger.jsonl") as ledger:
        ledger.spend(STEP)
    assert any("ledger counts 11" in problem for problem in verify(path))


def test_signatures(certified, document, tmp_path):
    pytest.importorskip("cryptography")
    key = tmp_path / "key.pem"
    public = signing.generate_key(key)
    assert key.stat().st_mode & 0o077 == 0
    signed = signing.sign(document, key)
    assert check(signed, public) == []
    assert check(json.loads(json.dumps(signed)), public) == []
    other = signing.generate_key(tmp_path / "other.pem")
    assert any("another key" in p for p in check(signed, other))
    assert any("not signed" in p for p in check(document, public))
    forged = copy.deepcopy(signed)
    forged["non_private"] = []  # nothing that recomputation could notice
    assert any("changed after" in p for p in check(forged, public))
    for bad in ({}, {"algorithm": "none", "public_key": public, "value": ""}, {**signed["signature"], "value": "zz"}):
        assert check({**document, "signature": bad}, public)
    with pytest.raises(signing.SigningError, match="private key"):
        signing.sign(document, tmp_path / "nowhere.pem")


def test_a_signature_that_cannot_be_checked_is_a_problem(document, tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    signing.generate_key(tmp_path / "key.pem")
    signed = signing.sign(document, tmp_path / "key.pem")
    monkeypatch.setattr("erlangen.extras.find_spec", lambda name: None)
    assert any("pip install 'erlangen[sign]'" in problem for problem in check(signed))


# --- hostile documents ---------------------------------------------------------------------------------------------

SPICE = [
    None, True, -1, 0, 10**400, 1e308, "inf", "", "os.system('true')", [], {}, [[]], {"type": "GaussianDpEvent"},
    {"type": "SelfComposedDpEvent", "event": {"type": "NoOpDpEvent"}, "count": 10**8},
    {"type": "NoOpDpEvent"}, {"type": "ComposedDpEvent", "events": []}, "\ud800",
]  # fmt: skip


def spoil(value, rng: random.Random):
    """Replace, delete or duplicate something somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        action = rng.random()
        if action < 0.1:
            del value[key]
        elif action < 0.15:
            value[str(rng.random())] = rng.choice(SPICE)
        else:
            value[key] = spoil(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        value[index] = spoil(value[index], rng)
        return value
    return rng.choice(SPICE)


def fuzz(document: dict, path: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    honest = acc.epsilon([(STEP.event, 1000)], 1e-5)
    text = json.dumps(document)
    for _ in range(rounds):
        if rng.random() < 0.3:
            data = bytearray(text.encode())
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
        else:
            bad = spoil(copy.deepcopy(document), rng)
            path.write_bytes(json.dumps(bad).encode("utf-8", "surrogatepass"))
        problems = verify(path)
        assert all(isinstance(problem, str) for problem in problems)
        if problems:
            continue
        accepted = cert.load(path)["guarantee"]["best_epsilon"]
        assert accepted == "inf" or accepted >= honest * (1 - 1e-6) or cert.load(path)["delta"] != 1e-5


def test_hostile_certificates(document, tmp_path):
    fuzz(document, tmp_path / "bad.json", 300, seed=1)


@pytest.mark.slow
def test_hostile_certificates_at_length(document, tmp_path):
    fuzz(document, tmp_path / "bad.json", 12_000, seed=2)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a":1,"a":2}', '{"a":NaN}', "[" * 100_000, '"\\ud800"', "\x00"])
def test_files_that_are_not_certificates(text, tmp_path):
    path = tmp_path / "certificate.json"
    path.write_text(text)
    assert len(verify(path)) == 1
    assert verify(tmp_path)
    assert verify(tmp_path / "nowhere.json")


# --- over runs, metrics --------------------------------------------------------------------------------------------


def test_runs_add_up_per_data_set(tmp_path):
    a, b = run(tmp_path / "a", 400), run(tmp_path / "b", 600)
    c = run(tmp_path / "c", 50, data="other")
    spent = {group.fingerprint: group for group in acc.compose_runs([a, b, c, a / "ledger.jsonl"])}
    assert spent["digits:1"].runs == ["a", "b"]
    assert spent["digits:1"].epsilon(1e-5) == pytest.approx(1.8282, abs=1e-4)
    assert spent["other"].steps == 50
    with pytest.raises(acc.LedgerError, match="no ledger"):
        acc.compose_runs([tmp_path / "nowhere"])


def test_runs_under_different_relations_do_not_add_up(tmp_path):
    a = run(tmp_path / "a", 1)
    b = run(tmp_path / "b", 1, Release(acc.gaussian(5.0), neighbouring="replace-one"))
    with pytest.raises(acc.LedgerError, match="do not add up"):
        acc.compose_runs([a, b])[0].epsilon(1e-5)


def test_runs_that_protect_different_units_do_not_add_up(tmp_path):
    """"ε holds for the smallest of them" was not so: a record that joins its patient's others can turn their clipped average
    around, and move the sum by two bounds where the patient's price is for one."""
    a, b = run(tmp_path / "a", 10), run(tmp_path / "b", 10, dataclasses.replace(STEP, unit="patient"))
    assert acc.compose_runs([a, b])[0].epsilon(1e-5) == math.inf
    assert acc.compose_runs([b])[0].epsilon(1e-5) < 1
    told = CliRunner().invoke(app, ["account", str(a), str(b), "--delta", "1e-5", "--json"])
    (group,) = json.loads(told.output)["data_sets"]
    assert group["epsilon"] == {"pld": "inf", "rdp": "inf"}
    assert "protect different units (patient, record)" in group["notes"][0]


def test_private_metrics_have_the_stated_noise_and_sensitivity():
    rng = np.random.default_rng(0)
    actual = rng.integers(0, 3, 500)
    predicted = np.where(rng.random(500) < 0.8, actual, (actual + 1) % 3)
    true = float((actual == predicted).mean())
    draws = [acc.metrics.accuracy(predicted, actual, 4.0, rng) for _ in range(3000)]
    values = np.array([d.value for d in draws])
    assert values.mean() == pytest.approx(true, abs=4 * draws[0].std / math.sqrt(3000))
    assert values.std() == pytest.approx(math.hypot(4.0, math.sqrt(1 / 12)) / 500, rel=0.06)
    assert draws[0].event == acc.gaussian(4.0)

    exact = acc.metrics.confusion_matrix(predicted, actual, 3, 0.0)
    assert acc.epsilon(exact.event, 1e-5) == math.inf
    assert exact.value.sum() == 500
    assert np.trace(exact.value) / 500 == pytest.approx(true)
    noisy = np.stack([acc.metrics.confusion_matrix(predicted, actual, 3, 4.0, rng).value for _ in range(2000)])
    assert np.allclose(noisy.mean(0), exact.value, atol=0.5)
    covariance = np.cov(noisy.reshape(2000, 9).T)
    assert np.linalg.eigvalsh(covariance).min() > 16 * 0.8  # no direction of the matrix escapes the noise
    for i in range(0, 500, 50):  # one record less changes the histogram by at most 1 in L2
        keep = np.arange(500) != i
        fewer = acc.metrics.confusion_matrix(predicted[keep], actual[keep], 3, 0.0).value
        assert np.linalg.norm(exact.value - fewer) <= exact.sensitivity


def test_noise_without_a_stream_is_normal_and_never_the_same():
    from scipy import stats

    draws = acc.metrics._normal((20_000,), None)
    assert stats.kstest(draws, "norm").pvalue > 1e-4
    assert not np.array_equal(draws, acc.metrics._normal((20_000,), None))
    assert acc.metrics.accuracy([1, 0], [1, 1], 3.0).std == 1.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: acc.metrics.accuracy([1], [1, 2], 1.0),
        lambda: acc.metrics.accuracy([], [], 1.0),
        lambda: acc.metrics.accuracy([0.5], [1], 1.0),
        lambda: acc.metrics.accuracy([1], [1], -1.0),
        lambda: acc.metrics.confusion_matrix([3], [1], 3, 1.0),
        lambda: acc.metrics.confusion_matrix([-1], [1], 3, 1.0),
        lambda: acc.metrics.confusion_matrix([1], [1], 0, 1.0),
    ],
)
def test_bad_metrics_input(call):
    with pytest.raises(ValueError):
        call()


def test_a_ledger_that_defines_a_release_twice_counts_both(tmp_path):
    """Each of the two kinds was compared with the certificate by itself: half of the releases were never asked about."""
    header = {"ledger": 1, "run": "twice", "data": "d", "unit": "record", "block": 1, "growth": 0.4}
    lines, last = [], ""
    for record in (header, {"define": 0, **STEP.to_json()}, [0, 10], {"define": 1, **STEP.to_json()}, [1, 10]):
        line, last = fmt.encode(record, last)
        lines.append(line)
    for name in ("ledger.jsonl", "ledger.jsonl.copy"):
        (tmp_path / name).write_bytes(b"".join(lines))
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert verify(cert.save(cert.build(book, 1e-5, FACTS), tmp_path)) == []
    half = dataclasses.replace(book, releases=book.releases[:1], counts=book.counts[:1])
    assert "the ledger counts 20" in verify(cert.save(cert.build(half, 1e-5, FACTS), tmp_path))[0]


@pytest.mark.parametrize(
    ("facts", "config", "words"),
    [
        ({"secure": True}, {"secure": False}, "secure = False"),
        ({"secure": True, "non_private": []}, {"secure": True, "non_private": True}, "turned statistics"),
        ({"secure": True, "non_private": ["train_loss"]}, {"secure": True, "non_private": True}, None),
        ({"secure": False, "non_private": []}, {"secure": False, "non_private": False}, None),
    ],
)
def test_a_certificate_does_not_contradict_its_own_configuration(facts, config, words, tmp_path):
    folder = run(tmp_path / "run", 5)
    document = cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5, {**facts, "config": config})
    problems = check(document)
    assert (words in problems[0]) if words else problems == []
