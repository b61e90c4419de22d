"""A small Lipschitz network, its records, and what one backward pass gives to `Clipless`."""

from __future__ import annotations

import torch

from erlangen.gradients.tape import Tape
from erlangen.lipschitz import (
    BoundedInput,
    CrossEntropy,
    Flatten,
    Householder,
    MaxMin,
    Projector,
    Residual,
    Sequential,
    SpectralConv2d,
    SpectralDense,
    output,
)
from erlangen.mechanisms import Clipless, StreamNoise
from tests.gradients.reference import one_by_one

LOSS = CrossEntropy(4.0)
SHAPE, CLASSES = (1, 6, 6), 3


def network(*extra, seed: int = 0) -> Sequential:
    torch.manual_seed(seed)
    net = Sequential(
        BoundedInput(SHAPE, 2.0), SpectralConv2d(1, 4, 3, bias=True, bias_bound=0.1), MaxMin(), Householder(4),
        Residual(SpectralConv2d(4, 4, 1), MaxMin()), Flatten(), SpectralDense(144, CLASSES, bias=True), *extra,
    )  # fmt: skip
    with torch.no_grad():
        net[1].weight.add_(0.05 * torch.randn_like(net[1].weight))
    output(net)
    Projector(net)()
    return net


def batch(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *SHAPE, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def mechanism(net, sigma: float = 0.0, loss=LOSS, **options) -> Clipless:
    built = Clipless(sigma, net, loss, noise=StreamNoise(0), **options)
    built.bind(dict(net.named_parameters()))
    return built


def summed(net, x, y, loss=LOSS, rows=None, reduction="mean", backstop=False):
    """What reaches the mechanism from one backward pass."""
    built = mechanism(net, loss=loss, backstop=backstop)
    recorder = built.recorder(Tape(dict(net.named_parameters()), reduction))
    recorder.attach(net)
    try:
        recorder.rows = rows
        loss(net(x), y).backward()
        built.accumulate(recorder.gradients())
    finally:
        recorder.detach(net)
    return built.finish(1.0), built


def reference(net, x, y, loss=LOSS):
    """[rows, *shape] gradients of each record's own loss."""
    grads = [one_by_one(net, (x[i : i + 1],), lambda out, i=i: loss(out, y[i : i + 1])) for i in range(len(x))]
    return {n: torch.cat([g[n] for g in grads]) for n in grads[0]}


def assert_close(got, want):
    for name, w in want.items():
        assert torch.allclose(got[name], w, rtol=1e-4, atol=1e-5), name
