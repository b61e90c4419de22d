"""Layers that follow each other in a chain, run as one kernel on a GPU: [activation] norm [activation] [2×2 max pool].

A chain (`nn.Sequential`, or a subclass with its forward) is read at every pass, so that layers may be exchanged; wherever
such a run of layers begins and the tensor suits the kernel, the run is one launch each way instead of a dozen passes over
the map. Elsewhere the layers run as they are. `attach` uses this for private training; `join` does the same for ordinary
training and evaluation, so that both sides of a comparison are equally fast.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.kernels import norm_act, usable
from erlangen.gradients.kernels.conv2d import conv2d
from erlangen.gradients.kernels.norm_act import NormAct
from erlangen.gradients.pooling import averaged, is_plain_max_pool, pooled
from erlangen.gradients.tape import Tape


@dataclass(frozen=True)
class NormLayer:
    """A normalisation the kernel can do: how many groups, and how its parameters meet the channels."""

    module: Any
    groups: int
    eps: float
    #: [parameters] → [channels]; and its adjoint on [rows, channels]
    spread: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


_NORMS: dict[type[nn.Module], Callable[[Any], NormLayer | None]] = {}
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], str | None]] = {
    nn.Mish: lambda _: "mish",
    nn.ReLU: lambda _: "relu",
    nn.SiLU: lambda _: "silu",
}
_POOLS: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.MaxPool2d: lambda m: (
        all(v in (2, (2, 2)) for v in (m.kernel_size, m.stride))
        and m.padding in (0, (0, 0)) and m.dilation in (1, (1, 1)) and not m.ceil_mode and not m.return_indices
    )
}  # fmt: skip


def joinable_norm(kind: type[nn.Module], describe: Callable[[Any], NormLayer | None]) -> None:
    """Tell how a normalisation of this type looks to the kernel; ``None`` for those it cannot do."""
    _NORMS[kind] = describe


def joinable_activation(kind: type[nn.Module], name: Callable[[Any], str | None]) -> None:
    _ACTIVATIONS[kind] = name


def joinable_pool(kind: type[nn.Module], is_two_by_two: Callable[[Any], bool]) -> None:
    _POOLS[kind] = is_two_by_two


#: what a layer's own kernel computes: (module, tape, input) → output, where it has no parameters, or there is no tape
_OWN: dict[type[nn.Module], Callable[[Any, Tape | None, Any], Any]] = {}


def own_kernel(kind: type[nn.Module], run: Callable[[Any, Tape | None, Any], Any]) -> None:
    """Layers of this type have a faster form of their own: in ordinary training, and in private training if they have no
    parameters (those of others are a rule's)."""
    _OWN[kind] = run


own_kernel(nn.AvgPool2d, averaged)


def faster(module: nn.Module) -> Callable[[Any, Tape | None, Any], Any] | None:
    """The faster form of a layer whose forward is its type's."""
    if is_plain_max_pool(module):
        return pooled
    return None if "forward" in module.__dict__ else _OWN.get(type(module))


def activation_name(module: nn.Module) -> str | None:
    """The kernel's name of an activation layer, or None."""
    name = _ACTIVATIONS.get(type(module))
    return None if name is None else name(module)


def norm_layer(module: nn.Module) -> NormLayer | None:
    """How the kernel sees a normalisation; None without affine parameters of its own."""
    describe = _NORMS.get(type(module))
    found = None if describe is None else describe(module)
    if found is None or not isinstance(module.weight, nn.Parameter) or not isinstance(module.bias, nn.Parameter):
        return None
    return found


joinable_norm(
    nn.GroupNorm, lambda m: NormLayer(m, m.num_groups, m.eps, lambda p: p, lambda g: g) if m.affine else None
)


@dataclass(frozen=True)
class Run:
    """Layers start … stop−1 of a chain as one kernel."""

    start: int
    stop: int
    norm: NormLayer
    spec: NormAct

    def suits(self, x: Tensor) -> bool:
        return suits(x, self.spec)


def suits(x: Tensor, spec: NormAct) -> bool:
    """Whether the kernel can work on this map as it lies in memory."""
    return (
        x.dim() == 4
        and usable(x)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.shape[0] > 0
        and norm_act.fits(x, spec)
    )


def runs(layers: Sequence[nn.Module]) -> list[Run]:
    """The runs of a chain, left to right, each as long as it can be."""
    found, at = [], 0
    while at < len(layers):
        run = _run_at(layers, at)
        if run is None:
            at += 1
            continue
        found.append(run)
        at = run.stop
    return found


def _run_at(layers: Sequence[nn.Module], start: int) -> Run | None:
    at, pre, post, pool = start, "identity", "identity", False
    name = activation_name(layers[at])
    if name is not None and at + 1 < len(layers):
        pre, at = name, at + 1
    norm = norm_layer(layers[at])
    if norm is None:
        return None
    at += 1
    # an activation that a later norm would rather take stays with that norm
    taken = at + 1 < len(layers) and norm_layer(layers[at + 1]) is not None
    if at < len(layers) and not taken and (name := activation_name(layers[at])) is not None:
        post, at = name, at + 1
    if at < len(layers) and _POOLS.get(type(layers[at]), lambda _: False)(layers[at]):
        pool, at = True, at + 1
    if any(has_hooks(layer) for layer in layers[start:at]):
        return None
    return Run(start, at, norm, NormAct(norm.groups, norm.eps, pre, post, pool))


def has_hooks(module: nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in module.modules()
    )


class _Joined(torch.autograd.Function):
    """The kernel as one differentiable operation. With ``record`` the parameters' gradients go there, row by row."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, norm: NormLayer, spec: NormAct,
        record: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:  # fmt: skip
        gamma, beta = (norm.spread(p.detach()).float().contiguous() for p in (weight, bias))
        z, mean, rstd = norm_act.forward(y, gamma, beta, spec)
        ctx.save_for_backward(y, gamma, beta, mean, rstd)
        ctx.norm, ctx.spec, ctx.record = norm, spec, record
        return z

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        y, gamma, beta, mean, rstd = ctx.saved_tensors
        dy, dgamma, dbeta = norm_act.backward(y, cotangent, gamma, beta, mean, rstd, ctx.spec)
        if ctx.record is not None:
            ctx.record(ctx.norm.gather(dgamma), ctx.norm.gather(dbeta))
            return dy, None, None, None, None, None
        return dy, ctx.norm.gather(dgamma.sum(0)), ctx.norm.gather(dbeta.sum(0)), None, None, None


def apply(x: Tensor, norm: NormLayer, spec: NormAct, tape: Tape | None) -> Tensor:
    """One run on a map that `suits` it; with a tape, every row's gradients of the norm's parameters are recorded."""
    weight, bias = norm.module.weight, norm.module.bias
    if tape is None:
        return _Joined.apply(x, weight, bias, norm, spec, None)
    batch = tape.batch

    def record(dweight: Tensor, dbias: Tensor) -> None:
        wanted = {p: g for p, g in ((weight, dweight), (bias, dbias)) if p.requires_grad}
        tape._capture_rows(wanted, len(dweight), batch)

    return _Joined.apply(x, weight, bias, norm, spec, record)


def chain(module: nn.Sequential, tape: Tape | None, x: Any) -> Any:
    """The forward pass of a chain, its runs joined where the tensor suits them."""
    layers, at = list(module), 0
    starts = {run.start: run for run in runs(layers)}
    while at < len(layers):
        run = starts.get(at)
        if run is not None and isinstance(x, Tensor) and run.suits(x):
            x, at = apply(x, run.norm, run.spec, tape), run.stop
        else:
            x, at = layers[at](x), at + 1
    return x


def chains(model: nn.Module) -> list[tuple[nn.Sequential, list[Run]]]:
    """Every chain of a model that has a run."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            here = runs(list(module))
            if here:
                found.append((module, here))
    return found


def join(model: nn.Module) -> nn.Module:
    """Run joined layers as one kernel in ordinary training and evaluation, where the device can. In place."""
    for sequence, _ in chains(model):
        sequence.__dict__["forward"] = Plain(sequence, chain)
    for module in model.modules():
        if (run := faster(module)) is not None:
            module.__dict__["forward"] = Plain(module, run)
        elif type(module) is nn.Conv2d and module.padding_mode == "zeros":
            module.__dict__["forward"] = Plain(module, _convolve)
        elif norm_layer(module) is not None:
            module.__dict__["forward"] = Plain(module, _normalise)
    return model


def _convolve(module: nn.Conv2d, tape: None, x: Tensor) -> Tensor:
    return conv2d(x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)


def _normalise(module: nn.Module, tape: None, x: Tensor) -> Tensor:
    norm = norm_layer(module)
    assert norm is not None
    spec = NormAct(norm.groups, norm.eps)
    return apply(x, norm, spec, None) if suits(x, spec) else type(module).forward(module, x)


class Plain:
    """Stands in for a module's forward in ordinary training; copies of the module are ordinary again."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run

    def __call__(self, x: Any) -> Any:
        return self.run(self.module, None, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module), self.module)
        return types.MethodType(type(module).forward, module)
