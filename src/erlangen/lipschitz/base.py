"""What a Lipschitz layer must know about itself: three bounds, and how to keep its weights inside them.

A layer f(θ, x) of a network trained without clipping answers, for inputs of norm ≤ X and cotangents of norm ≤ G,

    propagate_input         ‖f(θ, x)‖ ≤ ?          (what the next layer receives)
    backpropagate_cotangent ‖(∂f/∂x)ᵀ c‖ ≤ ?       (what the layer before receives)
    parameter_bound         ‖(∂f/∂θ)ᵀ c‖ ≤ ?       (the sensitivity of each of its parameters)

for *every* θ that `project` leaves unchanged. Bounds are computed in Python floats (float64). A new layer implements
these three, and `project` if it has weights to constrain; `check_layer` then tries to refute them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from erlangen.lipschitz.norms import Symbols

#: outward factor on every certified norm and every sensitivity; absorbs float32 rounding of the layer's own arithmetic
MARGIN = 1.0 + 1e-4

#: relative error of the factors of a product: bfloat16 keeps 8 bits, TF32 11 (and truncates on some hardware)
ROUNDOFF: Mapping[str, float] = {"fp32": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Activation:
    """One sample's activation: its shape, a bound on its L2 norm, and the roundoff u of the factors of products.

    u = 0 stands for float32, whose rounding the margins absorb. For TF32 and bfloat16 the bounds grow with u: see
    `rounded` and the linear layers.
    """

    shape: tuple[int, ...]
    norm: float
    roundoff: float = 0.0

    def to(self, shape: tuple[int, ...], norm: float) -> Activation:
        return replace(self, shape=shape, norm=norm)

    @property
    def rounded(self) -> float:
        """Factor for storing a tensor in low precision: entries move by at most u of themselves, so norms do."""
        return 1.0 + self.roundoff


class LipschitzLayer(nn.Module):
    """Defaults: no parameters, 1-Lipschitz, f(0) = 0, shape kept. Everything acts on each row of a batch separately."""

    #: attributes that may move during training, because whoever uses the bounds follows them
    followed: tuple[str, ...] = ()

    def jacobian_bound(self, x: Activation) -> float:
        """A bound on ‖∂f/∂x‖ over the ball of radius ``x.norm``."""
        return 1.0

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return x.shape

    def propagate_input(self, x: Activation) -> Activation:
        """Shape and norm bound of f(θ, x)."""
        return x.to(self.output_shape(x), self.jacobian_bound(x) * x.norm)

    def backpropagate_cotangent(self, x: Activation, g: float) -> float:
        """Bound on the cotangent of the input, for cotangents of the output with norm ≤ g."""
        return self.jacobian_bound(x) * g

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        """Bound on one sample's gradient of each parameter, by the parameter's name in this layer."""
        return {}

    def project(self) -> None:
        """Move the parameters into the set for which the bounds hold. Runs after every step, before use."""


class Constrained(LipschitzLayer):
    """A linear operator of norm ≤ ``lipschitz`` given by ``weight``, and maybe a bias of norm ≤ ``bias_bound``."""

    weight: Tensor
    bias: Tensor | None
    lipschitz: float
    bias_bound: float

    def constrain(self, lipschitz: float, bias_bound: float) -> None:
        for name, value in (("lipschitz", lipschitz), ("bias_bound", bias_bound)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be a positive, finite number")
        self.lipschitz, self.bias_bound = float(lipschitz), float(bias_bound)

    def certified_norm(self) -> Tensor:
        """An upper bound on the operator norm of the weight as it is now, as a float64 scalar, margin included."""
        raise NotImplementedError

    def symbols(self) -> Symbols | None:
        """Matrices that decide the operator norm, to be certified with those of other layers; None if there are none."""
        return None

    def frobenius_factor(self) -> float:
        """c with ‖operator of ΔW‖ ≤ c·‖ΔW‖_F."""
        return 1.0

    def project(self) -> None:
        self.shrink(self.certified_norm())

    def shrink(self, bound: Tensor) -> None:
        """Scale the weight by min(1, l/bound) for a certified ``bound``; a weight that is not finite becomes zero."""
        shrink_to(self.weight, bound, self.lipschitz)
        self.project_bias()

    def project_bias(self) -> None:
        if self.bias is not None:
            shrink_to(self.bias, self.bias.detach().double().norm() * MARGIN, self.bias_bound)


def shrink_to(parameter: Tensor, bound: Tensor, limit: float) -> None:
    """In place and without waiting for the device: parameter · min(1, limit/bound), zero if the bound is not finite."""
    scale = (limit / bound).clamp(max=1.0)
    parameter.detach().mul_(scale).masked_fill_(~bound.isfinite(), 0.0)
