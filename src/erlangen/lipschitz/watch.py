"""Bounds are those of what the layers say that they compute: nobody else may compute in between, and nothing that they were
computed from may move afterwards.

Both are looked at in the host's memory alone: dictionaries are compared, and no device waits.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from erlangen.gradients.attach import PrivateForward
from erlangen.lipschitz.base import LipschitzLayer

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GONE = object()


def refuse_strangers(network: nn.Module) -> None:
    """Raise if something without a bound takes part: a forward that its bounds were not written for, or a hook."""
    for path, module in network.named_modules():
        where = f"{type(module).__name__} at {path!r}" if path else f"the network, a {type(module).__name__},"
        if isinstance(module, LipschitzLayer) and (missing := _unsaid(module)):
            raise ValueError(
                f"{where} has a forward (or __call__) of its own and inherits the bounds of another: write {', '.join(missing)} "
                "for it, in the same class or in one that inherits from it, or leave the forward as it is"
            )
        if _shadowed(module):
            raise ValueError(
                f"the forward of {where} was replaced on the instance: nobody knows its bounds. Delete it (del layer.forward), or "
                "write a LipschitzLayer with bounds of its own"
            )
    hooked = next((path for path, module in network.named_modules() if path and any(_hooks(module))), None)
    if hooked is not None or any(_everywhere()):
        raise ValueError(_hooked(f"the layer {hooked!r}" if hooked is not None else "every module"))


class Watch:
    """A network as it is when its bounds are computed. Looking again costs some comparisons per layer."""

    def __init__(self, network: nn.Module) -> None:
        modules = list(network.named_modules())
        self._network = network
        self._inside = [found for path, module in modules if path for found in _hooks(module)]
        self._kinds = [(module, type(module)) for _, module in modules]
        self._children = [(module._modules, dict(module._modules)) for _, module in modules]
        self._own = [(path, module.__dict__, dict(_plain(module))) for path, module in modules]
        self._look = [_look(values) for _, _, values in self._own]
        self._seen = [look(own) for look, (_, own, _) in zip(self._look, self._own)]
        self._buffers = [
            (path, module._buffers, key, buffer, buffer._version)
            for path, module in modules for key, buffer in module._buffers.items() if buffer is not None
        ]  # fmt: skip

    def strangers(self) -> str | None:
        """What has come into the network since, and has no bound."""
        shadowed = any("forward" in module.__dict__ and _shadowed(module) for module, _ in self._kinds)
        if shadowed or any(self._inside) or any(_everywhere()):
            try:
                refuse_strangers(self._network)
            except ValueError as found:
                return str(found)
        if any(now != before for now, before in self._children) or any(type(m) is not kind for m, kind in self._kinds):
            return (
                "a layer was added, removed or exchanged since the bounds were computed. Call engine.remove(), and make_private "
                "with the network as it is now"
            )
        return None

    def moved(self) -> list[str]:
        """What is not as it was of the numbers and words that bounds may be computed from."""
        found = []
        for (path, own, values), look, seen in zip(self._own, self._look, self._seen):
            if look(own) != seen:
                changed = [f"{key} ({old!r}, now {own.get(key)!r})" for key, old in values.items() if own.get(key, _GONE) != old]
                found += [f"{what} of layer {path!r}" for what in changed or ["the attributes"]]
        for path, buffers, key, buffer, version in self._buffers:
            if buffers.get(key) is not buffer or buffer._version != version:
                found.append(f"{key} of layer {path!r}")
        return found


def _hooked(what: str) -> str:
    return (
        f"a hook is registered on {what}: it may change what goes through the network, and no bound knows of it. Remove it "
        "(handle.remove()); features can be looked at in a copy of the network"
    )


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for name in _HOOKS]


def _everywhere() -> list[dict[int, Any]]:
    """Hooks on all modules there are."""
    return [getattr(torch_module, f"_global{name}") for name in _HOOKS]


def _shadowed(module: nn.Module) -> bool:
    own = module.__dict__.get("forward")
    if own is None or isinstance(own, PrivateForward):
        return False
    # copies of a network in private training hold the forward of their class
    return not (isinstance(own, types.MethodType) and own.__func__ is type(module).forward and own.__self__ is module)


def _unsaid(layer: LipschitzLayer) -> list[str]:
    """Bounds that are written for another forward than the layer's: by a class that its forward overrides.

    Who writes the first forward of all may rely on the defaults of `LipschitzLayer`, which say what they hold for.
    """
    kinds = type(layer).__mro__

    def place(name: str) -> int:
        return next(k for k, kind in enumerate(kinds) if name in vars(kind))

    at = min(place("forward"), place("__call__"))
    if not any("forward" in vars(kind) for kind in kinds[at + 1 :] if kind is not nn.Module):
        return []
    by_jacobian = place("jacobian_bound") <= at
    both = ("propagate_input", "backpropagate_cotangent")
    missing = [n for n in both if place(n) > at and not (by_jacobian and kinds[place(n)] is LipschitzLayer)]
    if place("parameter_bound") > at and any(True for _ in layer.parameters()):
        missing.append("parameter_bound")
    return missing


def _look(values: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """What reads these entries, and how many others there are: one that is new may hide an attribute of the class."""
    read = itemgetter(*values) if values else lambda own: ()

    def look(own: dict[str, Any]) -> Any:
        try:
            return len(own) - ("forward" in own), read(own)  # which private training puts there and takes away
        except KeyError:
            return None

    return look


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a bound may be computed from, less what the mechanism follows by itself."""
    followed = module.followed if isinstance(module, LipschitzLayer) else ()
    for key, value in module.__dict__.items():
        if key != "training" and key not in followed and _is_plain(value):
            yield key, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
