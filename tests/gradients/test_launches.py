"""How often a private step calls the device: on a fast GPU the host is what a step waits for.

Counted without a GPU: the operations that PyTorch would launch (views left out), and the kernels' launches, which are not run.
"""

import argparse
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scripts import script

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.gradients import kernels

if not kernels.INTERPRETED:
    pytest.skip("counted where kernels are interpreted", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

gpu = script("gpu")

#: operations that only make another view of the same memory, or another dtype's name
FREE = ("view", "permute", "aten.t.", "transpose", "squeeze", "detach", "slice", "select", "expand", "as_strided", "alias",
        "split", "unbind", "empty", "promote_types", "_record_function")  # fmt: skip


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(word in str(function) for word in FREE):
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def launches(method: str, model: str, monkeypatch) -> int:
    """Of a physical part in the middle of a logical batch."""
    options = {"device": "cpu", "model": model, "physical": 2, "views": 1, "strategy": "auto", "options": None}
    flags = dict.fromkeys(("contiguous", "separate", "compile", "float32", "graph"), False)
    seen = Launches()

    def instead(self, grid):
        return lambda *args, **options: seen.count.update([self.fn.__name__])

    monkeypatch.setattr(kernels, "FORCED", True)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", instead)
    step = gpu.stepper(method, argparse.Namespace(**options, **flags))
    step(True, False)
    seen.count.clear()
    with seen:
        step(False, False)
    return seen.count.total()


@pytest.mark.parametrize(("model", "most"), [("resnet9", 1.25), ("wrn-16-4", 0.85)])
def test_a_private_part_needs_about_as_many_launches_as_a_plain_one(model, most, monkeypatch):
    torch.manual_seed(0)
    plain, private = (launches(method, model, monkeypatch) for method in ("plain", "erlangen"))
    print(f"{model}: {plain} launches plain, {private} private")
    assert private <= most * plain, f"{model}: {private} launches of a private part, {plain} of a plain one"
