"""One module in private training: the tape, the mechanism, the sampler and the optimizer's step, wired together."""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from erlangen import joint, sharded
from erlangen.accounting import Accountant, sequence
from erlangen.accounting import noise_multiplier as calibrated
from erlangen.gradients.attach import attach, detach, is_attached
from erlangen.gradients.independence import check_independence, check_loss, check_padding, known_problems
from erlangen.gradients.pages import keep_pages
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.mechanisms import Context, Mechanism, SecureNoise, StreamNoise, make_clipping, make_mechanism, mechanisms
from erlangen.sampling import PoissonSampler, PrivateLoader, Sampler, ShuffledBatches, Units, find_physical_batch
from erlangen.sampling.loader import refuse_iterable
from erlangen.sampling.records import refuse_repeats, refuse_sampler
from erlangen.sampling.tickets import Pass, Tickets
from erlangen.sampling.units import unit_labels
from erlangen.workers import Workers

if TYPE_CHECKING:
    from dp_accounting import DpEvent


#: records whose shapes are looked at before training
LOOKED_AT = 16
_SERIAL = itertools.count()


class PrivateTraining:
    """The state of private training. Made by `prepare`, kept by the engine."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, tape: Tape, mechanism: Mechanism, sampler: Sampler,
        accountant: Accountant, denoiser: Callable[..., Any] | None, workers: Workers | None = None,
    ) -> None:  # fmt: skip
        # a mechanism may bring its own recorder (clipless sums gradients without a per-sample tape)
        self.module, self.optimizer = module, optimizer
        self.tape: Tape = mechanism.recorder(tape) if hasattr(mechanism, "recorder") else tape
        self.mechanism, self.sampler, self.accountant, self.denoiser = mechanism, sampler, accountant, denoiser
        self._serial = mechanism.serves = next(_SERIAL)
        self.workers = Workers() if workers is None else workers
        joint.refuse_unmerged(mechanism, self.workers)
        self.loader: PrivateLoader
        #: called with the event before each release; a ledger writes here
        self.before_release: list[Callable[[DpEvent], None]] = []
        #: shown each physical batch before it is clipped: diagnostics that no guarantee covers
        self.watch: list[Callable[[PerSampleGradients], None]] = []
        #: what else a step releases where the mechanism has σ (a selective update's decision); part of the step's event
        self.extras: list[Callable[[float], DpEvent]] = []
        #: called after each update of the weights; a projection is post-processing
        self.after_step: list[Callable[[], None]] = [mechanism.after_step] if hasattr(mechanism, "after_step") else []
        self._last, self._pending, self._tickets = True, False, Tickets()
        #: whether the announced batch is in the mechanism's sum already: a recorded part adds it without the tape
        self.summed = False
        self._event: tuple[tuple[float, float, int], DpEvent] | None = None
        #: the expected batch at which the loader drew the batch in hand
        self._drawn: float | None = None
        #: which draw of the sampler that batch is; None where it was announced by hand
        self._draw: int | None = None
        #: what the other workers know of the mechanism's state
        self.known: dict[str, Any] = {}
        self._updates = 0

    # -- one step -------------------------------------------------------------------------------------------------

    def announce(self, rows: RowMap, first: bool = True, last: bool = True, source: Pass | None = None) -> None:
        """The next batch holds these rows; it is the ``first`` / ``last`` physical part of its logical batch.

        ``source`` is the loader's pass it was drawn in; batches announced by hand have none.
        """
        if first and self._pending:  # a loop was left in the middle of a logical batch: nothing of it is released
            self.mechanism.bind(self.tape.parameters, self.sampler.expected_batch)
            self._pending, self._event = False, None  # noise may be made for the batch of this moment from here on
        self._tickets.draw(source, tried=self.tape.next_batch())
        self.tape.logical += first
        self._drawn, self._draw = (None, None) if source is None else (source.expected_batch, source.draw)
        self.tape.rows, self._last, self.summed = rows, last, False

    @torch.no_grad()  # the tape's activations carry a graph that sums and norms must not extend
    def accumulate(self, gradients: PerSampleGradients) -> None:
        """Clip one physical batch and add it to the mechanism's sum."""
        self._require_own_mechanism()
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for shown in self.watch:
                shown(gradients)
            self.mechanism.accumulate(gradients)

    @torch.no_grad()
    def take(self) -> bool:
        """Clip and sum the batch of the last backward pass. After the last part, set private gradients: True."""
        gradients = None if self.summed else self.tape.gradients()
        self._tickets.take()
        if gradients is not None:
            self.accumulate(gradients)
        self._pending, self.summed = True, False
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
        self._hand_over(private)

    def noised(self) -> joint.Private:
        """Write the release down, add the noise, post-process. Of several workers only the first does this."""
        self._require_own_mechanism()
        self.account()
        released = self.mechanism.finish(self.sampler.expected_batch)
        if self.denoiser is None and not hasattr(self.optimizer, "set_noise_variance"):
            return joint.Private(released, None)
        scale = self.sampler.expected_batch**-2
        square = lambda s: s * s * scale  # noqa: E731
        variances = {name: square(self.mechanism.noise_std(name)) for name in released}
        if self.denoiser is not None:
            return joint.Private(self.denoiser(released, variances), None)
        return joint.Private(released, variances)

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
        self.accountant.record(event)
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

    def _clear_gradients(self) -> None:
        for parameter in self.tape.parameters.values():
            parameter.grad = None

    def event(self) -> DpEvent:
        """One step's event at the σ of this moment and the rate at which the batch in hand was drawn (that of this moment if
        there is none): a schedule of either is accounted as it goes."""
        sigma = self.mechanism.noise_multiplier
        now = (sigma, self.drawn, len(self.extras))
        if self._event is None or self._event[0] != now:
            self._event = (now, self.step_event(sigma, self.drawn))
        return self._event[1]

    @property
    def drawn(self) -> float:
        """The expected batch at which the batch in hand was drawn; the next one's if there is none."""
        return self.sampler.expected_batch if self._drawn is None else self._drawn

    @property
    def draw(self) -> int:
        """Which of the sampler's draws the batch in hand is; all workers divide the same one."""
        return self.sampler.step if self._draw is None else self._draw

    def step_event(self, sigma: float, expected_batch: float | None = None) -> DpEvent:
        """Everything that one step releases at noise multiplier σ, amplification included."""
        sampler = self.sampler if expected_batch is None else self.sampler.at(expected_batch)
        own = sampler.event(self.mechanism.event(sigma))
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
        every_record = 1.0  # the event of a step is amplified already
        sigma = calibrated(
            target_epsilon,
            delta,
            every_record,
            steps,
            method=method,  # type: ignore[arg-type]
            make_event=self.step_event,
            history=history,
        )
        self.set_noise_multiplier(sigma)

    def set_noise_multiplier(self, sigma: float) -> None:
        """Settle σ before the first step."""
        self.mechanism.noise_multiplier = sigma
        self.mechanism.bind(self.tape.parameters, self.sampler.expected_batch)
        self._event = None

    def remove(self) -> None:
        if hasattr(self.tape, "detach"):
            self.tape.detach(self.module)
        detach(self.module)
        for name in ("step", "zero_grad", "add_param_group"):
            self.optimizer.__dict__.pop(name, None)
        self.optimizer.__dict__.update(self._shadowed)
        for name, value in self._loud.items():
            setattr(self._wrapper, name, value)

    def install(self, wrapper: nn.Module | None = None) -> None:
        """From here on the module records and the optimizer steps privately; a DDP ``wrapper`` keeps quiet."""
        if any(p.device.type == "cpu" for p in self.module.parameters()):
            keep_pages()
        self._wrapper = self.module if wrapper is None else wrapper
        self._loud = joint.silence(self._wrapper)
        if hasattr(self.tape, "attach"):
            self.tape.attach(self.module)
        else:
            attach(self.module, self.tape)
        optimizer, training = self.optimizer, self
        self._shadowed: dict[str, Any] = {
            n: optimizer.__dict__[n] for n in ("step", "zero_grad") if n in optimizer.__dict__
        }
        plain_step, plain_zero = optimizer.step, optimizer.zero_grad

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            """Private step: noise is added once per logical batch; physical parts before the last only add up."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if training.take():
                plain_step()
                training.updated()
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


def prepare(
    module: nn.Module, optimizer: Optimizer, data_loader: DataLoader, accountant: Accountant, *, noise_multiplier: float | None,
    max_grad_norm: Any, poisson_sampling: bool, loss_reduction: str, mechanism: str | Mechanism,
    mechanism_options: Mapping[str, Any], clipping: Any, clipping_options: Mapping[str, Any],
    max_physical_batch: int | str | None, unit: Any, batch_first: bool, strategy: str, criterion: Any, denoiser: Any,
    check: bool, seed: int | None, run_id: str, secure: bool, workers: Workers | None = None,
) -> PrivateTraining:  # fmt: skip
    """Check everything, then install. Nothing is changed if anything is wrong."""
    wrapper, module, workers = module, joint.unwrapped(module), workers or Workers()
    refuse_iterable(data_loader)
    refuse_sampler(data_loader)
    refuse_module(module)
    parameters = _trainable(module, optimizer)
    dataset: Any = data_loader.dataset
    labels = unit_labels(dataset, unit)
    refuse_repeats(dataset, labels)
    units = Units(
        len(dataset),
        labels,
        unit if isinstance(unit, str) else "record" if unit is None else "group",
    )
    kind = PoissonSampler if poisson_sampling else ShuffledBatches
    assert data_loader.batch_size is not None
    sampler = kind(units.count, data_loader.batch_size * workers.count, seed, run_id, secure)
    noise = SecureNoise() if secure else StreamNoise(seed, run_id)
    apart = sharded.is_sharded(module)
    if isinstance(mechanism, str):
        if apart:
            sharded.refuse_by_name(mechanism)
        assert noise_multiplier is not None
        if max_grad_norm is None and not getattr(mechanisms().get(mechanism), "clips", True):
            max_grad_norm = 1.0  # asked of every clipping rule, read by none here
        rule = make_clipping(str_or_rule(clipping), max_grad_norm, **clipping_options)
        context = Context(noise_multiplier, rule, noise, module, sampler.expected_batch, mechanism_options)
        built = make_mechanism(mechanism, context)
    else:
        built = _given(mechanism, noise_multiplier, max_grad_norm)
        if secure and not built.noise.secure:
            built.noise = noise
    if apart:
        built = sharded.adopt(built, noise, workers)
        if denoiser is not None or max_physical_batch == "auto":
            raise ValueError("denoiser and max_physical_batch='auto' are not for sharded parameters (FSDP): leave them out")
    if criterion is not None and hasattr(built, "use_criterion"):
        built.use_criterion(criterion)
    built.bind(parameters, sampler.expected_batch)
    joint.require_alike(workers, built, sampler, units, f"{seed} {run_id}", dataset)
    tape = Tape(parameters, loss_reduction, strategy, batch_first)
    tape.ignore(p for p in module.parameters() if p.requires_grad and id(p) not in {id(q) for q in parameters.values()})
    tape.metric, tape.private_sizes = built.metric, poisson_sampling
    if apart:
        sharded.record_gathered(module, tape)
        if check:
            not_checked("its parameters are sharded; check it before fully_shard")
        check = False
    probe = _probe_inputs(module, data_loader)
    limit = workers.decide(lambda: _physical_limit(module, tape, probe, max_physical_batch))
    if probe is None and check:
        not_checked("batches are not (inputs, …) tensors")
    if probe is not None and check:
        _check(module, probe, criterion, loss_reduction)
        _check_padding(module, data_loader)
    elif criterion is not None:
        check_loss(criterion, torch.zeros(1), None, loss_reduction)
    training = PrivateTraining(module, optimizer, tape, built, sampler, accountant, denoiser, workers)
    training.loader = PrivateLoader(data_loader, sampler, units, limit, training.announce, workers)
    sampler.join(workers)
    if not apart:
        workers.align(module)
    training.install(wrapper)
    return training


def str_or_rule(clipping: Any) -> Any:
    return clipping.replace("_", "-") if isinstance(clipping, str) else clipping


def refuse_module(module: nn.Module) -> None:
    if is_attached(module):
        raise RuntimeError("this module is private already: call engine.remove() before making it private again")
    problems = known_problems(module)
    if problems:
        raise ValueError("this module cannot train privately:\n  " + "\n  ".join(problems))


def _trainable(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by their names in the module."""
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates its closure several times a step, each a release: use a first-order optimizer"
        )
    if getattr(getattr(optimizer.step, "__func__", None), "is_private", False):
        raise RuntimeError("this optimizer is private already: call engine.remove() first")
    names = {id(p): name for name, p in module.named_parameters()}
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in ours if id(p) not in names]
    if strangers:
        raise ValueError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not the module's (shapes {strangers[:3]}): they "
            "would train without privacy. Build the optimizer from module.parameters()."
        )
    trainable = {names[id(p)]: p for p in ours if p.requires_grad}
    if not trainable:
        raise ValueError("the optimizer holds no parameter of the module that requires a gradient: nothing to train")
    return {name: trainable[name] for name, _ in module.named_parameters() if name in trainable}


def _given(mechanism: Mechanism, noise_multiplier: float | None, bound: Any) -> Mechanism:
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"mechanism is a {type(mechanism).__name__}; pass a registered name or a Mechanism")
    if noise_multiplier is not None and noise_multiplier != mechanism.noise_multiplier:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier} but the mechanism was built with {mechanism.noise_multiplier}; leave one out"
        )
    if bound is not None and bound != mechanism.sensitivity:
        raise ValueError(
            f"max_grad_norm is {bound} but the mechanism's sensitivity is {mechanism.sensitivity}; leave one out"
        )
    return mechanism


def _probe_inputs(module: nn.Module, loader: DataLoader) -> tuple[Tensor, Any] | None:
    """Three made-up rows of the data's shape and type, and real targets; None if batches are not (inputs, …)."""
    dataset: Any = loader.dataset
    rows = [dataset[i % len(dataset)] for i in range(3)]
    batch = loader.collate_fn(rows)
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(first, Tensor):
        return None
    parameter = next(module.parameters())
    if first.is_floating_point():
        floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
        if first.dtype not in floating and not torch.is_autocast_enabled():
            raise TypeError(
                f"the data is {first.dtype} but the module's parameters are {floating[0]}: convert one, e.g. x.to({floating[0]})"
            )
        first = torch.randn_like(first)
    targets = batch[1].to(parameter.device) if len(batch) > 1 and isinstance(batch[1], Tensor) else None
    return first.to(parameter.device), targets


def _check(module: nn.Module, probe: tuple[Tensor, Any], criterion: Any, reduction: str) -> None:
    inputs, targets = probe
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = module(inputs)
    except Exception as error:  # the module wants other arguments than the first of the batch; its own call will tell
        not_checked(f"the module could not be called on the first part of a batch ({str(error)[:80]})")
        return
    check_independence(module, (inputs,))
    if criterion is not None:
        check_loss(criterion, out if isinstance(out, Tensor) else torch.zeros(1), targets, reduction)


def _check_padding(module: nn.Module, loader: DataLoader) -> None:
    """Records of different shapes are padded to the longest of a batch: nobody's output may depend on the others' length."""
    dataset: Any = loader.dataset
    seen = min(LOOKED_AT, len(dataset))
    rows = [dataset[k * len(dataset) // seen] for k in range(seen)]
    device = next(module.parameters()).device
    first = lambda batch: (batch[0] if isinstance(batch, (list, tuple)) else batch).to(device)  # noqa: E731
    try:
        sizes = [first(loader.collate_fn([row])).numel() for row in rows]
        if len(set(sizes)) == 1:
            return
        short, long = rows[min(range(len(rows)), key=sizes.__getitem__)], rows[max(range(len(rows)), key=sizes.__getitem__)]
        alone, beside = first(loader.collate_fn([short])), first(loader.collate_fn([short, long]))[:1]
    except Exception:  # its own call will tell
        return
    check_padding(module, alone, beside)


def not_checked(why: str) -> None:
    warnings.warn(
        f"whether the module mixes samples was not checked: {why}. If one record's output depends on the others, the "
        "guarantee does not hold; erlangen.gradients.independence.check_independence(module, inputs) checks by hand.",
        stacklevel=4,
    )


def _physical_limit(
    module: nn.Module, tape: Tape, probe: tuple[Tensor, Any] | None, wanted: int | str | None
) -> int | None:
    if wanted is None:
        return None
    if wanted == "auto":
        if probe is None:
            raise ValueError("max_physical_batch='auto' needs batches of (inputs, …) to measure; give a number")
        attach(module, tape)
        try:
            return find_physical_batch(module, tape, (probe[0],))
        finally:
            detach(module)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"max_physical_batch is {wanted!r}; give a number of rows ≥ 1, or 'auto'")
    return wanted
