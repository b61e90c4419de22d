"""All that a module remembers, so that an experiment can see it change and leave it as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from erlangen.streams import seed_layers


class Memory(NamedTuple):
    """All that a module remembers and its state_dict() shows."""

    tensors: dict[str, Tensor]
    #: what modules of the user's own keep beside parameters and buffers, by path
    extra: dict[str, Any]


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[Memory]:
    """Parameters, buffers and random states are as they were afterwards. Inside, what `torch.compile` has compiled runs as it was
    written: graphs take neither the hooks of an experiment nor a backward pass that is repeated."""
    extra = {path: copy.deepcopy(m.get_extra_state()) for path, m in _with_extra_state(module)}
    start = Memory({name: t.detach().clone() for name, t in _own(module)}, extra)
    devices = list({b.device for b in module.parameters() if b.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what modules draw from)
    with torch.random.fork_rng(devices=devices), _as_written():
        try:
            yield start
        finally:
            restore(module, start)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def draw_again() -> None:
    """Inside `untouched`: from here on a module draws what it drew in the pass before."""
    seed_layers(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


@contextlib.contextmanager
def modes_untouched(module: nn.Module) -> Iterator[None]:
    """Every module in it trains or evaluates afterwards as before."""
    modes = {m: m.training for m in module.modules()}
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training


def _as_written() -> contextlib.AbstractContextManager[Any]:
    """Nothing is compiled where the compiler has not been imported, and importing it takes a while."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers()
    yield from module.named_parameters()


def _with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, m) for path, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]


def remembered(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a module remembers, in numbers under a name."""
    yield from _own(module)
    for path, m in _with_extra_state(module):
        for k, leaf in enumerate(tree_leaves(m.get_extra_state())):
            if isinstance(leaf, (Tensor, int, float)):
                yield f"{path}.extra_state[{k}]".removeprefix("."), torch.as_tensor(leaf)


def restore(module: nn.Module, start: Memory) -> None:
    for name, t in _own(module):
        if name in start.tensors and t.shape == start.tensors[name].shape:
            t.data.copy_(start.tensors[name])
        elif name in start.tensors:
            t.data = start.tensors[name].clone()
    for path, m in _with_extra_state(module):
        m.set_extra_state(copy.deepcopy(start.extra[path]))


#: what every module has: parameters, buffers and hooks, which handles of the user's own point into
_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextlib.contextmanager
def attributes_untouched(module: nn.Module) -> Iterator[None]:
    """What modules keep in plain attributes, which no state_dict() shows, is as it was afterwards: the same objects with the same
    contents."""
    own = lambda m: {name: value for name, value in vars(m).items() if name not in _EVERY_MODULE}  # noqa: E731
    before = [(m, own(m), {name: _contents(value) for name, value in own(m).items()}) for m in module.modules()]
    try:
        yield
    finally:
        for m, attributes, contents in before:
            for name in own(m).keys() - attributes.keys():
                del m.__dict__[name]
            m.__dict__.update(attributes)
            for name, value in attributes.items():
                _refill(value, contents[name])


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if isinstance(value, (list, set, collections.deque)) else None


def _refill(value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape == contents.shape and not torch.equal(value, contents):
            value.data.copy_(contents)
    elif contents is not None:
        value.clear()
        (value.extend if isinstance(value, (list, collections.deque)) else value.update)(contents)


def answers_of(module: nn.Module, inputs: Iterable[Tensor]) -> list[Any]:
    """All that a call returns, and after it the single numbers with gradients that modules keep of it in plain attributes: a
    loop may add them to its loss, as that by which experts are to be used alike."""
    before = _numbers(module)
    returned = tree_leaves(module(*inputs))
    return [*returned, *(t for place, t in _numbers(module).items() if t is not before.get(place))]


def _numbers(module: nn.Module) -> dict[tuple[int, str], Tensor]:
    own = (((k, name), value) for k, m in enumerate(module.modules()) for name, value in vars(m).items())
    return {place: t for place, t in own if isinstance(t, Tensor) and t.ndim == 0 and _has_graph(t)}


def _has_graph(t: Tensor) -> bool:
    return not torch._C._functorch.is_functorch_wrapped_tensor(t) and t.grad_fn is not None  # what vmap left is of no use
