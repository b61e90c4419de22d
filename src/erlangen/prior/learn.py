"""What a network can learn before it sees a record: that two views of one made-up image belong together.

Views are parts of an image at different scales, mirrored, with other colours and contrasts. Among the views of a batch each is to
find its twin (Chen et al., 2020). The last linear layer takes no part: it belongs to the task, and begins anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.atomic import write_atomically
from erlangen.gradients.joined import join
from erlangen.models.standardised import StandardisedConv2d
from erlangen.prior.images import made_up_images

#: made-up images are so many times as wide as what the network sees
LARGER = 2
#: units of the two layers that views are compared behind; they are thrown away
HIDDEN, COMPARED = 512, 128


@dataclass(frozen=True)
class PriorOptions:
    """How much is learnt, and from how many made-up images."""

    steps: int = 1000
    batch: int = 256
    images: int = 8192
    rate: float = 2e-3
    temperature: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 2), ("images", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give {least} or more")
        for name in ("rate", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0")


def learn_prior(
    model: nn.Module,
    input_shape: tuple[int, ...],
    options: PriorOptions = PriorOptions(),
    *,
    device: str = "cpu",
    told: Callable[[int, Tensor], None] = lambda step, loss: None,
) -> nn.Module:
    """Train ``model`` in place, for images of ``input_shape`` with pixels in [−1, 1]. No data set is read.

    ``told`` hears of every step. Filters that are standardised come back as long as they were: their length has no effect on what
    the network computes, but it decides how far a later step turns them.
    """
    colours, side = square(input_shape)
    on_gpu = torch.device(device).type == "cuda"
    generator = torch.Generator(device).manual_seed(options.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        compared = Compared(model).to(device)
    if on_gpu:
        compared = compared.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = bank(options.images, colours, LARGER * side, generator)
    optimizer = torch.optim.AdamW(compared.parameters(), options.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: factor(k, options.steps))
    lengths = {layer: layer.weight.detach().norm() for layer in standardised(model)}
    with joined(compared):  # on a CPU, faster pooling with the same values
        for step in range(options.steps):
            rows = torch.randint(len(images), (options.batch,), generator=generator, device=device)
            seen = torch.cat([view(images[rows], side, generator) for _ in range(2)])
            seen = seen.contiguous(memory_format=torch.channels_last) if on_gpu else seen
            with torch.autocast(seen.device.type, torch.bfloat16, enabled=on_gpu):
                found = compared(seen)
            loss = contrast(found.float(), options.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            told(step, loss.detach())
    with torch.no_grad():
        for layer, length in lengths.items():
            layer.weight.mul_(length.to(layer.weight) / layer.weight.norm())
    return model


def save_prior(model: nn.Module, path: str | Path, facts: dict[str, Any]) -> None:
    """A ``.safetensors`` file for ``weights`` of a training: all but the last linear layer, and how it was made."""
    from safetensors.torch import save

    head, _ = last_linear(model)
    kept = {n: t.detach().cpu().contiguous() for n, t in model.state_dict().items() if not n.startswith(f"{head}.")}
    write_atomically(Path(path), save(kept, {"erlangen-prior": json.dumps(facts)}))


def facts_of(model: str, model_options: dict[str, Any], input_shape: tuple[int, ...], options: PriorOptions) -> dict[str, Any]:
    """All that decides the file: whoever has the same machine can make it again."""
    return {
        "model": model, "model_options": model_options, "input_shape": list(input_shape), **dataclasses.asdict(options),
        "torch": torch.__version__,
    }  # fmt: skip


class Compared(nn.Module):
    """The network up to its last linear layer, and two layers behind it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        width = last_linear(model)[1].in_features
        self.compare = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, COMPARED))

    def forward(self, x: Tensor) -> Tensor:
        return self.compare(features(self.model, x))


def features(model: nn.Module, x: Tensor) -> Tensor:
    """What the last linear layer of ``model`` is given."""
    given: list[Tensor] = []
    hook = last_linear(model)[1].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    try:
        model(x)
    finally:
        hook.remove()
    return given[-1]


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The layer that is made for a task, and its path."""
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no nn.Linear at its end, so that nobody knows where its features end")
    return found[-1]


def contrast(found: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding a view's twin among all others; the twin of row i is row i + n/2."""
    z = F.normalize(found, dim=1)
    alike = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(alike, torch.arange(len(z), device=z.device).roll(len(z) // 2))


def bank(count: int, colours: int, side: int, generator: torch.Generator) -> Tensor:
    """Made-up images in bytes, [count, colours, side, side]; in parts that stay in a CPU's cache, or fill a GPU."""
    part = 2048 if generator.device.type == "cuda" else 32
    sizes = [min(part, count - done) for done in range(0, count, part)]
    return torch.cat([made_up_images(n, colours, side, generator).mul(255).round().byte() for n in sizes])


def view(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """A random part of each image (bytes), ``side`` pixels wide, mirrored or not, in other colours; pixels in [−1, 1]."""
    n, colours, device = len(images), images.shape[1], images.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=generator, device=device)

    part, aspect = uniform(0.15, 1).sqrt(), uniform(-0.28, 0.28).exp()
    wide, high = (part * aspect.sqrt()).clamp(max=1), (part / aspect.sqrt()).clamp(max=1)
    where = torch.zeros(n, 2, 3, device=device)
    where[:, 0, 0], where[:, 1, 1] = torch.where(uniform(0, 1) < 0.5, wide, -wide), high
    where[:, 0, 2], where[:, 1, 2] = uniform(-1, 1) * (1 - wide), uniform(-1, 1) * (1 - high)
    grid = F.affine_grid(where, [n, colours, side, side], align_corners=False)
    x = F.grid_sample(images.float().div_(255), grid, padding_mode="reflection", align_corners=False)
    return _recoloured(x, uniform).clamp_(0, 1).mul_(2).sub_(1)


def _recoloured(x: Tensor, uniform: Callable[..., Tensor]) -> Tensor:
    """Other contrast and brightness for each image; colours are mixed, made stronger, weaker, or lost."""
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * uniform(-0.6, 0.4, 1, 1, 1).exp() + mean + uniform(-0.2, 0.2, 1, 1, 1)
    if x.shape[1] != 3:
        return x
    grey = x.mean(1, keepdim=True)
    kept = torch.where(uniform(0, 1, 1, 1, 1) < 0.2, 0.0, uniform(0.4, 1.4, 1, 1, 1))
    mixed = torch.eye(3, device=x.device) + uniform(-0.2, 0.2, 3, 3)
    return torch.einsum("nij,njhw->nihw", mixed, grey + kept * (x - grey))


def standardised(model: nn.Module) -> list[Any]:
    """Layers whose weights have a direction only."""
    return [m for m in model.modules() if isinstance(m, StandardisedConv2d) or getattr(m, "standardise", None) is True]


def factor(step: int, steps: int) -> float:
    """Of the rate: up during the first fiftieth of the steps, then down along a cosine."""
    return min(1.0, 50 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def square(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 3 or shape[1] != shape[2] or min(shape) < 1 or shape[1] < 4:
        given = "x".join(map(str, shape))
        raise ValueError(f"the shape is {given}; made-up images are COLOURSxSIDExSIDE, square and 4 pixels or more")
    return shape[0], shape[1]


@contextmanager
def joined(module: nn.Module) -> Iterator[None]:
    """Chains of layers as one kernel each; afterwards as they were."""
    join(module)
    try:
        yield
    finally:
        for part in module.modules():
            part.__dict__.pop("forward", None)

