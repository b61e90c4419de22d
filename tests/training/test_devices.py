"""A run goes on where it stopped, on another device and with another physical batch, and counts every release once.

Without a GPU the same journey is made between sizes of physical batches on the CPU; on a machine with CUDA
`python -m pytest tests/training/test_devices.py` makes both.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

from erlangen.accounting import certificate_check, epsilon
from erlangen.accounting.ledger import read_ledger
from erlangen.training import TrainConfig, run

CONFIG = TrainConfig(
    model="mlp", model_options={"width": 16}, steps=9, batch=64, evaluations=3, optimizer="adam", schedule="cosine",
    clipping="adaptive", epsilon=3.0,
)  # fmt: skip
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def stop_after(step: int):
    def watch(session, _metrics) -> None:
        if session.step_count == step:
            os.kill(os.getpid(), signal.SIGINT)

    return watch


def journey(folder: Path, config: TrainConfig, *stations: dict) -> run.Result:
    """Start at the first station, change after steps 3 and 6, and finish at the last one."""
    with pytest.raises(run.Interrupted, match="after step 3 of 9: ε = "):
        run.train(dataclasses.replace(config, **stations[0]), folder, watch=stop_after(3))
    assert read_ledger(folder / "ledger.jsonl").steps == 3
    with pytest.raises(run.Interrupted, match="after step 6 of 9"):
        run.resume(folder, watch=stop_after(6), **stations[1])
    assert read_ledger(folder / "ledger.jsonl").steps == 6
    return run.resume(folder, **stations[2])


def check(result: run.Result, folder: Path, device: str) -> None:
    assert result.session.device.type == device
    assert {p.device.type for p in result.session.model.parameters()} == {device}
    book = read_ledger(folder / "ledger.jsonl")
    assert result.summary["steps"] == result.session.config.steps == book.steps == 9
    assert book.settled
    assert not book.notes
    spent = epsilon(book.pairs(), result.session.config.delta)
    assert spent == pytest.approx(result.summary["guarantee"]["epsilon"]["pld"], rel=1e-9)
    assert 0.9 * 3.0 < spent <= 3.0
    assert certificate_check.verify(folder / "certificate.json") == []
    assert all(torch.isfinite(w).all() for w in result.session.weights().values())


def test_other_physical_batches(tmp_path):
    sizes = [{"device": "cpu", "max_physical_batch": n} for n in (None, 7, 50)]
    check(journey(tmp_path / "run", CONFIG, *sizes), tmp_path / "run", "cpu")


@GPU
@pytest.mark.parametrize("stations", [("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")])
@pytest.mark.parametrize("secure", [False, True])
def test_other_devices(tmp_path, stations, secure):
    config = dataclasses.replace(CONFIG, secure=secure)
    result = journey(tmp_path / "run", config, *({"device": device} for device in stations))
    check(result, tmp_path / "run", stations[-1])


@GPU
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam-bc"])
def test_moments_and_averages_move_with_the_run(tmp_path, optimizer):
    """After one step on the other device, everything that was saved is there, and nothing is left behind."""
    config = dataclasses.replace(CONFIG, optimizer=optimizer, seed=0, device="cpu")
    with pytest.raises(run.Interrupted):
        run.train(config, tmp_path / "run", watch=stop_after(3))
    with pytest.raises(run.Interrupted):
        run.resume(tmp_path / "run", watch=stop_after(4), device="cuda")
    session = run.resume(tmp_path / "run", device="cuda", max_physical_batch=16).session
    moments = [t for state in session.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert moments
    assert all(t.device.type == "cuda" for t in moments if t.ndim)
    assert {t.device.type for t in session.weights().values()} == {"cuda"}
