r"""How much noise each metric adds beside the gradients of a network, at its start and along private training with ISO.

    python benchmarks/balance.py --data FOLDER --out balance.json                           # the network of the REP paper
    python benchmarks/balance.py --data FOLDER --dataset cifar10 --model eq-resnet9-tuned --model-options '{"norm_groups": 7}' \
        --looks 0 --records 32

Two figures for every metric M, both relative to ISO: the noise energy (Σ m²)·E‖M⁻¹g‖² that a gradient of the same length gets, and
the power of the clipped mean over that of its noise, with all of the records clipped. They are read off records without noise:
figures for choosing between metrics on public data, not to be published of private ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn

from erlangen.data import Dataset, load
from erlangen.mechanisms.rep import aligned_metric, normalised
from erlangen.models import make_model
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

#: name → options of the mechanism
METRICS: dict[str, dict[str, Any]] = {
    "escnn^0.25": {"power": 0.25}, "escnn^0.5": {"power": 0.5}, "escnn^0.75": {"power": 0.75}, "escnn": {},
    "paper^0.5": {"metric": "paper", "power": 0.5}, "paper": {"metric": "paper"},
    "balanced^0.5": {"metric": "balanced", "power": 0.5}, "balanced": {"metric": "balanced"},
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", default=os.environ.get("ERLANGEN_DATA"), help="folder of the data sets; default ERLANGEN_DATA")
    add("--dataset", default="rotated_mnist")
    add("--model", default="c8-cnn")
    add("--model-options", type=json.loads, default={"field_counts": [4, 8, 16]})
    add("--looks", type=lambda text: [int(n) for n in text.split(",")], default=[0, 100, 400], help="steps at which it is measured")
    add("--records", type=int, default=256)
    add("--sigma", type=float, default=1.0)
    add("--batch", type=float, default=64.0)
    add("--lr", type=float, default=0.13)
    add("--clip", type=float, default=0.5)
    add("--seed", type=int, default=0)
    add("--out", type=Path)
    return parser.parse_args()


def gradients(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[records, d], one record at a time."""
    rows = []
    for k in range(len(x)):
        loss = nn.functional.cross_entropy(module(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    return torch.stack(rows)


def figures(rows: Tensor, m: Tensor) -> tuple[float, float]:
    """Noise energy beside a gradient, and signal over noise of the clipped mean; both at σ = C = 1."""
    lengths = (rows / m).norm(dim=1)
    noise, mean = float(m.square().sum()), (rows / lengths[:, None]).mean(0)
    return noise * float(lengths.square().mean()), float(mean.square().sum()) / noise


def metrics(module: nn.Module, shape: tuple[int, ...], rows: Tensor) -> dict[str, Tensor]:
    """Those of the mechanism, and the best scales there are for these very gradients: one for each parameter."""
    named = list(module.named_parameters())
    flat = lambda metric: torch.cat([metric[name].flatten() for name, _ in named])  # noqa: E731
    found = {name: flat(aligned_metric(module, options, shape)[0]) for name, options in METRICS.items()}
    own = {
        name: part.square().mean().sqrt().expand(p.shape)
        for (name, p), part in zip(named, rows.split([p.numel() for _, p in named], dim=1), strict=True)
    }
    return found | {"own scales^0.5": flat(normalised(own, 0.5)), "own scales": flat(normalised(own))}


def measure(module: nn.Module, data: Dataset, count: int) -> dict[str, dict[str, float]]:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[:count].numpy()
    rows = gradients(module, torch.as_tensor(data.x_train[order]), torch.as_tensor(data.y_train[order]))
    energy, ratio = figures(rows, torch.ones(rows.shape[1]))
    found = {name: figures(rows, m) for name, m in metrics(module, data.input_shape, rows).items()}
    return {name: {"noise_energy": e / energy, "signal_to_noise": r / ratio} for name, (e, r) in found.items()}


def main() -> None:
    o = arguments()
    if o.data:
        os.environ["ERLANGEN_DATA"] = o.data
    data = load(o.dataset)
    session = Session(TrainConfig(
        data=o.dataset, model=o.model, model_options=o.model_options, mechanism="iso", max_grad_norm=o.clip, epsilon=None,
        noise_multiplier=o.sigma, batch=o.batch, steps=max(*o.looks, 1), lr=o.lr, momentum=0.0, ema=0.0, seed=o.seed,
    ), data)  # fmt: skip
    module = make_model(o.model, data.input_shape, data.classes, **o.model_options)
    found: dict[int, Any] = {}
    for step in range(max(o.looks) + 1):
        if step in o.looks:
            module.load_state_dict(session.model.state_dict())
            found[step] = measure(module, data, o.records)
            print(f"step {step}: noise energy, and signal over noise, in units of ISO's")
            for name, row in found[step].items():
                print(f"  {name:16} {row['noise_energy']:.3f}  {row['signal_to_noise']:.2f}", flush=True)
        if step < max(o.looks):
            session.step()
    if o.out:
        settings = {k: v for k, v in vars(o).items() if k not in ("data", "out")}
        o.out.write_text(json.dumps({"settings": settings, "torch": torch.__version__, "steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
