"""Layer rules: what a rule tells the tape is what ordinary autograd says, one sample at a time; and clipping holds end to end."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.audit.flow import TOLERANCE
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Finding, failed, passed
from erlangen.gradients import RowMap, Tape, attach, detach, kernels
from erlangen.gradients.tape import STRATEGIES, PerSampleGradients
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.streams import seed_layers

AGREEMENT = 1e-4


@dataclass(frozen=True)
class Example:
    """A layer and inputs for it: ``inputs(rows)`` is a batch of that many rows."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


def _loss(out: object) -> Tensor:
    """A nonlinear loss per row of whatever tensors a layer returns."""
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)]
    return torch.stack([(o.flatten(1).sin() + 0.1 * o.flatten(1).square()).sum(1) for o in outs]).sum(0)


def recorded(module: nn.Module, x: Tensor, strategy: str, rows: RowMap | None = None) -> PerSampleGradients:
    tape = Tape(dict(module.named_parameters()), "sum", strategy)
    tape.rows = rows
    attach(module, tape)
    try:
        _loss(module(x)).sum().backward()
        return tape.gradients()
    finally:
        detach(module)


def one_by_one(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """By ordinary autograd, in ordinary memory."""
    plain: Any = copy.deepcopy(module)
    plain, x, rows = plain.to(memory_format=torch.contiguous_format), x.contiguous(), []
    for r in range(x.shape[0]):
        plain.zero_grad()
        _loss(plain(x[r : r + 1])).sum().backward()
        rows.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in plain.named_parameters()})
    return {n: torch.stack([row[n] for row in rows]) for n in rows[0]}


@single_threaded
def audit_layer(name: str, example: Example, rows: int = 3, device: str = "cpu") -> Finding:
    """Agreement of gradients, norms and sums for every strategy and row map, in two metrics; then contributions under hostile
    inputs, also in bfloat16. On a GPU this goes through the fused kernels."""
    seed_layers(0)
    module = example.build()
    for p in module.parameters():
        if p.ndim == 1:  # affine parameters at their defaults hide mistakes
            p.data.add_(0.3 * torch.randn_like(p))
    module, x = placed(module, device), placed(example.inputs(2 * rows), device)
    problem = _agreement(module, x) or _contributions(module, x)
    return failed(name, "layer rule", problem) if problem else passed(name, "layer rule", rows * len(STRATEGIES))


def placed(what: Any, device: str) -> Any:
    """On the device, images as its kernels want them."""
    fused = device != "cpu" or kernels.FORCED
    images = fused and (isinstance(what, nn.Module) or what.ndim == 4)
    return what.to(device, memory_format=torch.channels_last) if images else what.to(device)


def row_maps(rows: int) -> dict[str, RowMap]:
    """One owner for each row, two views of each owner, and owners in any order with a row that is padding."""
    mixed = torch.arange(rows) % max(1, rows // 2)
    mixed[-1] = -1
    return {"rows": RowMap.regular(rows), "views": RowMap.regular(rows // 2, 2), "owners": RowMap.of(mixed)}


def _agreement(module: nn.Module, x: Tensor) -> str | None:
    alone = one_by_one(module, x)
    for strategy in STRATEGIES:
        for label, rows in row_maps(len(x)).items():
            problem = _difference(recorded(module, x, strategy, rows), _of_owners(alone, rows), f"{strategy}, {label}")
            if problem:
                return problem
    return None


def _of_owners(alone: dict[str, Tensor], rows: RowMap) -> dict[str, Tensor]:
    """The mean over each owner's rows, written out."""
    owner = torch.arange(rows.rows) // rows.views if rows.owner is None else rows.owner
    return {
        n: torch.stack([g[(owner == k).to(g.device)].mean(0) for k in range(rows.owners)]) for n, g in alone.items()
    }


@torch.no_grad()
def _difference(got: PerSampleGradients, want: dict[str, Tensor], strategy: str) -> str | None:
    mix = torch.linspace(0.2, 1.0, got.owners, device=next(iter(want.values())).device)
    total = math.sqrt(sum(float(w.square().sum()) for w in want.values())) + 1e-30
    metric = {n: torch.linspace(0.5, 1.5, w[0].numel(), device=w.device).view(w.shape[1:]) for n, w in want.items()}
    norms, sums = got.norms_squared(), got.weighted_sum({n: mix for n in got.names})
    measured = got.norms_squared(lambda n: metric[n])
    for name, w in want.items():
        if name not in got.names:
            if float(w.abs().max()) > 0:
                return f"the gradient of {name!r} is not recorded: it would be released without clipping"
            continue
        error = {
            "gradients": float((got.dense(name) - w).norm()),
            "norms": float((norms[name].sqrt() - w.flatten(1).norm(dim=1)).abs().max()),
            "weighted norms": float((measured[name].sqrt() - (w * metric[name]).flatten(1).norm(dim=1)).abs().max()),
            "sums": float((sums[name] - torch.einsum("n,n...->...", mix, w)).norm()),
        }
        for what, value in error.items():
            if not value / total < AGREEMENT:
                return f"{what} of {name!r} differ from autograd by {value / total:.2g} ({strategy})"
    return None


def hostile_rows(x: Tensor) -> Iterator[tuple[Tensor, torch.dtype | None]]:
    """One row of every size that floating point knows, and in bfloat16."""
    if not x.is_floating_point():
        yield x[:1], None
        return
    for size in (1.0, 1e-20, 1e6, 1e18):
        yield x[:1] * size, None
    for bad in (math.nan, math.inf, -math.inf):
        yield torch.full_like(x[:1], bad), None
        one = x[:1].clone()
        one[(0,) * one.ndim] = bad
        yield one, None
    yield x[:1], torch.bfloat16


def _contributions(module: nn.Module, x: Tensor, bound: float = 0.5) -> str | None:
    """One row through tape and clip without noise, alone and after two others: it adds at most C, whatever it holds."""
    for row, dtype in hostile_rows(x):
        layer = module if dtype is None else copy.deepcopy(module).to(dtype)
        others = x[1:3].to(row.dtype) if dtype is None else x[1:3].to(dtype)
        for strategy in STRATEGIES:
            try:
                alone = _clipped(layer, row.to(others.dtype), strategy, bound)
                among = _clipped(layer, torch.cat([others, row.to(others.dtype)]), strategy, bound)
                without = _clipped(layer, others, strategy, bound)
            except (RuntimeError, NotImplementedError) as error:
                if dtype is not None and "not implemented" in str(error):
                    break  # this layer has no bfloat16 kernel here at all
                raise
            slack = bound * (
                TOLERANCE if dtype is None else 0.02
            )  # others' gradients in bfloat16 depend on the batch's shape
            for length, limit in ((alone.norm(), bound * (1 + TOLERANCE)), ((among - without).norm(), bound + slack)):
                if not float(length) <= limit:
                    what = f"input of size {float(row.abs().max()):.3g}, {dtype or row.dtype}, {strategy}"
                    return f"one row contributes {float(length):.6g} at C = {bound:g} ({what})"
    return None


def _clipped(layer: nn.Module, x: Tensor, strategy: str, bound: float) -> Tensor:
    """The clipped sum, as one vector."""
    gradients = recorded(layer, x, strategy)
    clip = GaussianMechanism(0.0, bound)
    clip.bind(dict(layer.named_parameters()))
    with torch.no_grad():
        released = clip.release(gradients, 1.0)
    return torch.cat([t.double().flatten() for t in released.values()])
