"""Recorded parts on a GPU: real CUDA graphs add what ordinary parts add, never wait, and keep what they read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from erlangen.training.graphs import CudaRecorder
from erlangen.training.session import Session
from tests.training.recordings import Counts, dropping, flat, model_named, run, session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def lenet_pair(**changes: Any) -> tuple[Session, Session]:
    options = {"model": "lenet", "batch": 256, "steps": 200, "device": "cuda", "precision": "float32", **changes}
    plain, recorded = (session(graph=graph, **options) for graph in (False, True))
    return plain, recorded


@pytest.mark.parametrize("changes", [
    {}, {"max_physical_batch": 64}, {"views": 2, "augment": "shift"}, {"views": 3, "augment": "flip-crop-mix"},
    {"precision": "bf16"}, {"model": "cnn"}, {"model": "c8-tiny"},
], ids=str)  # fmt: skip
def test_a_cuda_graph_gives_the_weights_of_ordinary_parts(changes):
    plain, recorded = (run(made, 20) for made in lenet_pair(noise_multiplier=0.0, lr=0.05, **changes))
    assert recorded.graph.reason is None
    near = 1e-2 if changes.get("precision") == "bf16" else 1e-5
    torch.testing.assert_close(flat(recorded), flat(plain), rtol=near, atol=near)
    assert recorded.accountant.steps == plain.accountant.steps == 20


def test_a_cuda_graph_costs_the_same_privacy_and_draws_the_same_noise():
    plain, recorded = (run(made, 20) for made in lenet_pair())
    assert recorded.graph.reason is None
    assert recorded.epsilon() == plain.epsilon()
    torch.testing.assert_close(flat(recorded), flat(plain), rtol=1e-3, atol=1e-4)


def test_dropout_in_a_cuda_graph_is_drawn_anew():
    with model_named(dropping) as name:
        plain, recorded = (run(session(graph=g, device="cuda", precision="float32", **name), 5) for g in (False, True))
        assert recorded.graph.reason is None
        torch.testing.assert_close(flat(recorded), flat(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"views": 2, "augment": "shift"}, {"max_physical_batch": 64}], ids=str)
def test_the_host_never_waits_inside_a_step(changes):
    for made in lenet_pair(**changes):
        run(made, 3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(made, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_and_replays_are_faster():
    times = {}
    for made in lenet_pair():
        run(made, 5)
        torch.cuda.synchronize()
        held, begin = torch.cuda.memory_allocated(), time.perf_counter()
        run(made, 50)
        torch.cuda.synchronize()
        times[made.config.graph] = (time.perf_counter() - begin) / 50
        assert torch.cuda.memory_allocated() <= held + 2**20
    print(f"LeNet, B = 256: {1e3 * times[False]:.2f} ms a step, {1e3 * times[True]:.2f} ms with a graph")
    assert times[True] < times[False]


def test_a_look_at_the_device_is_refused():
    class Looks(Counts):
        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            return self.inner(x) if bool(x.isfinite().any()) else self.inner(2 * x)

    with model_named(Looks) as name:
        made = session(graph=True, device="cuda", **name)
        with pytest.warns(UserWarning, match="host read"):
            run(made, 2)
        assert made.accountant.steps == 2


def test_a_recording_keeps_what_it_reads():
    total = torch.zeros((), device="cuda")

    def recorded() -> Callable[[], None]:
        x = torch.ones(1 << 20, device="cuda")

        def part() -> None:
            total.add_(x.sum())

        part()
        return CudaRecorder(torch.device("cuda"))(part)

    replay = recorded()
    others = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(4)]  # where x was, if it was given back
    total.zero_()
    replay()
    assert total == 1 << 20
    del others
