"""Clip, sum, add Gaussian noise — in any linear geometry. ISO, plain DP-SGD, is the identity geometry.

    g̃_i = T g_i,   w_i from the clipping rule so that ‖w_i g̃_i‖ ≤ C,   release  T⁺(Σ w_i g̃_i + N(0, σ²C²I)) / B

Sensitivity C under add/remove of one owner: each term of the sum has norm ≤ C and depends on one owner alone. Noise
multiplier σ, so one release is Gaussian(σ). T must be fixed before training. Because T is linear the raw gradients are
summed and mapped once; nothing is materialised in the new coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from erlangen.accounting import gaussian
from erlangen.gradients.pieces import Weight
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms.base import Context, Mechanism, known_options, register_mechanism, unmoved
from erlangen.mechanisms.clipping import ClippingRule, Flat
from erlangen.mechanisms.geometry import Geometry
from erlangen.mechanisms.noise import NoiseSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class GaussianMechanism(Mechanism):
    """Geometry × clipping rule × noise: three independent choices."""

    def __init__(
        self,
        noise_multiplier: float,
        clipping: ClippingRule | float = 1.0,
        geometry: Geometry | None = None,
        noise: NoiseSource | None = None,
        name: str = "iso",
    ) -> None:
        super().__init__(noise_multiplier, noise)
        self.clipping = clipping if isinstance(clipping, ClippingRule) else Flat(clipping)
        self.geometry = Geometry() if geometry is None else geometry
        self.name = name

    @property
    def sensitivity(self) -> float:
        return self.clipping.sensitivity

    @property
    def std(self) -> float:
        """Noise on each coordinate of T⁺'s argument."""
        return self.clipping.gradient_multiplier(self.noise_multiplier) * self.clipping.sensitivity

    def layer_std(self, name: str) -> float:
        """`std` where layers differ in it."""
        return self.std

    def noise_std(self, name: str) -> Tensor | float:
        energy = self.geometry.energy(name, self._like[name])
        return self.layer_std(name) * (energy.sqrt() if isinstance(energy, Tensor) else energy**0.5)

    def covariance(self, name: str) -> Tensor:
        d = self.shapes[name].numel()
        units = torch.eye(d, dtype=torch.float64).view(d, *self.shapes[name])
        coordinates = self.geometry.forward(name, units)
        basis = torch.eye(coordinates[0].numel(), dtype=torch.float64).view(-1, *coordinates.shape[1:])
        back = self.geometry.inverse(name, basis).reshape(basis.shape[0], d)
        return self.layer_std(name) ** 2 * back.T @ back

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        return gaussian(self.noise_multiplier if noise_multiplier is None else noise_multiplier)

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        super().bind(parameters, expected_batch)
        self.geometry.bind(self.shapes)
        self.clipping.prepare(self.noise_multiplier, expected_batch)
        self.clipping.groups(list(self.shapes))
        self._reset()

    def _reset(self, sums: dict[str, Tensor] | None = None) -> None:
        self._sum = self._zeros() if sums is None else sums
        #: Σ of the answers to side queries, on the device: the host asks for it once a release and not once a part
        self._side_total: Tensor | float = 0.0
        #: the bound of the parts that the sum holds
        self.clipped_at: float | None = None

    def metric(self, name: str) -> Weight:
        return self.geometry.measure(name, self._like[name])

    def accumulate(self, gradients: PerSampleGradients) -> None:
        if not gradients.owners or not gradients.names:
            return
        groups = [[n for n in group if n in gradients.names] for group in self.clipping.groups(list(self.shapes))]
        gradients, norms = finite(gradients, gradients.norms_squared(self.metric), groups, sums_only=True)
        self._require_one_bound()
        weights = self.clipping.weights(norms)
        if gradients.valid is not None:
            weights = torch.where(gradients.valid, weights, 0.0)
        by_name = {name: w for w, group in zip(weights, groups, strict=True) for name in group}
        self._add(gradients, by_name)
        self._ask(norms, gradients.valid)

    def _require_one_bound(self) -> None:
        """All parts of a logical batch are clipped at the bound for which the noise is made."""
        self.clipped_at = unmoved(self.clipped_at, self.clipping.sensitivity, "the clipping bound")

    def _add(self, gradients: PerSampleGradients, weights: Mapping[str, Tensor]) -> None:
        totals = gradients.weighted_sum(weights)
        torch._foreach_add_([self._sum[name] for name in totals], list(totals.values()))

    def sum_in(self, sums: dict[str, Tensor]) -> None:
        """Forget the sum and add up in these tensors until the next release, at the bound of this moment: what was recorded
        finds them where they are. What they hold already counts as added."""
        self._reset(sums)
        self.clipped_at = self.clipping.sensitivity

    def clipped_sum(self) -> Mapping[str, Tensor]:
        """Σ of the clipped contributions so far, *before noise*: a diagnostic that no guarantee covers."""
        return self._sum

    def _ask(self, norms: Tensor, valid: Tensor | None) -> None:
        query = self.clipping.side_query(norms)
        if query is not None:
            values = query.values if valid is None else torch.where(valid, query.values, 0.0)
            self._side_total = self._side_total + values.sum().double()

    def merge(self, add_up: Callable[[list[Tensor]], list[Tensor]]) -> None:
        *sums, side = add_up([*self._sum.values(), torch.tensor([float(self._side_total)], dtype=torch.float64)])
        self._sum, self._side_total = dict(zip(self._sum, sums, strict=True)), float(side)
        self.clipped_at = None  # workers that hold nothing any more may learn another bound

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self._require_one_bound()
        self.noise.next_release()
        noisy = self.noise.perturb_all([self.geometry.forward(name, total) for name, total in self._sum.items()], self.std)
        released = [self.geometry.inverse(name, c) for name, c in zip(self._sum, noisy, strict=True)]
        private = dict(zip(self._sum, torch._foreach_div(released, expected_batch), strict=True)) if released else {}
        self._adapt(expected_batch)
        self._reset()
        return private

    def _adapt(self, expected_batch: float) -> None:
        """Side queries are asked of empty batches too: then the answer is noise alone."""
        empty = self.clipping.side_query(torch.zeros(1, 0))
        if empty is not None and self.noise_multiplier > 0:
            total = torch.tensor([float(self._side_total)], dtype=torch.float64)
            self.clipping.update(float(self.noise.perturb(total, empty.std)), expected_batch)
        elif empty is not None:
            self.clipping.update(float(self._side_total), expected_batch)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clipping": self.clipping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.clipping.load_state_dict(state["clipping"])

    def describe(self) -> dict[str, Any]:
        rule = type(self.clipping).__name__
        facts = {"clipping": rule, **self.clipping.describe()}
        facts |= {"geometry": type(self.geometry).__name__, "noise_std": self.std}
        return {**super().describe(), **facts, "covariance": self.geometry.covariance_words(self.std)}


def finite(
    gradients: PerSampleGradients, squared: Mapping[str, Tensor], groups: list[list[str]], sums_only: bool = False
) -> tuple[PerSampleGradients, Tensor]:
    """Norms per group, [groups, n]; owners with a gradient that is not finite are set to exactly zero.

    A caller that only asks for weighted sums (``sums_only``) and gives zero weight to owners that are not valid is
    served without a copy where sums do not read such owners.
    """
    coarsest = min(squared.values(), key=Tensor.element_size)  # its rounding is what the clipping rule leaves room for
    zero = coarsest.new_zeros(gradients.owners)
    total = torch.stack([torch.stack([zero, *(squared[n].to(zero) for n in group)]).sum(0) for group in groups])
    bad = ~torch.isfinite(total).all(0)
    if sums_only and gradients.guarded:  # without asking the device whether there are any
        return gradients.only(~bad), torch.where(bad, 0.0, total).sqrt()
    if gradients.blind or bool(bad.any()):
        gradients, total = gradients.without(bad), torch.where(bad, 0.0, total)
    return gradients, total.sqrt()


@register_mechanism("iso")
def iso(context: Context) -> Mechanism:
    """DP-SGD (Abadi et al. 2016): the identity geometry."""
    known_options("iso", context.options, ())
    return GaussianMechanism(context.noise_multiplier, context.clipping, None, context.noise)
