"""Kernel gradients of small maps: stored and read, or norms and sum without storing them; which tiles are fastest here.

    python benchmarks/kernels.py --keep --json
    python benchmarks/kernels.py --model eq-resnet9-tuned --shape 3x32x32 --views 4 --owners 1024 --keep

For the layers of ResNet-9 and WRN-16-4 (or of ``--model``) with few positions: the time of one physical batch by the stored path
(gradients, norms, weighted sum), then of the kernels that store nothing, tile by tile; for the others, of tiles that form and
store. Every variant is checked first against float64 on fresh random operands: norms must bound what is summed. ``--keep``
writes the winners for this device into the user's cache, where `erlangen.gradients.kernels.tuned` reads them. Networks of your
own are found by ``ERLANGEN_PLUGINS``. Medians between device events, caches flushed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from erlangen import plugins
from erlangen.equivariant import SteerableConv2d
from erlangen.gradients import kernels
from erlangen.gradients.kernels import conv_gradient, conv_unformed, tuned
from erlangen.gradients.kernels.conv_gradient import FILTERS, OWNERS
from erlangen.gradients.kernels.row_sum import row_sum
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.models import make_model
from erlangen.models.standardised import StandardisedConv2d


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
    views: int = 1
    #: by its rule always: steerable kernels want coefficients
    formed: bool = False

    @property
    def plane(self) -> tuple[tuple[int, int], ...]:
        pair = lambda n: (n, n)  # noqa: E731
        return pair(self.kernel), pair(self.stride), pair(self.kernel // 2), pair(1)

    @property
    def tokens(self) -> int:
        """Positions of an owner."""
        return self.views * self.size**2

    @property
    def unformed(self) -> bool:
        """Whether there is a choice between storing its gradients and forming them twice."""
        return not self.formed and self.tokens <= conv_unformed.MOST_TOKENS and min(self.channels, self.outputs) >= 64

    def __str__(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        seen = f", {self.views} views" if self.views > 1 else ""
        shape = f"{self.channels} to {self.outputs}, {self.kernel}x{self.kernel}{stride}, {self.size}x{self.size}"
        return f"{self.network}: {shape}{seen}"

    def operands(self, owners: int, device: str) -> tuple[Tensor, Tensor]:
        dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies no bfloat16 matrices
        rows = owners * self.views
        x = torch.randn(rows, self.channels, *(self.size * self.stride,) * 2, device=device)
        d = torch.randn(rows, self.outputs, self.size, self.size, device=device)
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
    tuned.Gradient(False, 128, 128, 64, 8, 3), tuned.Gradient(True, 64, 64, 64, 4, 4), tuned.Gradient(True, 128, 64, 32, 8, 4),
    tuned.Gradient(True, 128, 64, 64, 8, 3), tuned.Gradient(False, 128, 256, 32, 8, 6, True),
    tuned.Gradient(False, 128, 256, 64, 8, 3, True), tuned.Gradient(False, 128, 128, 32, 4, 5, True),
    tuned.Gradient(False, 64, 256, 32, 4, 4, True),
)  # fmt: skip
NORMS = (
    tuned.Norms(64, 4, 3), tuned.Norms(128, 2, 3), tuned.Norms(128, 1, 3), tuned.Norms(64, 8, 3), tuned.Norms(128, 4, 3),
    tuned.Norms(64, 4, 5),
)  # fmt: skip


def layers_of(name: str, shape: tuple[int, int, int], views: int = 1) -> list[Layer]:
    """The convolutions of a network by name whose gradients our kernels form, each shape once."""
    model, found = make_model(name, shape, 10), []

    def see(module: torch.nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        conv: Any = module
        kernel, stride, padding, dilation = (
            v if isinstance(v, tuple) else (v, v) for v in (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        )
        (height, width), size = inputs[0].shape[2:], out.shape[2]
        layer = Layer(
            name, inputs[0].shape[1], out.shape[1], size, kernel[0], stride[0],
            isinstance(conv, StandardisedConv2d), views,
        )  # fmt: skip
        usual = conv.groups == 1 and dilation == (1, 1) and layer.plane[:3] == (kernel, stride, padding)
        square = height == width == size * stride[0] and out.shape[3] == size
        if not (usual and square and conv.padding_mode == "zeros"):
            seen = f"{type(conv).__name__} of {tuple(inputs[0].shape[1:])}"
            print(f"left out: {seen}, whose padding, groups or shape have no case here")
        elif conv_gradient.worth_it(layer.tokens, layer.channels, layer.outputs):
            found.append((layer, isinstance(conv, torch.nn.Conv2d)))

    hooks = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, (torch.nn.Conv2d, SteerableConv2d))]
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return list(dict.fromkeys(layer if plain else replace(layer, formed=True) for layer, plain in found))


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
    g, _ = conv_gradient.conv_gradient(x, d, layer.views, *layer.plane, FILTERS if layer.centred else OWNERS)
    row_sum(w, g.flatten(1))


def in_float32(layer: Layer, x: Tensor, d: Tensor, w: Tensor) -> None:
    """The path without kernels of its own: Gram matrices of windows and an ordinary weighted product, all in float32."""
    shape = layer.outputs, layer.channels, layer.kernel, layer.kernel
    piece = Conv(x, d, layer.views, shape, Geometry(*layer.plane, 1))  # type: ignore[arg-type]
    with exact_float32():
        torch.cat([part.gram() for part in piece.chunks()])
        piece.precise().weighted_sum(w)


def checked(layer: Layer, device: str, norms: tuned.Norms | None, total: tuned.Sum | None) -> str:
    """Why a variant must not be used, or nothing: on fresh operands, norms bound what is summed and are near the exact ones,
    sums are the exact ones, and an owner of weight zero leaves no trace."""
    x, d = layer.operands(3, device)
    inverse = torch.rand(layer.outputs, device=device) * 0.9 + 0.1 if layer.centred else None
    exact, magnitude = conv_unformed.reference(x, d, layer.views, *layer.plane, inverse)
    measured = conv_unformed.squared_norms(x, d, layer.views, *layer.plane, inverse, setting=norms)
    sums = lambda w: conv_unformed.weighted_sum(x, d, w, layer.views, *layer.plane, setting=total).double()  # noqa: E731
    g = torch.stack([sums(one) for one in torch.eye(3, device=device)])
    wanted = conv_gradient.reference(x.double(), d.double(), layer.views, *layer.plane)
    if float((g - wanted).norm() / wanted.norm()) > 1e-5:
        return f"sums are off by {float((g - wanted).norm() / wanted.norm()):.1e}"
    g = g.flatten(2)
    g = g if inverse is None else (g - g.mean(2, keepdim=True)) * inverse.double()[:, None]
    if not bool((g.square().sum((1, 2)) <= measured).all() and (exact <= measured).all()):
        return "norms are below what is summed"
    if not bool((measured <= exact + 2e-4 * magnitude.square()).all()):
        return f"norms are off by {float(((measured - exact) / magnitude.square()).max()):.1e} of the magnitudes"
    x[layer.views : 2 * layer.views] = torch.nan
    return (
        "" if bool(torch.isfinite(sums(torch.tensor([1.0, 0.0, 2.0], device=device))).all()) else "weight zero is read"
    )


def rounding(layer: Layer, device: str) -> float:
    """How far norms are from the exact ones before they are rounded outwards, in units of the error that is granted."""
    x, d = layer.operands(64 if device == "cuda" else 2, device)
    inverse = torch.rand(layer.outputs, device=device) * 0.9 + 0.1 if layer.centred else None
    exact, _ = conv_unformed.reference(x, d, layer.views, *layer.plane, inverse)
    value, bound = (
        conv_unformed.squared_norms(x, d, layer.views, *layer.plane, inverse, rounded=r).double() for r in (False, True)
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
                lambda s=setting: conv_unformed.weighted_sum(x, d, w, layer.views, *layer.plane, setting=s), device
            )
        else:
            report.norms[setting] = milliseconds(
                lambda s=setting: conv_unformed.squared_norms(x, d, layer.views, *layer.plane, inverse, setting=s), device
            )
    return report


def formed(layer: Layer, x: Tensor, d: Tensor, setting: tuned.Gradient | None) -> tuple[Tensor, Tensor]:
    return conv_gradient.conv_gradient(x, d, layer.views, *layer.plane, FILTERS if layer.centred else OWNERS, setting=setting)


def measure_stored(layer: Layer, owners: int, device: str, variants: int) -> dict[tuned.Gradient | None, float]:
    """Milliseconds of forming, norms and storing, by the built-in tile (None) and by others that compute the same."""
    x, d = layer.operands(owners, device)
    few = 3 * layer.views
    wanted = conv_gradient.reference(x[:few].double(), d[:few].double(), layer.views, *layer.plane)
    found: dict[tuned.Gradient | None, float] = {}
    for setting in (None, *GRADIENTS[:variants]):
        try:
            g, norms = formed(layer, x[:few], d[:few], setting)
            exact = g.double().square().sum((2, 3))
            energy = norms[:, 0] if layer.centred else norms
            same = (g.double() - wanted).norm() <= 1e-2 * wanted.norm()
            if bool(same) and torch.allclose(energy.double(), exact if layer.centred else exact.sum(1), rtol=1e-4):
                found[setting] = milliseconds(lambda s=setting: formed(layer, x, d, s), device)
        except Exception as error:  # a tile that this device cannot hold
            print(f"    refused   {setting}: {type(error).__name__}", flush=True)
    return found


def keep(reports: list[Report], machine: str) -> None:
    """The winners, by shape; norms by positions alone, the fastest in total over the layers that have them."""
    for report in reports:
        layer, best = report.layer, min(report.sums, key=report.sums.__getitem__, default=None)
        if best is not None and layer.kernel > 1:
            setting = replace(best, stored=report.stored_ms <= report.unformed_ms)
            tuned.keep(
                machine, "sums", f"{conv_unformed.padded(layer.tokens)}x{layer.outputs}x{layer.channels}", setting
            )
    for size in {conv_unformed.padded(r.layer.tokens) for r in reports}:
        same = [r for r in reports if conv_unformed.padded(r.layer.tokens) == size]
        common = [s for s in NORMS if all(s in r.norms for r in same)]
        if common:
            tuned.keep(machine, "norms", str(size), min(common, key=lambda s: sum(r.norms[s] for r in same)))


def sizes(text: str) -> tuple[int, int, int]:
    colours, height, width = map(int, text.split("x"))
    return colours, height, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: under Triton's interpreter, to try it"
    )
    parser.add_argument("--owners", type=int, default=2048, help="records in memory at once")
    parser.add_argument("--model", help="a network by name, in place of ResNet-9 and WRN-16-4")
    parser.add_argument("--shape", type=sizes, default=(3, 32, 32), help="what it sees, colours x side x side")
    parser.add_argument("--views", type=int, default=1, help="of each record")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="only the first so many")
    parser.add_argument("--variants", type=int, default=len(SUMS), help="only the first so many tiles")
    parser.add_argument("--keep", action="store_true", help="write the winners into the user's cache")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plugins.load()
    kernels.FORCED = args.device == "cpu"
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    reports = []
    ours = [*LAYERS[: args.layers], *LARGER[: args.layers]]
    chosen = layers_of(args.model, args.shape, args.views) if args.model else ours
    for layer in (one for one in chosen if one.unformed):
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
    larger = {one: measure_stored(one, args.owners, args.device, args.variants) for one in chosen if not one.unformed}
    for layer, found in larger.items():
        print(f"{layer}, {args.owners} records, formed and stored:")
        for setting, ms in found.items():
            print(f"    {ms:8.3f}  {setting or 'built in'}", flush=True)
    if args.keep:
        keep(reports, tuned.machine())
        for layer, found in larger.items():
            best = min(found, key=found.__getitem__, default=None)
            if best is not None and found[best] < 0.97 * found.get(None, float("inf")):
                tuned.keep(tuned.machine(), "gradients", f"{layer.tokens}x{layer.outputs}x{layer.channels}", best)
        print(f"kept in {tuned.path()}")
    if args.json:
        print(json.dumps({"benchmark": "kernels", "device": name, "torch": torch.__version__, "owners": args.owners,
                          "stored": {str(k): {str(s): ms for s, ms in v.items()} for k, v in larger.items()},
                          "layers": [r.rows() for r in reports]}))  # fmt: skip


if __name__ == "__main__":
    main()
