"""Private against plain on one GPU: time of a logical step, memory, and Opacus on the same model and batch.

    python benchmarks/gpu.py --model resnet9 --batch 8192 --views 4 --physical 256 --json

Both sides of a ratio use the same precision (bf16 autocast unless --float32), memory format, physical batch and compile
mode. A logical step is batch/physical physical ones and one release; times are medians of whole logical steps, between
device events, after warm-up. The plain side runs the same fused layers (--separate: as PyTorch runs them). With --graph
both sides replay their physical step (plain: both passes; private: to the clipped sum) as a CUDA graph; noise, release and
the optimizer's step stay outside on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import nullcontext
from datetime import date

from provenance import provenance

SHAPE, SHAPES = (3, 32, 32), {"lenet": (1, 28, 28)}
NAMES = {"eq-resnet9-d4": "eq-resnet9-tuned"}
METHODS = ("plain", "erlangen", "opacus-hooks", "opacus-functorch", "opacus-ew", "opacus-ghost")


def build(name: str, device: str, channels_last: bool, options: dict | None = None):
    import torch

    from erlangen.models import make_model

    torch.manual_seed(0)
    module = make_model(NAMES.get(name, name), SHAPES.get(name, SHAPE), 10, **(options or {})).to(device)
    return module.to(memory_format=torch.channels_last) if channels_last else module


def made_private(module, optimizer, physical: int, strategy: str):
    """The pieces of the engine without a data loader."""
    from erlangen.accounting import Accountant
    from erlangen.gradients.tape import Tape
    from erlangen.mechanisms import GaussianMechanism, StreamNoise
    from erlangen.private import PrivateTraining
    from erlangen.sampling import PoissonSampler

    parameters = dict(module.named_parameters())
    tape = Tape(parameters, "mean", strategy)
    mechanism = GaussianMechanism(1.0, 2.0, noise=StreamNoise(seed=0))
    mechanism.bind(parameters, physical)
    training = PrivateTraining(
        module, optimizer, tape, mechanism, PoissonSampler(10 * physical, physical), Accountant(), None
    )
    training.install()
    return training


def stepper(method: str, args: argparse.Namespace):
    """(physical step without release, physical step with release)"""
    import torch
    import torch.nn.functional as F

    device = args.device
    torch.backends.cudnn.benchmark = True  # both sides: shapes are fixed
    module = build(args.model, device, not args.contiguous, args.options)
    rows = args.physical * args.views
    x = torch.randn(rows, *SHAPES.get(args.model, SHAPE), device=device)
    x = x if args.contiguous else x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (rows,), device=device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    training = None
    criterion = F.cross_entropy
    if method == "plain" and not args.separate:
        from erlangen.gradients.joined import join

        join(module)
    if method == "erlangen":
        training = made_private(module, optimizer, args.physical, args.strategy)
    elif method.startswith("opacus"):
        from step import _opacus

        module, optimizer, criterion = _opacus(
            module, optimizer, torch.nn.CrossEntropyLoss(), rows, method.split("-")[1]
        )
    run = torch.compile(module) if args.compile and method != "erlangen" else module
    precision = nullcontext if args.float32 else (lambda: torch.autocast(device, torch.bfloat16))

    def passes() -> None:
        with precision():
            loss = criterion(run(x), y)
        loss.backward()

    if (args.graph and method in ("plain", "erlangen")) or (args.compile and method == "erlangen"):
        return replayed(module, optimizer, passes, training, args, [x, y])

    def step(first: bool, last: bool) -> None:
        from erlangen.gradients.rows import RowMap

        if training is not None:
            training.announce(RowMap.regular(args.physical, args.views), first, last)
        passes()
        if method.startswith("opacus"):  # as its BatchMemoryManager does: clip and add up each part, release with the last
            optimizer.signal_skip_step(not last)
            optimizer.step()
            optimizer.zero_grad()
            return
        if training is not None or last:
            optimizer.step()
        if training is None and last:
            optimizer.zero_grad(set_to_none=True)

    return step


def replayed(module, optimizer, passes, training, args: argparse.Namespace, records):
    """As `stepper`, with the physical step recorded once; a private one is compiled as a whole first, with --compile."""
    import torch

    from erlangen.gradients.rows import RowMap
    from erlangen.training.graphs import CudaRecorder

    record = CudaRecorder(torch.device(args.device)) if args.device == "cuda" and args.graph else (lambda part: part)
    rows = RowMap.regular(args.physical, args.views)
    if training is None:
        passes()  # gradients exist from here on, at addresses that they keep
        gradients = [p.grad for p in module.parameters()]
        replay = record(passes)

        def plain(first: bool, last: bool) -> None:
            if first:
                torch._foreach_zero_(gradients)
            replay()
            if last:
                optimizer.step()

        return plain

    mechanism, tape = training.mechanism, training.tape
    sums = {name: torch.zeros_like(total) for name, total in mechanism.clipped_sum().items()}
    mechanism.sum_in(sums)

    def part() -> None:
        tape.next_batch()
        tape.logical += 1
        tape.rows, tape.blind = rows, True
        passes()
        training.accumulate(tape.gradients())

    part()
    if args.compile:
        from erlangen.training.compiled import CompiledRecorder

        part = CompiledRecorder([*records, *module.parameters(), *module.buffers()], sums)(part)
    replay = record(part)

    def private(first: bool, last: bool) -> None:
        training.announce(rows, first, last)
        if first:
            torch._foreach_zero_(list(sums.values()))
            mechanism.sum_in(sums)
        replay()
        training.summed = True
        optimizer.step()

    return private


def timed(step, repeats: int, device: str) -> list[float]:
    import time

    import torch

    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def profile(step) -> None:
    """The kernels of one physical step, by time."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        step(True, False)
        torch.cuda.synchronize()
    rows = sorted(((e.self_device_time_total / 1e3, e.count, e.key[:100]) for e in seen.key_averages()), reverse=True)
    print(f"kernels {sum(r[0] for r in rows):.2f} ms", file=sys.stderr)
    for milliseconds, count, name in rows[:30]:
        print(f"  {milliseconds:8.3f} {count:4d} {name}", file=sys.stderr)


def measure(method: str, args: argparse.Namespace) -> dict:
    import torch

    step = stepper(method, args)
    for _ in range(args.warmup):
        step(True, False)
        step(False, True)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    parts = max(1, round(args.batch / args.physical))

    def logical_step() -> None:
        for k in range(parts):
            step(k == 0, k == parts - 1)

    times = timed(logical_step, args.repeats, args.device)
    logical = statistics.median(times)
    if args.profile and args.device == "cuda":
        profile(step)
    peak = torch.cuda.max_memory_allocated() / 2**20 if args.device == "cuda" else 0.0
    return {"ms": times, "ms_logical": logical, "peak_mb": round(peak),
            "views_per_second": 1e3 * args.batch * args.views / logical}  # fmt: skip


def alone(method: str, argv: list[str]) -> dict:
    """A process of its own: memory and compilation of one method do not touch another's."""
    done = subprocess.run([sys.executable, __file__, *argv, "--only", method], capture_output=True, text=True)
    if "--profile" in argv:
        print(method, done.stderr[-6000:], file=sys.stderr)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-12:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--options", type=json.loads, help="model options, as JSON")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--physical", type=int, default=1024, help="owners in memory at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--compile", action="store_true", help="the module; of a private step both passes, rules and clipping")
    parser.add_argument("--graph", action="store_true", help="replay physical steps as CUDA graphs, on both sides")
    parser.add_argument("--separate", action="store_true", help="plain layers one by one, not joined as the private ones")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one private step")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--contiguous", action="store_true", help="not channels-last")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--methods", nargs="*", default=["plain", "erlangen"], choices=METHODS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    import torch

    argv = [a for a in sys.argv[1:] if a != "--json"]
    rows = {method: alone(method, argv) for method in args.methods}
    plain = rows.get("plain", {}).get("ms_logical")
    for row in rows.values():
        if plain and "ms_logical" in row:
            row["ratio"] = row["ms_logical"] / plain
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    result = {"benchmark": "gpu", "date": str(date.today()), "device": device, **provenance(args.device),
              "arguments": {k: v for k, v in vars(args).items() if k not in ("json", "only")}, "methods": rows}  # fmt: skip
    failed = [method for method, row in rows.items() if "failed" in row]
    if args.json:
        print(json.dumps(result))
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    print(
        f"{args.model}: {args.batch} x {args.views} views, physical {args.physical}, {device}, torch {torch.__version__}"
    )
    for method, row in rows.items():
        if "failed" in row:
            print(f"  {method:16} failed: {row['failed']}")
        else:
            print(f"  {method:16} {row['ms_logical']:9.1f} ms a step  {row.get('ratio', 0):5.2f}x  "
                  f"{row['views_per_second']:10,.0f} views/s  {row['peak_mb']:6d} MB")  # fmt: skip
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
