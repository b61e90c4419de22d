"""The same layers on a GPU: every rule agrees with the CPU, in float32 and under bfloat16 autocast."""

from __future__ import annotations

import copy

import pytest
import torch

from erlangen.gradients import RowMap, Tape, attach, detach
from tests.gradients.reference import seeded_loss
from tests.gradients.test_rules import CASES, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def on_gpu(module, x, rows=None, precision=None, **options):
    module = copy.deepcopy(module).cuda()
    tape = Tape(dict(module.named_parameters()), **options)
    attach(module, tape)
    tape.rows = rows
    with torch.autocast("cuda", torch.bfloat16, enabled=precision is not None):
        out = module(x.cuda())
    out = tuple(o.cpu().float() for o in out) if isinstance(out, tuple) else out.cpu().float()
    seeded_loss(out).mean().backward()
    return tape.gradients()


def on_cpu(module, x, rows=None, **options):
    tape = Tape(dict(module.named_parameters()), **options)
    attach(module, tape)
    tape.rows = rows
    seeded_loss(module(x)).mean().backward()
    detach(module)
    return tape.gradients()


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*cannot be batched")
def test_float32_agrees_with_the_cpu(name, strategy):
    module, x = make(name, torch.float32, rows=6)
    rows = RowMap.regular(3, 2)
    want, got = on_cpu(module, x, rows), on_gpu(module, x, rows, strategy=strategy)
    total = sum(float(n.sum()) for n in want.norms_squared().values()) ** 0.5
    mix = torch.tensor([0.3, 1.0, 0.5])
    sums, theirs = want.weighted_sum({n: mix for n in want.names}), got.weighted_sum({n: mix.cuda() for n in got.names})
    for n, norm in want.norms_squared().items():
        assert (got.norms_squared()[n].cpu().sqrt() - norm.sqrt()).abs().max() / total < 2e-3, n  # TF32 in the forward pass
        assert (theirs[n].cpu() - sums[n]).norm() / total < 2e-3, n


@pytest.mark.parametrize("name", ["linear", "linear-tokens", "conv2d", "conv2d-wide", "conv2d-groups", "groupnorm", "encoder"])
def test_autocast_measures_what_it_sums(name):
    """A clipped owner alone: its contribution, added up in float32, never exceeds the norm it was measured at."""
    module, x = make(name, torch.float32, rows=1)
    for strategy in ("auto", "materialise", "norms-first"):
        got = on_gpu(module, x, precision="bf16", strategy=strategy)
        norm = sum(n.double().sum() for n in got.norms_squared().values()).sqrt()
        total = sum(g.double().square().sum() for g in got.weighted_sum({n: torch.ones(1).cuda() for n in got.names}).values())
        assert float(total.sqrt() / norm) < 1 + 1e-6


def test_what_is_nothing_but_rounding_is_no_influence():
    """The shift of a norm before another norm gets back rounding alone, which is another each time unless convolutions of so many
    channels add up in one order."""
    from erlangen.gradients.independence import check_independence
    from erlangen.models import make_model

    torch.manual_seed(0)
    options = {"group": "D16", "field_counts": [4, 7, 14], "restriction": False, "scale_norm": True, "norm_groups": 7}
    model = make_model("eq-resnet9", (3, 32, 32), 10, **options).cuda().to(memory_format=torch.channels_last)
    for _ in range(3):
        check_independence(model, (torch.randn(3, 3, 32, 32, device="cuda"),), reduction="sum")
