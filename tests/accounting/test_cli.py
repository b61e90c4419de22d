"""The accounting commands: one JSON object on stdout, errors on stderr, exit codes, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import erlangen.accounting as acc
from erlangen.accounting import certificate as cert
from erlangen.accounting.ledger import Ledger, Release, copy_path, read_ledger
from erlangen.cli.main import app as application
from erlangen.sampling import Units

STEP = Release(acc.poisson(0.01, acc.gaussian(1.0)), 1.0, 1.0, 0.01, mechanism="iso")


@pytest.fixture
def call():
    def run(*arguments: object, code: int = 0, words: str = ""):
        result = CliRunner().invoke(application, [str(a) for a in arguments])
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        assert "Traceback" not in result.output
        assert words in result.stderr
        if code:
            assert result.stderr.strip()
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    return run


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "run1"
    with Ledger.create(folder / "ledger.jsonl", data="digits", run="run1") as ledger:
        ledger.spend(STEP, 1000)
    return folder


PARAMETERS = ("account", "--sample-rate", 0.01, "--noise-multiplier", 1.0, "--steps", 1000, "--delta", 1e-5)


def test_account_by_parameters(call):
    out = call(*PARAMETERS, "--json")
    assert out["epsilon"]["pld"] == pytest.approx(1.8282, abs=1e-4)
    assert out["epsilon"]["rdp"] == pytest.approx(2.101367, abs=1e-6)
    words = call(*PARAMETERS)
    assert "1.828" in words
    assert "2.101367" in words


def test_account_without_noise_is_infinite(call):
    out = call("account", "--sample-rate", 0.01, "--noise-multiplier", 0, "--steps", 3, "--json")
    assert out["epsilon"] == {"pld": "inf", "rdp": "inf"}
    assert "∞" in call("account", "--sample-rate", 0.01, "--noise-multiplier", 0, "--steps", 3)


def test_account_of_a_search_is_rdp_only(call):
    out = call(*PARAMETERS, "--repeat-mean", 10, "--json")
    assert out["epsilon"]["pld"] is None
    assert out["epsilon"]["rdp"] > 2.2
    assert "RDP only" in out["accountant_notes"][0]


def test_account_of_an_opacus_history(call, tmp_path):
    file = tmp_path / "history.json"
    for document in ([[1.0, 0.01, 600], [1.0, 0.01, 400]], {"history": [[1.0, 0.01, 1000]], "mechanism": "rdp"}):
        file.write_text(json.dumps(document))
        out = call("account", "--opacus-history", file, "--json")
        assert out["epsilon"]["rdp"] == pytest.approx(2.101367, abs=1e-6)
    for bad in ("{}", "[[1]]", "[[1.0, 2.0, 3]]", "nonsense"):
        file.write_text(bad)
        call("account", "--opacus-history", file, code=2)
    call("account", "--opacus-history", tmp_path / "nowhere.json", code=2, words="nowhere.json")


def test_account_over_runs(call, run_folder):
    out = call("account", run_folder, "--json")
    assert out["epsilon"]["pld"] == pytest.approx(1.8282, abs=1e-4)
    assert out["data_sets"][0]["data"] == "digits"
    assert "1000 releases" in call("account", run_folder, run_folder)


def test_a_ledger_that_was_rolled_back_is_not_added_up(call, run_folder, tmp_path):
    """An older copy of it, put back: `verify` saw that, and `account` and `inspect` told the ε of a part as what was spent."""
    ledger = run_folder / "ledger.jsonl"
    early = ledger.read_text()
    with Ledger.open(ledger) as more:
        more.spend(STEP, 10)
    cert.save(cert.build(read_ledger(ledger), 1e-5), run_folder)
    late = ledger.read_text()
    assert "1010 releases" in call("account", run_folder)
    for path in (ledger, copy_path(ledger)):
        path.write_text(early)
    assert read_ledger(ledger).steps == 1000
    for command in ("account", "inspect"):
        call(command, run_folder, code=1, words="never stood where certificate.json beside it ends, after 1010 releases")
    for path in (ledger, copy_path(ledger)):
        path.write_text(late)
    with Ledger.open(ledger) as more:  # a run that went on after its certificate was written
        more.spend(STEP, 10)
    assert "1020 releases" in call("account", run_folder)
    (run_folder / "certificate.json").write_text("{")
    assert "1020 releases" in call("account", run_folder), "what is wrong with a certificate, verify says"


def test_whoever_is_in_two_data_sets_has_spent_both(call, run_folder, tmp_path):
    """One record more is another fingerprint, and a thousand others have paid twice."""
    with Ledger.create(tmp_path / "more.jsonl", data="digits and one more", run="run2") as ledger:
        ledger.spend(Release(acc.poisson(0.01, acc.gaussian(1.0))), 1000)
    out = call("account", run_folder, tmp_path / "more.jsonl", "--json")
    assert [group["epsilon"]["pld"] for group in out["data_sets"]] == [pytest.approx(1.8282, abs=1e-4)] * 2
    assert out["in_all"]["epsilon"]["pld"] == pytest.approx(acc.epsilon([(acc.poisson(0.01, acc.gaussian(1.0)), 2000)], 1e-5))
    assert "whoever is in all 2 data sets" in call("account", run_folder, tmp_path / "more.jsonl")
    with Ledger.create(tmp_path / "patients.jsonl", data="patients", unit="patient") as ledger:
        ledger.spend(Release(acc.gaussian(5.0), unit="patient"))
    with Ledger.create(tmp_path / "replaced.jsonl", data="replaced") as ledger:
        ledger.spend(Release(acc.gaussian(5.0), neighbouring="replace-one"))
    for other in ("patients.jsonl", "replaced.jsonl"):
        assert call("account", run_folder, tmp_path / other, "--json")["in_all"]["epsilon"]["pld"] == "inf"
    said = call("account", run_folder, tmp_path / "patients.jsonl")
    assert "ε = ∞" in said.splitlines()[-2]
    assert "note: the runs protect different units (patient, record)" in said.splitlines()[-1]


def test_runs_of_other_groupings_do_not_add_up(call, tmp_path):
    """Both protect patients, and a patient of one is parts of several of the other: 20 steps of each were added up to 1.48."""
    digests = {"a": Units(8, [0, 0, 1, 1, 2, 2, 3, 3]).digest(), "b": Units(8, [0, 1, 2, 3, 0, 1, 2, 3]).digest()}
    digests["again"] = digests["a"]
    for run, digest in digests.items():
        with Ledger.create(tmp_path / f"{run}.jsonl", {"units": digest}, data="scans", run=run, unit="patient") as ledger:
            ledger.spend(Release(acc.poisson(0.1, acc.gaussian(2.0)), unit="patient"), 20)
    a, b, again = (tmp_path / f"{run}.jsonl" for run in digests)
    assert call("account", a, again, "--json")["epsilon"]["pld"] == pytest.approx(1.48353, abs=1e-5)
    for said in (call("account", a, again), call("inspect", a)):
        assert "at δ = 1e-05, for each patient\n" in said
    for runs in ((a, b), (b, again, a)):
        out = call("account", *runs, "--json")
        assert out["epsilon"] == {"pld": "inf", "rdp": "inf"}
        first, second = (run.stem for run in runs[:2])
        assert f"the runs {first} and {second} put the records of data scans together" in out["data_sets"][0]["notes"][0]
    with Ledger.create(tmp_path / "more.jsonl", {"units": digests["b"]}, data="more scans", run="more", unit="patient") as ledger:
        ledger.spend(Release(acc.gaussian(5.0), unit="patient"))
    both = call("account", a, tmp_path / "more.jsonl", "--json")
    assert both["in_all"]["epsilon"]["pld"] < 5  # other records are put together in ways of their own
    assert call("account", a, b, tmp_path / "more.jsonl", "--json")["in_all"]["epsilon"]["pld"] == "inf"


def test_groups_without_a_name_on_other_data_do_not_add_up(call, tmp_path):
    """Pairs of records in one run and fives in another, both called "group", were added up: ε = 4.05 for each group in both."""
    for run, size in (("pairs", 2), ("fives", 5)):
        header = {"units": Units(20, [k // size for k in range(20)]).digest()}
        with Ledger.create(tmp_path / f"{run}.jsonl", header, data=f"records of {run}", run=run, unit="group") as ledger:
            ledger.spend(Release(acc.poisson(0.1, acc.gaussian(2.0)), unit="group"), 20)
    pairs, fives = tmp_path / "pairs.jsonl", tmp_path / "fives.jsonl"
    assert call("account", pairs, pairs, "--json")["epsilon"]["pld"] < 2
    out = call("account", pairs, fives, "--json")
    assert [group["epsilon"]["pld"] < 2 for group in out["data_sets"]] == [True, True]
    assert out["in_all"]["epsilon"] == {"pld": "inf", "rdp": "inf"}
    assert "groups without a name on different data" in out["in_all"]["notes"][-1]


def test_a_relation_that_the_ledgers_do_not_state_is_not_answered_in_silence(call, run_folder):
    """The ε of add-or-remove-one, 1.83, was printed for whoever asked for replace-one, under which it is 2.2 and more."""
    for relation in ("replace-one", "add-or-remove-one"):
        call("account", run_folder, "--neighbouring", relation, code=2, words="under the relation that its ledger states")
    assert call(*PARAMETERS, "--neighbouring", "replace-one", "--json")["neighbouring"] == "replace-one"


def test_runs_are_priced_at_the_delta_they_were_trained_for(call, run_folder, tmp_path):
    """1e-5 is too much for a data set of a million, and its certificate says another ε."""
    (run_folder / "config.json").write_text(json.dumps({"delta": 1e-7}))
    assert call("account", run_folder, "--json")["delta"] == 1e-7
    assert call("account", run_folder, "--json")["epsilon"] == call("inspect", run_folder, "--json")["epsilon"]
    with Ledger.create(tmp_path / "more.jsonl", data="digits", run="run2") as ledger:
        ledger.spend(Release(acc.gaussian(5.0)))
    assert call("account", run_folder, tmp_path / "more.jsonl", "--json")["delta"] == 1e-7
    assert call("account", run_folder, "--delta", "1e-4", "--json")["delta"] == 1e-4


def test_inspect(call, run_folder):
    out = call("inspect", run_folder, "--json")
    assert (out["run"], out["steps"], out["settled"]) == ("run1", 1000, True)
    assert "1000 × Gaussian noise" in call("inspect", run_folder)
    assert out["unit"] == ["record"]
    assert out["delta"] == 1e-5
    (run_folder / "config.json").write_text('{"delta": 1e-6}')  # the run's own, unless another is asked for
    assert call("inspect", run_folder, "--json")["delta"] == 1e-6
    assert call("inspect", run_folder, "--delta", 1e-4, "--json")["delta"] == 1e-4
    path = cert.save(cert.build(read_ledger(run_folder / "ledger.jsonl"), 1e-5), run_folder)
    assert call("inspect", path, "--json")["run"] == "run1"
    assert "Privacy certificate" in call("inspect", path)


def test_calibrate(call):
    by_rdp = ("calibrate", "--epsilon", 8, "--sample-rate", 0.16384, "--method", "rdp", "--json")
    out = call(*by_rdp, "--steps", 2160)
    assert out["noise_multiplier"] == pytest.approx(4.93, rel=4e-3)
    assert out["epsilon"]["rdp"] <= 8
    out = call(*by_rdp, "--noise-multiplier", 5)
    assert out["steps"] > 2160
    assert "steps fit" in call("calibrate", "--epsilon", 1, "--sample-rate", 1, "--noise-multiplier", 5)


def test_verify(call, run_folder):
    path = cert.save(cert.build(read_ledger(run_folder / "ledger.jsonl"), 1e-5), run_folder)
    out = call("verify", path, "--json")
    epsilon = out["certified"].pop("epsilon")
    assert epsilon == pytest.approx(1.8282, abs=1e-4)
    facts = {"private": True, "delta": 1e-5, "unit": "record", "reasons": [], "randomness": cert.REPRODUCIBLE, "releases": 1000,
             "non_private": [], "ledger_compared": True, "weights_compared": None, "signed_by": None,
             "epsilon_with_validation": None}  # fmt: skip
    assert out == {"file": str(path), "valid": True, "problems": [], "notes": [], "remarks": [], "certified": facts}
    assert call("verify", run_folder, "--json")["file"] == str(path)
    path.write_text(path.read_text().replace('"pld": 1.8', '"pld": 1.7'))
    out = call("verify", path, "--json", code=1)
    assert not out["valid"]
    assert out["certified"] is None, "an ε that does not hold is not repeated"
    assert "recomputed" in out["problems"][0]
    call("inspect", path, code=1)


@pytest.mark.parametrize(
    ("release", "facts", "line"),
    [
        (STEP, {"secure": True},
         "ε = 1.829 at δ = 1e-05 for each record; secure; 1000 releases; ledger compared; not signed"),
        (STEP, {"mechanism": {"noise_source": "pseudo-random, unseeded"}, "non_private": ["train_loss", "a\x1b[8mb"]},
         "ε = 1.829 at δ = 1e-05 for each record; pseudo-random, unseeded: not for release; 1000 releases; without any guarantee: "
         "train_loss, a�[8mb; ledger compared; not signed"),
        (STEP, {},
         "ε = 1.829 at δ = 1e-05 for each record; reproducible: not for release; 1000 releases; ledger compared; not signed"),
        (Release(acc.non_private("x"), unit="patient", reason="no noise is added (σ = 0)"), {"secure": True},
         "consistent, but NO privacy guarantee: ε = ∞ for each patient (no noise is added (σ = 0)); secure; 1000 releases; "
         "ledger compared; not signed"),
    ],
)  # fmt: skip
def test_verify_says_what_it_verified(call, tmp_path, release, facts, line):
    """"Every recomputed value agrees" was all there was to read, of ε = ∞ too."""
    with Ledger.create(tmp_path / "ledger.jsonl", data="digits", run="r", unit=release.unit) as ledger:
        ledger.spend(release, 1000)
    path = cert.save(cert.build(read_ledger(tmp_path / "ledger.jsonl"), 1e-5, facts), tmp_path)
    assert call("verify", path).splitlines() == [f"{path}: every recomputed value agrees", line]
    out = call("verify", path, "--json")["certified"]
    assert out["private"] == (out["epsilon"] != "inf") == ("NO privacy" not in line)
    assert out["randomness"] in line


def test_a_certificate_without_its_ledger_says_so(call, run_folder, tmp_path):
    """Whoever deletes the ledger deletes what the certificate might have left out."""
    path = cert.save(cert.build(read_ledger(run_folder / "ledger.jsonl"), 1e-5), run_folder)
    elsewhere = tmp_path / "kept.jsonl"
    for ledger, kept in ((run_folder / "ledger.jsonl", elsewhere), (copy_path(run_folder / "ledger.jsonl"), copy_path(elsewhere))):
        ledger.rename(kept)
    said = call("verify", path)
    assert "; no ledger compared; " in said
    assert "note: there is no ledger beside the certificate: its releases were not compared" in said
    out = call("verify", path, "--json")
    assert out["valid"]
    assert out["certified"]["ledger_compared"] is False
    assert "no ledger" in out["remarks"][0]
    assert "no ledger" not in call("verify", path, "--ledger", elsewhere)


def test_sign(call, run_folder, tmp_path):
    pytest.importorskip("cryptography")
    path = cert.save(cert.build(read_ledger(run_folder / "ledger.jsonl"), 1e-5), run_folder)
    key = tmp_path / "key.pem"
    public = call("sign", path, "--key", key, "--new-key", "--json")["public_key"]
    assert call("verify", path, "--public-key", public, "--json")["valid"]
    call("verify", path, "--public-key", "00" * 32, code=1)
    call("sign", path, "--key", key, "--new-key", code=2, words="never replaced; leave --new-key out")
    call("sign", path, "--key", tmp_path / "nowhere.pem", code=2, words="no key at")
    assert f"; signed by {public[:16]}\n" in call("verify", path)
    assert "ε = 1.829 at δ = 1e-05 for each record" in call("sign", path, "--key", key), "what somebody signs is said"
    with Ledger.create(run_folder / "validation-ledger.jsonl", data="digits", run="run1") as ledger:
        ledger.spend(Release(acc.gaussian(1.0)), 5)
    (said,) = call("sign", path, "--key", key, "--json")["remarks"]
    assert "which the certificate does not" in said
    page = path.with_suffix(".md").read_text()
    path.with_suffix(".md").write_text(page.replace("1.82", "0.82"))
    call("sign", path, "--key", key, code=1, words="line 3 is")  # what somebody read is what they sign
    path.with_suffix(".md").write_text(call("inspect", path))  # as the problem advises
    assert call("verify", path, "--json")["certified"]["signed_by"] == public
    path.write_text(path.read_text().replace('"sampler": null', '"sampler": "Poisson"'))
    call("verify", path, code=1)
    call("sign", path, "--key", key, code=1)


def test_a_signature_without_its_package_says_what_to_install(call, run_folder, tmp_path, monkeypatch):
    path = cert.save(cert.build(read_ledger(run_folder / "ledger.jsonl"), 1e-5), run_folder)
    monkeypatch.setattr("erlangen.extras.find_spec", lambda name: None)
    call("sign", path, "--key", tmp_path / "key.pem", "--new-key", code=2, words="pip install 'erlangen[sign]'")
    assert not (tmp_path / "key.pem").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["account"], 2),
        (["account", "--steps", "3"], 2),
        (["account", "x", "--steps", "3"], 2),
        (["account", "x", "--repeat-mean", "3"], 2),
        (["account", "--sample-rate", "2", "--noise-multiplier", "1", "--steps", "3"], 2),
        (["account", "--sample-rate", "nan", "--noise-multiplier", "1", "--steps", "3"], 2),
        (["account", "--sample-rate", "0.1", "--noise-multiplier", "-1", "--steps", "3"], 2),
        (["account", "--sample-rate", "0.1", "--noise-multiplier", "1", "--steps", "-3"], 2),
        (["account", "--sample-rate", "0.1", "--noise-multiplier", "1", "--steps", "many"], 2),
        (["account", "--sample-rate", "0.1", "--noise-multiplier", "1", "--steps", "3", "--delta", "0"], 2),
        (["account", "--sample-rate", "0.1", "--noise-multiplier", "1", "--steps", "3", "--neighbouring", "x"], 2),
        (["calibrate", "--epsilon", "1", "--sample-rate", "0.1"], 2),
        (["calibrate", "--epsilon", "-1", "--sample-rate", "0.1", "--steps", "3"], 2),
        (["calibrate", "--epsilon", "1", "--sample-rate", "0.1", "--steps", "3", "--method", "x"], 2),
        (["account", "no-such-run"], 2),
        (["inspect", "no-such-run"], 2),
        (["verify", "no-such-file"], 2),
        (["verify"], 2),
        (["verify", "x", "--frobnicate"], 2),
        (["nonsense"], 2),
    ],
)
def test_misuse_and_failure(call, arguments, code):
    call(*arguments, code=code)
    assert list(call(*arguments, "--json", code=code)) == ["error"]


def test_a_lone_copy_is_refused_until_accepted(call, run_folder):
    copy_path(run_folder / "ledger.jsonl").unlink()
    call("account", run_folder, code=1)
    assert call("account", run_folder, "--single-copy", "--json")["epsilon"]["pld"] > 1.8
    path = cert.save(cert.build(read_ledger(run_folder / "ledger.jsonl", single_copy=True), 1e-5), run_folder)
    call("verify", path, code=1, words="only one exists")
    accepted = call("verify", path, "--single-copy", "--json")
    assert accepted["valid"]
    assert "missing" in accepted["notes"][0]
    call("inspect", path, "--single-copy")


def test_verify_says_that_a_copy_was_damaged(call, run_folder):
    """A copy that is behind changes no count; a torn record counts a block more, which the certificate does not have."""
    ledger = run_folder / "ledger.jsonl"
    path = cert.save(cert.build(read_ledger(ledger), 1e-5), run_folder)
    whole = ledger.read_bytes()
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    out = call("verify", path, "--json", words="damaged and repaired")
    assert out["valid"]
    assert "behind the other copy" in out["notes"][0]
    ledger.write_bytes(whole + b"[0,12")
    out = call("verify", path, "--json", code=1, words="torn")
    assert "the ledger counts" in out["problems"][0]
    assert "torn" in out["notes"][0]
    Ledger.open(ledger).close()  # repairs, and keeps the note
    path = cert.save(cert.build(read_ledger(ledger), 1e-5), run_folder)
    assert "torn" in call("verify", path, "--json", words="damaged and repaired")["notes"][0]


@pytest.mark.parametrize("command", ["verify", "inspect", "account", "sign"])
def test_what_is_no_certificate_or_ledger_is_said_by_name(call, tmp_path, run_folder, command):
    words, text, empty = tmp_path / "notes.txt", tmp_path / "some.json", tmp_path / "empty"
    words.write_text("not what you think\n")
    text.write_text('{"a": 1}')
    empty.mkdir()
    more = ["--key", "k.pem"] if command == "sign" else []
    for thing in (words, text, empty):
        message = call(command, thing, *more, "--json", code=2)["error"]
        assert str(thing) in message
    if command in ("verify", "sign"):
        assert "no certificate.json" in call(command, run_folder, *more, "--json", code=2)["error"]
    else:
        assert "not a ledger" in call(command, words, "--json", code=2)["error"]


def test_validation_releases_count_for_their_data(call, run_folder):
    before = call("account", run_folder, "--json")["epsilon"]["pld"]
    with Ledger.create(run_folder / "validation-ledger.jsonl", data="digits", block=1) as ledger:
        ledger.spend(Release(acc.gaussian(5.0)), 2)
    out = call("account", run_folder, "--json")
    assert len(out["data_sets"]) == 1
    assert out["epsilon"]["pld"] > before
    named = call("account", run_folder / "ledger.jsonl", "--json")
    assert named["epsilon"] == out["epsilon"], "whoever names the file of a run's ledger means the run"
    assert call("account", run_folder, run_folder / "ledger.jsonl", "--json")["epsilon"] == out["epsilon"], "and counts it once"
    (link := run_folder.parent / "elsewhere.jsonl").symlink_to(run_folder / "ledger.jsonl")
    for other in (link, run_folder / "ledger.jsonl.copy"):
        assert call("account", other, run_folder, "--json")["epsilon"] == out["epsilon"], other
        assert call("account", other, "--single-copy", "--json")["epsilon"] == out["epsilon"], other


def test_calibrate_says_why_no_step_fits(call):
    never = ("calibrate", "--epsilon", 0.5, "--sample-rate", 0.5, "--noise-multiplier", 0.3)
    assert "one step alone costs" in call(*never)
    out = call(*never, "--json")
    assert out["steps"] == 0
    assert "one step alone costs" in out["why"]
