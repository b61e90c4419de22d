"""`erlangen audit all`: every task is there once, results do not depend on the number of processes, and the page says it all."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections import Counter

import pytest

from erlangen.audit import everything, kept, recipes, static, trust
from erlangen.audit.everything import Everything, Row, Task, tasks
from erlangen.audit.kept import Kept
from erlangen.audit.markdown import page
from erlangen.audit.table import audit_entry, entries, wanted
from erlangen.audit.verdict import CONSISTENT, VIOLATED, failed, passed, unable
from erlangen.audit.zoo import zoo
from erlangen.mechanisms import mechanisms
from erlangen.mechanisms.companions import companions


def test_every_mechanism_and_companion_has_a_row():
    listed = {entry.mechanism for entry in wanted()}
    assert set(mechanisms()) | set(companions()) <= listed
    assert {"DP-SGD", "REP", "Equivariant networks", "Clipless", "Spectral-DP", "GReDP", "GeoDP"} <= {
        e.paper for e in entries()
    }


def test_rows_with_layers_have_as_many_as_they_say():
    """Each of the three is clipped at C by itself; with the weight and bias of one layer counted twice it would be more."""
    rows = [entry for entry in entries() if "3 layers" in entry.label]
    assert len(rows) == 2
    for entry in rows:
        recipe = recipes.Recipe(entry.mechanism, entry.options, entry.settings["network"], clipping=entry.settings["clipping"])
        mechanism = recipe.build()
        assert mechanism.describe()["layers"] == 3
        factor = math.sqrt(0.5 if entry.mechanism == "gredp" else 1.0)
        assert mechanism.event().noise_multiplier == pytest.approx(recipe.sigma * factor / math.sqrt(3))


def test_tasks_are_complete_and_can_travel():
    todo = list(tasks(1.0, 0))
    count = Counter(task.part for task in todo)
    assert count["rows"] == len(wanted())
    assert count["zoo"] == len(zoo())
    assert count["static"] == len(static.PARTS)
    assert count["runs"] == len(everything.RUNS)
    assert pickle.loads(pickle.dumps(todo)) == todo
    assert len(set(map(repr, todo))) == len(todo)


@pytest.mark.slow
def test_processes_share_the_work_without_changing_it():
    todo = [Task("zoo", k, 0.1, 0) for k, s in enumerate(zoo()) if s.kind == "clipping"][:2]
    silent = lambda what, done, total: None  # noqa: E731
    alone = everything._alone(todo, silent, Kept(None))
    assert everything._shared(todo, silent, 2, Kept(None)) == alone
    assert all(result["name"] for result in alone)


def counted(task, tell=None):
    RAN.append(task)
    return [passed("x", "flow", 3, {"limit": math.inf}), {"k": task.which}], 0.5


RAN: list[Task] = []


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(everything, "timed", counted)
    silent, file = lambda what, done, total: None, tmp_path / "parts" / "kept.jsonl"
    todo = [Task("zoo", k, 0.1, 0) for k in range(3)]
    RAN.clear()
    first = everything._alone(todo[:2], silent, Kept(file))
    file.write_bytes(file.read_bytes()[:-20])  # killed while the second line was written
    again = everything._alone(todo, silent, Kept(file))
    assert [todo[0], todo[1], todo[1], todo[2]] == RAN
    assert again[:2] == first
    assert again[0][0].facts["limit"] == math.inf
    assert everything._alone(todo, silent, Kept(file)) == again
    assert len(RAN) == 4
    other = Task("zoo", 0, 0.1, 1)
    assert other not in Kept(file)


def test_results_of_other_sources_do_not_count(tmp_path, monkeypatch):
    file, task, zoo_task = tmp_path / "kept.jsonl", Task("power", 1.0, 1.0, 0), Task("zoo", 0, 1.0, 0)
    for each in (task, zoo_task):
        Kept(file).add(each, {"epsilon": 1.0}, 0.1)
    assert task in Kept(file)
    assert zoo_task in Kept(file)
    was = kept.fingerprint(True)
    monkeypatch.setattr(kept, "fingerprint", lambda with_zoo: "changed" if with_zoo else was)
    assert zoo_task not in Kept(file)


def test_the_fingerprint_is_of_the_sources(tmp_path, monkeypatch):
    package = tmp_path / "erlangen"
    for name in ("__init__.py", "audit/zoo.py", "ui/app.py", "mechanisms/base.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(kept.erlangen, "__file__", str(package / "__init__.py"))
    compute = kept.fingerprint.__wrapped__
    plain, with_zoo = compute(False), compute(True)
    (package / "ui/app.py").write_text("x = 2\n")
    assert (compute(False), compute(True)) == (plain, with_zoo)
    (package / "audit/zoo.py").write_text("x = 2\n")
    assert compute(False) == plain
    assert compute(True) != with_zoo
    (package / "mechanisms/base.py").write_text("x = 2\n")
    assert compute(False) != plain


@pytest.mark.parametrize(
    "label", ["Selective update, one decision", pytest.param("Clipless, training steps", marks=pytest.mark.slow)]
)
def test_special_rows_are_consistent_and_not_idle(label):
    entry = next(e for e in entries() if e.label == label)
    found = audit_entry(dataclasses.replace(entry, settings={**entry.settings, "trials": 500}))
    assert found.verdict == CONSISTENT, found.reason
    assert 1.5 < found.gdp_lower_bound["99.9%"] <= found.claim


def test_a_row_that_cannot_run_is_inconclusive():
    entry = dataclasses.replace(entries()[0], mechanism="nothing of that name")
    assert audit_entry(entry).verdict == "inconclusive"


def results(**changes) -> Everything:
    finding = audit_entry(dataclasses.replace(entries()[0], settings={"claim_epsilon": 4.0, "trials": 2000}))
    sound = {
        "rows": [Row(entries()[0], finding)], "runs": [passed("ISO", "noise along canaries", 10, {"noise_upper_limit": 1.01})],
        "static": [passed("iso", "flow", 3, {"sensitivity": 0.999})],
        "zoo": [
            {"name": "a", "kind": "mechanism", "bug": "broken", "caught_by": ["flow"]},
            {"name": "b", "kind": "mechanism", "bug": "", "caught_by": []},
        ],
        "power": [{"epsilon": 1.0, "gdp": 0.6, "one_run": 0.2, "above_truth": 0.04}],
        "false_alarms": [trust.monte_carlo_rate(3, 200)], "opacus": [],
    }  # fmt: skip
    return Everything(**{**sound, **changes})


def test_the_page_and_the_verdict():
    good = results()
    text = page(good)
    assert good.to_json()["verdict"] == CONSISTENT
    for expected in (
        "1 of 1 deliberately broken",
        "1 of 1 sound ones",
        "5.0% | 1.5% | 200",
        "noise ≤ 1.010",
        "ISO",
        "0.999000",
        "| iso | 0.999000 |",
    ):
        assert expected in text, expected
    assert results(static=[failed("iso", "flow", "leak")]).to_json()["verdict"] == VIOLATED
    assert results(runs=[failed("ISO", "noise along canaries", "less")]).to_json()["verdict"] == VIOLATED
    assert results(static=[unable("new", "flow", "cannot be built")]).to_json()["verdict"] == "inconclusive"
    toothless = results(zoo=[{"name": "a", "kind": "mechanism", "bug": "broken", "caught_by": []}])
    assert toothless.to_json()["verdict"] == VIOLATED
    assert "**nothing**" in page(toothless)


CANNED = {
    "rows": passed("a row", "mechanism", 10), "runs": [passed("ISO", "one run", 10)], "static": [passed("iso", "flow", 3)],
    "zoo": {"name": "a", "kind": "noise", "bug": "broken", "caught_by": ["noise"]},
    "power": {"epsilon": 1.0, "gdp": 0.6, "one_run": 0.2, "above_truth": 0.04}, "alarms": 1,
    "randomness": [trust.monte_carlo_rate(1, 100)], "opacus": [],
}  # fmt: skip


def test_the_command_writes_the_page_and_goes_on_from_what_it_kept(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from erlangen.cli.main import app

    done: list[Task] = []
    monkeypatch.setattr(everything, "timed", lambda task, tell=None: (done.append(task), (CANNED[task.part], 0.1))[1])
    page_at, keep_at = tmp_path / "docs" / "audit.md", tmp_path / "parts.jsonl"
    command = ["audit", "all", "--out", str(page_at), "--keep", str(keep_at), "--json"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["verdict"] == CONSISTENT
    assert page_at.read_text().startswith("# Audit of every mechanism")
    count = len(done)
    assert count == len(list(tasks(1.0, 0)))
    assert len(keep_at.read_text().splitlines()) == count
    again = CliRunner().invoke(app, command)
    assert again.stdout == first.stdout
    assert len(done) == count
    monkeypatch.setitem(CANNED, "zoo", {"name": "a", "kind": "noise", "bug": "broken", "caught_by": []})
    assert CliRunner().invoke(app, ["audit", "all", "--json"]).exit_code == 1  # something broken was not caught
    monkeypatch.setitem(CANNED, "static", [unable("new", "flow", "cannot be built")])
    monkeypatch.setitem(CANNED, "zoo", {"name": "a", "kind": "noise", "bug": "", "caught_by": []})
    assert CliRunner().invoke(app, ["audit", "all", "--json"]).exit_code == 3
