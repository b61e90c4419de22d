"""How far a released gradient is from the true one. NON-PRIVATE: everything here looks at private gradients.

For experiments on public or synthetic gradients, and for the figures of the GeoDP paper. Results carry
``non_private = True``; a run that computed them on private records must say so in its certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.hyperspherical import angle_difference, to_spherical

NON_PRIVATE = True


@dataclass(frozen=True)
class GradientError:
    """Mean errors over releases (GeoDP, Definition 4), and the mean cosine to the true gradient."""

    direction_mse: float
    magnitude_mse: float
    gradient_mse: float
    cosine: float
    non_private: bool = True


@dataclass(frozen=True)
class Efficiency:
    """Theorem 1 of GeoDP: ‖w⁺_noisy − w*‖² − ‖w⁺_clean − w*‖² = item_a + item_b for one step of length η."""

    item_a: float
    item_b: float
    non_private: bool = True

    @property
    def difference(self) -> float:
        return self.item_a + self.item_b


def flatten(gradient: Mapping[str, Tensor]) -> Tensor:
    """One vector from the parameters' gradients, in their order."""
    return torch.cat([g.reshape(-1) for g in gradient.values()])


def gradient_error(released: Tensor, true: Tensor) -> GradientError:
    """Released gradients [m, d] (or [d]) against the true ones, of the same shape or [d]. Angles are GeoDP's Eq. 25."""
    released = torch.atleast_2d(released.double())
    true = torch.atleast_2d(true.double()).expand_as(released)
    (r, phi), (r0, phi0) = to_spherical(released), to_spherical(true)
    cosine = torch.nn.functional.cosine_similarity(released, true, dim=1)
    return GradientError(
        float(angle_difference(phi, phi0).square().sum(1).mean()),
        float((r - r0).square().mean()),
        float((released - true).square().sum(1).mean()),
        float(cosine.mean()),
    )


def measure(
    mechanism: Mechanism,
    gradients: Mapping[str, Tensor],
    true: Mapping[str, Tensor],
    expected_batch: float,
    repeats: int = 1,
) -> GradientError:
    """Release the same per-sample gradients ``repeats`` times and compare with the ``true`` gradient."""
    if not mechanism.shapes:
        mechanism.bind(true, expected_batch)
    released = [flatten(mechanism.release(gradients, expected_batch)) for _ in range(repeats)]
    return gradient_error(torch.stack(released), flatten(true))


def efficiency(w: Tensor, optimum: Tensor, clean: Tensor, noisy: Tensor, rate: float) -> Efficiency:
    """Items A = η²(‖g*‖² − ‖g‖²) and B = 2η⟨g* − g, w* − w⟩ of a step from w with the noisy and the clean gradient."""
    w, optimum, clean, noisy = (t.double() for t in (w, optimum, clean, noisy))
    item_a = rate**2 * (noisy.square().sum() - clean.square().sum())
    item_b = 2 * rate * ((noisy - clean) * (optimum - w)).sum()
    return Efficiency(float(item_a), float(item_b))


def measure_efficiency(
    mechanism: Mechanism,
    gradients: Mapping[str, Tensor],
    w: Mapping[str, Tensor],
    optimum: Mapping[str, Tensor],
    clean: Mapping[str, Tensor],
    rate: float,
    expected_batch: float,
    repeats: int = 1,
) -> Efficiency:
    """Items A and B of any mechanism, the mean over ``repeats`` releases of the same per-sample gradients."""
    if not mechanism.shapes:
        mechanism.bind(w, expected_batch)
    start, goal, true = flatten(w), flatten(optimum), flatten(clean)
    items = [
        efficiency(start, goal, true, flatten(mechanism.release(gradients, expected_batch)), rate)
        for _ in range(repeats)
    ]
    return Efficiency(sum(i.item_a for i in items) / repeats, sum(i.item_b for i in items) / repeats)


__all__ = [
    "NON_PRIVATE",
    "Efficiency",
    "GradientError",
    "efficiency",
    "flatten",
    "gradient_error",
    "measure",
    "measure_efficiency",
]
