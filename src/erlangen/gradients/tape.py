"""The tape: what one backward pass says about every owner's gradient.

A layer with a rule runs with *detached* parameters, so that autograd computes input gradients only; a `tap` behind its
output hands the cotangent to the tape, which keeps a `Piece` per parameter. Weight gradients are formed afterwards and
once: per owner where that is cheaper, else as norms and one weighted sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.bundle import Bundle
from erlangen.gradients.filtered import KernelFilter
from erlangen.gradients.means import PrivateMeans
from erlangen.gradients.pieces import Dense, Piece, Weight
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rows import RowMap

STRATEGIES = ("auto", "materialise", "norms-first")

_LATECOMER = (
    "a parameter takes part in training that did not when the module was made private (added or unfrozen since). Call "
    "make_private again after changing which parameters train."
)

_OTHER_BATCH = (
    "another batch was drawn between the forward and the backward pass, so whose rows these are is not known. Call backward() "
    "and optimizer.step() before the next batch is drawn."
)

_TWICE = (
    "gradients of gradients (create_graph=True: a gradient penalty, forces of an energy) are not recorded: the weights of layers "
    "would be left out of them without a word. Let a module of its own compute the inner gradient by torch.func.grad of its own "
    "parameters, so that it is differentiated as a whole; or leave create_graph out."
)

Pieces = Callable[[tuple[Tensor, ...], Tensor, int], Iterable[tuple[Tensor, Piece]]]
Metric = Callable[[str], Weight]


def euclidean(name: str) -> Weight:
    return None


def refuse_twice() -> None:
    """In a backward pass: raise if it is to be differentiated itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(_TWICE)


class PerSampleGradients:
    """The gradients of every owner in one physical batch: what a mechanism works on.

    Mechanisms ask for norms and weighted sums; `dense` is there for geometries that need the vectors themselves.
    """

    def __init__(
        self, pieces: Mapping[str, Piece], owners: int, factor: float = 1.0, valid: Tensor | None = None
    ) -> None:
        self._pieces, self.owners, self._factor, self.valid = dict(pieces), owners, factor, valid
        self._bundle: Bundle | None = None  # of small gradients, from the norms to the sum
        #: whether nobody may look at values: what is recorded takes the same way for all records
        self.blind = False

    @classmethod
    def from_dense(cls, gradients: Mapping[str, Tensor], valid: Tensor | None = None) -> PerSampleGradients:
        """From materialised gradients [n, *shape] by parameter name."""
        counts = {name: g.shape[0] for name, g in gradients.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"per-sample gradients disagree on the number of samples: {counts}")
        owners = next(iter(counts.values()), 0)
        return cls({name: Dense(g) for name, g in gradients.items()}, owners, 1.0, valid)

    @property
    def names(self) -> list[str]:
        return list(self._pieces)

    def norms_squared(self, metric: Metric = euclidean) -> dict[str, Tensor]:
        """Per parameter, ‖T g_i‖² for each owner, T the metric's coordinates."""
        weights = {name: metric(name) for name in self._pieces}
        if self._bundle is None:
            self._bundle = Bundle.of({name: self._pieces[name] for name, weight in weights.items() if weight is None})
        with exact_float32():
            together = {} if self._bundle is None else self._bundle.norms_squared()
            together = {name: norms for name, norms in together.items() if weights[name] is None}
            squared = {
                name: together[name] if name in together else piece.norms_squared(weights[name])
                for name, piece in self._pieces.items()
            }
        if self._factor == 1.0 or not squared:
            return squared
        scaled = torch._foreach_mul(list(squared.values()), self._factor**2)
        return dict(zip(squared, scaled, strict=True))

    def weighted_sum(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per parameter, Σ_i w_i g_i of the raw gradients."""
        groups = {id(w): w for w in weights.values()}  # one tensor serves a whole clipping group
        scaled = {key: w * self._factor for key, w in groups.items()}
        of = {name: scaled[id(weights[name])] for name in self._pieces}
        with exact_float32():
            together: dict[str, Tensor] = {}
            if self._bundle is not None and len({id(of[name]) for name in self._bundle.shapes}) == 1:
                together = self._bundle.weighted_sum(of[next(iter(self._bundle.shapes))])
            return {
                name: together[name] if name in together else piece.weighted_sum(of[name])
                for name, piece in self._pieces.items()
            }

    def dense(self, name: str) -> Tensor:
        return self._pieces[name].dense() * self._factor

    def directions(self, name: str) -> Tensor:
        """`dense` up to a positive factor that all owners and parameters share: for what only depends on directions."""
        return self._pieces[name].dense()

    def _with(self, pieces: Mapping[str, Piece]) -> PerSampleGradients:
        return PerSampleGradients(pieces, self.owners, self._factor, self.valid)

    def formed(self) -> PerSampleGradients:
        """The same gradients, formed now and kept: for mechanisms that will look at every entry."""
        pieces = {name: piece.formed() for name, piece in self._pieces.items()}
        return self._with(pieces)

    def unfiltered(self) -> PerSampleGradients:
        """The same gradients before any filter: those of layers that filter what they form if the tape is ``watched``."""
        pieces = {name: piece.whole or piece for name, piece in self._pieces.items()}
        return self._with(pieces)

    def of(self, name: str) -> PerSampleGradients:
        """The gradients of one parameter alone."""
        return self._with({name: self._pieces[name]})

    @property
    def guarded(self) -> bool:
        """Whether sums never read an owner of weight zero."""
        return all(piece.guarded for piece in self._pieces.values())

    def only(self, good: Tensor) -> PerSampleGradients:
        """The same gradients with owners outside ``good`` declared padding; nothing is copied or looked at."""
        valid = good if self.valid is None else self.valid & good
        same = PerSampleGradients(self._pieces, self.owners, self._factor, valid)
        same._bundle = self._bundle
        return same

    def without(self, bad: Tensor) -> PerSampleGradients:
        """The same gradients, exactly zero for the owners flagged in ``bad`` (whatever they held, NaN included)."""
        pieces = {name: piece.without(bad) for name, piece in self._pieces.items()}
        return self._with(pieces)


class _Tap(torch.autograd.Function):
    """Identity forwards; backwards it shows the cotangent to the tape. Parameters are inputs only to ask for it."""

    @staticmethod
    def forward(ctx: Any, use: _Use, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(*tensors[: use.saved])
        return out.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        refuse_twice()
        ctx.use.tape._capture(ctx.use, ctx.saved_tensors, cotangent)
        return (None, cotangent, *[None] * ctx.use.inputs)


class _Use:
    """One use of one layer in one forward pass."""

    __slots__ = ("batch", "batch_dim", "inputs", "pieces", "saved", "tape")

    def __init__(self, tape: Tape, pieces: Pieces, batch_dim: int, saved: int, inputs: int) -> None:
        self.tape, self.pieces, self.batch_dim, self.saved, self.inputs = tape, pieces, batch_dim, saved, inputs
        self.batch = tape.batch


class Tape(PrivateMeans):
    """Collects the per-owner gradients of a model's trainable parameters over one backward pass.

    ``rows`` says whose rows the next batch holds (one record per row unless told otherwise); ``metric`` is the
    geometry in which norms will be asked for, because it decides which way of computing them is cheaper.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        loss_reduction: str = "mean",
        strategy: str = "auto",
        batch_first: bool = True,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum', as your loss reduces")
        self.parameters = dict(parameters)
        self.loss_reduction, self.strategy, self.batch_first = loss_reduction, strategy, batch_first
        self.metric: Metric = euclidean
        #: whether how many rows a batch has is as private as who they are (Poisson sampling without padding)
        self.private_sizes = False
        self.rows: RowMap | None = None
        #: handed on to the gradients
        self.blind = False
        #: whether somebody looks at gradients as they were before a filter
        self.watched = False
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._ignored: set[int] = set()
        #: how many batches were announced, and which of them the last forward pass was for
        self.batch, self.seen_forward = 0, -1
        #: which of them a layer was last called for, with gradients or without
        self.called = -1
        #: how many logical batches began: between two of them the weights may have been written to in any way
        self.logical = 0
        self.clear()

    def next_batch(self) -> bool:
        """Another batch was announced; whether the one before it had gone forward."""
        self.clear()
        tried = self.seen_forward == self.batch
        self.batch += 1
        return tried

    def stand_in(self, name: str, parameter: nn.Parameter) -> None:
        """In forward passes the parameter ``name`` is this tensor (a shard is gathered into it)."""
        self._names[id(parameter)] = name

    def ignore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters that ask for gradients but are nobody's to update: their gradients are not recorded."""
        self._ignored.update(id(p) for p in parameters)

    def clear(self) -> None:
        """Forget the last backward pass."""
        self._pieces: dict[str, list[Piece]] = {}
        self._derived: list[tuple[Tensor, Piece]] = []
        self._seen: RowMap | None = None
        self._scheduled = self.complete = False
        self._forget_rounding()

    def batch_dim(self, x: Tensor, inner: int = 1) -> int:
        """Where the batch is in a tensor with ``inner`` feature dimensions: dimension 1 of a time-major sequence."""
        return 0 if self.batch_first or x.ndim - inner < 2 else 1

    def tap(
        self,
        out: Tensor,
        saved: tuple[Tensor, ...],
        parameters: tuple[Tensor | None, ...],
        pieces: Pieces,
        batch_dim: int = 0,
    ) -> Tensor:
        """Pass ``out`` on; in the backward pass ``pieces(saved, cotangent, views)`` names each parameter's gradients."""
        wanted = [p for p in parameters if p is not None and p.requires_grad]
        if not wanted:
            return out
        # leaves only: backward would free the graph of a computed weight, which is pulled back afterwards
        present = [leaf for p in wanted for leaf in leaves_of(p)]
        self._note_rounding(None, out)
        use = _Use(self, pieces, batch_dim, len(saved), len(saved) + len(present))
        return _Tap.apply(use, out, *saved, *present)

    def _capture(self, use: _Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        if use.batch != self.batch:
            raise RuntimeError(_OTHER_BATCH)
        if not self._scheduled:
            self._enter_exact(cotangent.device)
        self._begin()
        self._refuse_rounded(cotangent)
        self._look_at_bits(cotangent)
        if use.batch_dim:
            saved = tuple(s.movedim(use.batch_dim, 0) for s in saved)
            cotangent = cotangent.movedim(use.batch_dim, 0)
        rows = self._rows_of(cotangent.shape[0], cotangent.device)
        if rows.is_regular:
            captured = use.pieces(saved, cotangent, rows.views)
        else:
            by_row = use.pieces(saved, rows.scaled(cotangent), 1)
            captured = [(target, Dense(rows.sum_rows(piece.dense()))) for target, piece in by_row]
        for target, piece in captured:
            name = self._names.get(id(target))
            if id(target) in self._ignored:
                continue
            if name is None:
                self._derived.append((target, piece))
            else:
                self._pieces.setdefault(name, []).append(self._choose(name, piece))

    def _capture_rows(self, per_row: Mapping[Tensor, Tensor], count: int, batch: int) -> None:
        """Gradients that a module computed itself in its forward pass for ``batch``, [rows, *shape] by parameter."""
        if batch != self.batch:
            raise RuntimeError(_OTHER_BATCH)
        self._begin()
        for parameter, g in per_row.items():
            self._refuse_rounded(g)
            if id(parameter) in self._ignored:
                continue
            if id(parameter) not in self._names:
                raise RuntimeError(_LATECOMER)
            rows = self._rows_of(count, g.device)
            per_owner = rows.sum_rows(g if rows.is_regular else rows.scaled(g))
            self._pieces.setdefault(self._names[id(parameter)], []).append(Dense(per_owner))

    def _begin(self) -> None:
        if self.seen_forward not in (-1, self.batch):
            raise RuntimeError(_OTHER_BATCH)
        if self.complete:
            raise RuntimeError(
                "backward() was called a second time before optimizer.step(): per-sample gradients of one batch are "
                "clipped together. Add the losses and call backward() once, or let max_physical_batch split the batch; "
                "optimizer.zero_grad() discards a backward pass. (Where torch.utils.checkpoint holds the last layers, it goes back "
                "on its own: checkpoint(…, use_reentrant=False) does not.)"
            )
        if not self._scheduled:
            self._scheduled = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _choose(self, name: str, piece: Piece) -> Piece:
        """Form the gradients now where that is cheaper; elsewhere keep what they are made of."""
        weight = self.metric(name)
        if isinstance(weight, KernelFilter):
            piece = piece.filtered(weight)
        if isinstance(piece, Dense) or self.strategy == "norms-first":
            return piece
        tied_to_vectors = callable(weight) and not isinstance(weight, Tensor) and piece.filter is None
        dear = piece.prefers_dense or (weight is not None and piece.euclidean_only)
        if not (self.strategy == "materialise" or tied_to_vectors or dear):
            return piece
        formed = piece.formed()
        if self.watched:  # what it was made of is let go otherwise
            formed.whole = piece.whole
        return formed

    def _rows_of(self, count: int, device: torch.device) -> RowMap:
        if self._seen is None:
            self._seen = RowMap.regular(count) if self.rows is None else self.rows.to(device)
        if self._seen.rows != count:
            raise RuntimeError(
                f"a layer saw {count} rows where {self._seen.rows} were expected: the first dimension must be the "
                "batch, with the same rows in every forward pass of a step. Keep tokens or windows in later dimensions, "
                "or pass batch_first=False for time-major sequences."
            )
        return self._seen

    def _finish(self) -> None:
        """At the end of backward: gradients of computed weights are pulled back to the parameters behind them."""
        for target, piece in self._derived:
            behind = leaves_of(target)
            leaves = [p for p in behind if id(p) in self._names]
            if any(id(p) not in self._names and id(p) not in self._ignored for p in behind):
                raise RuntimeError(_LATECOMER)
            for leaf, g in zip(leaves, _pull_back(target, leaves, piece), strict=True):
                if g is not None:
                    self._pieces.setdefault(self._names[id(leaf)], []).append(Dense(g))
        self._derived.clear()
        self._leave_exact()
        self._have_looked()
        self.complete = True

    def gradients(self) -> PerSampleGradients:
        """The gradients of the last backward pass; the tape is cleared."""
        if not self.complete or self._seen is None:
            raise RuntimeError(
                "optimizer.step() without a backward pass: no layer of the private module took part in one since the "
                "last step. Call loss.backward() on a loss computed from the module first."
            )
        rows = self._seen
        factor = (rows.rows if self.loss_reduction == "mean" else 1) * (rows.mean_factor() if rows.is_regular else 1.0)
        pieces = {name: _joined(uses) for name, uses in self._pieces.items()}
        result = PerSampleGradients(pieces, rows.owners, float(factor), rows.valid)
        result.blind = self.blind
        self.clear()
        self.rows = None
        return result


def _joined(uses: list[Piece]) -> Piece:
    """A parameter used several times has one gradient: the sum over its uses, before any norm is taken."""
    if len(uses) == 1:
        return uses[0]
    total = uses[0].dense()
    for piece in uses[1:]:
        total = total + piece.dense()
    return Dense(total)


def _pull_back(target: Tensor, leaves: list[Tensor], piece: Piece) -> list[Tensor | None]:
    """Every owner's gradient of a computed weight, through the Jacobian of its computation."""
    if not piece.count:
        return [leaf.new_zeros(0, *leaf.shape) for leaf in leaves]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*batching rule.*")  # slower, not wrong
        return list(
            torch.autograd.grad(
                target, leaves, piece.dense(), retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        )


def leaves_of(t: Tensor) -> list[Tensor]:
    """The leaf tensors that a computed tensor depends on; of a leaf, itself."""
    if t.is_leaf:
        return [t]
    found, seen, stack = [], set(), [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack.extend(parent for parent, _ in node.next_functions)
    return found
