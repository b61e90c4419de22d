"""One module in private training: the tape, the mechanism, the sampler and the optimizer's step, wired together."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from erlangen import joint, sharded
from erlangen.accounting import Accountant, Protected, sequence
from erlangen.accounting import noise_multiplier as calibrated
from erlangen.gradients.attach import attach, detach
from erlangen.gradients.pages import keep_pages
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.mechanisms import Mechanism
from erlangen.private_step import put_on, take_off
from erlangen.sampling import PrivateLoader, Sampler
from erlangen.sampling.samplers import Draw
from erlangen.sampling.tickets import Pass, Tickets
from erlangen.workers import Workers

if TYPE_CHECKING:
    from dp_accounting import DpEvent


_SERIAL = itertools.count()

_RATE_BETWEEN_PARTS = (
    "the learning rate (or another option of the optimizer) changed between two physical parts of one batch: a scheduler steps at "
    "every part, and how many parts there are depends on who was drawn, which no noise covers. Step it once for each logical "
    "batch: if engine.stepped: scheduler.step()"
)
_OUTSIDE = (
    "gradients reached parameters outside their layers (a weight penalty in the loss, or F.linear(x, layer.weight) in the loop): "
    "they are dropped, because no clipping bounds them. Use the optimizer's weight_decay, and call layers as modules."
)
_TRAINED_ELSEWHERE = (
    "another optimizer trains {name!r}, a parameter of this module that the private one does not hold, with gradients that nothing "
    "clips and no noise covers: they reached it outside its layer (F.linear(x, layer.weight), a tied table). Give all parameters "
    "that train to one optimizer, in groups, before make_private"
)
_NEW_LAYER = (
    "{name!r} was put into the module since it was made private (a new head, an adapter): nothing clips its gradients, and whoever "
    "trains it adds no noise. Call engine.remove(), build an optimizer of the parameters that train, and make_private again; or "
    "freeze it (requires_grad_(False))"
)
_COPIED = (
    "this loader and the training that it belongs to are copies, and copies of a private module and of its optimizer are ordinary "
    "ones: nothing would be clipped, noised or accounted. Call make_private with the copied module, an optimizer and a DataLoader"
)


class PrivateTraining:
    """The state of private training. Made by `prepare.prepare`, kept by the engine."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, tape: Tape, mechanism: Mechanism, sampler: Sampler,
        accountant: Accountant, denoiser: Callable[..., Any] | None, workers: Workers | None = None,
    ) -> None:  # fmt: skip
        self.module, self.optimizer = module, optimizer
        self.tape: Tape = mechanism.recorder(tape)
        self.mechanism, self.sampler, self.accountant, self.denoiser = mechanism, sampler, accountant, denoiser
        self._serial = mechanism.serves = next(_SERIAL)
        self.workers = Workers() if workers is None else workers
        joint.refuse_unmerged(mechanism, self.workers)
        self.loader: PrivateLoader
        #: whom its releases protect; None where that is written down elsewhere
        self.protected: Protected | None = None
        #: called with the event before each release; a ledger writes here
        self.before_release: list[Callable[[DpEvent], None]] = []
        #: shown each physical batch before it is clipped: diagnostics that no guarantee covers
        self.watch: list[Callable[[PerSampleGradients], None]] = []
        #: what else a step releases where the mechanism has σ (a selective update's decision); part of the step's event
        self.extras: list[Callable[[float], DpEvent]] = []
        #: called after each update of the weights; a projection is post-processing
        self.after_step: list[Callable[[], None]] = [mechanism.after_step]
        self._last, self._pending, self._tickets = True, False, Tickets()
        #: whether the announced batch is in the mechanism's sum already: a recorded part adds it without the tape
        self.summed = False
        #: the event of the last release that was written down
        self.charged: DpEvent | None = None
        #: the expected batch at which the loader drew the batch in hand
        self._drawn: float | None = None
        #: which draw of the sampler that batch is; None where it was announced by hand
        self._draw: Draw | None = None
        #: the draw after the last one that was released: with worker processes loaders are ahead, by more the smaller batches are
        self.place = sampler.step
        #: whether who announces by hand draws by `sampler`; otherwise nobody knows how, and nothing is amplified
        self.own_draws = False
        self._by_hand = False
        #: what the other workers know of the mechanism's state
        self.known: dict[str, Any] = {}
        self._updates = 0
        #: whether the last call of the optimizer's step was that of a logical batch's last part, and moved the weights
        self.stepped = False
        self._options: list[dict[str, Any]] = []
        #: the releases at which the target ε is reached, and that ε
        self._planned: tuple[int, float] | None = None
        #: parameters of the module that nobody trains privately, and their versions when the batch in hand was drawn
        own = {id(p) for p in self.tape.parameters.values()}
        self._others = {n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in own}
        self._versions: dict[str, int] = {}
        #: all parameters that were there when layers began to record, held: no other one can have the number of one that left
        self._there: dict[int, nn.Parameter] = {}
        #: gradients from before would be mistaken for those of the first backward pass
        self._looked = any(p.grad is not None for p in self.tape.parameters.values())

    # -- one step -------------------------------------------------------------------------------------------------

    def announce(self, rows: RowMap, first: bool = True, last: bool = True, source: Pass | None = None) -> None:
        """The next batch holds these rows; it is the ``first`` / ``last`` physical part of its logical batch.

        ``source`` is the loader's pass it was drawn in. Batches announced by hand have none, and cost what a release costs that
        everybody is in: how they were chosen is not known here.
        """
        if source is not None and first:
            self._require_own_layers()
        if first and self._pending:  # a loop was left in the middle of a logical batch: nothing of it is released
            self.mechanism.bind(self.tape.parameters, self.sampler.expected_batch)
            self._pending = False
        backward, used = self.tape.complete, not self._there or self.tape.called == self.tape.batch
        self._tickets.draw(source, self.tape.next_batch(), backward, used)
        self.tape.logical += first
        if first:
            self._options = []
        self._drawn, self._draw = (None, None) if source is None else (source.expected_batch, source.draw)
        self._by_hand = source is None and not self.own_draws
        self.tape.rows, self._last, self.summed = rows, last, False
        self.tape.watched = bool(self.watch)
        self._versions = {name: p._version for name, p in self._others.items()}

    @torch.no_grad()  # the tape's activations carry a graph that sums and norms must not extend
    def accumulate(self, gradients: PerSampleGradients) -> None:
        """Clip one physical batch and add it to the mechanism's sum."""
        self._require_own_mechanism()
        with exact_float32():
            for shown in self.watch:
                shown(gradients.unfiltered())
            self.mechanism.accumulate(gradients)

    @torch.no_grad()
    def take(self) -> bool:
        """Clip and sum the batch of the last backward pass. After the last part, set private gradients: True."""
        self._require_one_rate()
        self._pending = True  # first: whatever is broken off here may have been added in part, and is forgotten with the batch
        gradients = None if self.summed else self.tape.gradients()
        self._tickets.take()
        self._remark_on_dropped()
        self._drop_gradients_of_others()
        if gradients is not None:
            self.accumulate(gradients)
        self.summed = False
        if not self._last:
            self._clear_gradients()
            return False
        self.release()
        return True

    @torch.no_grad()
    def release(self) -> None:
        """Set the private gradient of all that was accumulated since the last release; once per logical batch."""
        private = self.noised() if self.workers.alone else joint.release(self)
        self._pending, self._drawn = False, None
        if self._draw is not None:  # of loops that overlap, one may be behind the other's release
            self.place = max(self.place, self._draw.step + 1)
        self._hand_over(private)

    def noised(self) -> joint.Private:
        """Write the release down, add the noise, post-process. Of several workers only the first does this."""
        self._require_own_mechanism()
        self.account()
        with exact_float32():
            released = self.mechanism.finish(self.sampler.expected_batch)
        if self.denoiser is None and not hasattr(self.optimizer, "set_noise_variance"):
            return joint.Private(released, None)
        scale = self.sampler.expected_batch**-2
        square = lambda s: s * s * scale  # noqa: E731
        variances = {name: square(self.mechanism.noise_std(name)) for name in released}
        if self.denoiser is not None:
            return joint.Private(self.denoiser(released, variances), None)
        return joint.Private(released, variances)

    def _require_one_rate(self) -> None:
        """What the optimizer is told may change with each logical batch, not with its parts: their number is private."""
        if self._last and not self._pending:  # one part: nothing to compare, and tensors stay where they are
            return
        value = lambda v: v.tolist() if isinstance(v, torch.Tensor) else v  # noqa: E731
        now = [{k: value(v) for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if self._pending and self._options not in ([], now):  # none: one part, whose step was broken off and is tried again
            raise RuntimeError(_RATE_BETWEEN_PARTS)
        self._options = now

    def _remark_on_dropped(self) -> None:
        """Once: private gradients replace whatever else a backward pass left on the parameters."""
        if not self._looked and any(p.grad is not None for p in self.tape.parameters.values()):
            warnings.warn(_OUTSIDE, stacklevel=4)
        self._looked = True

    def _require_own_mechanism(self) -> None:
        """One sum is one batch of one training: two that share a mechanism could release a record twice behind one noise."""
        if self.mechanism.serves not in (None, self._serial):
            raise RuntimeError(
                f"the mechanism {self.mechanism.name!r} serves another training since: its sum would hold batches of both. Build a "
                "mechanism for each training"
            )

    def account(self) -> None:
        """Before anything of this release is used."""
        event = self.event()
        if self._planned is not None and self.accountant.steps >= self._planned[0]:
            warnings.warn(
                f"the steps for which σ was chosen are taken: with this one training costs more than the target ε = "
                f"{self._planned[1]:g}. Stop here, or give make_private_with_epsilon the epochs you train for",
                stacklevel=6,
            )
            self._planned = None
        self.accountant.record(event, protected=self.protected)
        self.charged = event
        for told in self.before_release:
            told(event)

    def _hand_over(self, private: joint.Private) -> None:
        parameters = self.tape.parameters
        if private.variances is not None:
            self.optimizer.set_noise_variance(  # type: ignore[attr-defined]
                {parameters[n]: v for n, v in private.variances.items()}
            )
        self._refuse_raw_gradients()
        for name, parameter in parameters.items():
            parameter.grad = private.gradient[name].to(parameter.dtype)

    def updated(self) -> None:
        """After each update of the weights: projections, and now and then a look at the other workers."""
        for told in self.after_step:
            told()
        self._updates += 1
        joint.compare(self, self._updates)

    def agree(self) -> None:
        """All workers have the same weights, or everybody raises: before they are evaluated and kept."""
        joint.compare(self, self._updates, now=True)

    def _refuse_raw_gradients(self) -> None:
        """What the optimizer steps is either private or has no gradient at all."""
        private = {id(p) for p in self.tape.parameters.values()}
        strangers = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in private]
        if any(p.grad is not None for p in strangers):
            for p in strangers:
                p.grad = None
            raise RuntimeError(
                "a parameter of the optimizer that was frozen when the module was made private has a gradient without "
                "noise (it was unfrozen since, or the gradient is from before). Call make_private again after changing "
                "which parameters train."
            )

    def _require_own_layers(self) -> None:
        """What a batch is about to meet is recorded, all of it, and stepped privately."""
        if not self._there:  # removed, or sharded
            return
        if "step" not in self.optimizer.__dict__:
            raise RuntimeError(_COPIED)
        for name, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in self._there:
                raise RuntimeError(_NEW_LAYER.format(name=name))

    def _drop_gradients_of_others(self) -> None:
        """Layers leave none; what reached them elsewhere is nobody's to use, and whoever has used it is found by what moved."""
        for name, p in self._others.items():
            if p.grad is not None:
                p.grad = None
                if p._version != self._versions.get(name, p._version):
                    raise RuntimeError(_TRAINED_ELSEWHERE.format(name=name))

    def _clear_gradients(self) -> None:
        for parameter in self.tape.parameters.values():
            parameter.grad = None

    def event(self) -> DpEvent:
        """One step's event as mechanism, companions and sampler are at this moment, at the rate at which the batch in hand was
        drawn (that of this moment if there is none). It is asked anew each time: whatever is moved between two steps is accounted
        as it goes."""
        return self.step_event(self.mechanism.noise_multiplier, self.drawn)

    @property
    def drawn(self) -> float:
        """The expected batch at which the batch in hand was drawn; the next one's if there is none."""
        return self.sampler.expected_batch if self._drawn is None else self._drawn

    @property
    def draw(self) -> Draw:
        """Which of the sampler's draws the batch in hand is; all workers divide the same one."""
        return self.sampler.last if self._draw is None else self._draw

    def step_event(self, sigma: float, expected_batch: float | None = None) -> DpEvent:
        """Everything that one step releases at noise multiplier σ, amplification included."""
        sampler = self.sampler if expected_batch is None else self.sampler.at(expected_batch)
        own = self.mechanism.event(sigma) if self._by_hand else sampler.event(self.mechanism.event(sigma))
        return sequence([own, *(extra(sigma) for extra in self.extras)]) if self.extras else own

    # -- before and after -----------------------------------------------------------------------------------------

    def calibrate(
        self, target_epsilon: float, delta: float, steps: int, method: str, history: Sequence[tuple[DpEvent, int]] = ()
    ) -> None:
        """Choose the least σ whose ``steps`` steps, with what was released before, cost at most (ε, δ)."""
        for what in (self.mechanism, self.sampler):
            if what.unsound is not None:
                raise ValueError(
                    f"no noise makes {what.name!r} private: {what.unsound}. Give noise_multiplier to run it all the same "
                    "(ε = ∞), or use its sound form."
                )
        rate = 1.0  # the event of a step is amplified already
        sigma = calibrated(
            target_epsilon, delta, rate, steps, method=method, make_event=self.step_event, history=history  # type: ignore[arg-type]
        )
        self.set_noise_multiplier(sigma)

    def plan(self, steps: int, target_epsilon: float, delta: float) -> None:
        """σ was chosen for this many steps from here; say so when they are taken, and where δ promises too little."""
        units = self.loader.units
        if delta * units.count > 1:
            warnings.warn(
                f"target_delta is {delta:g}, above 1/{units.count}: that allows to publish a {units.name} outright; give less",
                stacklevel=3,
            )
        self._planned = (self.accountant.steps + steps, target_epsilon)

    def set_noise_multiplier(self, sigma: float) -> None:
        """Settle σ before the first step."""
        self.mechanism.noise_multiplier = sigma
        self.mechanism.bind(self.tape.parameters, self.sampler.expected_batch)

    def remove(self) -> None:
        self._there = {}
        if hasattr(self.tape, "detach"):
            self.tape.detach(self.module)
        detach(self.module)
        take_off(self.optimizer, self._replaced)
        for wrapper, name, value in self._loud:
            setattr(wrapper, name, value)

    def install(self, wrapper: nn.Module | None = None) -> None:
        """From here on the module records and the optimizer steps privately; a DDP ``wrapper`` keeps quiet."""
        if any(p.device.type == "cpu" for p in self.module.parameters()):
            keep_pages()
        self._loud = joint.silence(self.module if wrapper is None else wrapper)
        if hasattr(self.tape, "attach"):
            self.tape.attach(self.module)
        else:
            attach(self.module, self.tape)
        if not sharded.is_sharded(self.module):  # gathered parameters are others
            self._there = {id(p): p for p in self.module.parameters()}
        self._replaced = put_on(self.optimizer, self)
