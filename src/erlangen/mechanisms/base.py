"""The one abstraction: a mechanism turns the per-sample gradients of one batch into one private gradient.

It says what that cost: `sensitivity`, `noise_std` and `covariance` of what it releases, its neighbouring relation, and
`event()`, one un-amplified release. The sampler wraps the event, the accountant composes it. A mechanism can be used
alone, without a trainer: ``mechanism.release({"weight": per_sample_gradients})``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from erlangen.gradients.pieces import Weight
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.mechanisms.clipping.base import ClippingRule
from erlangen.mechanisms.noise import NoiseSource, StreamNoise
from erlangen.spelling import hint, refuse_unknown

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ADD_OR_REMOVE = "add-or-remove-one"
T = TypeVar("T")


def unmoved(before: T | None, now: T, what: str) -> T:
    """What all parts of a logical batch were cut at (``before``; None is no part yet) is what its noise is made for (``now``)."""
    if before is not None and before != now:
        raise RuntimeError(
            f"{what} moved from {before} to {now} between two parts of a logical batch, or before its noise: change it between "
            "steps only"
        )
    return now


class Mechanism(ABC):
    """Per-sample gradients in, one private mean gradient out.

    A subclass implements what is abstract here. Life of a step: `accumulate` once per physical batch, then `finish`
    once per logical batch, which adds the noise and forgets the sums.
    """

    name: str = "mechanism"
    neighbouring: str = ADD_OR_REMOVE
    #: why there is no guarantee, for mechanisms that have none; `event` must then be non-private
    unsound: str | None = None
    #: the serial number of the training that it works for, once it works for one
    serves: int | None = None
    #: the loss that its sensitivity was certified for; None where any loss will do
    loss: Any = None

    def __init__(self, noise_multiplier: float, noise: NoiseSource | None = None) -> None:
        if not (
            isinstance(noise_multiplier, (int, float)) and math.isfinite(noise_multiplier) and noise_multiplier >= 0
        ):
            raise ValueError(
                f"noise_multiplier is {noise_multiplier!r}; σ must be a finite number ≥ 0 (0 means no privacy, ε = ∞)"
            )
        self.noise_multiplier = float(noise_multiplier)
        self.noise: NoiseSource = StreamNoise() if noise is None else noise
        self.shapes: dict[str, torch.Size] = {}

    # -- what it says ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """L2 sensitivity of the noised query under `neighbouring`, in the coordinates where noise is added."""

    @abstractmethod
    def noise_std(self, name: str) -> Tensor | float:
        """Per-coordinate standard deviation of the noise on the released *sum*, in the parameter's own coordinates."""

    @abstractmethod
    def covariance(self, name: str) -> Tensor:
        """Full covariance [d, d] of the noise on the released sum of one (small) parameter."""

    @abstractmethod
    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        """One un-amplified release, at this mechanism's σ or at another (for calibration)."""

    # -- what it does ---------------------------------------------------------------------------------------------

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        """Learn the parameters before the first batch; raise if they do not fit."""
        for name, p in parameters.items():
            if p.is_complex():  # complex noise of variance 1 has half of it in each part: σ/√2 where σ is accounted
                raise ValueError(
                    f"parameter {name!r} is complex: norms and noise are those of real coordinates. Keep its real and imaginary "
                    "parts as one real parameter (torch.view_as_real), and use torch.view_as_complex of it in forward()."
                )
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self._like = {name: p.detach() for name, p in parameters.items()}
        self.expected_batch = float(expected_batch)

    def metric(self, name: str) -> Weight:
        """The geometry in which layer rules measure norms."""
        return None

    @property
    def clips_samples(self) -> bool:
        """Whether it clips the gradients of single samples; a mechanism with a `recorder` of its own does not."""
        return type(self).recorder is Mechanism.recorder

    def recorder(self, tape: Tape) -> Tape:
        """What records a backward pass for it: the per-sample tape."""
        return tape

    def use_criterion(self, criterion: Any) -> None:
        """The loss that the training loop announces; to be refused where the sensitivity does not cover it."""

    def after_step(self) -> None:
        """Post-processing of the updated weights, such as a projection."""

    @abstractmethod
    def accumulate(self, gradients: PerSampleGradients) -> None:
        """Add one physical batch to the sum. No noise."""

    def merge(self, add_up: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace *every* pending sum by what ``add_up`` returns for it: the total over all workers on the first one,
        zero on the others. What is not handed over would be lost; a mechanism that does not say trains in one process.
        """
        raise NotImplementedError(
            f"mechanism {self.name!r} does not say which sums its workers add up: define merge(), or train in one process"
        )

    @abstractmethod
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        """Noise once, divide by the *expected* batch size, forget the sum: the private gradient of a logical batch."""

    def release(
        self, gradients: Mapping[str, Tensor] | PerSampleGradients, expected_batch: float | None = None
    ) -> dict[str, Tensor]:
        """One whole release from per-sample gradients [n, *shape]; for audits, tests and use without a trainer."""
        if not isinstance(gradients, PerSampleGradients):
            if not self.shapes:
                self.bind({name: g[0] if g.shape[0] else g.new_zeros(g.shape[1:]) for name, g in gradients.items()})
            self._require_known(gradients)
            gradients = PerSampleGradients.from_dense(gradients)
        batch = self.expected_batch if expected_batch is None else expected_batch
        if not 0 < batch < math.inf:
            raise ValueError(f"expected_batch is {batch}; sums are divided by it: give the expected number of owners in a batch")
        self.accumulate(gradients)
        return self.finish(batch)

    def _require_known(self, gradients: Mapping[str, Tensor]) -> None:
        """Per-sample gradients of the parameters that it is bound to."""
        for name, g in gradients.items():
            if name not in self.shapes:
                raise ValueError(
                    f"gradients name {name!r}, and the mechanism is bound to {sorted(self.shapes)}: call bind() with all"
                )
            if g.shape[1:] != self.shapes[name]:
                raise ValueError(
                    f"gradients of {name!r} have shape {list(g.shape)}; give one gradient of shape {list(self.shapes[name])} for "
                    "each record, or bind() the mechanism to other parameters"
                )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue exactly. JSON-able; never a seed."""
        return {"noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.noise.load_state_dict(state["noise"])

    def describe(self) -> dict[str, Any]:
        """Plain facts for summaries and certificates."""
        return {
            "name": self.name,
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.sensitivity,
            "neighbouring": self.neighbouring,
            "noise_source": self.noise.description,
            "guarantee": self.unsound or "sound",
        }

    def _zeros(self) -> dict[str, Tensor]:
        return {n: torch.zeros_like(p, dtype=accumulate_dtype(p)) for n, p in self._like.items()}


@dataclass(frozen=True)
class Context:
    """All that a mechanism may be built from. Nothing here depends on private records."""

    noise_multiplier: float
    clipping: ClippingRule
    noise: NoiseSource
    module: nn.Module
    expected_batch: float
    options: Mapping[str, Any] = field(default_factory=dict)
    #: of one record, where it is known
    input_shape: tuple[int, ...] | None = None


Builder = Callable[[Context], Mechanism]
_MECHANISMS: dict[str, Builder] = {}


def register_mechanism(name: str) -> Callable[[Builder], Builder]:
    """Make ``build(context) -> Mechanism`` known by name: to the engine, the CLI and the audits."""

    def add(builder: Builder) -> Builder:
        _MECHANISMS[name] = builder
        return builder

    return add


def mechanisms() -> dict[str, Builder]:
    """Every registered mechanism by name."""
    import erlangen.mechanisms  # noqa: F401  (registers them)

    return dict(_MECHANISMS)


def reads_clipping(mechanism: str) -> bool:
    """Whether a mechanism of this name clips by its rule. A builder that does not says so: ``build.clips = False``."""
    return getattr(mechanisms().get(mechanism), "clips", True)


def make_mechanism(mechanism: str, context: Context) -> Mechanism:
    known = mechanisms()
    if mechanism not in known:
        raise ValueError(
            f"mechanism is {mechanism!r}; choose one of {', '.join(sorted(known))}, pass a Mechanism, or load what registers it "
            f"(--plugin FILE).{hint(mechanism, known)}"
        )
    return known[mechanism](context)


def known_options(mechanism: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an option that would silently do nothing."""
    refuse_unknown(f"mechanism {mechanism!r}", options, known)
