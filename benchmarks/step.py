"""The price of privacy: one private step over one plain SGD step, time and peak memory, beside Opacus.

    python benchmarks/step.py --model resnet9 --batch 32 --threads 2 --json

Times: every method is a process of its own, warmed up, then they take turns in short rounds, so that the machine's mood
is shared by all; a ratio is the median over rounds of method time / plain time in the same round. Memory: peak resident
size of a fresh process that runs the method alone. Opacus runs as its documentation says is fastest for each mode, with
the same model, data, dtype and number of threads, and flat clipping at the same σ and C; memory is allocated alike. It
refuses steerable layers. `joined` is plain SGD with the layers that our engine runs faster (max pooling, on a CPU), so that what
privacy costs can be told from what they save. What remains for steerable layers without rules of their own: `functional`
(``torch.func`` over the whole network) and, if asked for, `fallback` (our engine, in which layers without a rule get
``torch.func`` one by one).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from datetime import date

from provenance import provenance

METHODS = ("plain", "joined", "erlangen", "functional", "opacus-hooks", "opacus-functorch", "opacus-ew", "opacus-ghost")
SHAPES = {
    "lenet": (1, 28, 28),
    "opacus-cnn": (1, 28, 28),
    "resnet9": (3, 32, 32),
    "cnn": (3, 32, 32),
    "wrn-16-4": (3, 32, 32),
    "wrn-16-4-ws": (3, 32, 32),  # with weight standardisation, which Opacus does not know
    "eq-resnet9": (3, 32, 32),
    "eq-resnet9-tuned": (3, 32, 32),
}


def build(model: str, method: str):
    """The same network for everyone; Opacus needs ordinary modules and no in-place sharing, which these have."""
    import torch

    from erlangen.models import make_model

    torch.manual_seed(0)
    options: dict = {"wrn-16-4": {"standardise": False}, "resnet9": {"activation": "relu"}}
    return make_model(model.removesuffix("-ws"), SHAPES[model], 10, **options.get(model, {}))


def stepper(method: str, model_name: str, batch: int, strategy: str):
    """A function that takes one step of the method on a fixed batch."""
    import torch
    from torch import nn

    from erlangen import RowMap
    from erlangen.gradients.joined import join

    module = build(model_name, method)
    x, y = torch.randn(batch, *SHAPES[model_name]), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    if method == "functional":
        return _functional(module, optimizer, criterion, x, y)
    if method == "joined":
        join(module)
    if method == "fallback":
        forget_our_rules()
    private = method in ("erlangen", "fallback")
    if private:
        training = _erlangen(module, optimizer, batch, strategy)
    elif method.startswith("opacus"):
        module, optimizer, criterion = _opacus(module, optimizer, criterion, batch, method.removeprefix("opacus-"))

    def step() -> None:
        if private:
            training.announce(RowMap.regular(batch))  # what the loader does before it hands a batch out
        optimizer.zero_grad(set_to_none=True)
        criterion(module(x), y).backward()
        optimizer.step()

    return step


def forget_our_rules() -> None:
    """From now on layers of ours have no per-sample rule in this process; those of ``torch.nn`` keep theirs."""
    from erlangen.gradients import registry

    for layer in registry.registered():
        if layer.__module__.startswith("erlangen."):
            del registry._RULES[layer]


def _erlangen(module, optimizer, batch, strategy):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import erlangen

    loader = DataLoader(TensorDataset(torch.zeros(10 * batch, 1)), batch_size=batch)
    engine = erlangen.PrivacyEngine()
    engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        strategy=strategy,
        check=False,
    )
    return engine.training


def _functional(module, optimizer, criterion, x, y):
    """DP-SGD by ``torch.func``: per-sample gradients of the whole network at once, for any layers, with no rule for any."""
    import torch
    from torch.func import functional_call, grad, vmap

    parameters = dict(module.named_parameters())

    def loss(weights, one, label):
        return criterion(functional_call(module, weights, (one[None],)), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        found = gradients({name: p.detach() for name, p in parameters.items()}, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in found.values()).sqrt()
        weights = (1.0 / norms).clamp(max=1.0)
        for name, p in parameters.items():
            p.grad = torch.einsum("n,n...->...", weights, found[name]).add_(torch.randn_like(p)).div_(len(x))
        optimizer.step()

    return step


def _opacus(module, optimizer, criterion, batch, mode):
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(10 * batch, 1)), batch_size=batch)
    options = {"criterion": criterion} if mode == "ghost" else {}
    made = PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode=mode, **options,
    )  # fmt: skip
    return made[0], made[1], made[2] if mode == "ghost" else criterion


def worker(method: str, args: argparse.Namespace) -> None:
    """Answers each line on stdin with the seconds of that many steps."""
    warnings.filterwarnings("ignore")
    import torch

    from erlangen.gradients.pages import keep_pages

    keep_pages()  # every method, as our engine does
    torch.set_num_threads(args.threads)
    step = stepper(method, args.model, args.batch, args.strategy)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        steps = int(line)
        step()  # wakes the threads after the others' turn
        start = time.perf_counter()
        for _ in range(steps):
            step()
        print(time.perf_counter() - start, flush=True)
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), flush=True)


def start(method: str, args: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, __file__, "--worker", method, "--model", args.model, "--batch", str(args.batch),
               "--threads", str(args.threads), "--strategy", args.strategy]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if process.stdout.readline().strip() != "ready":
        process.stdin.close()
        raise RuntimeError(f"{method} failed: {process.stderr.read().strip().splitlines()[-1:]}")
    return process


def take(process: subprocess.Popen, steps: int) -> float:
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline()) / steps


def measure(args: argparse.Namespace) -> dict:
    workers = {method: start(method, args) for method in args.methods}
    times: dict[str, list[float]] = {method: [] for method in workers}
    for _ in range(args.rounds):
        for method, process in workers.items():
            times[method].append(take(process, args.steps))
    rows = {}
    for method, process in workers.items():
        process.stdin.close()
        peak = float(process.stdout.readline())
        ratios = [a / b for a, b in zip(times[method], times["plain"], strict=True)]
        rows[method] = {
            "ratio": statistics.median(ratios), "ratio_of_best": min(times[method]) / min(times["plain"]),
            "ms": 1e3 * statistics.median(times[method]), "peak_mb": round(peak), "times": times[method],
        }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet9", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps a round")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args)
        return
    if "plain" not in args.methods:
        args.methods.insert(0, "plain")
    rows = measure(args)
    made_by = provenance()
    result = {
        "benchmark": "step", "model": args.model, "batch": args.batch, "threads": args.threads, "date": str(date.today()),
        "machine": f"{platform.machine()}, {args.threads} CPU threads", **made_by, "methods": rows,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.model}, batch {args.batch}, {args.threads} threads, torch {made_by['torch']}")
    for method, row in rows.items():
        print(
            f"  {method:18} {row['ratio']:5.2f}x  (best {row['ratio_of_best']:4.2f}x)  {row['ms']:7.1f} ms  {row['peak_mb']:5d} MB"
        )


if __name__ == "__main__":
    main()
