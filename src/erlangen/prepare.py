"""Making a module private: everything that could void the guarantee is looked for first, and then installed."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from erlangen import joint, sharded
from erlangen.accounting import Accountant, Protected
from erlangen.accounting.protected import NAMELESS, require_name
from erlangen.gradients.attach import attach, detach, is_attached, refuse_set_forwards, remark_on_swallowed
from erlangen.gradients.fewer import check_parts
from erlangen.gradients.independence import MixesSamples, check_independence, check_padding
from erlangen.gradients.losses import check_loss, check_some_loss, refuse_by_type
from erlangen.gradients.memory import attributes_untouched, untouched
from erlangen.gradients.problems import known_problems
from erlangen.gradients.tape import Tape
from erlangen.mechanisms import Context, Mechanism, SecureNoise, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.base import reads_clipping
from erlangen.private import PrivateTraining
from erlangen.probe import Form, fitting, forms
from erlangen.sampling import PoissonSampler, PrivateLoader, ShuffledBatches, Units, find_physical_batch
from erlangen.sampling.loader import refuse_iterable
from erlangen.sampling.records import (
    LOOKED_AT,
    digest_of,
    fetched,
    refuse_mixing,
    refuse_repeats,
    refuse_sampler,
    seeded,
)
from erlangen.sampling.units import unit_labels
from erlangen.workers import Workers


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
    remark_on_swallowed(module)
    parameters = _trainable(module, optimizer)
    dataset: Any = data_loader.dataset
    units = _units(dataset, unit)
    protected = Protected(units.name, units.grouping(), digest_of(dataset))
    accountant.require_agreement(protected)
    kind = PoissonSampler if poisson_sampling else ShuffledBatches
    assert data_loader.batch_size is not None
    sampler = kind(units.count, data_loader.batch_size * workers.count, seed, run_id, secure)
    noise = SecureNoise() if secure else StreamNoise(seed, run_id)
    apart = sharded.is_sharded(module)
    if isinstance(mechanism, str):
        if apart:
            sharded.refuse_by_name(mechanism)
        assert noise_multiplier is not None
        rule = _rule(mechanism, clipping, max_grad_norm, clipping_options)
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
    if criterion is not None:
        _refuse_own_parameters(criterion, parameters)
        built.use_criterion(criterion)
    built.bind(parameters, sampler.expected_batch)
    joint.require_alike(workers, built, sampler, units, f"{seed} {run_id}", dataset, check)
    tape = Tape(parameters, loss_reduction, strategy, batch_first)
    tape.ignore(p for p in module.parameters() if p.requires_grad and id(p) not in {id(q) for q in parameters.values()})
    tape.metric, tape.private_sizes = built.metric, poisson_sampling or units.grouped  # a unit may have any number of rows
    tried = forms(module, data_loader)
    limit = workers.decide(lambda: _physical_limit(module, tape, tried, max_physical_batch))
    if apart:
        sharded.record_gathered(module, tape)
        if check:
            not_checked("its parameters are sharded; check it before fully_shard", stacklevel=4)
    if check and not apart:
        refuse_mixing(data_loader, units.grouped)
        counted = tape.private_sizes and built.clips_samples  # others see to what comes back themselves
        _check(module, data_loader, tried, criterion, loss_reduction, batch_first, counted)
        if limit is not None and limit < len(dataset):
            _check_parts(tried)
    elif criterion is not None and check:
        _check_loss(criterion, [], loss_reduction, 0)
    elif criterion is not None:
        check_loss(criterion, torch.zeros(1), None, loss_reduction)
    training = PrivateTraining(module, optimizer, tape, built, sampler, accountant, denoiser, workers)
    training.protected = protected
    training.loader = PrivateLoader(data_loader, sampler, units, limit, training.announce, workers)
    if isinstance(unit, str) and hasattr(dataset, unit):
        training.loader.unit_attribute = unit
    sampler.join(workers)
    if not workers.alone:
        accountant.share(workers.tell(secrets.token_hex(8).encode()).decode())
    if not apart:
        workers.align(module)
    training.install(wrapper)
    return training


def _units(dataset: Any, unit: Any) -> Units:
    """What is protected: records, or the groups that ``unit`` names, lists, or names and lists."""
    name = unit if isinstance(unit, str) else "record" if unit is None else NAMELESS
    if isinstance(unit, Mapping):
        if len(unit) != 1 or not all(isinstance(key, str) and key for key in unit):
            raise ValueError(f"unit has the entries {list(unit)}; give one, a name and its labels: unit={{'patient': labels}}")
        ((name, unit),) = unit.items()
    if unit is not None:
        require_name(name)
    labels = unit_labels(dataset, unit)
    refuse_repeats(dataset, labels)
    return Units(len(dataset), labels, name)


def _rule(mechanism: str, clipping: Any, bound: Any, options: Mapping[str, Any]) -> Any:
    if bound is None and not reads_clipping(mechanism):
        bound = 1.0  # asked of every clipping rule, read by none here
    return make_clipping(clipping.replace("_", "-") if isinstance(clipping, str) else clipping, bound, **options)


def refuse_module(module: nn.Module) -> None:
    if is_attached(module):
        raise RuntimeError("this module is private already: call engine.remove() before making it private again")
    problems = known_problems(module)
    if problems:
        raise ValueError("this module cannot train privately:\n  " + "\n  ".join(problems))
    refuse_set_forwards(module)


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


def _refuse_own_parameters(criterion: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """A loss that learns (class centres, ArcFace) has gradients of its own, which are neither clipped nor noised."""
    known = {id(p) for p in parameters.values()}
    learnt = criterion.named_parameters() if isinstance(criterion, nn.Module) else ()
    own = [name for name, p in learnt if p.requires_grad and id(p) not in known]
    if own:
        raise ValueError(
            f"the loss {type(criterion).__name__} has parameters of its own ({', '.join(own[:3])}), which would train without "
            "privacy. Let a layer of the module hold them, so that the loss has none (the module returns the similarities to class "
            "centres, say), or freeze them: criterion.requires_grad_(False)"
        )


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


def _check(
    module: nn.Module, loader: DataLoader, tried: list[Form], criterion: Any, reduction: str, batch_first: bool, counted: bool
) -> None:
    """Rows are independent on their way through the module, through the loss, and beside longer ones."""
    found: list[tuple[Form, Any]] = []
    if not tried:
        not_checked("batches are neither tensors (inputs, …) nor a mapping of tensors")
    else:
        try:
            found = fitting(tried)
        except Exception as error:
            not_checked(f"the module could not be called on the first part of a batch ({str(error)[:80]})")
        else:
            _check_forms([form for form, _ in found], batch_first, reduction if counted else None)
        _check_padding(module, loader)
    if criterion is not None:
        _check_loss(criterion, found, reduction, 4 * (loader.batch_size or 0) + 16)  # Poisson batches are not much longer


def _check_loss(criterion: Any, found: list[tuple[Form, Any]], reduction: str, rows: int) -> None:
    """By experiment where the loss can be computed on made-up answers, else by its type; what is left is said."""
    # a network that learns its own inputs has nothing left of a batch
    if any(check_some_loss(criterion, out, form.targets or form.inputs, reduction, rows) for form, out in found):
        return
    refuse_by_type(criterion, reduction)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    warnings.warn(
        f"whether the loss {name} mixes samples was not checked: it could not be computed on what the module returns and what "
        "batches hold besides its inputs. If the gradient of one record depends on the others, the guarantee does not hold; "
        "erlangen.gradients.losses.check_loss(criterion, outputs, targets, loss_reduction) checks by hand.",
        stacklevel=5,
    )


def _check_forms(found: list[Form], batch_first: bool, reduction: str | None) -> None:
    """In every form in which the module can be called: nobody says in which the loop will."""
    for form in found:
        try:
            check_independence(form.call, form.inputs, batch_first, reduction)
        except MixesSamples as error:
            if len(found) == 1:
                raise
            raise MixesSamples(
                f"{error} The module was called with {form}: if your loop calls it otherwise, check that by hand "
                "(erlangen.gradients.independence.check_independence(module, inputs)) and pass check=False."
            ) from error
        except Exception as error:
            if form is found[-1]:
                raise
            not_checked(f"called with {form}, it raised {type(error).__name__} ({str(error)[:80]})", stacklevel=6)


def _check_parts(tried: list[Form]) -> None:
    """How many parts a batch is cut into must not show; a module that could not be called was said."""
    with contextlib.suppress(Exception):
        tried = [form for form, _ in fitting(tried)]
    for form in tried:
        try:
            check_parts(form.call, form.inputs)
        except MixesSamples:
            raise
        except Exception:  # its own call will tell
            continue


def _check_padding(module: nn.Module, loader: DataLoader) -> None:
    """Records of different shapes are padded to the longest of a batch: nobody's output may depend on the others' length."""
    dataset: Any = loader.dataset
    seen = min(LOOKED_AT, len(dataset))
    places = [k * len(dataset) // seen for k in range(seen)]
    device = next(module.parameters()).device
    first = lambda batch: (batch[0] if isinstance(batch, (list, tuple)) else batch).to(device)  # noqa: E731

    def batch(*places: int) -> Tensor:
        with seeded(0):  # a record that is drawn twice is augmented alike
            return first(loader.collate_fn(fetched(dataset, list(places))))

    try:
        sizes = [batch(place).numel() for place in places]
        if len(set(sizes)) == 1:
            return
        short, long = (places[sizes.index(size)] for size in (min(sizes), max(sizes)))
        alone, again = (batch(short, short)[:1] for _ in range(2))
        beside, longs = batch(short, long), batch(long, long)
        row = int(torch.equal(beside[0], longs[0]))  # the short one's: a collate function may have sorted them
    except Exception:  # its own call will tell
        return
    if not torch.equal(alone, again):  # drawn by a generator of its own
        return
    check_padding(module, alone, beside[row : row + 1])


def not_checked(why: str, stacklevel: int = 5) -> None:
    warnings.warn(
        f"whether the module mixes samples was not checked: {why}. If one record's output depends on the others, the "
        "guarantee does not hold; erlangen.gradients.independence.check_independence(module, inputs) checks by hand.",
        stacklevel=stacklevel,
    )


def _physical_limit(module: nn.Module, tape: Tape, tried: list[Form], wanted: int | str | None) -> int | None:
    if wanted is None:
        return None
    if wanted == "auto":
        if not tried:
            raise ValueError("max_physical_batch='auto' needs batches of (inputs, …) to measure; give a number")
        form, _ = fitting(tried)[0]
        attach(module, tape)
        try:
            with untouched(module), attributes_untouched(module):
                return find_physical_batch(form.call, tape, form.inputs)
        finally:
            detach(module)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"max_physical_batch is {wanted!r}; give a number of rows ≥ 1, or 'auto'")
    return wanted
