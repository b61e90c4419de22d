"""Sessions with recorded parts, and a recorder that stands in for CUDA graphs on any machine, and as strictly.

`kept` keeps the operations of one pass with the very tensors they worked on, and repeats those, whatever Python would do by
then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from erlangen.data import load
from erlangen.models import register_model
from erlangen.training import TrainConfig
from erlangen.training.graphs import PartGraph
from erlangen.training.session import Session

BASE = TrainConfig(
    model="cnn", steps=8, batch=48, seed=0, pad=True, noise_multiplier=1.0, epsilon=None, lr=0.5, device="cpu"
)

DIGITS = load("digits")
LARGE = dataclasses.replace(DIGITS, x_train=DIGITS.x_train.repeat(3, 2).repeat(3, 3), x_test=None, y_test=None)


class Kept(TorchDispatchMode):
    """Every operation, with the tensors it was given and the ones it made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        alias = lambda t: t.detach() if isinstance(t, Tensor) else t  # noqa: E731  (autograd reshapes some in place)
        self.calls.append((func, *pytree.tree_map(alias, (args, kwargs or {}, out))))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, kept in self.calls:
            given = {
                t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
            }
            made = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(kept), pytree.tree_leaves(made), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def kept(part: Callable[[], None]) -> Callable[[], None]:
    """Record as a CUDA graph would."""
    mode = Kept()
    with mode:
        part()
    return mode.replay


def session(config: TrainConfig = BASE, recorder: Any = None, **changes: Any) -> Session:
    config = dataclasses.replace(config, **changes)
    made = Session(config, LARGE if config.model == "lenet" else DIGITS)
    if recorder is not None:
        made.graph = PartGraph(made, recorder)
    return made


def run(made: Session, steps: int = 5) -> Session:
    for _ in range(steps):
        made.step()
    return made


def flat(made: Session) -> Tensor:
    return torch.cat([t.flatten() for t in made.weights().values()])


def alike(one: Session, other: Session) -> bool:
    """The same weights up to rounding: libraries may add in another order where a tensor lies elsewhere."""
    near = 1e-2 if one.halved else 1e-5
    return torch.allclose(flat(one), flat(other), rtol=near, atol=near)


@contextmanager
def model_named(build: Callable[[], nn.Module]):
    register_model("recorded", lambda input_shape, classes: build())
    yield {"model": "recorded"}


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(64, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x.flatten(1))
