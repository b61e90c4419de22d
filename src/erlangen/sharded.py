"""Parameters that no process holds whole (FSDP2, `fully_shard`): clip at home, sum and noise by shards.

Every record is on one worker, which sees its cotangents and activations in all layers: norms and clipping weights are formed
there, over the whole network, without communication. The clipped sum of one parameter at a time is then reduced to its
shards: worker r holds Σ over *all* records for the coordinates S_r alone, and adds N(0, σ²C²) to them. S_1 … S_R are a
partition of the coordinates, so the joint release is Σ_i w_i g_i + N(0, σ²C²I): sensitivity C, event Gaussian(σ), as in one
process. Nothing of the size of the network is held by one worker, but one parameter at a time. A diagonal metric M changes
nothing of this, M⁻¹ being a product by coordinates; but norms ask for all of it, so that every worker holds it whole.

Without a seed each worker draws from entropy of its own. With one, noise belongs to coordinates: everybody draws that of a
whole parameter from the one stream and keeps what it holds. So a seeded run has the noise of one process however many
shards there are, and a step that is repeated with another number of them never puts the same numbers on other coordinates.

What is proved here is proved for that: identity or diagonal geometry with a rule whose bound does not move, parameters split
along one dimension of a one-dimensional mesh of all workers. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from erlangen.gradients.precision import accumulate_dtype, exact_float32
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.clipping import AdaptiveQuantile
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.geometry import Diagonal, Geometry
from erlangen.mechanisms.noise import NoiseSource, StreamNoise
from erlangen.mechanisms.rep import Aligned
from erlangen.workers import Workers

if TYPE_CHECKING:
    from erlangen.private import PrivateTraining


class ShardedGaussian(GaussianMechanism):
    """The Gaussian mechanism in the identity or a diagonal geometry on sharded parameters; sums, noise and release are
    DTensors. Sensitivity C, event Gaussian(σ)."""

    #: what the mechanism that it is a form of says of itself besides
    facts: Mapping[str, Any] = {}

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        for name, p in parameters.items():
            refuse_layout(name, p)
        if isinstance(self.geometry, Diagonal):  # it may have been read off the network before that went to its devices
            device = next(iter(parameters.values())).device
            self.geometry = Diagonal({name: t.to(device) for name, t in self.geometry.m.items()})
        super().bind(parameters, expected_batch)
        m = self.geometry.m if isinstance(self.geometry, Diagonal) else {}
        #: this worker's part of the metric; none is the identity
        self._metric = {name: local_part(t, self._like[name]) for name, t in m.items() if name in self._like}

    def _zeros(self) -> dict[str, Tensor]:
        return {n: torch.zeros_like(_local(p), dtype=accumulate_dtype(p)) for n, p in self._like.items()}

    def accumulate(self, gradients: PerSampleGradients) -> None:
        """Collective: every worker comes here equally often, with or without records."""
        if gradients.owners and gradients.names:
            super().accumulate(gradients)
        else:
            self._add(gradients, {})

    def _add(self, gradients: PerSampleGradients, weights: Mapping[str, Tensor]) -> None:
        for name, like in self._like.items():
            if name in weights:
                total = gradients.of(name).weighted_sum({name: weights[name]})[name].to(accumulate_dtype(like))
            else:
                total = torch.zeros(like.shape, dtype=accumulate_dtype(like), device=_local(like).device)
            self._sum[name] += reduced(total.contiguous(), like)

    def merge(self, add_up: Any) -> None:
        """Sums were added up as they came."""

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        """On every worker: its own coordinates, each noised by this worker alone."""
        self._require_one_bound()
        self.noise.next_release()
        released = {}
        for name, total in self._sum.items():
            like, m = self._like[name], self._metric.get(name)
            noisy = self._noised(total if m is None else total * (1.0 / m), like)
            released[name] = _as_shard((noisy if m is None else noisy * m) / expected_batch, like)
        self._reset()
        return released

    def _noised(self, local: Tensor, like: Any) -> Tensor:
        if not (isinstance(self.noise, StreamNoise) and self.noise.seeded):
            return self.noise.perturb(local, self.std)
        whole = self.noise.perturb(torch.zeros(like.shape, dtype=local.dtype, device=local.device), self.std)
        return local + local_part(whole, like)

    def noise_std(self, name: str) -> Tensor | float:
        m = self._metric.get(name)
        return self.std if m is None else _as_shard(self.std * m, self._like[name])

    def covariance(self, name: str) -> Tensor:
        d = self.shapes[name].numel()
        m = self.geometry.m[name] if isinstance(self.geometry, Diagonal) else torch.ones(d)
        return self.std**2 * torch.diag(m.flatten().double().square())

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self.facts}


# --- DTensors ------------------------------------------------------------------------------------------------------


def is_sharded(module: nn.Module) -> bool:
    return any(hasattr(p, "device_mesh") for p in module.parameters())


def _local(p: Any) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def _as_shard(local: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_part(whole: Tensor, like: Any) -> Tensor:
    """The coordinates of a whole tensor that this worker holds of ``like``."""
    parts = whole.chunk(like.device_mesh.size(), like.placements[0].dim)
    rank = like.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole.narrow(like.placements[0].dim, 0, 0)


def shard_of(whole: Tensor, like: Any) -> Tensor:
    """A whole tensor that everybody has, as shards laid out like those of ``like``. No communication."""
    own = local_part(whole, like).to(_local(like).device)
    return _as_shard(own.clone(memory_format=torch.contiguous_format), like)


def reduced(total: Tensor, like: Any) -> Tensor:
    """This worker's shard of the sum over workers."""
    from torch.distributed.tensor import DTensor, Partial

    parts = DTensor.from_local(total, like.device_mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=like.placements).to_local()


def refuse_layout(name: str, p: Any) -> None:
    """Each coordinate on exactly one worker: only then is each noised exactly once."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(p, DTensor):
        raise ValueError(f"parameter {name!r} is not sharded while others are: apply fully_shard to the whole module")
    everybody, here = dist.get_world_size(), p.device_mesh.size()
    if here != everybody:
        raise ValueError(
            f"parameter {name!r} is sharded over {here} of {everybody} processes: the others would hold copies, each with noise "
            "of its own. Use fully_shard with a one-dimensional mesh of all processes"
        )
    if p.device_mesh.ndim != 1 or not isinstance(p.placements[0], Shard):
        raise ValueError(
            f"parameter {name!r} is placed as {tuple(p.placements)} on a mesh of {p.device_mesh.ndim} dimension(s): copies of a "
            "coordinate would get noise of their own. Use fully_shard with a one-dimensional mesh of all processes"
        )


# --- in the engine ---------------------------------------------------------------------------------------------------


def adopt(mechanism: Mechanism, noise: NoiseSource, workers: Workers) -> Mechanism:
    """The sharded form of a mechanism; refused where there is none. ``noise`` is seeded alike on all workers or not at all."""
    proved = (type(mechanism), type(getattr(mechanism, "geometry", None))) in (
        (GaussianMechanism, Geometry), (GaussianMechanism, Diagonal), (Aligned, Diagonal),
    )  # fmt: skip
    if not proved or isinstance(mechanism.clipping, AdaptiveQuantile):  # type: ignore[attr-defined]
        raise ValueError(
            f"mechanism {mechanism.name!r} with this clipping rule is not proved for sharded parameters (FSDP): use mechanism "
            "'iso' with a fixed bound, or pass the plain module (with max_physical_batch to save memory)"
        )
    assert isinstance(mechanism, GaussianMechanism)
    if workers.alone:
        raise ValueError("the module is sharded but the engine trains alone (distributed=False): pass the plain module")
    own = ShardedGaussian(mechanism.noise_multiplier, mechanism.clipping, mechanism.geometry, noise, mechanism.name)
    own.facts = dict(getattr(mechanism, "facts", {}))
    return own


def refuse_by_name(mechanism: str) -> None:
    """A metric is read off the whole network, before it is split."""
    if mechanism in ("rep", "shuffle"):
        raise ValueError(
            f"mechanism {mechanism!r} is made from the whole module, and this one is sharded (FSDP): build it before fully_shard "
            "(erlangen.mechanisms.make_mechanism) and pass it as mechanism, or use 'iso'"
        )


def refuse_computed_weights(module: nn.Module) -> None:
    """Gradients of a computed weight are pulled back after the backward pass, when what it is computed from is gone."""
    for path, m in module.named_modules():
        if hasattr(m, "parametrizations"):
            raise ValueError(
                f"{type(m).__name__} at {path!r} computes a weight from parameters (parametrizations), which cannot be sharded: "
                "call torch.nn.utils.parametrize.remove_parametrizations on it, or train the module whole"
            )


def refuse_device(device: torch.device) -> None:
    """`fully_shard` gathers on a stream of its own, which CPUs have from PyTorch 2.7 on."""
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ValueError(
            f"PyTorch {torch.__version__} cannot gather sharded parameters (FSDP) on a CPU: install PyTorch 2.7 or newer, or pass "
            "the plain module (erlangen train: leave --shard out)"
        )


def record_gathered(module: nn.Module, tape: Tape) -> None:
    """Let the tape know the tensors into which shards are gathered for a forward pass; one group of them at a time."""
    from torch.distributed.fsdp import FSDPModule

    refuse_device(next(module.parameters()).device)
    refuse_computed_weights(module)
    names = {id(p): name for name, p in module.named_parameters()}
    for shell in module.modules():
        if not isinstance(shell, FSDPModule):
            continue
        held = {place: id(p) for place, p in shell.named_parameters(remove_duplicate=False)}
        shell.unshard()
        for place, gathered in shell.named_parameters(remove_duplicate=False):
            name = names.get(held[place])
            if id(gathered) == held[place] or name is None:  # of another group
                continue
            if name in tape.parameters:
                tape.stand_in(name, gathered)
            else:
                tape.ignore([gathered])
        shell.reshard()


def release(training: PrivateTraining) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The first worker writes the release down; only then does anybody add noise. With it, the variance of its noise where
    the optimizer asks for that."""
    from erlangen.joint import alike

    workers, mechanism = training.workers, training.mechanism
    told = alike(training)
    sigma = workers.decide(lambda: _accounted(training, told))
    if not workers.first:
        if sigma != mechanism.noise_multiplier:
            raise ValueError(f"the noise multiplier is {mechanism.noise_multiplier} here and {sigma} on the first worker")
        training.account()
    expected = training.sampler.expected_batch
    with exact_float32():
        released = mechanism.finish(expected)
    if not hasattr(training.optimizer, "set_noise_variance"):
        return released, None
    stds = {name: mechanism.noise_std(name) for name in released}
    return released, {name: std * std / expected**2 for name, std in stds.items()}


def _accounted(training: PrivateTraining, told: Callable[[], None]) -> float:
    told()
    training.account()
    return training.mechanism.noise_multiplier
