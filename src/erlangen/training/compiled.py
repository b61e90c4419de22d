"""A physical part compiled as one graph: forward pass, backward pass, per-sample rules, norms, clipping and sum.

`torch.compile` of a module ends where autograd begins, and breaks at every layer whose gradients are recorded. Here the part
runs once under a tracer that sees every operation on tensors, those of the backward pass and of the tape's rules among them; what
it has seen is one graph without Python, which `torch.compile` (Inductor) fuses across what were layers, passes and rules.

It is a `Recorder` as a CUDA graph is one: the same parts are refused, and the compiled part is compared with the ordinary one on
made-up records before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from erlangen.gradients.precision import exact_float32
from erlangen.gradients.tracing import followed
from erlangen.training.graphs import Watch

#: random numbers are PyTorch's own, so that a compiled part draws what the ordinary one does
OPTIONS: dict[str, Any] = {"fallback_random": True}


class CompiledRecorder:
    """Compiles computations on tensors that keep their addresses: ``given`` may hold other values at every call, ``sums`` are what
    a call adds to."""

    def __init__(self, given: Sequence[Tensor], sums: Mapping[str, Tensor]) -> None:
        self._given, self._sums = list(given), list(sums.values())

    def __call__(self, part: Callable[[], None]) -> Callable[[], None]:
        graph, read = traced(part, self._given, self._sums)
        compiled = torch.compile(graph, fullgraph=True, dynamic=False, options=OPTIONS)
        return Compiled(compiled, [*self._given, *self._sums, *read])


class Compiled:
    """A compiled computation, with the tensors that it reads and writes."""

    def __init__(self, compiled: Callable[..., Any], tensors: list[Tensor]) -> None:
        self._compiled, self._tensors = compiled, tensors

    @torch.no_grad()
    def __call__(self) -> None:
        with exact_float32():  # products of layers and of the tape are one graph: none is taken in fewer bits than it says
            self._compiled(*self._tensors)


def traced(part: Callable[[], None], given: list[Tensor], sums: list[Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    """Every operation of ``part`` as a graph without Python, and what it reads beside ``given`` and ``sums``, its first inputs.

    Where an operation depends on what tensors hold (a look at a value, a choice of rows), there is no such graph.
    """

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        part()
        return tensors[len(given) :]  # or nobody would seem to need what was added to them

    with followed(), Watch(sums[0].device.type):
        graph = make_fx(run, tracing_mode="real")(*given, *sums)
    read = _lifted(graph)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # a compiler may lay a tensor out in another order than the tracer saw
    graph.recompile()
    return graph, read


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Tensors that the graph holds become its last inputs: a compiler would take what they hold now for what they always hold."""
    places, read = dict[str, fx.Node](), list[Tensor]()
    *_, last = graph.graph.find_nodes(op="placeholder")
    for node in graph.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in places:
            with graph.graph.inserting_after(last):
                last = places[name] = graph.graph.placeholder(f"read_{len(read)}")
            read.append(getattr(graph, name))
        node.replace_all_uses_with(places[name])
        graph.graph.erase_node(node)
    return read
