"""A session whose network no worker holds whole (``--shard``): parameters, gradients, optimizer state and moving average are
split over the workers (FSDP2), and gathered layer by layer where a pass needs them.

How sums are clipped and noised is in `erlangen.sharded`. Here: what is split and how, how a state is gathered for the
ordinary checkpoint and cut again from one, and how the others take part in what the first worker does between two steps.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from erlangen.gradients.attach import plan
from erlangen.mechanisms import Mechanism
from erlangen.sharded import adopt, refuse_computed_weights, shard_of
from erlangen.training import checkpoint
from erlangen.training.config import ConfigError
from erlangen.workers import LostWorker, Workers

if TYPE_CHECKING:
    from erlangen.training.session import Session

#: parameters of a layer that is gathered by itself; smaller ones are gathered together
LEAST = 1 << 16
#: what the first worker may ask of the others between two steps
ORDERS = ("evaluate", "public_predictions", "weights", "state_dict")

#: how back ends say that somebody is gone; a layer's own errors are its own
_GONE = re.compile(r"gloo|nccl|connection|timed out|process ?group", re.IGNORECASE)

T = TypeVar("T")


def split(model: nn.Module, workers: Workers, device: torch.device) -> None:
    """Split all parameters over all workers, in place: each coordinate is one worker's. Buffers stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda" and "nccl" not in str(dist.get_backend_config()):
        raise ConfigError("shard on GPUs needs one for each process (NCCL): start as many processes as there are GPUs")
    refuse_computed_weights(model)
    mesh = init_device_mesh(device.type, (workers.count,))
    for module in _groups(model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _groups(model: nn.Module) -> list[nn.Module]:
    """The large layers, where per-sample gradients are recorded; those that share parameters are the whole model's."""
    layers = list({id(module): module for _, module, _ in plan(model) if module is not model}.values())
    users = Counter(id(p) for module in layers for p in module.parameters())
    own = [m for m in layers if all(users[id(p)] == 1 for p in m.parameters())]
    return [m for m in own if sum(p.numel() for p in m.parameters()) >= LEAST]


class Shards:
    """What is particular to a session on a split model."""

    def __init__(self, session: Session) -> None:
        self.session, self.workers = session, session.workers
        #: whether the others wait for this worker's orders
        self.leading = False
        #: a whole state that the first worker has loaded and the others have not got yet
        self.unsent: dict[str, Any] | None = None
        #: made for the model as it was before it was split
        self.mechanism: Mechanism

    def split(self, mechanism: Mechanism) -> None:
        """Split the session's model, and train it by the sharded form of this mechanism."""
        session = self.session
        self.mechanism = adopt(mechanism, mechanism.noise, self.workers)
        split(session.model, self.workers, session.device)

    # -- states ---------------------------------------------------------------------------------------------------

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Collective. On the first worker the state with whole tensors in host memory; on the others nothing is kept."""
        return checkpoint.with_tensors(state, self._whole)

    def _whole(self, path: str, value: Tensor) -> Tensor:
        whole = value.full_tensor().detach() if hasattr(value, "full_tensor") else value
        return whole.cpu() if self.workers.first else value

    def received(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of whole tensors, as this worker holds it. The first one keeps it whole until the others have it, too."""
        if self.workers.first:
            self.unsent = dict(state)
        return checkpoint.with_tensors(dict(state), self._part)

    def _part(self, path: str, value: Tensor) -> Tensor:
        like = self._like(path)
        fits = hasattr(like, "placements") and like.shape == value.shape and not hasattr(value, "placements")
        return shard_of(value, like) if fits else value

    def _like(self, path: str) -> Any:
        """The parameter that a tensor of the state belongs to."""
        session = self.session
        match path.split("/")[1:]:
            case ["model", name] | ["ema", "average", name]:
                return dict(session.model.named_parameters()).get(name)
            case ["optimizer", "state", k, _]:
                return [p for group in session.optimizer.param_groups for p in group["params"]][int(k)]
        return None

    def hand_out(self) -> None:
        """Collective: everybody at the state of the first worker, one tensor at a time."""
        workers, session = self.workers, self.session
        fresh = workers.decide(lambda: self.unsent is None)
        state = session.state_dict() if fresh else self.unsent
        self.unsent = None
        tree, tensors = checkpoint.taken_apart(state) if workers.first else (None, {})  # type: ignore[arg-type]
        tree, names = json.loads(workers.tell(json.dumps([tree, list(tensors)]).encode()))
        for name in names:
            content = workers.tell(save({"part": tensors[name]}) if workers.first else b"")
            if not workers.first:
                tensors[name] = self._part(name, load(content)["part"])
        if not workers.first:
            session.load_state_dict(checkpoint.put_together(tree, tensors))

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Layers are gathered inside: a worker that is lost meanwhile is named as such."""
        try:
            yield
        except LostWorker:
            raise
        except RuntimeError as error:
            if not _GONE.search(str(error)):
                raise
            with self.workers.asking("gathering shards"):
                raise

    # -- orders ---------------------------------------------------------------------------------------------------

    def order(self, name: str) -> None:
        """On the first worker: the others do this too, now."""
        if self.leading:
            self.workers.tell(name.encode())

    def dismiss(self) -> None:
        """On the first worker: no more orders for now."""
        self.order("")

    def attend(self) -> None:
        """On the others: do what the first worker does until it says that was all."""
        while order := self.workers.tell(b"").decode():
            if order not in ORDERS:
                raise ValueError(f"the first worker asks for {order!r}; known are {', '.join(ORDERS)}")
            getattr(self.session, order)()


def with_everybody(method: Callable[[Any], T]) -> Callable[[Any], T]:
    """A method of a session that needs all shards. Between steps, where the first worker leads, the others do it as well."""

    @wraps(method)
    def call(session: Any) -> T:
        if session.shards is None:
            return method(session)
        if method.__name__ in ORDERS:
            session.shards.order(method.__name__)
        with session.shards.gathering():
            return method(session)

    return call


__all__ = ["LEAST", "ORDERS", "Shards", "split", "with_everybody"]
