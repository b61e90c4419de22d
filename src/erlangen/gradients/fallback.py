"""Any other module with parameters: one forward pass under `torch.func`, with a copy of the parameters per row.

The whole subtree of such a module is run functionally, because its parameters may meet its children anywhere. Forward
happens once, so random layers are differentiated at the values they took. What vmap cannot batch is done row by row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from erlangen.gradients.fewer import MixesSamples
from erlangen.gradients.tape import Tape, refuse_twice

_ROW_BY_ROW: set[type[nn.Module]] = set()

#: arguments of each module that had another length than the batch once: a mask is nobody's rows, however many are drawn
_CONSTANT: WeakKeyDictionary[nn.Module, set[tuple[str, int]]] = WeakKeyDictionary()


class _Body(nn.Module):
    """The module's own computation, without the shadowed ``forward`` and without its hooks running twice."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.inner).forward(self.inner, *args, **kwargs)


class _Functional(torch.autograd.Function):
    """Forward keeps the pullback; backward asks it for input gradients and per-row parameter gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> Any:
        ctx.run = run
        outputs = run.forward(tensors)
        if len(outputs) == 1 and outputs[0]._is_view() and not _shares_memory(outputs[0], tensors):
            outputs = (outputs[0].clone(),)  # whoever comes after may write to it (h = prelu(x); h *= 2), and may not to a view
        ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        run: _Run = ctx.run
        run.tape._enter_exact(run.inputs()[0].device)  # what is pulled back is a product, too
        per_row, inputs = run.pullback(cotangents)
        run.tape._capture_rows({run.parameters[k]: g for k, g in per_row.items()}, run.rows, run.batch)
        return (None, *inputs, *[None] * len(run.parameters))


class _Run:
    """One functional forward pass over the rows of a batch."""

    def __init__(self, module: nn.Module, tape: Tape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.tape, self.batch, self.body = module, tape, tape.batch, _Body(module)
        self.flat, self.spec = pytree.tree_flatten((args, kwargs))
        tensors = [t for t in self.flat if isinstance(t, Tensor)]
        if not tensors:
            raise TypeError(
                f"{type(module).__name__} has parameters but was called without a tensor: no row to attribute"
            )
        tape._note_rounding(module, tensors[0])
        self.rows = tensors[0].shape[0]
        lengths = {i: t.shape[0] for i, t in enumerate(self.flat) if isinstance(t, Tensor) and t.ndim}
        constant, call = _CONSTANT.setdefault(module, set()), str(self.spec)
        constant.update((call, i) for i, length in lengths.items() if length != self.rows)
        self.batched = [i for i in lengths if (call, i) not in constant]
        self.parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
        #: the leaves of what it returned; those that are no tensors (None, numbers) are returned as they are
        self.returned: list[Any] = []
        self.out_spec: Any = None
        self._pull: Callable[..., Any]

    def inputs(self) -> list[Tensor]:
        return [self.flat[i] for i in self.batched]

    def one_row(self, parameters: dict[str, Tensor], *rows: Tensor) -> tuple[Tensor, ...]:
        flat = list(self.flat)
        for i, row in zip(self.batched, rows, strict=True):
            flat[i] = row.unsqueeze(0)
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        out = functional_call(self.body, {f"inner.{k}": p for k, p in parameters.items()}, args, kwargs)
        self.returned, self.out_spec = pytree.tree_flatten(out)
        return tuple(t.squeeze(0) for t in self.returned if isinstance(t, Tensor))

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = [t.detach() for t in tensors[: len(self.batched)]]
        copies = {k: p.detach().expand(self.rows, *p.shape) for k, p in self.parameters.items()}
        if type(self.module) not in _ROW_BY_ROW and self.rows:
            try:
                return self._forward_batched(copies, inputs)
            except (RuntimeError, ValueError) as error:
                _ROW_BY_ROW.add(type(self.module))
                name = type(self.module).__name__
                warnings.warn(f"{name} cannot be batched by torch.func ({str(error)[:120]}…): row by row", stacklevel=2)
        return self._forward_by_row(inputs)

    def _forward_batched(self, copies: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """By vmap; token numbers and masks have no gradient to ask for."""
        smooth = [t.is_floating_point() or t.is_complex() for t in inputs]

        def rows(copies: dict[str, Tensor], *moving: Tensor) -> Any:
            given = iter(moving)
            every = [next(given) if s else t for s, t in zip(smooth, inputs, strict=True)]
            return vmap(self.one_row, randomness="different")(copies, *every)

        outputs, pull = vjp(rows, copies, *(t for s, t in zip(smooth, inputs, strict=True) if s))  # type: ignore[misc]

        def pulled(cotangents: tuple[Tensor, ...]) -> tuple[Any, ...]:
            by_name, *rest = pull(cotangents)
            given = iter(rest)
            return by_name, *[next(given) if s else None for s in smooth]

        self._pull = pulled
        return outputs

    def _forward_by_row(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        leaves, outputs = [], []
        before = self._versions()
        with torch.enable_grad():
            for r in range(max(self.rows, 1)):  # an empty batch runs on one made-up row, to learn the output's shape
                rows = [t[r].detach() if self.rows else t.new_zeros(t.shape[1:]) for t in inputs]
                rows = [t.requires_grad_() if t.is_floating_point() else t for t in rows]
                params = {k: p.detach().clone().requires_grad_() for k, p in self.parameters.items()}
                leaves.append((params, rows))
                outputs.append(self.one_row(params, *rows))
        self._refuse_counted(before)

        def pull(cotangents: tuple[Tensor, ...]) -> tuple[Any, ...]:
            grads = []
            for r in range(self.rows):
                params, rows = leaves[r]
                wanted = [*params.values(), *[t for t in rows if t.requires_grad]]
                pairs = [(o, c[r]) for o, c in zip(outputs[r], cotangents, strict=True) if o.requires_grad]
                got = torch.autograd.grad(
                    [o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True, retain_graph=True
                )  # kept, because whoever keeps the graph outside may ask again; it goes when the batch does
                grads.append([torch.zeros_like(w) if g is None else g for g, w in zip(got, wanted, strict=True)])
            stacked = [torch.stack(column) for column in zip(*grads, strict=True)] if grads else []
            if not stacked:
                stacked = [w.new_zeros(0, *w.shape) for w in [*leaves[0][0].values(), *leaves[0][1]]]
            by_name = dict(zip(self.parameters, stacked, strict=False))
            rest = iter(stacked[len(self.parameters) :])
            return by_name, *[next(rest) if t.is_floating_point() else None for t in inputs]

        self._pull = pull
        with torch.no_grad():
            return tuple(torch.stack(column)[: self.rows].detach() for column in zip(*outputs, strict=True))

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(b), b._version) for name, b in self.module.named_buffers()}

    def _refuse_counted(self, before: dict[str, tuple[int, int]]) -> None:
        """A buffer that changes with every row knows how many there were, and every row's weights how many came before."""
        moved = next((name for name, version in self._versions().items() if before.get(name) != version), None)
        if moved is not None:
            raise MixesSamples(
                f"{type(self.module).__name__} writes to its buffer {moved!r} in every forward pass (a counter, power iteration "
                "in spectral_norm), and torch.func cannot batch it: run row by row, the buffer would count the records of each "
                "batch, and be released with the weights, without noise. Put its own parameters into a small module without that "
                "buffer, so that layers keep their rules, or drop the buffer."
            )

    def pullback(self, cotangents: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        by_name, *inputs = self._pull(tuple(cotangents))
        return by_name, [g if g is not None and g.is_floating_point() else None for g in inputs]


def _shares_memory(t: Tensor, others: tuple[Tensor, ...]) -> bool:
    return any(t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


def functional(module: nn.Module, tape: Tape, *args: Any, **kwargs: Any) -> Any:
    """The rule of last resort: right for any module that treats rows independently, at the price of vmap."""
    run = _Run(module, tape, args, kwargs)
    if not run.parameters:
        return type(module).forward(module, *args, **kwargs)
    outputs = iter(_Functional.apply(run, *run.inputs(), *run.parameters.values()))
    leaves = [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in run.returned]
    run.returned = []  # of one row, inside the transform
    return pytree.tree_unflatten(leaves, run.out_spec)


__all__ = ["functional"]
