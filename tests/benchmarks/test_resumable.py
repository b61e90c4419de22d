"""What the long benchmarks stand on: a file that is whole after a kill, rows that are made once, an end in time, no mixing."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erlangen.data.base import Dataset
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble
from tests.scripts import script

base = script("resumable")
ROOT = Path(__file__).parents[2]
PHASES = {"tuning": ("key",), "runs": ("key",)}


# -- the file -------------------------------------------------------------------------------------------------------


def killed(work: Callable[[], object]) -> int:
    """The signal that ended a child process which did this work."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(path: Path) -> None:
    """Add a second row, and die when its bytes are on their way to the disk."""
    results = base.Results(path, PHASES)
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
    results.keep("runs", [{"key": [2], "score": 0.2}])


def careless(path: Path, content: bytes) -> None:
    """The broken twin: over the old file."""
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        os.fsync(file.fileno())
        file.write(content[len(content) // 2 :])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_kill_in_the_middle_of_a_write_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "out" / "rows.json"
    base.Results(path, PHASES).keep("runs", [{"key": [1], "score": 0.1}])
    assert killed(lambda: dying(path)) == -signal.SIGKILL
    after = base.Results(path, PHASES)
    assert after.rows("runs") == [{"key": [1], "score": 0.1}]
    after.keep("runs", [{"key": [2], "score": 0.2}])
    assert [row["key"] for row in json.loads(path.read_text())["runs"]] == [[1], [2]]
    monkeypatch.setattr(base, "write_atomically", careless)
    assert killed(lambda: dying(path)) == -signal.SIGKILL
    with pytest.raises(json.JSONDecodeError):
        base.Results(path, PHASES)


def test_a_row_is_known_by_its_fields_whatever_else_it_says(tmp_path):
    results = base.Results(tmp_path / "rows.json", {"runs": ("method", "options", "seed")})
    results.keep("runs", [{"method": "a", "seed": 0, "options": {"x": 1, "y": [2]}, "score": 0.5, "device": "cpu"}])
    again = base.Results(tmp_path / "rows.json", {"runs": ("method", "options", "seed")})
    for held in (results, again):
        assert held.find("runs", {"method": "a", "options": {"y": [2], "x": 1}, "seed": 0})["score"] == 0.5
        assert held.find("runs", {"method": "a", "options": {"y": [3], "x": 1}, "seed": 0}) is None


def test_other_options_under_the_same_name_are_an_error_that_changes_nothing(tmp_path):
    path = tmp_path / "rows.json"
    fields = {"runs": ("method", "seed")}
    base.Results(path, fields).keep("runs", [{"method": "rep", "seed": 3, "lr": 0.5, "score": 0.9}])
    before = path.read_bytes()
    with pytest.raises(SystemExit) as error:
        base.Results(path, fields).find("runs", {"method": "rep", "seed": 3, "lr": 0.25})
    for word in (str(path), '["rep", 3]', "runs", "lr", "0.5", "0.25", "as before, or another file"):
        assert word in str(error.value)
    assert path.read_bytes() == before


def test_rows_made_under_other_conditions_are_an_error(tmp_path):
    path = tmp_path / "rows.json"
    first = base.Results(path, PHASES)
    first.hold({"steps": 3, "sizes": (1, 2)}, unsaid={})
    first.hold({"steps": 5, "sizes": (1, 2)}, unsaid={})  # nothing was made with 3
    first.keep("runs", [{"key": [1]}])
    base.Results(path, PHASES).hold({"steps": 5, "sizes": (1, 2), "more": 1}, unsaid={})
    with pytest.raises(SystemExit, match=r"rows with steps = 5, and now it is 6.*Give steps as before"):
        base.Results(path, PHASES).hold({"steps": 6}, unsaid={})


def test_a_file_from_before_says_nothing_and_is_what_was_usual(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"tuning": [], "runs": [{"key": [1]}]}))
    with pytest.raises(SystemExit, match="steps = 100, and now it is 2"):
        base.Results(path, PHASES).hold({"steps": 2}, unsaid={"steps": 100})
    base.Results(path, PHASES).hold({"steps": 100}, unsaid={"steps": 100})


def test_time_adds_up_versions_do_not_repeat_and_the_summary_is_of_the_rows(tmp_path):
    path, count = tmp_path / "rows.json", lambda content: {"count": len(content["runs"])}
    for k in range(3):
        results = base.Results(path, PHASES, summary=count)
        time.sleep(0.01)
        results.keep("runs", [{"key": [k]}], torch="2", device="cpu" if k < 2 else "gpu")
        assert json.loads(path.read_text())["count"] == k + 1
    content = json.loads(path.read_text())
    assert 0.03 <= content["seconds"] < 5
    assert content["versions"] == [{"torch": "2", "device": "cpu"}, {"torch": "2", "device": "gpu"}]
    assert base.Results(path, PHASES, resume=False).rows("runs") == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gredp_geodp", "benchmarks/results/gredp.json"), ("gredp_geodp", "benchmarks/results/geodp-tables.json"),
        ("gredp_geodp", "benchmarks/results/geodp-fig5.json"), ("rep_table1", "docs/results/rep-table1.json"),
    ],
)  # fmt: skip
def test_stored_files_go_on(name, file):
    module = script(name)
    phases = (module.Tables if name == "gredp_geodp" else module.Table1).phases
    results = base.Results(ROOT / file, phases)
    for phase in phases:
        rows = results.rows(phase)
        assert rows
        if name == "gredp_geodp":
            assert results.left(phase, [module.Trial(*row["key"]) for row in rows]) == []
        else:
            fields = module.Cell.__dataclass_fields__
            assert results.left(phase, [module.Cell(**{f: row[f] for f in fields}) for row in rows]) == []


# -- the work -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    method: str
    seed: int

    @property
    def given(self) -> dict:
        return {"key": [self.method, self.seed]}

    @property
    def family(self) -> str:
        return self.method


def records() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 1, 4, 4)).astype(np.float32), np.arange(60) % 3
    return Dataset("few", x, y, x[:12], y[:12], 3)


class Small(base.Bench):
    """Logistic regressions by two mechanisms, three steps each."""

    def __init__(self, folder: Path, resume: bool = True, fails_at: int = -1, **options) -> None:
        usual = {"data": folder, "out": folder / "out.json", "members": 2, "no_graph": False, "device": "cpu"}
        super().__init__(argparse.Namespace(**{**usual, "budget": math.inf, **options}), resume)
        self.ensembles: list[list[Member]] = []
        self.fails_at = fails_at

    def train(self, phase, trials):
        if len(self.ensembles) == self.fails_at:
            raise KeyboardInterrupt
        self.ensembles.append(trials)
        config = TrainConfig(
            data="few", model="logistic", epsilon=None, noise_multiplier=1.0, batch=10, steps=3, lr=0.1, device="cpu"
        )
        configs = [replace(config, seed=t.seed, mechanism=t.method) for t in trials]
        return self.together(configs, records(), run_ids=[f"{phase} {t.seed}" for t in trials]).evaluate()

    def work(self):
        self.run("tuning", [Member(m, 1000) for m in ("iso", "gredp")])
        self.run("runs", [Member(m, seed) for seed in range(4) for m in ("iso", "gredp")])


def rows(folder: Path) -> dict[str, list]:
    content = json.loads((folder / "out.json").read_text())
    return {phase: sorted(content[phase], key=lambda row: row["key"]) for phase in PHASES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("whole")
    Small(folder).main()
    return rows(folder)


def test_families_train_apart_and_never_more_than_asked_for(tmp_path, whole):
    bench = Small(tmp_path, members=3)
    bench.main()
    assert [len(part) for part in bench.ensembles] == [1, 1, 2, 2, 2, 2]
    assert all(len({t.method for t in part}) == 1 for part in bench.ensembles)
    assert rows(tmp_path) == whole


def test_what_is_finished_is_not_made_again(tmp_path, whole, capsys):
    with pytest.raises(KeyboardInterrupt):
        Small(tmp_path, fails_at=4).main()
    kept = rows(tmp_path)
    assert [len(kept[phase]) for phase in PHASES] == [2, 4]
    second = Small(tmp_path)
    second.main()
    assert len(second.ensembles) == 2
    assert rows(tmp_path) == whole, "an interrupted run has the rows of one that was not"
    third = Small(tmp_path)
    third.main()
    assert third.ensembles == []
    fresh = Small(tmp_path, resume=False)
    fresh.main()
    assert len(fresh.ensembles) == 6
    assert rows(tmp_path) == whole


def test_no_ensemble_is_begun_after_the_budget(tmp_path, whole, capsys):
    nothing = Small(tmp_path, budget=0.0)
    nothing.main()
    assert nothing.ensembles == []
    assert "out of time: run again with --resume" in capsys.readouterr().out

    class Slow(Small):
        def train(self, phase, trials):
            found = super().train(phase, trials)
            if len(self.ensembles) == 3:
                self.budget.end = time.perf_counter() - 1e-3  # it was spent meanwhile
            return found

    slow = Slow(tmp_path)
    slow.main()
    assert len(slow.ensembles) == 3
    assert [len(kept) for kept in rows(tmp_path).values()] == [2, 2], "what was begun in time is kept"
    rest = Small(tmp_path)
    rest.main()
    assert len(rest.ensembles) == 3
    assert rows(tmp_path) == whole


def test_a_budget_counts_from_now():
    with pytest.raises(base.OutOfTime):
        base.Budget(-1.0).check()
    budget = base.Budget(100.0)
    budget.check()
    assert 99 < budget.left() <= 100
    assert base.Budget().left() == math.inf


class NoCapture(Ensemble):
    """As on a device where capturing a graph fails."""

    def __init__(self, *args, graph: bool, **options) -> None:
        super().__init__(*args, graph=graph, **options)
        self.use_graph = graph

    def run(self, steps=None) -> None:
        if self.use_graph:
            raise RuntimeError("operation not permitted when stream is capturing")
        super().run(steps)


def test_where_no_graph_can_be_captured_kernels_are_launched_one_by_one(tmp_path, whole, monkeypatch, capsys):
    monkeypatch.setattr(base, "Ensemble", NoCapture)
    Small(tmp_path).main()
    assert capsys.readouterr().out.count("CUDA graphs do not work here (operation not permitted") == 1
    assert rows(tmp_path) == whole

    def broken(self, steps=None):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(NoCapture, "run", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        Small(tmp_path, resume=False, no_graph=True).main()


@given(count=st.integers(0, 200), size=st.integers(1, 60))
def test_parts_are_nearly_equal_and_none_is_too_large(count, size):
    parts = list(base.batched(list(range(count)), size))
    assert [item for part in parts for item in part] == list(range(count))
    lengths = {len(part) for part in parts}
    assert max(lengths, default=0) <= size
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    assert len(parts) == math.ceil(count / size)


def test_held_out_records_are_the_last_twelfth_of_the_training_set():
    data = records()
    held = base.held_out(data)
    assert (len(held), len(held.x_test)) == (55, 5)
    assert np.array_equal(np.concatenate([held.x_train, held.x_test]), data.x_train)
    assert np.array_equal(np.concatenate([held.y_train, held.y_test]), data.y_train)
