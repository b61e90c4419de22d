"""Public weights for the transfer table: ResNet-18 trained without privacy on data that is taken to be public.

    python -m erlangen.experiments.pretrain --data cifar10_first_half --out $ERLANGEN_DATA
    python -m erlangen.experiments.pretrain --data cifar10_first_half_five --out $ERLANGEN_DATA

CIFAR-10 is cut in two by record: one half plays the public data, the other the private. The split is part of the
experiment and says nothing about anybody's privacy. Fashion-MNIST would do for MNIST in the same way. With all ten classes
in public a network has nothing left to learn from the private half; with five of them it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from erlangen.data import Dataset, load
from erlangen.data.base import register_dataset
from erlangen.models import make_model
from erlangen.models.gredp import BasicBlock
from erlangen.training.metrics import evaluate

#: of ten, in the data set that has some of them
PUBLIC_CLASSES = 5


def half(which: int) -> Dataset:
    """Every other record of CIFAR-10's training set; the test set stays whole."""
    data = load("cifar10")
    return dataclasses.replace(
        data, name=f"{data.name} half {which}", x_train=data.x_train[which::2], y_train=data.y_train[which::2]
    )


@register_dataset("cifar10_first_half")
def first_half() -> Dataset:
    return half(0)


@register_dataset("cifar10_first_half_five")
def first_half_five() -> Dataset:
    """Classes 0 to 4 of the first half and of the test set; the network keeps ten outputs."""
    data = first_half()
    assert data.x_test is not None
    assert data.y_test is not None
    train, test = data.y_train < PUBLIC_CLASSES, data.y_test < PUBLIC_CLASSES
    return dataclasses.replace(
        data, name=f"{data.name}, five classes", x_train=data.x_train[train], y_train=data.y_train[train],
        x_test=data.x_test[test], y_test=data.y_test[test],
    )  # fmt: skip


@register_dataset("cifar10_second_half")
def second_half() -> Dataset:
    return half(1)


def pretrain(
    data: Dataset, model: str = "resnet18", epochs: int = 30, rate: float = 0.05, batch: int = 256, device: str = "cpu"
) -> tuple[torch.nn.Module, dict[str, float]]:
    """Ordinary training with momentum, a short warm-up, a cosine schedule, flips and shifts; the public test accuracy beside it.

    No step waits for the device.
    """
    torch.manual_seed(0)
    network = begin_as_identities(make_model(model, data.input_shape, data.classes).to(device))
    if on_gpu := torch.device(device).type == "cuda":  # 16-bit products on maps as its units want them
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = torch.from_numpy(data.x_train).to(device), torch.from_numpy(data.y_train).to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=on_gpu
    )
    steps = max(1, epochs * math.ceil(len(x) / batch))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: factor(k, steps))
    for _ in range(steps):
        rows = torch.randint(len(x), (batch,), device=device)
        images = x[rows]
        mirrored = torch.rand(batch, 1, 1, 1, device=device) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
        images = torch.roll(images, tuple(torch.randint(-3, 4, (2,)).tolist()), (2, 3))
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=on_gpu):
            loss = F.cross_entropy(network(images), y[rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if data.x_test is None or data.y_test is None:
        return network, {}
    x_test, y_test = torch.from_numpy(data.x_test).to(device), torch.from_numpy(data.y_test).to(device)
    return network, evaluate(network, x_test, y_test, data.classes)


def begin_as_identities(network: torch.nn.Module) -> torch.nn.Module:
    """Residual branches begin at zero. Eight that begin at one, without batch norm, bring a network to one output for all
    images within ten steps, and it stays there."""
    for module in network.modules():
        if isinstance(module, BasicBlock):
            torch.nn.init.zeros_(module.norm2.weight)
    return network


def factor(step: int, steps: int) -> float:
    """Of the learning rate: up in a line during the first twentieth, then down along a cosine."""
    return min(1.0, (step + 1) / (0.05 * steps + 1)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10_first_half")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for MODEL-DATA.safetensors")
    arguments = parser.parse_args()
    network, scores = pretrain(load(arguments.data), arguments.model, arguments.epochs, device=arguments.device)
    path = arguments.out / f"{arguments.model}-{arguments.data.replace('_', '-')}.safetensors"
    save_file({n: t.detach().cpu().contiguous() for n, t in network.state_dict().items()}, str(path))
    print(f"{path}: public test accuracy {100 * scores.get('test_accuracy', math.nan):.1f} %")


if __name__ == "__main__":
    main()
