"""GeoDP (Duan et al. 2025) in sound forms: the direction and the magnitude of the gradient are released separately.

    u = Σ g_i/‖g_i‖ + N(0, σ_dir² I)          sensitivity 1, because each term is a unit vector (or 0)
    m = Σ clip(‖g_i‖, C) + N(0, σ_mag² C²)    sensitivity C
    release  max(m, 0)/B · u/‖u‖

Both queries are answered on the same batch: in units of their noise the joint sensitivity is (σ_dir⁻² + σ_mag⁻²)^½, so
one release is a Gaussian of multiplier σ = (σ_dir⁻² + σ_mag⁻²)^(−½). What follows is post-processing. With
σ_mag = 10σ the direction has σ_dir = 1.005σ.

`shrink` adds James–Stein shrinkage towards the last private direction, `angles` releases clipped angles instead of the
direction (the paper's coordinates, as a sum of per-sample terms), `PublishedGeoDP` is the paper's algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from erlangen.accounting import gaussian, non_private
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms.base import Context, Mechanism, known_options, register_mechanism, unmoved
from erlangen.mechanisms.clipping import AdaptiveQuantile, ClippingRule, Flat, PerLayer
from erlangen.mechanisms.encoding import decode, encode
from erlangen.mechanisms.gaussian import GaussianMechanism, finite
from erlangen.mechanisms.hyperspherical import angle_blocks, angle_difference, from_spherical, to_spherical, wrapped
from erlangen.mechanisms.noise import NoiseSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent

FORMS = ("direction", "shrink", "angles")
MAGNITUDES = ("norms", "scaled")

# Gradients shorter than this have no direction: their squares would lose precision in float32.
SHORTEST = 1e-12

REGION = (
    "GeoDP as published noises the angles of the *averaged* gradient as if one record could move them by √(d+2)·βπ/B. "
    "It can move each by up to π, and β bounds nothing: the paper's own δ' is as large as 1 − β"
)


class Direction(Mechanism):
    """Direction and magnitude, each with its own noise (form S2). See the top of this file for the guarantee.

    ``clipping`` decides the magnitude that a sample reports, w_i‖g_i‖ ≤ C (so GeoDP + AUTO-S or PSAC is this class with
    that rule); the direction is always normalised fully. ``magnitude="scaled"`` multiplies the release by ‖u‖/B, so
    that it vanishes where the directions cancel; the mean of norms alone does not vanish at an optimum.
    """

    form = "direction"

    def __init__(
        self,
        noise_multiplier: float,
        clipping: ClippingRule | float = 1.0,
        noise: NoiseSource | None = None,
        magnitude_multiplier: float = 10.0,
        magnitude: str = "norms",
    ) -> None:
        super().__init__(noise_multiplier, noise)
        self.clipping = clipping if isinstance(clipping, ClippingRule) else Flat(clipping)
        if isinstance(self.clipping, (PerLayer, AdaptiveQuantile)):
            raise ValueError(
                f"geodp has one direction and one magnitude: clipping {type(self.clipping).__name__} does not fit; use "
                "'flat', 'auto-s' or 'psac'"
            )
        if not 1 < magnitude_multiplier < math.inf:
            raise ValueError(
                f"magnitude_multiplier is {magnitude_multiplier}; σ_mag = magnitude_multiplier·σ must leave noise for "
                "the direction and a magnitude to release: give a finite number above 1"
            )
        if magnitude not in MAGNITUDES:
            raise ValueError(f"magnitude is {magnitude!r}; choose one of {', '.join(MAGNITUDES)}")
        self.name = "geodp"
        self.magnitude_multiplier, self.magnitude = float(magnitude_multiplier), magnitude
        self._stretch = 1.0

    # -- what it says ---------------------------------------------------------------------------------------------

    @property
    def direction_std(self) -> float:
        """σ_dir = (σ⁻² − σ_mag⁻²)^(−½), on every coordinate of u."""
        return self.noise_multiplier / math.sqrt(1.0 - self.magnitude_multiplier**-2)

    @property
    def magnitude_std(self) -> float:
        """σ_mag·C"""
        return self.noise_multiplier * self.magnitude_multiplier * self.clipping.bound

    @property
    def sensitivity(self) -> float:
        """Of both queries together, the magnitude rescaled so that its noise is σ_dir too: σ_dir/σ."""
        return 1.0 / math.sqrt(1.0 - self.magnitude_multiplier**-2)

    def noise_std(self, name: str) -> float:
        """On the released sum, which is a multiple of u: σ_dir times that (private) multiple at the last release."""
        return self._stretch * self.direction_std

    def covariance(self, name: str) -> Tensor:
        """Of the noised query u, before post-processing."""
        return self.direction_std**2 * torch.eye(self.shapes[name].numel(), dtype=torch.float64)

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        return gaussian(self.noise_multiplier if noise_multiplier is None else noise_multiplier)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "form": self.form,
            "direction_std": self.direction_std,
            "magnitude_std": self.magnitude_std,
            "magnitude": self.magnitude,
        }

    # -- what it does ---------------------------------------------------------------------------------------------

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        super().bind(parameters, expected_batch)
        self._reset()

    def _reset(self) -> None:
        self._sum = self._zeros()
        self._magnitude: Tensor | float = 0.0
        #: the bound of the magnitudes that the sum holds
        self.clipped_at: float | None = None

    def _require_one_bound(self) -> None:
        """All parts of a logical batch report magnitudes below the bound for which the noise is made."""
        self.clipped_at = unmoved(self.clipped_at, self.clipping.bound, "the clipping bound")

    @torch.no_grad()
    def accumulate(self, gradients: PerSampleGradients) -> None:
        if not gradients.owners or not gradients.names:
            return
        self._require_one_bound()
        gradients, norms = finite(gradients, gradients.norms_squared(self.metric), [gradients.names])
        magnitudes = self.clipping.weights(norms)[0].nan_to_num(0.0, 0.0, 0.0) * norms[0]
        has_direction = norms[0] > SHORTEST
        if gradients.valid is not None:
            magnitudes = torch.where(gradients.valid, magnitudes, 0.0)
            has_direction = has_direction & gradients.valid
        self._magnitude = self._magnitude + magnitudes.clamp(max=self.clipping.bound).double().sum()
        self._add_directions(gradients, norms[0], has_direction)

    def _add_directions(self, gradients: PerSampleGradients, norms: Tensor, has_direction: Tensor) -> None:
        unit = self.clipping.safe_bound(norms, 1.0)
        weights = torch.where(has_direction, unit / norms, 0.0)
        for name, total in gradients.weighted_sum({n: weights for n in gradients.names}).items():
            self._sum[name] += total

    def merge(self, add_up: Callable[[list[Tensor]], list[Tensor]]) -> None:
        like = next(iter(self._sum.values()))
        magnitude = torch.as_tensor(self._magnitude, dtype=torch.float64, device=like.device).reshape(1)
        *sums, magnitude = add_up([*self._sum.values(), magnitude])
        self._sum, self._magnitude = dict(zip(self._sum, sums, strict=True)), magnitude[0]
        self.clipped_at = None  # workers that hold nothing any more may learn another bound

    def pending(self) -> tuple[dict[str, Tensor], float]:
        """The two sums so far, without noise: for sensitivity audits only."""
        return {name: total.clone() for name, total in self._sum.items()}, float(self._magnitude)

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        u, m = self.query()
        u = self._denoise(u)
        length = norm_of(u)
        factor = m / length if length > 0 else 0.0
        if self.magnitude == "scaled":
            factor *= length / expected_batch
        self._stretch = factor
        self._reset()
        return {name: t * (factor / expected_batch) for name, t in u.items()}

    def query(self) -> tuple[dict[str, Tensor], float]:
        """Both sums with their noise: all that is ever released. The magnitude is clamped at 0 (post-processing)."""
        self._require_one_bound()
        self.noise.next_release()
        u = dict(zip(self._sum, self.noise.perturb_all(list(self._sum.values()), self.direction_std), strict=True))
        return u, self._noisy_magnitude()

    def _noisy_magnitude(self) -> float:
        m = torch.as_tensor(self._magnitude, dtype=torch.float64).reshape(1).cpu()
        return max(float(self.noise.perturb(m, self.magnitude_std)), 0.0)

    def _denoise(self, u: dict[str, Tensor]) -> dict[str, Tensor]:
        return u


class Shrink(Direction):
    """S2 with James–Stein shrinkage of what is orthogonal to the last private direction (form S3, free).

    a = ⟨u, ref⟩,  o = u − a·ref,  λ = max(0, 1 − (d−1)σ_dir²/‖o‖²),  output a·ref + λ·o
    """

    form = "shrink"

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        super().bind(parameters, expected_batch)
        known = getattr(self, "_reference", {})
        self._reference: dict[str, Tensor] = known if {n: t.shape for n, t in known.items()} == self.shapes else {}

    def _denoise(self, u: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._reference:
            u = self._shrunk(u)
        length = norm_of(u)
        if length > 0:
            self._reference = {name: t / length for name, t in u.items()}
        return u

    def _shrunk(self, u: dict[str, Tensor]) -> dict[str, Tensor]:
        reference = {name: t.to(u[name]) for name, t in self._reference.items()}
        along = float(sum(torch.vdot(u[n].flatten(), reference[n].flatten()).double() for n in u))
        orthogonal = max(norm_of(u) ** 2 - along**2, 0.0)  # ‖o‖², ref being a unit vector
        d = sum(t.numel() for t in u.values())
        keep = max(0.0, 1.0 - (d - 1) * self.direction_std**2 / orthogonal) if orthogonal > 0 else 0.0
        return {n: keep * t + (1.0 - keep) * along * reference[n] for n, t in u.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reference": encode(getattr(self, "_reference", {}))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._reference = decode(state["reference"])


class Angles(Direction):
    """Clipped angles around a private reference, and the magnitude of S2 (form S1). Biased; here for fidelity.

    Σ clip(φ_i − φ_ref, ±βπ/2; the last ±βπ) has sensitivity (βπ/2)·√(d+2); φ_ref is the last private direction, and
    the equator φ = 0 at first. Angles depend on the order of the coordinates, and d of them share one budget.
    """

    form = "angles"

    def __init__(
        self,
        noise_multiplier: float,
        clipping: ClippingRule | float = 1.0,
        noise: NoiseSource | None = None,
        magnitude_multiplier: float = 10.0,
        magnitude: str = "norms",
        beta: float = 0.1,
    ) -> None:
        super().__init__(noise_multiplier, clipping, noise, magnitude_multiplier, magnitude)
        self.beta = check_beta(beta)

    @property
    def angle_sensitivity(self) -> float:
        return self.beta * math.pi / 2 * math.sqrt(self.dimension + 2)

    @property
    def dimension(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def covariance(self, name: str) -> Tensor:
        """Of the noised angles; they belong to no parameter alone, so this is the block of one parameter's size."""
        return super().covariance(name) * self.angle_sensitivity**2

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        super().bind(parameters, expected_batch)
        if self.dimension < 2:
            raise ValueError(f"angles need two trained numbers at least, and there are {self.dimension}; use form='direction'")
        first = next(iter(self._sum.values()))
        self._angles = first.new_zeros(self.dimension - 1)
        known = getattr(self, "_reference", self._angles[:0])
        self._refer(known if known.shape == self._angles.shape else torch.zeros_like(self._angles))

    def _refer(self, angles: Tensor) -> None:
        self._reference = angles
        self._reach = float(angles[:-1].abs().amax()) if angles.numel() > 1 else 0.0

    def accumulate(self, gradients: PerSampleGradients) -> None:
        super().accumulate(gradients.formed())  # every angle is looked at: norms without the gradients save nothing

    @exact_float32()
    def _add_directions(self, gradients: PerSampleGradients, norms: Tensor, has_direction: Tensor) -> None:
        names = [n for n in self.shapes if n in gradients.names]
        if len(names) < len(self.shapes):
            raise ValueError(
                f"angles need every parameter's gradient; {sorted(set(self.shapes) - set(names))} had none"
            )
        each = [gradients.directions(name).reshape(gradients.owners, -1) for name in names]  # a scalar has one column
        limit = self.clipping.safe_bound(self._angles, self.beta * math.pi / 2)
        counts, last = has_direction.to(self._angles), slice(-1, None)
        present = counts.sum()
        for columns, phi, reach in angle_blocks(each, torch.where(has_direction, norms, 0.0)):
            reference = self._reference[columns]
            if columns != last and reach + self._reach < 0.999 * float(limit):  # nothing to clip
                self._angles[columns] += counts @ phi.to(counts.dtype) - present * reference.to(counts)
                continue
            difference = angle_difference if columns == last else torch.sub
            bound = 2 * limit if columns == last else limit
            # the bound rounded to bfloat16 would be a larger one: clip in the precision of the sum
            moved = difference(phi, reference.to(phi)).to(counts.dtype)
            self._angles[columns] += counts @ moved.clamp_(-bound, bound)

    def merge(self, add_up: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().merge(add_up)
        (self._angles,) = add_up([self._angles])

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self._require_one_bound()
        self.noise.next_release()
        angles = self.noise.perturb(self._angles, self.direction_std * self.angle_sensitivity)
        m = self._noisy_magnitude()
        moved = self._reference.to(angles) + angles / expected_batch
        direction = from_spherical(torch.ones((), device=angles.device), moved)
        self._refer(wrapped(moved, direction))
        self._angles = torch.zeros_like(self._angles)
        self._reset()
        return by_parameter(direction * (m / expected_batch), self.shapes)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reference": encode({"angles": self._reference})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._refer(decode(state["reference"])["angles"])


class PublishedGeoDP(GaussianMechanism):
    """Algorithm 1 of the paper: clip, average, to angles, noise Cσ/B and √(d+2)·βπσ/B, back. No guarantee: ε = ∞."""

    unsound = REGION

    def __init__(
        self, noise_multiplier: float, clipping: ClippingRule | float, beta: float, noise: NoiseSource | None = None
    ) -> None:
        super().__init__(noise_multiplier, clipping, None, noise, "geodp")
        self.beta = check_beta(beta)

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        return non_private(REGION)

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self.noise.next_release()
        mean = torch.cat([total.flatten() for total in self._sum.values()]) / expected_batch
        radius, phi = to_spherical(mean)
        spread = math.sqrt(mean.numel() + 2) * self.beta * math.pi / expected_batch
        phi = self.noise.perturb(phi, spread * self.noise_multiplier)
        length_std = self.clipping.sensitivity / expected_batch * self.noise_multiplier
        radius = self.noise.perturb(radius.reshape(1), length_std)
        self._reset()
        return by_parameter(from_spherical(radius[0], phi), self.shapes)

    def noise_std(self, name: str) -> Tensor | float:
        """The noise is on angles; no coordinate of the gradient has a noise of its own."""
        return 0.0

    def covariance(self, name: str) -> Tensor:
        return torch.zeros(self.shapes[name].numel(), self.shapes[name].numel(), dtype=torch.float64)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "as_published": True, "beta": self.beta}


def norm_of(u: Mapping[str, Tensor]) -> float:
    """‖u‖ over all parameters, accumulated in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(t)) ** 2 for t in u.values()))


def by_parameter(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """One vector as the parameters that it is of, in their order."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def check_beta(beta: float) -> float:
    if not 0 < beta <= 1:
        raise ValueError(f"beta is {beta}; the bounding factor β must lie in (0, 1]")
    return float(beta)


@register_mechanism("geodp")
def geodp(context: Context) -> Mechanism:
    """Options: form="direction" | "shrink" | "angles", magnitude_multiplier, magnitude, beta (angles).

    as_published=True with beta is the paper's algorithm: ε = ∞.
    """
    options: dict[str, Any] = dict(context.options)
    if options.pop("as_published", False):
        known_options("geodp", options, ("beta",))
        if "beta" not in options:
            raise ValueError("geodp as published needs its bounding factor: as_published=True, beta=…")
        return PublishedGeoDP(context.noise_multiplier, context.clipping, options["beta"], context.noise)
    known_options("geodp", options, ("form", "magnitude_multiplier", "magnitude", "beta", "as_published"))
    form = options.pop("form", "direction")
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; GeoDP has the forms {', '.join(FORMS)}")
    if form != "angles" and "beta" in options:
        raise ValueError(f"beta bounds angles; form {form!r} has none. Use form='angles', or leave beta out")
    kind = {"direction": Direction, "shrink": Shrink, "angles": Angles}[form]
    return kind(context.noise_multiplier, context.clipping, context.noise, **options)
