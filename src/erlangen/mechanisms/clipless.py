"""Clipless DP-SGD: noise scaled by certified sensitivities of a Lipschitz network, in place of clipping.

    release  Σ_i g_i,d + N(0, s_d²I)   for every parameter d,   ‖g_i,d‖ ≤ Δ_d by Algorithm 1 (`lipschitz.bounds`)

Sensitivity under add/remove of one owner: (Δ_1 … Δ_D), one entry per parameter. With multipliers σ_d = s_d/Δ_d the
release is one Gaussian mechanism of multiplier σ = (Σσ_d⁻²)^(−½), whatever the split of the noise:

    global    s_d = σ·√ΣΔ_j²                      the same noise everywhere
    local     s_d = σ·√D·Δ_d                      the same multiplier everywhere
    optimal   s_d² = σ²·Δ_d·(Σ_j Δ_j√p_j)/√p_d    least noise energy Σ p_d s_d² for parameters of p_d entries

Every Δ_d holds for all weights inside the constraints, so it does not move during training; weights are projected after
every step and before use. Replacing a record moves the sum by at most 2Δ_d; an accountant for "replace-one" pays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from erlangen.accounting import gaussian
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.lipschitz import precision as precisions
from erlangen.lipschitz.backward_clip import AdaptiveBackwardClip, BackwardClip
from erlangen.lipschitz.base import ROUNDOFF
from erlangen.lipschitz.bounds import Sensitivities, backpropagate_bounds, output, require_network
from erlangen.lipschitz.losses import loss_constant, make_loss
from erlangen.lipschitz.projection import Projector
from erlangen.lipschitz.recorder import Recorder, SummedGradients
from erlangen.lipschitz.watch import Watch
from erlangen.mechanisms.base import Context, Mechanism, known_options, register_mechanism, unmoved
from erlangen.mechanisms.noise import NoiseSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SPLITS = ("optimal", "local", "global")


class Clipless(Mechanism):
    """Sums the gradients of one ordinary backward pass and adds noise by certified bounds: no per-sample gradients.

    ``loss`` is a loss with a declared constant, its name, or the constant itself; the gate of the recorder enforces it.
    ``backstop=True`` computes per-sample norms after all, cuts each parameter's gradient at its Δ and counts how often
    that changed anything (`backstop_hits`, which is not private and must be 0).
    """

    name = "clipless"

    def __init__(
        self, noise_multiplier: float, network: nn.Module, loss: Any = None, *, split: str = "optimal",
        precision: str = "auto", certify_every: int = 1, backstop: bool = False, noise: NoiseSource | None = None,
    ) -> None:  # fmt: skip
        super().__init__(noise_multiplier, noise)
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; choose one of {', '.join(SPLITS)}")
        self.network, self.split, self.backstop = require_network(network), split, backstop
        self.device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self.precision = precisions.current(self.device) if precision == "auto" else precision
        if self.precision not in ROUNDOFF:
            raise ValueError(f"precision is {precision!r}; choose auto, {', '.join(ROUNDOFF)}")
        self.loss = make_loss(loss)
        self.projector = Projector(network, certify_every)
        self.cutting = [m for m in network.modules() if isinstance(m, BackwardClip)]
        self.adaptive = [m for m in self.cutting if isinstance(m, AdaptiveBackwardClip)]
        self.backstop_hits = 0
        #: the thresholds of the parts that the sum holds
        self._cut_at: list[float] | None = None

    # -- what it says ---------------------------------------------------------------------------------------------

    @property
    def bounds(self) -> Sensitivities:
        """Δ of every parameter that trains, at the present thresholds of adaptive layers."""
        every = backpropagate_bounds(self.network, self.loss_constant, self.precision)
        return replace(every, rows=tuple(r for r in every.rows if r.name in self.shapes)) if self.shapes else every

    @property
    def loss_constant(self) -> float:
        if self.loss is None:
            raise ValueError(
                "clipless training needs the loss's Lipschitz constant: pass criterion= (a loss of erlangen.lipschitz) "
                "to make_private, or mechanism_options={'loss': …} with a loss, its name or its constant"
            )
        logits = output(self.network, self.precision)
        return loss_constant(self.loss, logits.shape[-1], logits.norm)

    @property
    def sensitivity(self) -> float:
        """√ΣΔ_d², in coordinates scaled so that the noise is the same everywhere."""
        return self.bounds.total

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """What is left for the gradient after the counts of adaptive layers: (σ⁻² − Σ(2σ_b)⁻²)^(−½)."""
        if noise_multiplier == 0 or not self.adaptive:
            return noise_multiplier
        counts = sum((2.0 * layer.count_std) ** -2 for layer in self.adaptive if layer.count_std is not None)
        left = noise_multiplier**-2 - counts
        if left <= 0:
            raise ValueError(
                f"the counts of {len(self.adaptive)} adaptive layer(s) alone cost more than the noise multiplier "
                f"{noise_multiplier:g} allows: give them a larger count_std"
            )
        return left**-0.5

    def stds(self) -> dict[str, float]:
        """s_d: noise on each entry of the released sum."""
        return noise_split(self.bounds, self.gradient_multiplier(self.noise_multiplier), self.split)

    def noise_std(self, name: str) -> float:
        self._follow()
        return self._stds[name]

    def covariance(self, name: str) -> Tensor:
        return self.noise_std(name) ** 2 * torch.eye(self.shapes[name].numel(), dtype=torch.float64)

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        return gaussian(self.noise_multiplier if noise_multiplier is None else noise_multiplier)

    # -- what it does ---------------------------------------------------------------------------------------------

    def use_criterion(self, criterion: Any) -> None:
        """The loss that the training loop announces; refused if it has no constant or contradicts an earlier one."""
        if self.loss is None:
            self.loss = make_loss(criterion)
            _ = self.loss_constant
        elif not isinstance(self.loss, (int, float)) and self.loss is not criterion:
            logits = output(self.network, self.precision)
            if loss_constant(criterion, logits.shape[-1], logits.norm) > self.loss_constant:
                raise ValueError("criterion= has a larger Lipschitz constant than the mechanism's loss: give one only")

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        super().bind(parameters, expected_batch)
        low = sorted({str(p.dtype) for p in parameters.values()} - {"torch.float32", "torch.float64"})
        if low:
            raise TypeError(f"parameters of {', '.join(low)}: keep them in float32 (autocast may compute in bfloat16)")
        output(self.network, self.precision)  # convolutions learn their sizes, for which they are certified
        self.projector()
        for layer in self.adaptive:
            layer.prepare(self.noise_multiplier, expected_batch)
        strangers = sorted(set(parameters) - set(self.bounds))
        if strangers:
            raise ValueError(f"no certified bound for {', '.join(strangers)}: not trainable parameters of the network")
        if len({p.device for p in parameters.values()}) > 1:
            raise ValueError(
                "the parameters lie on several devices; clipless keeps their sum as one vector on one device"
            )
        self._watch = Watch(self.network)  # as its weights were projected and its bounds are computed
        self._settle()
        self._reset()

    def _settle(self) -> None:
        """Bounds and noise for the σ and the thresholds of this moment."""
        self._settled, self._gate = self._moment(), self.loss_constant
        bounds = self.bounds
        sigma = self.gradient_multiplier(self.noise_multiplier)
        self._stds, self._delta = noise_split(bounds, sigma, self.split), dict(bounds)
        first = next(iter(self._like.values()))
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in self._like.values()) else torch.float32
        sizes = torch.tensor([shape.numel() for shape in self.shapes.values()])
        stds = torch.tensor([self._stds[name] for name in self.shapes], dtype=dtype)
        #: noise of every coordinate, in the order of `shapes`
        self._noise = stds.repeat_interleave(sizes).to(first.device)
        #: the shapes of the released parts; they hold nothing
        self._templates = [torch.empty(shape, device="meta") for shape in self.shapes.values()]

    def _moment(self) -> tuple[float, list[float], list[float | None]]:
        """What may move between two steps: σ, the thresholds on the way back, and the noise of their counts."""
        return self.noise_multiplier, self._thresholds(), [layer.count_std for layer in self.adaptive]

    def _thresholds(self) -> list[float]:
        return [layer.bound for layer in self.cutting]

    def _require_as_bounded(self) -> None:
        """The network is the one that bounds and noise were made for: nothing without a bound is in it, and nothing that a bound
        is computed from has moved. Other attributes may: a layer of the user's own may count its calls."""
        if strangers := self._watch.strangers():
            raise RuntimeError(strangers)
        if not (moved := self._watch.moved()):
            return
        now, then = self._thresholds(), self._settled[1]
        try:
            self._cut_back_at(then)
            same = dict(self.bounds) == self._delta
        finally:
            self._cut_back_at(now)
        if not same:
            raise RuntimeError(
                f"the noise is made for bounds that hold no more, since {'; '.join(moved[:3])} moved. Set it back, or call "
                "engine.remove() and make_private with the network as it is now"
            )
        self._watch = Watch(self.network)

    def _cut_back_at(self, thresholds: list[float]) -> None:
        for layer, bound in zip(self.cutting, thresholds, strict=True):
            layer.bound = bound

    def _follow(self) -> None:
        self._require_as_bounded()
        self._settle_anew()

    def _settle_anew(self) -> None:
        if self._settled != self._moment():
            self._settle()

    def _require_one_threshold(self) -> None:
        """All parts of a logical batch are cut where its noise is made for."""
        self._cut_at = unmoved(self._cut_at, self._thresholds(), "what backward clips cut at")

    def _reset(self) -> None:
        self._cut_at = None
        #: the sum of all parameters' gradients as one vector; None is zero
        self._sum: Tensor | None = None
        for layer in self.adaptive:
            layer.pending = layer.total = 0.0

    def recorder(self, tape: Tape) -> Recorder:
        """What records a backward pass for this mechanism, in place of a per-sample tape."""
        mode = "backstop" if self.backstop else "pieces" if self.precision == "bf16" else "autograd"
        return Recorder(tape, lambda: self._gate, self.before_forward, self.projector.intact, mode)

    def before_forward(self) -> Tensor:
        """Weights inside their constraints, products in no lower precision than the bounds were made for; the weights."""
        self._require_as_bounded()
        self.projector.ensure()
        precisions.require(self.precision, self.device)
        return self.projector.flat()

    def after_step(self) -> None:
        """Post-processing of the private update: project."""
        self._require_as_bounded()
        self.projector()

    def accumulate(self, gradients: PerSampleGradients) -> None:
        sums = gradients.sums if isinstance(gradients, SummedGradients) else self._cut(gradients)
        if not sums:
            return
        self._require_one_threshold()
        dtype, parts = self._noise.dtype, [sums[name] for name in self.shapes]
        whole = _flatten_dense_tensors([g if g.dtype == dtype else g.to(dtype) for g in parts]).detach()
        self._sum = whole if self._sum is None else self._sum.add_(whole)

    def _total(self) -> Tensor:
        return torch.zeros_like(self._noise) if self._sum is None else self._sum

    def _cut(self, gradients: PerSampleGradients) -> dict[str, Tensor]:
        """Per-sample gradients, when there are any, cut at Δ_d: the backstop, and `release` on its own."""
        if not gradients.owners or not gradients.names:
            return {}
        self._follow()
        squared = gradients.norms_squared()
        bad = ~torch.isfinite(torch.stack([s.double() for s in squared.values()]).sum(0))
        gradients, weights = gradients.without(bad), {}
        over = bad.clone()
        for name, s in squared.items():
            norms = torch.where(bad, 0.0, s.double()).sqrt()
            safe = self._delta[name] * (1.0 - 32 * torch.finfo(s.dtype).eps)
            over |= norms > self._delta[name]
            weights[name] = (safe / norms).clamp(max=1.0).nan_to_num(nan=1.0).to(s.dtype)
            if gradients.valid is not None:
                weights[name] = torch.where(gradients.valid, weights[name], 0.0)
        self.backstop_hits += int(over.sum())
        return gradients.weighted_sum(weights)

    def merge(self, add_up: Callable[[list[Tensor]], list[Tensor]]) -> None:
        counts = torch.tensor([layer.total for layer in self.adaptive], dtype=torch.float64)
        self._sum, counts = add_up([self._total(), counts])
        for layer, total in zip(self.adaptive, counts.tolist(), strict=True):
            layer.total = total
        self._cut_at = None  # workers that hold nothing any more may learn other thresholds

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self._require_one_threshold()
        self._follow()
        self.noise.next_release()
        whole = self.noise.perturb(self._total(), self._noise) / expected_batch
        released = dict(zip(self.shapes, _unflatten_dense_tensors(whole, self._templates), strict=True))
        for layer in self.adaptive:
            count = torch.tensor([layer.total], dtype=torch.float64)
            std = layer.count_std if self.noise_multiplier > 0 else None
            layer.update(float(count if std is None else self.noise.perturb(count, std)), expected_batch)
        self._settle_anew()
        self._reset()
        return released

    # -- what is kept -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "thresholds": [layer.bound for layer in self.adaptive]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for layer, bound in zip(self.adaptive, state["thresholds"], strict=True):
            layer.bound = float(bound)
        if self.shapes:
            self._require_as_bounded()
            self._settle()

    def describe(self) -> dict[str, Any]:
        self._follow()
        return {
            **super().describe(),
            "split": self.split,
            "precision": self.precision,
            "loss_constant": self.loss_constant,
            "bounds": dict(self.bounds),
            "noise_std": dict(self._stds),
            "backstop": self.backstop,
        }


def noise_split(bounds: Sensitivities, sigma: float, split: str) -> dict[str, float]:
    """s_d by parameter, with (ΣΔ_d²/s_d²)^(−½) = σ."""
    if split == "global":
        return {row.name: sigma * bounds.total for row in bounds.rows}
    if split == "local":
        return {row.name: sigma * math.sqrt(len(bounds)) * row.bound for row in bounds.rows}
    weight = sum(row.bound * math.sqrt(row.size) for row in bounds.rows)
    return {row.name: sigma * math.sqrt(row.bound * weight / math.sqrt(row.size)) for row in bounds.rows}


@register_mechanism("clipless")
def clipless(context: Context) -> Mechanism:
    """Options: loss, split, precision, certify_every, backstop. The clipping rule is not used: nothing is clipped."""
    known_options("clipless", context.options, ("loss", "split", "precision", "certify_every", "backstop"))
    return Clipless(context.noise_multiplier, context.module, noise=context.noise, **context.options)


clipless.clips = False  # type: ignore[attr-defined]
