"""The oracle: one sample at a time through ordinary autograd."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from erlangen.gradients import RowMap, Tape, attach, detach
from erlangen.gradients.tape import euclidean


def seeded_loss(out, seed: int = 0) -> Tensor:
    """A nonlinear, per-row loss [rows] of whatever a module returns; its coefficients are the same for every row."""
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)]
    total = 0
    for k, o in enumerate(outs):
        generator = torch.Generator().manual_seed(seed + k)
        c = torch.randn(o.shape[1:], generator=generator, dtype=o.dtype).to(o.device)
        total = total + (o * c + 0.1 * o.square()).flatten(1).sum(1)
    return total


def one_by_one(module: nn.Module, inputs: tuple[Tensor, ...], loss=seeded_loss) -> dict[str, Tensor]:
    """[rows, *shape] per parameter."""
    plain = copy.deepcopy(module)
    detach(plain)
    names = [n for n, p in plain.named_parameters() if p.requires_grad]
    rows = []
    for r in range(inputs[0].shape[0]):
        plain.zero_grad()
        loss(plain(*[t[r : r + 1] for t in inputs])).sum().backward()
        params = dict(plain.named_parameters())
        rows.append([torch.zeros_like(params[n]) if params[n].grad is None else params[n].grad.clone() for n in names])
    return {n: torch.stack([row[k] for row in rows]) for k, n in enumerate(names)}


def recorded(
    module: nn.Module, inputs: tuple[Tensor, ...], loss=seeded_loss, rows: RowMap | None = None, metric=euclidean, **options
):
    """What the tape says, through one ordinary backward pass."""
    tape = Tape({n: p for n, p in module.named_parameters() if p.requires_grad}, **options)
    tape.metric = metric
    attach(module, tape)
    try:
        tape.rows = rows
        per_row = loss(module(*inputs))
        (per_row.mean() if tape.loss_reduction == "mean" else per_row.sum()).backward()
        return tape.gradients()
    finally:
        detach(module)


def assert_same(got, want: dict[str, Tensor], dtype=torch.float64, outward: float = 0.0) -> None:
    """Gradients, norms (plain and diagonally weighted) and weighted sums agree to the house tolerance; plain norms may be
    too large by ``outward``."""
    tol = 1e-10 if dtype == torch.float64 else 1e-5
    total = max(float(sum(w.square().sum() for w in want.values()).sqrt()), 1e-30)
    generator = torch.Generator().manual_seed(7)
    weights = {n: torch.rand(w.shape[1:], generator=generator, dtype=dtype) + 0.5 for n, w in want.items()}
    plain, diagonal = got.norms_squared(), got.norms_squared(lambda n: weights[n])
    mix = torch.rand(got.owners, generator=generator, dtype=dtype)
    sums = got.weighted_sum({n: mix for n in got.names})
    for name, w in want.items():
        if name not in got.names:
            assert w.abs().max() == 0, f"{name} was not recorded"
            continue
        assert (got.dense(name) - w).norm() / total < tol, name
        n2 = w.flatten(1).square().sum(1)
        excess = (plain[name].sqrt() - n2.sqrt()) / total
        assert -tol < excess.min() <= excess.max() < tol + outward, name
        d2 = (w * weights[name]).flatten(1).square().sum(1)
        assert ((diagonal[name].sqrt() - d2.sqrt()).abs().max() / total) < tol, name
        assert (sums[name] - torch.einsum("n,n...->...", mix, w)).norm() / total < tol * 3, name
