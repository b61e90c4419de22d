"""Companions of a mechanism: selective update and release (SUR), and importance sampling (IS). Usable with any of them.

Each says what it costs on top of the gradient's own release, as an event, and is registered by name, so that the static
audit finds it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from erlangen.accounting import gaussian, non_private, poisson
from erlangen.mechanisms.noise import NoiseSource, SecureNoise, StreamNoise
from erlangen.sampling.samplers import PoissonSampler
from erlangen.streams import Stream, secure_words

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_COMPANIONS: dict[str, type] = {}
Kind = TypeVar("Kind", bound=type)


def register_companion(name: str) -> Callable[[Kind], Kind]:
    """Make a companion known by name: the static audit looks at every one."""

    def add(kind: Kind) -> Kind:
        _COMPANIONS[name] = kind
        return kind

    return add


def companions() -> dict[str, type]:
    """Every registered companion by name."""
    return dict(_COMPANIONS)


NORMALISED = (
    "importance sampling with probabilities normalised by the un-noised sum of all gradient norms: one record moves "
    "the inclusion of every other"
)


@register_companion("selective-update")
class SelectiveUpdate:
    """Keep an update only if it lowers the loss on a second Poisson sample, privately (Fu et al. 2024, DPSUR).

    d_i = clip(loss_i(after) − loss_i(before), ±bound);  accept iff (Σ d_i + N(0, σ²·bound²))/B < threshold

    The sum has sensitivity ``bound`` under add/remove, so each decision is Poisson(q, Gaussian(σ)), *on top of* the
    release of the gradient, and in every iteration, accepted or not: the gradient was released when the decision is
    made, and a rejection is itself an answer. ``record`` receives that event before each decision (for instance
    ``engine.accountant.record``), so that it cannot be forgotten.
    """

    def __init__(
        self,
        units: int,
        expected_batch: float,
        noise_multiplier: float,
        record: Callable[[DpEvent], None],
        bound: float = 1.0,
        threshold: float = 0.0,
        seed: int | None = None,
        run_id: str = "",
        secure: bool = False,
    ) -> None:
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"bound is {bound}; the clip of a loss difference must be positive and finite")
        if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
            raise ValueError(f"noise_multiplier is {noise_multiplier}; σ must be a finite number ≥ 0 (0: ε = ∞)")
        if math.isnan(threshold):
            raise ValueError("threshold is NaN, below which nothing lies: no update would ever be kept; give a number, 0 say")
        self.noise_multiplier, self.bound, self.threshold, self.record = noise_multiplier, bound, threshold, record
        self.sampler = PoissonSampler(units, expected_batch, seed, f"{run_id}/selective", secure)
        self.noise: NoiseSource = SecureNoise() if secure else StreamNoise(seed, run_id, purpose="selective")

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        """One decision, amplification included, at this σ or at another (for calibration)."""
        return self.sampler.event(gaussian(self.noise_multiplier if noise_multiplier is None else noise_multiplier))

    def batch(self) -> Tensor:
        """The records that judge the next update: a Poisson sample of their own, possibly empty."""
        return self.sampler.draw()

    def decide(self, before: Tensor, after: Tensor) -> bool:
        """Whether the update is kept, from per-record losses [n] of the same records before and after it."""
        if before.shape != after.shape or before.ndim != 1:
            raise ValueError(
                f"losses have shapes {tuple(before.shape)} and {tuple(after.shape)}; give one per record, [n]"
            )
        self.record(self.event())
        self.noise.next_release()
        worse = (after.detach().double() - before.detach().double()).nan_to_num(self.bound, self.bound, -self.bound)
        total = worse.clamp(-self.bound, self.bound).sum().reshape(1).cpu()
        noisy = float(self.noise.perturb(total, self.noise_multiplier * self.bound))
        return noisy / self.sampler.expected_batch < self.threshold

    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer, losses: Callable[[Tensor], Tensor]) -> bool:
        """``optimizer.step()``, undone (parameters and optimizer state) if it is rejected. Once per logical batch.

        ``losses(indices)`` returns the per-record losses [n] of the module for these records of the data set.
        """
        indices = self.batch()
        with torch.no_grad():
            before = losses(indices)
            kept = {name: t.detach().clone() for name, t in module.state_dict().items()}
            state = copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        with torch.no_grad():
            accepted = self.decide(before, losses(indices))
            if not accepted:
                module.load_state_dict(kept)
                optimizer.load_state_dict(state)
        return accepted

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.noise.load_state_dict(state["noise"])


@register_companion("importance-sampling")
class ImportanceSampling:
    """Records with large gradients are drawn more often and weigh less (after Wei et al. 2022, DPIS).

    p_i = q_max · clip(‖g_i‖/C, floor, 1);  multiply the loss of a drawn record by q_max/p_i *before* clipping

    What is proved: p_i ≤ q_max depends on record i and on earlier private output only, the draws are independent, and
    the mechanism clips after weighting. Adding a record then turns the output law A into (1 − p)A + pB, p ≤ q_max,
    which is a mixture of A and (1 − q_max)A + q_max·B; by joint convexity no divergence from A grows. So a step costs
    what Poisson(q_max) costs. At that price a plain Poisson batch has the same signal: what is saved is arithmetic.

    ``as_published`` normalises by the sum of all norms instead: no guarantee, ε = ∞.
    """

    def __init__(
        self,
        max_rate: float,
        bound: float,
        floor: float = 0.1,
        as_published: bool = False,
        seed: int | None = None,
        run_id: str = "",
        secure: bool = False,
    ) -> None:
        if not 0 < max_rate <= 1:
            raise ValueError(f"max_rate is {max_rate}; the largest inclusion probability must lie in (0, 1]")
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"bound is {bound}; use the clipping bound C of the mechanism, a positive finite number")
        if not 0 < floor <= 1:
            raise ValueError(f"floor is {floor}; the least share of max_rate must lie in (0, 1]")
        self.max_rate, self.bound, self.floor, self.secure = max_rate, bound, floor, secure
        self.unsound = NORMALISED if as_published else None
        self._stream, self.step, self._drawn = Stream("importance", seed, run_id), 0, 0

    def event(self, release: DpEvent) -> DpEvent:
        """A release on such a batch."""
        return non_private(self.unsound) if self.unsound else poisson(self.max_rate, release)

    def probabilities(self, norms: Tensor) -> Tensor:
        """Inclusion probabilities from the per-record gradient norms [N]. A norm that is not finite counts as C."""
        norms = norms.detach().double().cpu().nan_to_num(self.bound, self.bound, self.bound)
        if self.unsound:
            expected = self.max_rate * norms.numel()
            return (expected * norms / norms.sum().clamp(min=1e-300)).clamp(self.floor * self.max_rate, 1.0)
        return (norms / self.bound).clamp(self.floor, 1.0) * self.max_rate

    def draw(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """(records, loss weights q_max/p_i) of the next batch; may be empty. Divide by q_max·N, as without IS."""
        p = self.probabilities(norms)
        top = 1 << 62
        if self.step < self._drawn:  # set back: a batch that was drawn before is not drawn again
            self._stream = self._stream.renewed()
        if self.secure:
            draws = secure_words(p.numel()) & (top - 1)
        else:
            draws = torch.randint(0, top, (p.numel(),), generator=self._stream.at(self.step))
        self.step += 1
        self._drawn = self.step
        records = torch.nonzero(draws < torch.ceil(p * top).long()).flatten()
        return records, (self.max_rate / p)[records].to(norms.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])


class ImportanceSampler(PoissonSampler):
    """`ImportanceSampling` as the sampler of a run; ``expected_batch``/N is q_max, and so is the price of a step.

    ``norms()`` gives every unit's gradient norm and is asked every ``refresh`` draws (once an epoch): old norms are
    functions of a unit and of earlier private output, as the proof wants. ``weights`` [N] are the loss weights of the
    units. Norms look at private records; they decide who is drawn, and are neither shown nor stored.
    """

    name = "importance"

    def __init__(
        self, units: int, expected_batch: float, bound: float, floor: float = 0.1, refresh: int | None = None,
        as_published: bool = False, seed: int | None = None, run_id: str = "", secure: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(units, expected_batch, seed, run_id, secure)
        if refresh is not None and refresh < 1:
            raise ValueError(f"refresh is {refresh}; norms are taken again after a whole number of steps ≥ 1")
        self.rule = ImportanceSampling(self.sample_rate, bound, floor, as_published, seed, run_id, secure)
        self.refresh = self.steps_per_epoch if refresh is None else refresh
        self.norms: Callable[[], Tensor] = lambda: torch.full((units,), bound)
        self.weights = torch.ones(units)
        self.unsound = self.rule.unsound
        self._known: Tensor | None = None

    @property
    def due(self) -> bool:
        """Whether the next draw asks for the norms."""
        return self._known is None or self.step % self.refresh == 0

    def _draw(self, step: int) -> Tensor:
        if self.due:
            self.ask()
        assert self._known is not None
        self.rule.step = step
        records, weights = self.rule.draw(self._known)
        self.weights = torch.ones(self.units, dtype=weights.dtype).index_put_((records,), weights)
        return records

    def ask(self) -> None:
        """Take the norms of this moment."""
        self._known = self.norms().detach()

    def event(self, release: DpEvent) -> DpEvent:
        return self.rule.event(release)

    def describe(self) -> dict[str, Any]:
        own = {"floor": self.rule.floor, "bound": self.rule.bound, "refresh": self.refresh}
        return {**super().describe(), **own, "guarantee": self.unsound or "sound at the largest inclusion probability"}


__all__ = ["ImportanceSampler", "ImportanceSampling", "SelectiveUpdate"]
