"""Clipless steps against a plain SGD step of the same network, with ISO and Opacus' ghost clipping in the same run.

    python benchmarks/clipless.py --device cpu --batch 64,256 [--model vgg] [--size small] [--json out.json]
    python benchmarks/clipless.py --device cuda --batch 512,4096,20000 --json

A step is forward, backward, noise, update and projection. Times are medians over alternating repeats, as ratios to the
plain step; memory (CUDA only) is the peak above what was held before the step, as a ratio to the plain step's. What
does not fit into memory is left out, and the results say so. ``--count`` adds how many operators of a step compute
something (each is at least one launch on a GPU; what a captured projection replays is counted apart): at small batches
a GPU waits for launches.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine, RowMap
from erlangen.lipschitz import CrossEntropy, Projector, SpectralConv2d, SpectralDense
from erlangen.models import lipschitz as models

Step = Callable[[], None]
#: steps before the clock starts: caches fill, and on a GPU the projection is recorded at its second use
WARM_UP = 4
#: steps between two readings of the clock, so that launches may run ahead as they do in training
STEPS = 5
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "lenet": lambda size: models.lipschitz_lenet(),
    "vgg": lambda size: models.lipschitz_vgg(size=size),
    "resnet": lambda size: models.lipschitz_resnet(),
    "mixer": lambda size: models.lipschitz_mixer(),
}


def plain(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    optimizer, loss = torch.optim.SGD(net.parameters(), lr=1e-3), CrossEntropy(10.0)

    def step() -> None:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()

    return step


def private(net: nn.Module, x: torch.Tensor, y: torch.Tensor, mechanism: str, **options: Any) -> Step:
    """A private step of this library on fixed rows (the sampler is not part of what is measured)."""
    optimizer, loss, engine = torch.optim.SGD(net.parameters(), lr=1e-3), CrossEntropy(10.0), PrivacyEngine(seed=0)
    rows = DataLoader(TensorDataset(x[:4].cpu(), y[:4].cpu()), batch_size=2)
    bound = {"max_grad_norm": 1.0} if mechanism == "iso" else {}
    engine.make_private(
        module=net, optimizer=optimizer, data_loader=rows, noise_multiplier=1.0, mechanism=mechanism, criterion=loss,
        mechanism_options=options, check=False, **bound,
    )  # fmt: skip

    every = RowMap.regular(len(x))

    def step() -> None:
        assert engine.training is not None
        engine.training.announce(every)
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()

    return step


def ghost(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Opacus' fast gradient clipping on the same architecture with torch's own layers."""
    from opacus import PrivacyEngine as Opacus

    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    rows = DataLoader(TensorDataset(x, y), batch_size=len(x))
    model, optimizer, loss, _ = Opacus().make_private(
        module=net, optimizer=optimizer, data_loader=rows, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost",
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def as_torch_layers(net: nn.Module) -> nn.Module:
    """The same network made of ``nn.Conv2d`` and ``nn.Linear``, which is what Opacus knows."""
    twin = copy.deepcopy(net)
    for m in twin.modules():
        if isinstance(m, SpectralConv2d):
            m.__class__ = nn.Conv2d  # type: ignore[assignment]
        elif isinstance(m, SpectralDense):
            m.__class__ = nn.Linear  # type: ignore[assignment]
    return twin


def contestants(net: nn.Module, x: torch.Tensor, y: torch.Tensor, every: int) -> dict[str, Callable[[], Step]]:
    fresh = lambda: copy.deepcopy(net)  # noqa: E731
    return {
        "plain": lambda: plain(fresh(), x, y),
        "clipless": lambda: private(fresh(), x, y, "clipless"),
        f"clipless, certified every {every} steps": lambda: private(fresh(), x, y, "clipless", certify_every=every),
        "clipless with backstop": lambda: private(fresh(), x, y, "clipless", backstop=True),
        "iso": lambda: private(fresh(), x, y, "iso"),
        "opacus ghost": lambda: ghost(as_torch_layers(net), x, y),
    }


def measure(net: nn.Module, x: torch.Tensor, y: torch.Tensor, repeats: int, every: int) -> dict[str, dict[str, Any]]:
    steps: dict[str, Step] = {}
    result: dict[str, dict[str, Any]] = {}

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; without memory for it, or Opacus, the contestant is out."""
        try:
            return work()
        except (torch.OutOfMemoryError, ImportError) as error:
            print(f"  {name}: left out ({type(error).__name__})")
            steps.pop(name, None)
            result[name] = {"left_out": type(error).__name__}
            if x.is_cuda:
                torch.cuda.empty_cache()
            return None

    for name, make in contestants(net, x, y, every).items():
        step = attempt(name, lambda make=make: _warm(make()))  # type: ignore[misc]
        if step is not None:
            steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name in list(steps):
            taken = attempt(name, lambda name=name: _seconds(steps[name], x.is_cuda))  # type: ignore[misc]
            if taken is not None:
                times[name].append(taken)
    for name in list(steps):
        result[name] = {"seconds": statistics.median(times[name]), "times": times[name]}
        if x.is_cuda:
            result[name]["peak_bytes"] = _peak(steps[name])
    for row in (result[name] for name in steps if "plain" in steps):
        row["ratio"] = row["seconds"] / result["plain"]["seconds"]
        if x.is_cuda:
            row["memory_ratio"] = row["peak_bytes"] / result["plain"]["peak_bytes"]
    return result


def _warm(step: Step) -> Step:
    for _ in range(WARM_UP):
        step()
    return step


#: operators that only look at memory in another way, or reserve it
FREE = frozenset(
    {"alias", "as_strided", "chunk", "conj", "_conj", "contiguous", "detach", "empty", "empty_like", "empty_strided"}
    | {
        "expand",
        "flatten",
        "lift_fresh",
        "narrow",
        "new_empty",
        "permute",
        "promote_types",
        "reshape",
        "_reshape_alias",
    }
    | {"resolve_conj", "resolve_neg", "result_type", "select", "set_", "slice", "split", "split_with_sizes", "squeeze"}
    | {"t", "to", "transpose", "unbind", "unflatten", "_unsafe_view", "unsqueeze", "view", "view_as", "view_as_real"}
)


def operators(net: nn.Module, batch: int = 2) -> dict[str, dict[str, int]]:
    """Operators of one step that compute, on the CPU: of plain and clipless, and of the projection that a GPU replays."""
    net, shape = copy.deepcopy(net).cpu(), net[0].shape  # type: ignore[index]
    x, y = torch.rand(batch, *shape), torch.randint(10, (batch,))
    steps = {name: _warm(make()) for name, make in contestants(net, x, y, 10).items() if name in ("plain", "clipless")}
    found = {name: {"operators": _count(step)} for name, step in steps.items()}
    project = Projector(net)
    project()
    found["clipless"]["replayed"] = _count(project)
    return found


def _count(step: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [e.name[6:] for e in profile.events() or [] if e.name.startswith("aten::") and not e.cpu_children]
    return sum(name not in FREE for name in names)


def versions(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("opacus", "erlangen"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if device == "cuda":
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "gpu": torch.cuda.get_device_name(),
        }
    return found


def _seconds(step: Step, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS if cuda else 1):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / (STEPS if cuda else 1)


def _peak(step: Step) -> float:
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return float(torch.cuda.max_memory_allocated() - held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", default="256", help="comma-separated batch sizes")
    parser.add_argument("--model", default="vgg", choices=list(NETWORKS))
    parser.add_argument("--size", default="small", choices=list(models.VGG_WIDTHS))
    parser.add_argument("--certify-every", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", action="store_true", help="also count the operators of a step")
    parser.add_argument("--json", nargs="?", const="-", help="write the results here, or print them")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    net = NETWORKS[arguments.model](arguments.size).to(arguments.device)
    count = sum(p.numel() for p in net.parameters())
    facts = {k: getattr(arguments, k) for k in ("device", "model", "size", "threads", "repeats")}
    results: dict[str, Any] = {**facts, **versions(arguments.device), "parameters": count, "batches": {}}
    if arguments.count:
        results["operators"] = operators(net)
        print(f"operators that compute, a step: {json.dumps(results['operators'])}")
    for size in (int(b) for b in arguments.batch.split(",")):
        x = torch.rand(size, *net[0].shape, device=arguments.device)  # type: ignore[index]
        y = torch.randint(10, (size,), device=arguments.device)
        print(f"{arguments.model} ({count} parameters), batch {size}, {arguments.device}")
        found = results["batches"][str(size)] = measure(net, x, y, arguments.repeats, arguments.certify_every)
        for name, row in found.items():
            if "left_out" in row:
                continue
            memory = f"  memory {row['memory_ratio']:.2f}" if "memory_ratio" in row else ""
            print(f"  {name:40} {1e3 * row['seconds']:9.1f} ms  {row['ratio']:6.2f}{memory}")
    if arguments.json == "-":
        print(json.dumps(results))
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
