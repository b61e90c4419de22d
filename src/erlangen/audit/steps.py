"""Steps of real training as releases: records go in, private gradients come out, through the engine's whole path.

A mechanism's `release` starts from per-sample gradients. In training they come from layers, the tape, owners and physical
parts, and Clipless has no per-sample gradients at all: there the sensitivity is a theorem about the network. `Step` makes an
engine private as a user would, and runs forward, backward and ``optimizer.step()`` on any records; its learning rate is zero, so
that releases are independent. A record is an input x and a direction y of the logits, the loss is ⟨logits, y⟩: for ‖y‖ ≤ 1 every
loss of Lipschitz constant 1 has such a gradient, so the attacker chooses the worst loss too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen.audit.flow import over_pairs
from erlangen.audit.neighbours import Gradients, Pair
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Claim, Finding, passed, unable
from erlangen.engine import PrivacyEngine
from erlangen.gradients.rows import RowMap
from erlangen.mechanisms.base import Mechanism

BATCH = 4
RESTARTS, CLIMB = 8, 25


class Step:
    """One private step through the engine, as a release. ``noise`` is the mechanism's own, and may be replaced."""

    def __init__(
        self, network: nn.Module, input_shape: tuple[int, ...], mechanism: str | Mechanism,
        options: Mapping[str, Any] | None = None, *, sigma: float = 1.0, bound: float = 0.7, clipping: str = "flat",
        seed: int | None = 0, parts: int = 2,
    ) -> None:  # fmt: skip
        self.network, self.parts = network, parts
        with torch.no_grad():
            classes = network(torch.zeros(1, *input_shape)).shape[-1]
        self.shapes = {"x": torch.Size(input_shape), "y": torch.Size([classes])}
        data = TensorDataset(*[torch.zeros(2 * BATCH, *s) for s in self.shapes.values()])
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        self.engine = PrivacyEngine(seed=seed, run_id="audit step")
        self.engine.make_private(
            module=network, optimizer=self.optimizer, data_loader=DataLoader(data, batch_size=BATCH), noise_multiplier=sigma,
            max_grad_norm=bound, mechanism=mechanism, mechanism_options=options, clipping=clipping, check=False,
        )  # fmt: skip
        assert self.engine.training is not None
        self.training = self.engine.training

    @property
    def mechanism(self) -> Mechanism:
        return self.training.mechanism

    @property
    def noise(self) -> Any:
        return self.mechanism.noise

    @noise.setter
    def noise(self, source: Any) -> None:
        self.mechanism.noise = source

    def release(self, records: Gradients) -> dict[str, Tensor]:
        """Private gradients of these records (possibly none), in as many physical parts as there are rows for."""
        x, y = records["x"], records["y"]
        cuts = list(zip(x.tensor_split(self.parts), y.tensor_split(self.parts))) if len(x) >= self.parts else [(x, y)]
        for k, (rows, directions) in enumerate(cuts):
            self.training.announce(RowMap.regular(len(rows)), k == 0, k == len(cuts) - 1)
            loss_of(self.network(rows), directions).backward()
            self.optimizer.step()
        released = {n: p.grad.detach().clone() for n, p in self.network.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return released

    def event(self) -> Any:
        return self.mechanism.event()

    def state_dict(self) -> dict[str, Any]:
        return self.mechanism.state_dict()


def loss_of(logits: Tensor, directions: Tensor) -> Tensor:
    """The mean over rows of ⟨logits, y⟩; of no rows, zero."""
    return (logits * directions).sum() / max(1, len(logits))


def gradients(network: nn.Module, x: Tensor, y: Tensor, differentiable: bool = False) -> dict[str, Tensor]:
    """One record's gradients by ordinary autograd."""
    named = {n: p for n, p in network.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        loss_of(network(x), y), list(named.values()), create_graph=differentiable, allow_unused=True
    )
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found)}


def strongest(step: Step, seed: int = 0) -> list[tuple[float, Tensor, Tensor]]:
    """Records whose gradient, in units of the noise, gradient ascent made large: (length, x, y), the longest first.

    Where gradients are clipped every long one is as good as any other; for Clipless this looks for the bound itself.
    """
    restarts, climb = (2, 3) if step.mechanism.clips_samples else (RESTARTS, CLIMB)
    plain = copy.deepcopy(step.network).double()  # a copy of a private module is a plain one
    noise = {
        n: torch.as_tensor(step.mechanism.noise_std(n), dtype=torch.float64).clamp(min=1e-12)
        for n in step.mechanism.shapes
    }
    radius = reach(plain)
    g = torch.Generator().manual_seed(seed)
    found = []
    for restart in range(restarts):
        x, y = (torch.randn(1, *s, generator=g, dtype=torch.float64) for s in step.shapes.values())
        if restart % 2:  # smooth starts: overlapping windows and biases add up over space
            x, y = 1.0 + 0.1 * x, 1.0 + 0.1 * y
        x, y = _on_sphere(x, radius), _on_sphere(y, 1.0)
        for _ in range(climb):
            _, dx, dy = _slopes(plain, x, y, noise)
            x, y = _climb(x, dx, radius), _climb(y, dy, 1.0)
        found.append((_slopes(plain, x, y, noise)[0], x, y))
    return sorted(found, key=lambda f: -f[0])[:3]


def reach(network: nn.Module) -> float:
    """The norm of a record that uses up what the network lets in: beyond it the first layer cuts, and may take a mean off."""
    first: Any = next(iter(network.children()), None)
    return 4.0 * float(first.reach) if hasattr(first, "reach") else 10.0


def _slopes(
    plain: nn.Module, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]
) -> tuple[float, Tensor | None, Tensor | None]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    every = gradients(plain, x, y, differentiable=True)
    total = torch.stack([(every[n] / noise[n]).square().sum() for n in noise]).sum()
    dx, dy = torch.autograd.grad(total, (x, y), allow_unused=True)
    return math.sqrt(float(total.detach())), dx, dy


def _climb(at: Tensor, slope: Tensor | None, radius: float) -> Tensor:
    if slope is None or not bool(slope.isfinite().all()) or not bool(slope.abs().max() > 0):
        return at.detach()
    return _on_sphere(0.5 * at.detach() + _on_sphere(slope, radius), radius)


def _on_sphere(v: Tensor, radius: float) -> Tensor:
    return v * (radius / v.norm().clamp(min=1e-30))


def hostile(step: Step, seed: int = 0) -> Iterator[Pair]:
    """Neighbouring batches of records: the strongest found, and inputs and labels of every size that floating point knows."""
    g = torch.Generator().manual_seed(seed + 1)
    crowd = {n: 0.5 * torch.randn(5, *s, generator=g) for n, s in step.shapes.items()}
    nobody = {n: t[:0] for n, t in crowd.items()}
    best = [(x.float(), y.float()) for _, x, y in strongest(step, seed)]
    for k, (x, y) in enumerate(best):
        for word, others in (("alone", nobody), ("among others", crowd)):
            yield Pair(f"strongest record {k + 1}, {word}", others, {"x": x, "y": y})
    x, y = best[0]
    for size in (0.0, 1e-42, 1e-20, 1e-3, 1e4, 1e18, 3e38, math.nan, math.inf, -math.inf):
        yield Pair(f"input times {size:g}", crowd, {"x": x * size, "y": y})
        yield Pair(f"label times {size:g}", crowd, {"x": x, "y": y * size})
    one = x.clone()
    one.view(-1)[0] = math.nan
    yield Pair("one pixel not a number", crowd, {"x": one, "y": y})


@single_threaded
def audit_step(name: str, build: Callable[[], Step], delta: float = 1e-5) -> Finding:
    """Information flow and sensitivity of a training step (`flow`), over `hostile` records, against the mechanism's event."""
    claim = Claim.of(build().event(), delta)
    if claim.empty:
        return passed(name, "training step", facts={"note": "nothing is claimed (ε = ∞)"})
    if claim.sigma is None:
        return unable(name, "training step", f"one release claims {claim.event!r}; this audit knows Gaussian releases")
    others = lambda pair: len(pair.others["x"])  # noqa: E731
    return over_pairs(name, "training step", "a training step", build, hostile(build()), others, claim.sigma)


__all__ = ["Step", "audit_step", "hostile", "loss_of", "reach", "strongest"]
