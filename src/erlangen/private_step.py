"""What private training puts on an optimizer: a step that clips, sums and releases, and refusals of what would bypass it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from erlangen.private import PrivateTraining

#: the optimizer's own attributes of these names, if it has any, come back when training is no longer private
_INSTALLED = ("step", "zero_grad", "add_param_group", "_step_supports_amp_scaling")

_SCALER = (
    "a GradScaler steps this optimizer: it skips a step by what the gradients hold, which no noise covers, and gradients that it "
    "has scaled up are clipped to the bound, all of them. bfloat16 needs no scaler: torch.autocast(…, dtype=torch.bfloat16), and "
    "backward() and optimizer.step() as usual"
)


def put_on(optimizer: Optimizer, training: PrivateTraining) -> dict[str, Any]:
    """From here on the optimizer steps privately. Returns what `take_off` gives back."""
    replaced = {name: optimizer.__dict__[name] for name in _INSTALLED if name in optimizer.__dict__}
    plain_step, plain_zero = optimizer.step, optimizer.zero_grad

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Private step: noise is added once per logical batch; physical parts before the last only add up."""
        if "found_inf" in self.__dict__:  # how a GradScaler speaks to an optimizer
            del self.found_inf, self.grad_scale  # type: ignore[attr-defined]
            raise RuntimeError(_SCALER)
        loss = None
        training.stepped = False
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if training.take():
            plain_step()
            training.updated()
            training.stepped = True
        return loss

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        training.tape.clear()  # a complete backward pass, or what an exception left of one
        plain_zero(set_to_none)

    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        raise RuntimeError(
            "parameters cannot be added while training is private: their gradients would not be noised. Call "
            "engine.remove(), change the optimizer, and make_private again."
        )

    step.is_private = True  # type: ignore[attr-defined]
    if hasattr(plain_step, "_wrapped_by_lr_sched"):  # a scheduler made before looks for its own mark
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    for fn in (step, zero_grad, add_param_group):
        optimizer.__dict__[fn.__name__] = types.MethodType(fn, optimizer)
    optimizer.__dict__["_step_supports_amp_scaling"] = True  # so that a GradScaler comes to this step, and is refused
    return replaced


def take_off(optimizer: Optimizer, replaced: dict[str, Any]) -> None:
    """The optimizer as it was before `put_on`."""
    for name in _INSTALLED:
        optimizer.__dict__.pop(name, None)
    optimizer.__dict__.update(replaced)
