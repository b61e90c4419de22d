"""The ledger never counts fewer releases than were made: crashes, damage, hostile files, full disks."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import erlangen.accounting as acc
from erlangen.accounting import ledger as ledger_module
from erlangen.accounting.ledger import Ledger, LedgerError, Release, copy_path, read_ledger

STEP = Release(acc.poisson(0.01, acc.gaussian(1.0)), 1.0, 1.0, 0.01, unit="patient", mechanism="iso")
OTHER = Release(acc.gaussian(20.0), 1.0, 20.0)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


def crash(ledger: Ledger) -> None:
    """End like SIGKILL: nothing is settled, the lock goes."""
    ledger._state = "closed"
    for file in ledger._files:
        os.close(file)
    ledger._lock.close()


def test_clean_exit_counts_exactly(path):
    with Ledger.create(path, data="abc", run="r1") as ledger:
        for _ in range(100):
            ledger.spend(STEP)
        ledger.spend(OTHER)
        assert ledger.steps == 101
        assert ledger.pairs() == [(STEP.event, 100), (OTHER.event, 1)]
        assert ledger.book.steps > 101
    book = read_ledger(path)
    assert book.pairs() == [(STEP.event, 100), (OTHER.event, 1)]
    assert (book.run, book.data, book.notes) == ("r1", "abc", ())
    assert book.releases[0] == STEP
    assert acc.epsilon(book.pairs(), 1e-5) > 0


def test_release_is_on_disk_before_it_is_used(path):
    ledger = Ledger.create(path)
    for done in range(1, 400):
        ledger.spend(STEP)
        if done % 37 == 0:
            assert read_ledger(path).steps >= done
    crash(ledger)
    assert read_ledger(path).steps >= 399


def test_a_ledger_that_writes_behind_is_caught(path, monkeypatch):
    """The broken twin: reservations kept in memory. The check above must fail on it."""
    ledger = Ledger.create(path)
    monkeypatch.setattr(ledger, "_write", lambda line, book: setattr(ledger, "_book", book))
    ledger.spend(STEP)
    assert read_ledger(path).steps < 1
    crash(ledger)


def test_crash_counts_the_whole_block_and_resuming_adds(path):
    ledger = Ledger.create(path, block=50, growth=0)
    for _ in range(60):
        ledger.spend(STEP)
    crash(ledger)
    assert read_ledger(path).steps == 100
    with Ledger.open(path) as ledger:
        assert ledger.steps == 100
        for _ in range(10):
            ledger.spend(STEP)
    assert read_ledger(path).steps == 110
    for expected in (120, 130):  # the same old checkpoint resumed twice is two releases
        with Ledger.open(path) as ledger:
            for _ in range(10):
                ledger.spend(STEP)
        assert read_ledger(path).steps == expected


def test_a_hundred_thousand_equal_steps_take_a_few_hundred_bytes(path):
    with Ledger.create(path, data="0123456789abcdef") as ledger:
        start = time.process_time()  # other processes do not count
        for _ in range(100_000):
            ledger.spend(STEP)
        seconds = time.process_time() - start
    assert read_ledger(path).steps == 100_000
    assert path.stat().st_size < 1000
    assert seconds < 2.0  # 20 µs a step
    for line in path.read_text().splitlines():
        json.loads(line)


def test_reservations_stay_within_the_limit(path):
    with Ledger.create(path, block=64, growth=1.0) as ledger:
        ledger.limit = 100
        for done in range(1, 101):
            ledger.spend(STEP)
            assert ledger.book.steps <= 100
            assert ledger.steps == done
    assert read_ledger(path).steps == 100


def test_only_one_writer(path):
    with Ledger.create(path), pytest.raises(LedgerError, match="another process"):
        Ledger.open(path)
    Ledger.open(path).close()
    with pytest.raises(LedgerError, match="exists"):
        Ledger.create(path)
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger.open(path.parent / "nowhere" / "ledger.jsonl")


def test_a_forked_child_cannot_spend_the_parents_block(path):
    with Ledger.create(path) as ledger:
        ledger.spend(STEP)
        ledger._pid += 1  # what a child sees
        with pytest.raises(LedgerError, match="another process"):
            ledger.spend(STEP)
        ledger._pid -= 1


def test_misuse(path):
    ledger = Ledger.create(path)
    for steps in (0, -3):
        with pytest.raises(LedgerError, match="above 0"):
            ledger.spend(STEP, steps)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.spend(STEP)


def test_head_is_found_again_and_a_rolled_back_ledger_is_not(path):
    with Ledger.create(path) as ledger:
        ledger.spend(STEP)
        early = ledger.head
        ledger.spend(STEP, 500)
        late = ledger.head
        assert ledger.contains(early)
        assert ledger.contains(late)
        assert not ledger.contains({**early, "run": "other"})
        assert not ledger.contains({**early, "lines": 99})
        assert not ledger.contains({})
    rolled_back = b"".join(path.read_bytes().splitlines(keepends=True)[: early["lines"]])
    for file in (path, copy_path(path)):
        file.write_bytes(rolled_back)
    with Ledger.open(path) as ledger:
        assert ledger.contains(early)
        assert not ledger.contains(late)


# --- damage --------------------------------------------------------------------------------------------------------


def history(path: Path, crashed: bool = True) -> int:
    """A ledger with a resume, two kinds and an open block; returns the number of releases made."""
    with Ledger.create(path, data="d", run="r", block=16) as ledger:
        for _ in range(40):
            ledger.spend(STEP)
        ledger.spend(OTHER)
    ledger = Ledger.open(path)
    for _ in range(23):
        ledger.spend(STEP)
    if crashed:
        crash(ledger)
    else:
        ledger.close()
    return 64


def test_every_truncation_of_one_copy_is_repaired(path):
    made = history(path)
    before = read_ledger(path).counts
    whole = path.read_bytes()
    for victim in (path, copy_path(path)):
        for size in range(0, len(whole), 7):
            victim.write_bytes(whole[:size])
            book = read_ledger(path)
            assert book.notes
            assert all(now >= then for now, then in zip(book.counts, before))
            assert book.steps >= made
        victim.write_bytes(whole)


def test_repair_on_open_is_durable_and_keeps_the_evidence(path):
    history(path)
    before = read_ledger(path).steps
    damaged = path.read_bytes()[:-9]
    path.write_bytes(damaged)
    with Ledger.open(path) as ledger:
        assert ledger.book.notes
        assert ledger.steps >= before
        ledger.spend(STEP)
    book = read_ledger(path)
    assert book.steps >= before + 1
    assert "torn" in book.notes[0]
    assert path.read_bytes() == copy_path(path).read_bytes()
    kept = list(path.parent.glob("*.damaged-*"))
    assert any(file.read_bytes() == damaged for file in kept)


def test_torn_append_counts_a_block(path):
    """A crash while a reservation is written: it was never used, and is counted all the same."""
    history(path)
    before = read_ledger(path).steps
    with path.open("ab") as file:
        file.write(b"[0,12")
    assert read_ledger(path).steps >= before + 16
    Ledger.open(path).close()
    assert read_ledger(path).steps >= before + 16


def test_without_an_intact_copy_nothing_is_claimed(path):
    history(path)
    whole = path.read_bytes()
    for first, second in [
        (whole[:-5], whole[:-5]),
        (whole[:300], whole[:310]),
        (b"", b""),
        (whole[:-5], whole.splitlines(keepends=True)[0]),
        (whole.replace(b"[0,16", b"[0,11"), whole[:-3]),
    ]:
        path.write_bytes(first)
        copy_path(path).write_bytes(second)
        with pytest.raises(LedgerError, match="backup"):
            read_ledger(path)
        with pytest.raises(LedgerError, match="backup"):
            Ledger.open(path)


def test_two_different_histories_are_refused(path, tmp_path):
    history(path)
    other = tmp_path / "other.jsonl"
    with Ledger.create(other, run="r") as ledger:
        ledger.spend(OTHER)
    copy_path(path).write_bytes(other.read_bytes())
    with pytest.raises(LedgerError, match="different histories"):
        read_ledger(path)


def test_a_missing_copy_must_be_accepted_explicitly(path):
    history(path)
    before = read_ledger(path).counts
    copy_path(path).unlink()
    for call in (read_ledger, Ledger.open):
        with pytest.raises(LedgerError, match="single_copy"):
            call(path)
    assert read_ledger(path, single_copy=True).counts == before
    Ledger.open(path, single_copy=True).close()
    assert read_ledger(path).counts == before


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One act of vandalism."""
    out = bytearray(data)
    at = rng.randrange(len(out))
    kind = rng.randrange(7)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[at : at + rng.randrange(1, 40)]
    elif kind == 2:
        out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
    elif kind == 3:
        lines = bytes(out).splitlines(keepends=True)
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
        out = bytearray(b"".join(lines))
    elif kind == 4:
        lines = bytes(out).splitlines(keepends=True)
        del lines[rng.randrange(len(lines) - 1)]  # losing the last line of a lone file cannot be seen
        out = bytearray(b"".join(lines))
    elif kind == 5:
        out[at : at + 8] = b"\0" * 8
    else:
        hostile = [b'{"__class__":"os.system"}\n', b"[" * 3000 + b"\n", b"1e999\n", b'{"sum":1}\n', b"!!python/x\n"]
        out[at:at] = rng.choice(hostile)
    return bytes(out)


def fuzz(path: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    history(path, crashed=False)
    whole = path.read_bytes()
    before = read_ledger(path).counts
    for _ in range(rounds):
        alone = rng.random() < 0.5
        bad = whole
        for _ in range(rng.choice([1, 1, 1, 3])):
            bad = mutate(bad, rng)
        path.write_bytes(bad)
        if alone:
            copy_path(path).unlink(missing_ok=True)
        else:
            copy_path(path).write_bytes(whole)
        try:
            counts = read_ledger(path, single_copy=alone).counts
        except (LedgerError, ValueError):
            assert alone, "an intact copy must be enough"
            continue
        assert len(counts) >= len(before)
        assert all(now >= then for now, then in zip(counts, before)), bad


def test_hostile_ledgers(path):
    fuzz(path, 600, seed=1)


@pytest.mark.slow
def test_hostile_ledgers_at_length(path):
    fuzz(path, 12_000, seed=2)


def test_forged_lines_with_right_checksums_are_still_checked(path):
    """Checksums can be recomputed by anyone; the rules behind them cannot be talked around."""
    from erlangen.accounting.ledger_format import encode

    with Ledger.create(path) as ledger:
        ledger.spend(STEP)
        good, digest = path.read_bytes(), ledger.head["sum"]
    for record in (
        {"unused": {"0": 65}},
        {"unused": {"0": -1}},
        {"unused": {"7": 1}},
        {"unused": [1]},
        [0, -5],
        [0, 0],
        [3, 1],
        [0, 10**30],
        [0, 1.5],
        [0, True],
        {"define": 0, "event": {"type": "NoOpDpEvent"}},
        {"define": 1, "event": {"type": "eval", "code": "1"}, "neighbouring": "add-or-remove-one"},
        {"repair": "x", "counted": {"0": -4}},
        {"repair": 3, "counted": {}},
        {"surprise": 1},
    ):
        forged = good + encode(record, digest)[0]  # type: ignore[arg-type]
        for file in (path, copy_path(path)):
            file.write_bytes(forged)
        with pytest.raises(LedgerError, match="damaged"):
            read_ledger(path)


# --- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_disk_failures_release_nothing_and_lose_nothing(path, monkeypatch, call, error):
    ledger = Ledger.create(path, block=10, growth=0)
    for _ in range(10):
        ledger.spend(STEP)

    def fail(file, *data):
        if call == "write":
            real(file, data[0][:3])  # a few bytes get through
        raise OSError(error, os.strerror(error))

    real = getattr(os, call)
    monkeypatch.setattr(ledger_module.os, call, fail)
    with pytest.raises(LedgerError, match=os.strerror(error)):
        ledger.spend(STEP)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="broken"):
        ledger.spend(STEP)
    ledger.close()
    assert read_ledger(path).steps >= 10
    with Ledger.open(path) as again:
        again.spend(STEP)
    assert read_ledger(path).steps >= 11


def test_unwritable_folder_is_a_clear_error(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(LedgerError, match="cannot create"):
        Ledger.create(blocker / "ledger.jsonl")


KILLED = """
import sys
from pathlib import Path
import erlangen.accounting as acc
from erlangen.accounting.ledger import Ledger, Release
path, made = Path(sys.argv[1]), Path(sys.argv[2])
release = Release(acc.poisson(0.01, acc.gaussian(1.0)))
ledger = Ledger.open(path) if path.exists() else Ledger.create(path, block=4, growth=0.05)
with made.open("ab", buffering=0) as file:
    print("ready", flush=True)
    while True:
        ledger.spend(release)
        file.write(b".")
"""


def test_killed_processes_never_under_count(tmp_path):
    path, made = tmp_path / "ledger.jsonl", tmp_path / "made"
    rng = random.Random(0)
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(path), str(made)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.1)
        child.kill()
        child.wait()
        child.stdout.close()
        assert read_ledger(path).steps >= made.stat().st_size > 0
