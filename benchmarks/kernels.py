"""Kernel gradients of small maps: stored and read, or norms and sum without storing them; which tiles are fastest here.

    python benchmarks/kernels.py --keep --json

For the layers of ResNet-9 and WRN-16-4 with few positions: the time of one physical batch by the stored path (gradients,
norms, weighted sum), then of the kernels that store nothing, tile by tile. Every variant is checked first against float64
on fresh random operands: norms must bound what is summed. ``--keep`` writes the winners for this device into the user's
cache, where `erlangen.gradients.kernels.tuned` reads them. Medians between device events, caches flushed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from erlangen.gradients import kernels
from erlangen.gradients.kernels import conv_gradient, conv_unformed, tuned
from erlangen.gradients.kernels.conv_gradient import FILTERS, OWNERS
from erlangen.gradients.kernels.row_sum import row_sum
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rules.conv import Conv, Geometry


@dataclass(frozen=True)
class Layer:
    """A convolution with "same" padding, as the network sees it; ``centred``: its filters are standardised."""

    network: str
    channels: int
    outputs: int
    size: int
    kernel: int = 3
    stride: int = 1
    centred: bool = False

    @property
    def plane(self) -> tuple[tuple[int, int], ...]:
        pair = lambda n: (n, n)  # noqa: E731
        return pair(self.kernel), pair(self.stride), pair(self.kernel // 2), pair(1)

    @property
    def tokens(self) -> int:
        return self.size**2

    def __str__(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return f"{self.network}: {self.channels} to {self.outputs}, {self.kernel}x{self.kernel}{stride}, {self.size}x{self.size}"

    def operands(self, owners: int, device: str) -> tuple[Tensor, Tensor]:
        dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies no bfloat16 matrices
        x = torch.randn(owners, self.channels, *(self.size * self.stride,) * 2, device=device)
        d = torch.randn(owners, self.outputs, self.size, self.size, device=device)
        return tuple(t.to(dtype).to(memory_format=torch.channels_last) for t in (x, d))  # type: ignore[return-value]


LAYERS = (
    Layer("resnet9", 256, 256, 4),
    Layer("resnet9", 256, 256, 8),
    Layer("wrn-16-4", 256, 256, 8, centred=True),
    Layer("wrn-16-4", 128, 256, 8, stride=2, centred=True),
    Layer("wrn-16-4", 128, 256, 8, kernel=1, stride=2, centred=True),
)
SUMS = (
    tuned.Sum(128, 64, 4, 5), tuned.Sum(128, 128, 8, 5), tuned.Sum(128, 64, 4, 7), tuned.Sum(64, 128, 4, 5),
    tuned.Sum(128, 128, 8, 3), tuned.Sum(64, 256, 8, 5), tuned.Sum(64, 64, 4, 7), tuned.Sum(128, 64, 4, 3),
    tuned.Sum(128, 64, 4, 5, 1584), tuned.Sum(128, 128, 8, 5, 396),
)  # fmt: skip
#: layers with more positions: their gradients are stored
LARGER = (
    Layer("resnet9", 64, 128, 32),
    Layer("resnet9", 128, 128, 16),
    Layer("resnet9", 128, 256, 16),
    Layer("wrn-16-4", 64, 64, 32, centred=True),
)
GRADIENTS = (
    tuned.Gradient(True, 128, 128, 32, 8, 4), tuned.Gradient(True, 128, 64, 32, 4, 4),
    tuned.Gradient(False, 128, 128, 64, 8, 3), tuned.Gradient(True, 64, 64, 64, 4, 4),
)  # fmt: skip
NORMS = (
    tuned.Norms(64, 4, 3), tuned.Norms(128, 2, 3), tuned.Norms(128, 1, 3), tuned.Norms(64, 8, 3), tuned.Norms(128, 4, 3),
    tuned.Norms(64, 4, 5),
)  # fmt: skip


def milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=10, rep=40, return_mode="median"))
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def stored(layer: Layer, x: Tensor, d: Tensor, w: Tensor) -> None:
    """The path that forms every gradient: written once with its norms, read by the sum."""
    g, _ = conv_gradient.conv_gradient(x, d, 1, *layer.plane, FILTERS if layer.centred else OWNERS)
    row_sum(w, g.flatten(1))


def in_float32(layer: Layer, x: Tensor, d: Tensor, w: Tensor) -> None:
    """The path without kernels of its own: Gram matrices of windows and an ordinary weighted product, all in float32."""
    shape = layer.outputs, layer.channels, layer.kernel, layer.kernel
    piece = Conv(x, d, 1, shape, Geometry(*layer.plane, 1))  # type: ignore[arg-type]
    with exact_float32():
        torch.cat([part.gram() for part in piece.chunks()])
        piece.precise().weighted_sum(w)


def checked(layer: Layer, device: str, norms: tuned.Norms | None, total: tuned.Sum | None) -> str:
    """Why a variant must not be used, or nothing: on fresh operands, norms bound what is summed and are near the exact ones,
    sums are the exact ones, and an owner of weight zero leaves no trace."""
    x, d = layer.operands(3, device)
    inverse = torch.rand(layer.outputs, device=device) * 0.9 + 0.1 if layer.centred else None
    exact, magnitude = conv_unformed.reference(x, d, 1, *layer.plane, inverse)
    measured = conv_unformed.squared_norms(x, d, 1, *layer.plane, inverse, setting=norms)
    sums = lambda w: conv_unformed.weighted_sum(x, d, w, 1, *layer.plane, setting=total).double()  # noqa: E731
    g = torch.stack([sums(one) for one in torch.eye(3, device=device)])
    wanted = conv_gradient.reference(x.double(), d.double(), 1, *layer.plane)
    if float((g - wanted).norm() / wanted.norm()) > 1e-5:
        return f"sums are off by {float((g - wanted).norm() / wanted.norm()):.1e}"
    g = g.flatten(2)
    g = g if inverse is None else (g - g.mean(2, keepdim=True)) * inverse.double()[:, None]
    if not bool((g.square().sum((1, 2)) <= measured).all() and (exact <= measured).all()):
        return "norms are below what is summed"
    if not bool((measured <= exact + 2e-4 * magnitude.square()).all()):
        return f"norms are off by {float(((measured - exact) / magnitude.square()).max()):.1e} of the magnitudes"
    x[1] = torch.nan
    return (
        "" if bool(torch.isfinite(sums(torch.tensor([1.0, 0.0, 2.0], device=device))).all()) else "weight zero is read"
    )


def rounding(layer: Layer, device: str) -> float:
    """How far norms are from the exact ones before they are rounded outwards, in units of the error that is granted."""
    x, d = layer.operands(64 if device == "cuda" else 2, device)
    inverse = torch.rand(layer.outputs, device=device) * 0.9 + 0.1 if layer.centred else None
    exact, _ = conv_unformed.reference(x, d, 1, *layer.plane, inverse)
    value, bound = (
        conv_unformed.squared_norms(x, d, 1, *layer.plane, inverse, rounded=r).double() for r in (False, True)
    )
    return float(((value - exact).abs() / (bound - value)).max())


@dataclass
class Report:
    """What was measured for one layer."""

    layer: Layer
    stored_ms: float
    float32_ms: float
    rounding: float
    norms: dict[tuned.Norms, float]
    sums: dict[tuned.Sum, float]
    refused: dict[str, str]

    def rows(self) -> dict[str, object]:
        pick = lambda found: [{**asdict(k), "ms": v} for k, v in sorted(found.items(), key=lambda kv: kv[1])]  # noqa: E731
        return {"layer": str(self.layer), "stored_ms": self.stored_ms,
                "float32_ms": self.float32_ms, "norms": pick(self.norms), "sums": pick(self.sums),
                "unformed_ms": self.unformed_ms, "rounding": self.rounding, "refused": self.refused}  # fmt: skip

    @property
    def unformed_ms(self) -> float:
        return min(self.norms.values(), default=float("inf")) + min(self.sums.values(), default=float("inf"))


def measure(layer: Layer, owners: int, device: str, variants: int) -> Report:
    x, d = layer.operands(owners, device)
    w = torch.rand(owners, device=device)
    inverse = torch.rand(layer.outputs, device=device) * 0.9 + 0.1 if layer.centred else None
    others = (lambda: stored(layer, x, d, w), lambda: in_float32(layer, x, d, w))
    report = Report(layer, *(milliseconds(run, device) for run in others), rounding(layer, device), {}, {}, {})
    for setting in (*NORMS[:variants], *SUMS[:variants]):
        is_sum = isinstance(setting, tuned.Sum)
        try:
            problem = checked(layer, device, None if is_sum else setting, setting if is_sum else None)
        except Exception as error:  # a tile that this device cannot hold
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
        if problem:
            report.refused[str(setting)] = problem
        elif is_sum:
            report.sums[setting] = milliseconds(
                lambda s=setting: conv_unformed.weighted_sum(x, d, w, 1, *layer.plane, setting=s), device
            )
        else:
            report.norms[setting] = milliseconds(
                lambda s=setting: conv_unformed.squared_norms(x, d, 1, *layer.plane, inverse, setting=s), device
            )
    return report


def formed(layer: Layer, x: Tensor, d: Tensor, setting: tuned.Gradient | None) -> tuple[Tensor, Tensor]:
    return conv_gradient.conv_gradient(x, d, 1, *layer.plane, FILTERS if layer.centred else OWNERS, setting=setting)


def measure_stored(layer: Layer, owners: int, device: str, variants: int) -> dict[tuned.Gradient | None, float]:
    """Milliseconds of forming, norms and storing, by the built-in tile (None) and by others that compute the same."""
    x, d = layer.operands(owners, device)
    wanted = conv_gradient.reference(x[:3].double(), d[:3].double(), 1, *layer.plane)
    found: dict[tuned.Gradient | None, float] = {}
    for setting in (None, *GRADIENTS[:variants]):
        try:
            g, norms = formed(layer, x[:3], d[:3], setting)
            exact = g.double().square().sum((2, 3))
            energy = norms[:, 0] if layer.centred else norms
            same = (g.double() - wanted).norm() <= 1e-2 * wanted.norm()
            if bool(same) and torch.allclose(energy.double(), exact if layer.centred else exact.sum(1), rtol=1e-4):
                found[setting] = milliseconds(lambda s=setting: formed(layer, x, d, s), device)
        except Exception as error:  # a tile that this device cannot hold
            print(f"    refused   {setting}: {type(error).__name__}", flush=True)
    return found


def keep(reports: list[Report], device: str) -> None:
    """The winners, by shape; norms by positions alone, the fastest in total over the layers that have them."""
    for report in reports:
        layer, best = report.layer, min(report.sums, key=report.sums.__getitem__, default=None)
        if best is not None and layer.kernel > 1:
            setting = replace(best, stored=report.stored_ms <= report.unformed_ms)
            tuned.keep(
                device, "sums", f"{conv_unformed.padded(layer.tokens)}x{layer.outputs}x{layer.channels}", setting
            )
    for size in {conv_unformed.padded(r.layer.tokens) for r in reports}:
        same = [r for r in reports if conv_unformed.padded(r.layer.tokens) == size]
        common = [s for s in NORMS if all(s in r.norms for r in same)]
        if common:
            tuned.keep(device, "norms", str(size), min(common, key=lambda s: sum(r.norms[s] for r in same)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: under Triton's interpreter, to try it"
    )
    parser.add_argument("--owners", type=int, default=2048, help="records in memory at once")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="only the first so many")
    parser.add_argument("--variants", type=int, default=len(SUMS), help="only the first so many tiles")
    parser.add_argument("--keep", action="store_true", help="write the winners into the user's cache")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kernels.FORCED = args.device == "cpu"
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    reports = []
    for layer in LAYERS[: args.layers]:
        report = measure(layer, args.owners, args.device, args.variants)
        reports.append(report)
        print(
            f"{layer}, {args.owners} records: stored {report.stored_ms:.3f} ms, float32 {report.float32_ms:.3f} ms, "
            f"not stored {report.unformed_ms:.3f} ms; norms err by {report.rounding:.1%} of what is granted",
            flush=True,
        )
        for setting, ms in (*report.norms.items(), *report.sums.items()):
            print(f"    {ms:8.3f}  {setting}", flush=True)
        for setting, problem in report.refused.items():
            print(f"    refused   {setting}: {problem}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    larger = {layer: measure_stored(layer, args.owners, args.device, args.variants) for layer in LARGER[: args.layers]}
    for layer, found in larger.items():
        print(f"{layer}, {args.owners} records, formed and stored:")
        for setting, ms in found.items():
            print(f"    {ms:8.3f}  {setting or 'built in'}", flush=True)
    if args.keep:
        keep(reports, name)
        for layer, found in larger.items():
            best = min(found, key=found.__getitem__, default=None)
            if best is not None and found[best] < 0.97 * found.get(None, float("inf")):
                tuned.keep(name, "gradients", f"{layer.tokens}x{layer.outputs}x{layer.channels}", best)
        print(f"kept in {tuned.path()}")
    if args.json:
        print(json.dumps({"benchmark": "kernels", "device": name, "torch": torch.__version__, "owners": args.owners,
                          "stored": {str(k): {str(s): ms for s, ms in v.items()} for k, v in larger.items()},
                          "layers": [r.rows() for r in reports]}))  # fmt: skip


if __name__ == "__main__":
    main()
