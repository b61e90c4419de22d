"""Compiled parts: one graph from the records to the clipped sum, which adds what the ordinary part adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from erlangen.training.compiled import traced
from tests.training.recordings import alike, dropping, flat, model_named, run, session


def interpreted(part: Callable[[], None]) -> Callable[[], None]:
    """The graph that a compiler is given, run operation by operation."""
    graph = part.__self__
    given = [*graph.records.tensors, *graph.session.model.parameters(), *graph.session.model.buffers()]
    sums = list(graph.sums.values())
    found, read = traced(part, given, sums)
    graph.found = found
    return torch.no_grad()(lambda: found(*given, *sums, *read))


@pytest.mark.parametrize("changes", [
    {}, {"views": 3, "augment": "shift"}, {"views": 2, "augment": "flip-crop-mix"}, {"clipping": "auto-s"},
    {"clipping": "per-layer"}, {"model": "lenet"}, {"model": "c8-tiny", "batch": 16}, {"strategy": "norms-first"},
    {"strategy": "materialise"}, {"mechanism": "spectral"}, {"precision": "bf16"}, {"max_physical_batch": 16},
], ids=str)  # fmt: skip
def test_the_graph_of_a_part_adds_what_the_part_adds(changes):
    plain, followed = (run(session(recorder=r, **changes)) for r in (None, interpreted))
    assert followed.graph.reason is None
    assert alike(followed, plain)
    assert followed.epsilon() == plain.epsilon()
    assert followed.accountant.steps == 5


def test_one_graph_holds_both_passes_and_the_clipping():
    made = session(recorder=interpreted, model="lenet")
    made.step()
    assert made.graph.reason is None
    names = {str(node.target) for node in made.graph.found.graph.nodes if node.op == "call_function"}
    assert "aten.convolution.default" in names, "forward"
    assert "aten.convolution_backward.default" in names, "backward"
    assert "aten.bmm.out" in names, "per-sample gradients of a convolution"
    assert "aten.linalg_vector_norm.default" in names, "their norms"
    assert "aten._foreach_add_.List" in names, "the clipped sum"
    assert not [node for node in made.graph.found.graph.nodes if node.op in ("get_attr", "call_module")], "nothing is held fast"


def test_masks_of_dropout_are_drawn_anew():
    with model_named(dropping) as name:
        plain, followed = (run(session(recorder=r, **name)) for r in (None, interpreted))
    assert followed.graph.reason is None
    assert alike(followed, plain)


class Scaled(nn.Module):
    """Reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(64, 10), [torch.ones(())]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(1) * self.scale[0])


def test_what_a_part_reads_elsewhere_is_read_at_every_call():
    """A compiler takes a small tensor that a graph holds for a number."""
    ends = []
    with model_named(Scaled) as name:
        for recorder in (None, interpreted):
            made = run(session(recorder=recorder, **name), 2)
            made.model.scale[0].fill_(0.3)
            ends.append(run(made, 3))
    plain, followed = ends
    assert followed.graph.reason is None
    assert alike(followed, plain)


class Looks(nn.Module):
    """Python decides by what tensors hold: a graph would fix that for whatever it saw first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(64, 10), how

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x.flatten(1))
        if self.how == "value":
            return out if float(self.inner.weight.detach().abs().max()) < 1e9 else 2 * out
        weight = self.inner.weight.detach()
        return out + 0 * weight[weight[:, 0] > -1e9].sum()


@pytest.mark.parametrize(("how", "said"), [("value", "_local_scalar_dense"), ("rows", "aten::index")])
def test_parts_that_look_at_values_are_not_followed(how, said):
    with model_named(lambda: Looks(how)) as name, pytest.warns(UserWarning, match="parts run as usual") as warned:
        followed = run(session(recorder=interpreted, **name))
    assert any(said in str(w.message) for w in warned)
    with model_named(lambda: Looks(how)) as name:
        assert alike(followed, run(session(**name)))


def test_a_compiled_run_gives_the_weights_of_an_ordinary_one():
    plain, compiled = run(session(model="mlp")), run(session(model="mlp", compile=True))
    assert compiled.graph.reason is None
    assert alike(compiled, plain)
    assert torch.equal(flat(run(session(model="mlp", compile=True))), flat(compiled)), "and the same ones again"


def test_without_static_shapes_nothing_is_compiled():
    with pytest.warns(UserWarning, match="compile is on, but parts run as usual: .*pad=true"):
        made = run(session(compile=True, pad=False), 2)
    assert made.accountant.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"model": "lenet"}, {"model": "c8-tiny", "batch": 16}, {"views": 2, "augment": "flip-crop-mix"},
    {"model": "lenet", "precision": "bf16"}, {"mechanism": "spectral"}, {"clipping": "per-layer", "max_physical_batch": 16},
], ids=str)  # fmt: skip
def test_compiled_runs_of_other_kinds(changes):
    plain, compiled = run(session(**changes)), run(session(compile=True, **changes))
    assert compiled.graph.reason is None
    assert alike(compiled, plain)
