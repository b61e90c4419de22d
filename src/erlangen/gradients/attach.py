"""Making a module record per-sample gradients without becoming another module.

Each layer's ``forward`` is shadowed on the instance: type, ``state_dict`` keys, hooks, ``eval()`` and saving stay as
they were. Copies and pickles of the module are ordinary modules again.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from erlangen.gradients.fallback import functional
from erlangen.gradients.joined import Plain, chain, chains, faster
from erlangen.gradients.problems import where
from erlangen.gradients.registry import Rule, find_rule
from erlangen.gradients.tape import Tape


class PrivateForward:
    """Stands in for one module's ``forward`` while gradients are recorded. Compiled models break the graph here."""

    def __init__(self, module: nn.Module, rule: Rule, tape: Tape) -> None:
        self.module, self.rule, self.tape = module, rule, tape
        self._run = torch.compiler.disable(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.tape.called = self.tape.batch
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters()):
            self.tape.seen_forward = self.tape.batch
            return self.rule(self.module, self.tape, *args, **kwargs)
        out = type(self.module).forward(self.module, *args, **kwargs)
        if torch.is_grad_enabled():
            self.tape.pass_frozen(self.module, (*args, *kwargs.values()), out)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return _plain_forward, (self.module,)


class _FasterForward(PrivateForward):
    """Of a layer without parameters, whose rule computes the same in less time."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(self.module, self.tape, *args, **kwargs)


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def plan(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rule]]:
    """(path, module, rule) for every place where parameters act; subtrees without a rule go to the fallback whole."""
    yield from _plan("", model)


def _plan(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Rule]]:
    found = find_rule(module)
    if found is not None:
        if any(True for _ in module.parameters()):
            yield path, module, found
        return
    raw = any(isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in module.children())
    if raw or any(True for _ in module.parameters(recurse=False)) or hasattr(module, "parametrizations"):
        yield path, module, functional
        return
    for name, child in module.named_children():
        yield from _plan(f"{path}.{name}" if path else name, child)


def remark_on_swallowed(model: nn.Module) -> None:
    """Warn of modules whose few parameters of their own take many layers with rules along into the fallback."""
    for path, module, rule in plan(model):
        inside = [m for m in module.modules() if m is not module and find_rule(m) is not None and list(m.parameters())]
        shared = {id(p) for child in module.children() for p in child.parameters()}
        own = [name for name, p in module.named_parameters(recurse=False) if id(p) not in shared]
        if rule is functional and own and inside:
            where = f"{type(module).__name__} at {path!r}" if path else type(module).__name__
            count = sum(p.numel() for p in module.parameters())
            warnings.warn(
                f"{where} holds {', '.join(own)} beside its layers: torch.func then differentiates all of it together, with every "
                f"record's gradient of all {count:,} parameters in memory. Put {'it' if len(own) == 1 else 'them'} into a small "
                f"module of {'its' if len(own) == 1 else 'their'} own, and the layers keep their rules (docs/adding-a-layer.md).",
                stacklevel=2,
            )


def refuse_set_forwards(model: nn.Module) -> None:
    """A function in the place of a layer's ``forward`` would be dropped: private layers compute what their class does."""
    planned = [(path, m) for path, m, _ in plan(model)] + [("", m) for m, _ in chains(model)]
    for path, m in planned:
        own = m.__dict__.get("forward")
        if own is None or isinstance(own, Plain) or getattr(own, "__func__", None) is type(m).forward:
            continue
        raise ValueError(
            f"{where(path, m)} has a forward that was set on it (layer.forward = …), which private training would pass over: its "
            "layers compute what their class says. Write a subclass with that forward, and put it in the layer's place"
        )


def attach(model: nn.Module, tape: Tape) -> None:
    """Record on ``tape`` from now on."""
    done: set[int] = set()
    for _, module, rule in plan(model):
        if id(module) not in done:
            done.add(id(module))
            module.__dict__["forward"] = PrivateForward(module, rule, tape)
    for module, _ in chains(model):
        if id(module) not in done:
            module.__dict__["forward"] = PrivateForward(module, chain, tape)
    for module in model.modules():
        if (run := faster(module)) is not None:
            module.__dict__["forward"] = _FasterForward(module, run, tape)


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), PrivateForward):
            del module.__dict__["forward"]


def is_attached(model: nn.Module) -> bool:
    return any(isinstance(m.__dict__.get("forward"), PrivateForward) for m in model.modules())
