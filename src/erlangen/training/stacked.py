"""The layers of many models of one architecture at once.

E models act on E·P rows, P consecutive rows each: one skeleton module runs, and its layers with parameters are replaced
by products that are batched over the models. The backward pass leaves the gradient of every row w.r.t. the parameters of
its own model in one piece per parameter (`stacked_rows`). Layers without a batched form run under `torch.func` with a
copy of the parameters per row. Maps lie channels-last, so that a convolution's windows are runs of memory.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from erlangen.gradients.attach import plan
from erlangen.training.stacked_rows import Formed, Order, Rows

LayerBuilder = Callable[["Stack", nn.Module, Mapping[str, str]], "StackedLayer"]


class StackedLayer(ABC):
    """One layer of all the models. ``names`` maps its own parameter names to those in the whole model.

    The module owns the layer, and the stack owns the module: the layer only knows of them, so that all go together.
    """

    def __init__(self, stack: Stack, module: nn.Module, names: Mapping[str, str]) -> None:
        self._stack, self._module, self.names = weakref.ref(stack), weakref.ref(module), dict(names)

    @property
    def stack(self) -> Stack:
        stack = self._stack()
        assert stack is not None
        return stack

    @property
    def module(self) -> Any:
        return self._module()

    def parameter(self, local: str) -> Tensor | None:
        """[E, *shape], the same for all models where it is frozen; None where the layer has none."""
        if local in self.names:
            return self.stack.parameters[self.names[local]]
        own = getattr(self.module, local, None)
        return None if own is None else own.detach().expand(self.stack.models, *own.shape)

    def weight(self) -> Tensor:
        weight = self.parameter("weight")
        assert weight is not None
        return weight

    def record(self, local: str, rows: Tensor | Rows, order: Order | None = None) -> None:
        """The gradients of every row, [E·P, *shape] unless stored in another ``order``."""
        if local in self.names:
            piece = rows if isinstance(rows, Rows) else Formed(self.stack.models, rows, order)
            self.stack.record(self.names[local], piece)

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Rows [E·P, …] → output rows, and what `backward` will want."""

    @abstractmethod
    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        """Record the parameters' gradients; return the input's if it is wanted."""

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(x)[0]
        return _Act.apply(self, self.stack.anchor, x)


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: StackedLayer, anchor: Tensor, x: Tensor) -> Tensor:
        out, ctx.saved = layer.forward(x)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved, ctx.saved = ctx.saved, None
        return None, None, ctx.layer.backward(saved, cotangent, ctx.needs_input_grad[2])


class Stack:
    """E models as one: parameters in one matrix ``flat`` [E, d] of float32 or more.

    ``precision`` is the dtype of activations and products, and so of the rows' gradients where a product forms them.
    Convolutions with at most ``positions`` outputs a row keep windows and cotangents instead (`stacked_positions`).
    """

    def __init__(
        self, models: Sequence[nn.Module], rows: int, precision: torch.dtype | None = None, positions: int = 0
    ) -> None:
        self.models, self.rows, self.positions = len(models), rows, positions
        self.skeleton = copy.deepcopy(models[0])
        first = next(self.skeleton.parameters())
        self.precision = first.dtype if precision is None else precision
        self.shapes = {n: p.shape for n, p in self.skeleton.named_parameters() if p.requires_grad}
        named = [dict(model.named_parameters()) for model in models]
        self.flat = torch.stack([torch.cat([m[n].detach().flatten() for n in self.shapes]) for m in named])
        self.anchor = torch.zeros((), device=first.device, requires_grad=True)
        self._slices: dict[str, slice] = {}
        for name, shape in self.shapes.items():
            start = next(reversed(self._slices.values())).stop if self._slices else 0
            self._slices[name] = slice(start, start + shape.numel())
        self.use(self.flat)
        self._rows: dict[str, Rows] = {}
        self._replace_layers()

    def use(self, flat: Tensor) -> None:
        """Let the layers read their parameters from another matrix [E, d] (an average, say)."""
        self.parameters = {n: flat[:, s].unflatten(1, self.shapes[n]) for n, s in self._slices.items()}

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Views [..., d_k] of values [..., d], by parameter."""
        return {n: values[..., s] for n, s in self._slices.items()}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Tensors by parameter name as one vector [d], in the order of ``flat``."""
        return torch.cat([values[n].detach().flatten() for n in self.shapes]).to(self.flat)

    def state_dict(self, model: int, flat: Tensor | None = None) -> dict[str, Tensor]:
        """The parameters of one of the models."""
        row = (self.flat if flat is None else flat)[model]
        return {n: row[s].view(self.shapes[n]).clone() for n, s in self._slices.items()}

    def record(self, name: str, rows: Rows) -> None:
        before = self._rows.get(name)  # used twice: one gradient, the sum
        self._rows[name] = rows if before is None else Formed(self.models, (before.dense() + rows.dense()).flatten(0, 1))

    def backward(self, logits: Tensor, labels: Tensor) -> dict[str, Rows]:
        """The gradients of every row's cross-entropy, by parameter; one that had no part in it is missing."""
        self._rows = {}
        F.cross_entropy(logits.float(), labels, reduction="sum").backward()
        rows, self._rows = self._rows, {}
        return rows

    def dense(self, rows: Mapping[str, Rows]) -> Tensor:
        """[E, P, d] in the order of ``flat``."""
        count = next(iter(rows.values())).dense().shape[1]
        nothing = lambda s: self.flat.new_zeros(self.models, count, s.stop - s.start)  # noqa: E731
        return torch.cat([rows[n].dense() if n in rows else nothing(s) for n, s in self._slices.items()], 2)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [E·P, C, H, W], those of a model together → logits [E·P, classes]."""
        x = x.to(self.precision)
        if x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.skeleton(x)

    def _replace_layers(self) -> None:
        from erlangen.training.stacked_norm import join_activations
        from erlangen.training.stacked_pool import replace_pools

        replace_pools(self.skeleton)
        for path, module, _ in plan(self.skeleton):
            wanted = {n: f"{path}.{n}" if path else n for n, p in module.named_parameters() if p.requires_grad}
            known = {local: name for local, name in wanted.items() if name in self.shapes}
            if len(known) < len(wanted):
                raise ValueError(f"{sorted(set(wanted) - set(known))} of {path!r} are shared with another layer; untie them")
            if known:
                module.__dict__["forward"] = _builder(module)(self, module, known)
        join_activations(self.skeleton)


def _builder(module: nn.Module) -> LayerBuilder:
    """The batched form of a layer, if there is one for exactly this type and these options."""
    from erlangen.circulant import CirculantLinear
    from erlangen.training.stacked_conv import StackedConv
    from erlangen.training.stacked_kernels import kernel_of
    from erlangen.training.stacked_linear import StackedCirculantLinear, StackedLinear
    from erlangen.training.stacked_norm import StackedNorm, is_plain_norm

    if type(module) is nn.Linear:
        return StackedLinear
    if type(module) is CirculantLinear:
        return StackedCirculantLinear
    if kernel_of(module) is not None:
        return StackedConv
    return StackedNorm if is_plain_norm(module) else Functional


class Functional(StackedLayer):
    """Any other layer: one functional pass with the parameters of its model copied to every row."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        locals_, per_model = list(self.names), x.shape[0] // self.stack.models
        stacked = [self.stack.parameters[n].to(x.dtype) for n in self.names.values()]
        copies = [p.repeat_interleave(per_model, 0) for p in stacked]

        def one(row: Tensor, *parameters: Tensor) -> Tensor:
            inner = {f"inner.{n}": p for n, p in zip(locals_, parameters, strict=True)}
            return functional_call(_Inner(self.module), inner, (row.unsqueeze(0),)).squeeze(0)

        out, pull = vjp(vmap(one, randomness="different"), x, *copies)[:2]
        return out, pull

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        inputs, *rows = saved(cotangent)
        for local, g in zip(self.names, rows, strict=True):
            self.record(local, g)
        return inputs if wants_input else None


class _Inner(nn.Module):
    """The module's own ``forward``, without the shadow on the instance."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        return type(self.inner).forward(self.inner, x)
