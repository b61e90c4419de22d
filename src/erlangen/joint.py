"""One release by several workers, and the wrappers that distributed scripts put around a module.

Each worker clips and sums its own records. The sums go to the first worker, which writes the release down, draws the only
noise there is, and sends the private gradient to all. So sensitivity, noise and event are those of a single process, for
every mechanism and noise source, and the number of workers can change between two steps. The others never hold a sum
that is not their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from erlangen import sharded
from erlangen.mechanisms.base import Mechanism
from erlangen.sampling.order import order_of
from erlangen.sharded import ShardedGaussian
from erlangen.workers import Workers

if TYPE_CHECKING:
    from erlangen.private import PrivateTraining
    from erlangen.sampling import Sampler, Units

#: steps between two comparisons of the workers' weights
COMPARE_EVERY = 50


class Private(NamedTuple):
    """A private gradient by parameter name, and the variance of its noise where an optimizer asks for it."""

    gradient: dict[str, Tensor]
    variances: dict[str, Any] | None


def release(training: PrivateTraining) -> Private:
    """What `PrivateTraining.noised` returns on the first worker, on every worker."""
    workers, mechanism = training.workers, training.mechanism
    if isinstance(mechanism, ShardedGaussian):
        return Private(*sharded.release(training))
    made: list[Private] = []
    told = alike(training)
    mechanism.merge(workers.add_up)
    news = workers.decide(lambda: _made(training, made, told))
    if workers.first:
        private = made[0]
    else:
        private = _followed(training, news)
    gradient, variances = private
    names = list(training.tape.parameters)  # a denoiser may return them in another order
    flat = [gradient[n] for n in names] + ([variances[n] for n in names] if variances is not None else [])
    sent = workers.send(flat)
    variances = None if variances is None else dict(zip(names, sent[len(names) :], strict=True))
    return Private(dict(zip(names, sent[: len(names)], strict=True)), variances)


_ALIKE = (
    ("clipping bound", "change it on all alike"), ("expected batch", "change it on all alike"),
    ("draw that a batch is a part of", "look at batches of the private loader, leave and begin loops over it on all workers alike"),
    ("mark of who is in a draw", "load checkpoints before anybody looks at batches of the private loader, or after all have alike"),
)  # fmt: skip


def alike(training: PrivateTraining) -> Callable[[], None]:
    """Collective: what each worker clipped at, and which draw of whom, of which expected size, its records are a part of. The
    result raises on the first worker if they are not all the same: before the noise, which is made for its own bound and its
    own rate alone. Parts of two draws may hold the same record twice."""
    mechanism = training.mechanism
    bound = getattr(mechanism, "clipped_at", None) or getattr(mechanism, "clipping", mechanism).sensitivity
    own = torch.tensor([bound, training.drawn, *training.draw], dtype=torch.float64)
    count, total, squares = training.workers.add_up([torch.ones(1, dtype=torch.float64), own, own.square()])

    def check() -> None:
        same = torch.isclose(total, count * own, 1e-12, 0.0) & torch.isclose(squares, count * own.square(), 1e-12, 0.0)
        for ok, (what, cure), value in zip(same.tolist(), _ALIKE, own.tolist(), strict=True):
            if not ok:
                raise ValueError(f"the {what} is {value:.10g} on the first worker and another on others: {cure}")

    return check


def _made(training: PrivateTraining, made: list[Private], told: Callable[[], None]) -> dict[str, Any]:
    """On the first worker: the release, and what the others have to know about it."""
    told()
    gradient, variances = training.noised()
    if variances is not None:
        variances = {n: torch.as_tensor(v).to(gradient[n]).expand_as(gradient[n]) for n, v in variances.items()}
    made.append(Private(gradient, variances))
    state = _state(training.mechanism)
    changed, training.known = state != training.known, state
    return {
        "sigma": training.mechanism.noise_multiplier,
        "variances": variances is not None,
        "state": state if changed else None,
    }


def _followed(training: PrivateTraining, news: dict[str, Any]) -> Private:
    """On the others: books and mechanism as the first one has them, and room for what it sends."""
    mechanism = training.mechanism
    if news["sigma"] != mechanism.noise_multiplier:
        raise ValueError(
            f"the noise multiplier is {mechanism.noise_multiplier} on rank {training.workers.rank} and {news['sigma']} on "
            "the first worker: change it on all workers alike"
        )
    training.account()
    if news["state"] is not None:
        mechanism.load_state_dict({**news["state"], "noise": mechanism.noise.state_dict()})
    return Private(mechanism._zeros(), mechanism._zeros() if news["variances"] else None)


def _state(mechanism: Mechanism) -> dict[str, Any]:
    """What clipping may depend on. The state of the noise stays where the noise is."""
    return {key: value for key, value in mechanism.state_dict().items() if key != "noise"}


def compare(training: PrivateTraining, step: int, now: bool = False) -> None:
    """Now and then, or ``now``: are all weights still the same, bit for bit?"""
    apart = isinstance(training.mechanism, ShardedGaussian)  # nobody has what another has
    if not training.workers.alone and not apart and (now or step % COMPARE_EVERY == 1):
        training.workers.require_equal_weights(training.tape.parameters, step)


def require_alike(
    workers: Workers, mechanism: Mechanism, sampler: Sampler, units: Units, streams: str, dataset: Any, read: bool = True
) -> None:
    """Everybody clips to the same bound, draws from the same stream and divides the same units; or everybody raises.

    Seeds that differ by rank would draw a batch of its own on every worker, and a record could be in several of them; so it
    could where a record has another index on another worker, which with ``read`` is looked for.
    """
    if workers.alone:
        return
    plain = lambda facts: json.dumps(facts, sort_keys=True, default=str)  # noqa: E731
    workers.require_same({
        "seed or run_id": streams, "mechanism": plain([mechanism.describe(), _state(mechanism)]), "data": plain(sampler.describe()),
        "unit": units.digest(),
        "records, or their order (random_split with a generator of the same seed, lists of files sorted)": order_of(dataset, read),
    })  # fmt: skip


def refuse_unmerged(mechanism: Mechanism, workers: Workers) -> None:
    if not workers.alone and type(mechanism).merge is Mechanism.merge:
        raise ValueError(
            f"mechanism {mechanism.name!r} does not say which sums its workers add up (merge() is not defined): train it in "
            "one process, or define merge()"
        )


# --- wrappers ------------------------------------------------------------------------------------------------------

_QUIET = ("require_backward_grad_sync", "require_forward_param_sync", "static_graph")


def _shells(module: nn.Module) -> Iterator[nn.Module]:
    """From the outermost wrapper to what it is about."""
    yield module
    if isinstance(module, DistributedDataParallel):
        yield from _shells(module.module)
    elif type(module).__name__ == "OptimizedModule":  # what torch.compile returns
        yield from _shells(module._modules["_orig_mod"])  # type: ignore[arg-type]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel` and `torch.compile`, or the module itself; wrappers that hide its layers are
    refused."""
    *_, module = _shells(module)
    if isinstance(module, DataParallel):
        raise ValueError(
            "nn.DataParallel copies the module on every call: per-sample gradients of the copies are lost. Start one "
            "process per device with torchrun, and pass the plain module"
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        raise ValueError(
            "FullyShardedDataParallel flattens parameters, and with them the layers that per-sample gradients are made of. "
            "Use torch.distributed.fsdp.fully_shard, or pass the plain module"
        )
    return module


def silence(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Stop DDP's own all-reduce: it would average what is already the same everywhere, and wait for equal counts of
    forward passes. Returns what to set again."""
    found = [m for m in _shells(module) if isinstance(m, DistributedDataParallel)]
    before: list[tuple[nn.Module, str, Any]] = [(m, name, getattr(m, name)) for m in found for name in _QUIET]
    for m, name, _ in before:
        setattr(m, name, False)
    return before
