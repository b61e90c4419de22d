"""Where a mechanism puts its noise: the released standard deviation of every coordinate, relative to ISO.

The mechanism is built again from the configuration and the structure of the network. Nothing here looks at data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from erlangen.equivariant.conv import SteerableConv2d
from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.frequency import Fourier
from erlangen.report.chart import Axis, Chart, Gallery, Heat, Picture, Series, floats, plain
from erlangen.report.folder import Run

#: columns of the picture: coordinates of a layer, sorted by their noise
QUANTILES = 41
#: draws for the noise on the taps of a steerable kernel: fewer for large layers, whose picture averages many channels
DRAWS = (16, 1000)
MOST_ROWS, MOST_BARS, MOST_KERNELS = 40, 20, 8


@dataclass(frozen=True)
class LayerNoise:
    """One parameter: std of its noise divided by σ·(sensitivity), which is what ISO adds at the same guarantee."""

    name: str
    entries: int
    quantiles: np.ndarray
    energy: float

    @property
    def rms(self) -> float:
        return math.sqrt(self.energy / self.entries)


def mechanism_of(run: Run, model: nn.Module) -> Mechanism:
    """The run's mechanism, bound to its network. Without noise (σ = 0) the shape is that of σ = 1."""
    config, sigma = run.config, float(run.guarantee["mechanism"].get("noise_multiplier") or 0.0)
    rule = make_clipping(config.clipping, config.max_grad_norm, **config.clipping_options)
    batch, shape = float(config.batch or 1.0), tuple(run.summary["data"].get("input_shape") or ()) or None
    context = Context(sigma or 1.0, rule, StreamNoise(0), model, batch, config.mechanism_options, shape)
    mechanism = make_mechanism(config.mechanism, context)
    mechanism.bind({n: p for n, p in model.named_parameters() if p.requires_grad}, batch)
    return mechanism


def relative_std(mechanism: Mechanism, name: str) -> Tensor:
    """Standard deviation of the noise on each coordinate of one parameter, in units of ISO's."""
    std = torch.as_tensor(mechanism.noise_std(name), dtype=torch.float64).detach().cpu()
    scale = mechanism.noise_multiplier * mechanism.sensitivity
    return (std / scale).expand(mechanism.shapes[name]).flatten()


def layers(mechanism: Mechanism) -> list[LayerNoise]:
    found = []
    for name in mechanism.shapes:
        relative = relative_std(mechanism, name)
        quantiles = np.quantile(relative.numpy(), np.linspace(0, 1, QUANTILES))
        found.append(LayerNoise(name, relative.numel(), quantiles, float(relative.square().sum())))
    return found


def figures(run: Run, model: nn.Module) -> list[Heat | Chart | Gallery]:
    """Nothing for a mechanism whose noise is the same everywhere: there is nothing to see."""
    mechanism = mechanism_of(run, model)
    found = layers(mechanism)
    out: list[Heat | Chart | Gallery] = []
    spread = max(float(np.abs(np.log2(np.maximum(layer.quantiles, 1e-12))).max()) for layer in found)
    if spread > 1e-3:
        out += [_strip(run, found), _energy(run, found)]
    kernels = _taps(model, mechanism) if spread > 1e-3 else []
    kernels += _frequencies(mechanism)
    if kernels:
        out.append(_kernel_gallery(run, kernels))
    return out


def _strip(run: Run, found: list[LayerNoise]) -> Heat:
    shown = found if len(found) <= MOST_ROWS else sorted(found, key=lambda f: -f.entries)[:MOST_ROWS]
    shown = [layer for layer in found if layer in shown]
    values = np.log2(np.maximum(np.stack([layer.quantiles for layer in shown]), 2.0**-6))
    top = max(1.0, math.ceil(float(np.abs(values).max())))
    step = max(1, round(top / 3))
    ticks = [(float(k), _factor(2.0**k)) for k in range(-int(top), int(top) + 1) if k % step == 0]
    texts = tuple(tuple(_factor(q) for q in layer.quantiles) for layer in shown)
    least, most = min(found, key=lambda f: f.rms), max(found, key=lambda f: f.rms)
    left_out = f" The {len(shown)} largest of {len(found)} parameters are shown." if len(shown) < len(found) else ""
    return Heat(
        "noise-geometry",
        "Where the noise goes",
        "Each row is one parameter, its coordinates sorted from least to most noise; colour is the standard deviation of "
        "the released noise relative to ISO (plain DP-SGD) at the same σ and sensitivity. The guarantee is the same; only "
        f"the shape differs, and the shape does not depend on data.{left_out}",
        f"Noise of {run.config.mechanism} relative to ISO: from {_factor(least.rms)} on average in {least.name} to "
        f"{_factor(most.rms)} in {most.name}.",
        values, tuple(f"{layer.name} ({layer.entries:,})" for layer in shown),
        tuple(f"{100 * k / (QUANTILES - 1):g} %" for k in range(QUANTILES)),
        "coordinates of the layer, sorted by noise", "parameter (entries)", "std of noise / ISO",
        diverging=True, span=(-top, top), texts=texts, ticks=tuple(ticks), height=150 + 24 * len(shown),
    )  # fmt: skip


def _energy(run: Run, found: list[LayerNoise]) -> Chart:
    """Share of the noise energy beside the share of coordinates, which is ISO's share of the energy."""
    energy, entries = sum(f.energy for f in found), sum(f.entries for f in found)
    largest = sorted(found, key=lambda f: -max(f.energy / energy, f.entries / entries))[:MOST_BARS]
    shown = [f for f in found if f in largest and max(f.energy / energy, f.entries / entries) >= 0.005]
    places = floats(np.arange(len(shown)))
    most = max(shown, key=lambda f: f.energy)
    return Chart(
        "noise-energy",
        "Share of the noise by layer",
        "How the total noise energy (the sum of variances) is divided among the layers. ISO divides it by the number of "
        f"coordinates. In total this mechanism adds {energy / entries:.3g} times ISO's energy at the same σ and C.",
        f"{most.name} receives {most.energy / energy:.0%} of the noise energy; ISO would give it "
        f"{most.entries / entries:.0%}.",
        Axis("parameter", categories=tuple(f.name for f in shown)),
        Axis("share of noise energy", percent=True),
        (
            Series(run.config.mechanism, places, floats([f.energy / energy for f in shown]), "bars", colour="c0"),
            Series("ISO", places, floats([f.entries / entries for f in shown]), "bars", colour="c6"),
        ),
        height=360,
    )  # fmt: skip


@torch.no_grad()
def _taps(model: nn.Module, mechanism: Mechanism) -> list[tuple[str, np.ndarray, str]]:
    """For steerable convolutions: the noise on the dense kernel, per tap, relative to ISO's mean on the same kernel."""
    generator, out = torch.Generator().manual_seed(0), []
    for path, layer in model.named_modules():
        name = f"{path}.weight"
        if not isinstance(layer, SteerableConv2d) or name not in mechanism.shapes or layer.kernel_size < 2:
            continue
        relative = relative_std(mechanism, name).to(layer.weight.dtype)
        totals = {"own": torch.zeros(layer.kernel_size, layer.kernel_size), "iso": torch.zeros(())}
        for _ in range(min(DRAWS[1], max(DRAWS[0], 200_000 // relative.numel()))):
            white = torch.randn(relative.shape, generator=generator, dtype=relative.dtype)
            totals["own"] = totals["own"] + layer.expansion.expand(white * relative).square().mean((0, 1)).cpu()
            totals["iso"] = totals["iso"] + layer.expansion.expand(white).square().mean().cpu()
        ratio = (totals["own"] / totals["iso"]).sqrt().double().numpy()
        low, high = _factor(float(ratio.min())), _factor(float(ratio.max()))
        alt = f"noise on the taps of {path}, from {low} to {high} of ISO's mean"
        out.append((f"{path}, {low} to {high}", ratio / max(float(ratio.max()), 1e-12), alt))
    return out[:MOST_KERNELS]


def _frequencies(mechanism: Mechanism) -> list[tuple[str, np.ndarray, str]]:
    """For Fourier geometries: the frequencies of each kernel that are released and noised."""
    geometry, out = getattr(mechanism, "geometry", None), []
    if isinstance(geometry, Fourier):
        for name, mask in geometry.mask.items():
            if mask.ndim == 2 and mask.numel() > 1 and not bool(mask.all()):
                kept = geometry.kept(name)
                picture = torch.fft.fftshift(mask.double()).numpy()
                alt = f"frequencies of {name}: {kept:.0%} are released and noised, the others are set to zero"
                out.append((f"{name}: {kept:.0%} kept", picture, alt))
    return out[:MOST_KERNELS]


def _kernel_gallery(run: Run, kernels: list[tuple[str, np.ndarray, str]]) -> Gallery:
    spectral = isinstance(run.config.mechanism, str) and any("frequencies" in alt for _, _, alt in kernels)
    caption = (
        "Kernel frequencies, the mean in the middle. Bright: released, with noise. Dark: removed before clipping, no noise."
        if spectral
        else "The same noise on the kernels that the network convolves with, tap by tap, averaged over channels, in "
        "units of ISO's mean on the same kernels. Bright: more noise. Drawn from the kernel basis alone."
    )
    title = "Which frequencies carry noise" if spectral else "The noise on the kernels"
    pictures = tuple(Picture(pixels, label, alt) for label, pixels, alt in kernels)
    return Gallery("noise-kernels", title, caption, "; ".join(p.alt for p in pictures), pictures)


def _factor(ratio: float) -> str:
    """×2, ×1.3, ×1/8: powers of two below one as fractions."""
    if ratio < 1e-6:
        return "0"
    inverse = 1 / ratio
    if ratio < 1 and inverse.is_integer() and int(inverse) & (int(inverse) - 1) == 0:
        return f"×1/{int(inverse)}"
    return f"×{plain(float(f'{ratio:.2g}'))}"
