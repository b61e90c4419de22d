"""A physical part recorded once and replayed: small networks wait for Python and for launches, not for arithmetic.

A padded part has static shapes, so its forward pass, per-sample gradients, norms, clipping and sum are the same kernels on
the same addresses every time: one CUDA graph. Everything that makes a release what it is (one draw and one noise per logical
batch, the expected batch size, ledger, accountant, optimizer) happens outside, as it does without a graph; a batch that
overflows is more replays. A replay adds to the sum what the ordinary part would add.

Whatever Python decides inside a part is decided once. It must follow from shapes and options; where it could follow from
records, from the host's random numbers or from what other parts did, the part is not recorded and `PartGraph.reason` says
why. Before a recording is used it is compared with the ordinary part on made-up records.
"""

from __future__ import annotations

import gc
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from erlangen.data.augment import draw
from erlangen.gradients.rows import RowMap, sent
from erlangen.gradients.tape import Tape
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.clipping import ClippingRule

if TYPE_CHECKING:
    from erlangen.training.session import Session

#: records a computation on tensors at fixed addresses; what it returns repeats it
Recorder = Callable[[Callable[[], None]], Callable[[], None]]

#: relative differences of a replayed and an ordinary sum that rounding explains: of 16-bit products, of float32
HALF, FULL = 2e-2, 1e-3
#: batches of made-up records that a recording is tried on
TRIALS = 3


class Unrecordable(RuntimeError):
    """A part does something that a recording would not repeat; the message says what."""


class PartGraph:
    """The physical part of a session, recorded when it is first needed and anew when a fact that it rests on has changed.

    Where that cannot be, ``reason`` says why (a warning says it once) and parts run as usual.
    """

    def __init__(self, session: Session, recorder: Recorder | None = None) -> None:
        self.session, self.reason = session, refusal(session)
        if self.reason is None and recorder is None and session.device.type != "cuda" and not session.config.compile:
            self.reason = f"the device is {session.device.type}, and graphs are for a GPU"
        self._replay: Callable[[], None] | None = None
        self._facts: Any = None
        if self.reason is not None:
            self._say()
            return
        self.records = Records(session)
        self.sums = {name: torch.zeros_like(total) for name, total in self._mechanism.clipped_sum().items()}
        self._recorder = recorder or self._usual_recorder()

    def _usual_recorder(self) -> Recorder:
        """A CUDA graph, a compiled part, or a CUDA graph of the compiled part: as the options say."""
        session, config = self.session, self.session.config
        replayed = CudaRecorder(session.device)
        if not config.compile:
            return replayed
        from erlangen.training.compiled import CompiledRecorder  # a compiler takes a second to import

        compiled = CompiledRecorder([*self.records.tensors, *session.model.parameters(), *session.model.buffers()], self.sums)
        both = config.graph and session.device.type == "cuda"
        return (lambda part: replayed(compiled(part))) if both else compiled

    @property
    def _mechanism(self) -> GaussianMechanism:
        mechanism = self.session.training.mechanism
        assert isinstance(mechanism, GaussianMechanism)
        return mechanism

    def ready(self) -> bool:
        """Whether the parts of the next logical batch are replayed. To be asked before its first part is announced."""
        if self.reason is None and (self._replay is None or self._facts != facts(self.session)):
            self.reason = refusal(self.session)
            if self.reason is None:
                self._record()
            else:
                self._say()
        return self.reason is None

    def add(self, rows: Tensor, owner: Tensor, moves: Tensor, first: bool) -> None:
        """Add one announced part to the mechanism's sum by replay; ``optimizer.step()`` goes on from there."""
        assert self._replay is not None, "ready() comes first"
        training, mechanism = self.session.training, self._mechanism
        if first:
            self._sum_from_zero(self.sums)
        elif mechanism.clipped_sum() is not self.sums:
            raise RuntimeError(
                "the sum of a logical batch was begun anew between two of its parts; draw the batch again"
            )
        self.records.load(rows, owner, moves)
        self._replay()
        training.tape.seen_forward, training.tape.rows = training.tape.batch, None
        training.summed = True

    def _sum_from_zero(self, sums: dict[str, Tensor]) -> None:
        torch._foreach_zero_(list(sums.values()))
        self._mechanism.sum_in(sums)

    # -- recording ------------------------------------------------------------------------------------------------

    def _part(self) -> None:
        """One part from the records in their buffers to the sum, as `Session.step` does it."""
        session, records, training = self.session, self.records, self.session.training
        training.tape.next_batch()
        training.tape.logical += 1  # weights that rules compute from parameters belong to the part that uses them
        training.tape.rows = RowMap.regular(len(records.x), session.config.views, records.owner >= 0)
        session.backward(records.x, records.y, records.moves, records.owner)
        training.accumulate(training.tape.gradients())

    def _blind_part(self) -> None:
        """`_part` without a look at any value: what came of it would hold for all other records."""
        tape = self.session.training.tape
        tape.blind = True
        try:
            self._part()
        finally:
            tape.blind = False

    def _record(self) -> None:
        session = self.session
        training = session.training
        self._replay, self._facts = None, facts(session)
        try:
            with torch.random.fork_rng(devices=[session.device] if session.device.type == "cuda" else []):
                self._replay = self._recorded()
        except RuntimeError as error:  # whatever the library or the driver could not do, the ordinary part can
            self.reason = " ".join(str(error).split("\n")[:2]).strip()
            self._say()
        finally:
            training.tape.clear()
            training.tape.rows = None
            training.tape.logical += 1
            self._mechanism.bind(training.tape.parameters, session.sampler.expected_batch)  # forgets made-up sums

    def _recorded(self) -> Callable[[], None]:
        self.records.make_up(0)
        self._sum_from_zero(self.sums)
        watch = Watch()
        with unchanged(self.session.model, self.session.device):
            self._blind_part()
            with watch:
                self._blind_part()
        replay = self._recorder(self._blind_part)
        if not self._agrees(replay):
            raise Unrecordable("on made-up records the recording does not add what the ordinary part adds")
        #: what the recording reads and others may forget: a cached table, say
        self._kept = watch.read
        return replay

    def _agrees(self, replay: Callable[[], None]) -> bool:
        """Whether ordinary and replayed parts add up alike over several batches.

        Of made-up records: what comes of it shows in how the run behaves, so it must not depend on anybody's data.
        """
        ordinary = {name: torch.zeros_like(total) for name, total in self.sums.items()}
        self._sum_from_zero(self.sums)
        alike = torch.ones((), dtype=torch.bool, device=self.session.device)
        for trial in range(1, TRIALS + 1):
            self.records.make_up(trial)
            for add, sums in ((self._part, ordinary), (replay, self.sums)):
                self._mechanism.sum_in(sums)
                torch.manual_seed(trial)
                add()
            alike &= close(self.sums, ordinary, HALF if self.session.halved else FULL)
        return bool(alike)

    def _say(self) -> None:
        asked = "compile" if self.session.config.compile else "graph"
        warnings.warn(f"{asked} is on, but parts run as usual: {self.reason}", stacklevel=4)


class CudaRecorder:
    """A computation as a CUDA graph. It must have run before, so that libraries have chosen their kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, part: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.device):
            usual, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(usual)
            with torch.cuda.stream(side), _refused_waiting():
                part()
            usual.wait_stream(side)
            gc.collect()  # no node of an earlier backward pass may tie the recording to another stream
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=side):  # with PyTorch's own generator, which dropout draws from
                    part()
            finally:
                torch.cuda.set_stream(usual)  # where it fails, PyTorch may leave the other one behind
        return Recording(graph, part)


@dataclass(frozen=True)
class Recording:
    """A recorded computation, with whatever it reads: a graph knows addresses and keeps no tensor alive."""

    graph: torch.cuda.CUDAGraph
    part: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@contextmanager
def _refused_waiting() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Records:
    """Where a recorded part finds its records, in tensors that keep their addresses."""

    def __init__(self, session: Session) -> None:
        rows, config = session.physical_rows, session.config
        assert rows is not None, "parts have a static size"
        self.session = session
        self._picked = torch.zeros(2, rows, dtype=torch.long, device=session.device)
        self.x, self.y = (t.new_zeros(rows, *t.shape[1:]) for t in (session.inputs, session.y))
        self.moves = torch.zeros(rows * config.views, 4, dtype=torch.long, device=session.device)

    @property
    def owner(self) -> Tensor:
        return self._picked[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self._picked, self.x, self.y, self.moves]

    def load(self, rows: Tensor, owner: Tensor, moves: Tensor) -> None:
        """The records of one part; the host does not wait for the device."""
        if len(rows) != len(self.x):
            raise RuntimeError(f"a part has {len(rows)} rows where {len(self.x)} were recorded")
        self._picked.copy_(sent(torch.stack([rows, owner]), self._picked.device))
        torch.index_select(self.session.inputs, 0, self._picked[0], out=self.x)
        torch.index_select(self.session.y, 0, self._picked[0], out=self.y)
        self.moves.copy_(moves)

    def make_up(self, trial: int) -> None:
        """Random records, a quarter of them padding; from the second trial on one is not a number, and padding is infinite."""
        rows, device, config = len(self.x), self.x.device, self.session.config
        generator = torch.Generator(device).manual_seed(trial)
        self.x.copy_(torch.randn(self.x.shape, generator=generator, device=device))
        self.y.copy_(torch.randint(0, self.session.dataset.classes, self.y.shape, generator=generator, device=device))
        self.owner.copy_(torch.arange(rows, device=device))
        self.owner[rows - rows // 4 :] = -1
        self.moves.copy_(draw(rows, config.views, config.augment, generator))
        if trial > 1 and self.x.is_floating_point():
            self.x[self.owner < 0] = float("inf")
            self.x[: min(1, rows // 2)] = float("nan")


class Watch(TorchDispatchMode):
    """Follows a part: what it reads that it did not make (``read``), and whether the host looks at the device's values."""

    LOOKS = frozenset(
        f"aten::{name}" for name in
        ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
    )  # fmt: skip

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device, self.read = device, list[torch.UntypedStorage]()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._schema.name
        masked = name.startswith("aten::index") and any(t.dtype == torch.bool for t in given)
        if (name in self.LOOKS or masked) and any(t.device.type == self.device for t in given):
            raise Unrecordable(
                f"a part lets the host read a value ({name}), which a recording would repeat for other records"
            )
        for t in given:
            if self._new(t):
                self.read.append(t.untyped_storage())
        out = func(*args, **(kwargs or {}))
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        places = {t.device.type for t in (*given, *made)}
        if name in ("aten::_to_copy", "aten::copy_") and len(places) > 1:
            raise Unrecordable("a part moves a tensor between host and device")
        for t in made:
            self._new(t)
        return out

    def _new(self, t: Tensor) -> bool:
        address = t.untyped_storage().data_ptr()
        known = address in self._known
        self._known.add(address)
        return not known


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Refuse what a recording would not repeat: numbers drawn on the host, and state that a forward pass leaves in modules."""
    kept = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    before = _host_state(model, device)
    try:
        yield
        if any(buffer._version != version for buffer, version, _ in kept):
            raise Unrecordable("the forward pass writes to a buffer of the model")
        if before != _host_state(model, device):
            raise Unrecordable("the forward pass draws random numbers on the host, or changes an attribute of a module")
    finally:
        for buffer, version, value in kept:
            if buffer._version != version:
                buffer.copy_(value)


def _host_state(model: nn.Module, device: torch.device) -> bytes:
    scalar = (bool, int, float, str, type(None))
    plain = [{k: v for k, v in vars(m).items() if isinstance(v, scalar)} for m in model.modules()]
    own = None if device.type == "cpu" else torch.get_rng_state().tolist()
    drawn = random.getstate(), np.random.get_state(), own  # noqa: NPY002  (what old modules draw from)
    return pickle.dumps((drawn, plain))


def refusal(session: Session) -> str | None:
    """Why the parts of this session cannot be recorded, from its options; None if nothing speaks against it."""
    training, mechanism = session.training, session.training.mechanism
    if not session.config.pad:
        return "parts have as many rows as were drawn; pad=true gives them a static size"
    if session.units.grouped:
        return "units of several records: how many owners a part has varies"
    if not session.workers.alone:
        return "several workers step together"
    if session.judge is not None or session.importance is not None:
        return "selective updates and importance sampling look at every part"
    if session.config.non_private:
        return "non_private reads the loss of every part"
    if type(mechanism) is not GaussianMechanism or type(training.tape) is not Tape:
        return f"mechanism {mechanism.name!r} keeps more than a sum from part to part"
    if type(mechanism.clipping).side_query is not ClippingRule.side_query:
        return f"clipping rule {type(mechanism.clipping).__name__} asks every part for more than its gradients"
    if any(_hooks(module) for module in session.model.modules()):
        return "a module has hooks, which would run once and not for every part"
    return None


def _hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def facts(session: Session) -> Any:
    """Everything that a recording has fixed beside shapes. Asked for at every step: when it changes, the recording goes."""
    mechanism = session.training.mechanism
    rule = getattr(mechanism, "clipping", None)
    found: list[Any] = [
        id(mechanism), id(getattr(mechanism, "geometry", None)), id(rule), repr(vars(rule)),
        id(session.criterion), id(session.forward), session.halved, session.physical_rows, session.training.tape.strategy,
    ]  # fmt: skip
    waiting: list[nn.Module] = [session.model]
    while waiting:
        module = waiting.pop()
        found.append((id(module), module.training, _hooks(module)))
        for t in (*module._parameters.values(), *module._buffers.values()):
            found.append(None if t is None else (t.data_ptr(), t.requires_grad))
        waiting.extend(child for child in module._modules.values() if child is not None)
    return found


def close(sums: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> Tensor:
    """Whether every parameter's sum is finite and the expected one up to rounding; as a tensor, nobody waits."""
    sizes = torch.stack(torch._foreach_norm(list(expected.values())))
    apart = torch.stack(torch._foreach_norm(torch._foreach_sub([sums[n] for n in expected], list(expected.values()))))
    whole = torch.linalg.vector_norm(sizes)
    return torch.isfinite(whole) & (whole > 0) & (apart <= tolerance * sizes.clamp(min=1e-3 * whole)).all()


__all__ = ["CudaRecorder", "PartGraph", "Recorder", "Unrecordable", "Watch", "refusal"]
