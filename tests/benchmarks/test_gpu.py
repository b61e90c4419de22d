"""The GPU benchmark measures what it says: with recorded steps both sides train as they do without."""

from __future__ import annotations

import argparse

import pytest
import torch

from tests.scripts import script

bench = script("gpu")


def trained(method: str, monkeypatch: pytest.MonkeyPatch, graph: bool = False, compiled: bool = False) -> torch.Tensor:
    """The weights after three logical steps of two physical ones, on this machine's processor."""
    args = argparse.Namespace(
        model="lenet", device="cpu", physical=8, views=2, contiguous=True, separate=False, strategy="auto", compile=compiled,
        float32=True, graph=graph, options=None,
    )  # fmt: skip
    made, build = [], bench.build
    with monkeypatch.context() as patch:
        patch.setattr(bench, "build", lambda *a: made.append(build(*a)) or made[-1])
        step = bench.stepper(method, args)
    for _ in range(3):
        step(True, False)
        step(False, True)
    return torch.cat([p.detach().flatten() for p in made[0].parameters()])


@pytest.mark.parametrize("method", ["plain", "erlangen"])
def test_recorded_steps_train_alike(method, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    usual, recorded = (trained(method, monkeypatch, graph) for graph in (False, True))
    torch.testing.assert_close(recorded, usual, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_compiled_private_steps_train_alike(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    usual, compiled = (trained("erlangen", monkeypatch, compiled=c) for c in (False, True))
    torch.testing.assert_close(compiled, usual, rtol=1e-5, atol=1e-6)
