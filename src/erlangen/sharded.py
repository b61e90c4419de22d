"""Parameters that no process holds whole (FSDP2, `fully_shard`): clip at home, sum and noise by shards.

Every record is on one worker, which sees its cotangents and activations in all layers: norms and clipping weights are formed
there, over the whole network, without communication. The clipped sum of one parameter at a time is then reduced to its
shards: worker r holds Σ over *all* records for the coordinates S_r alone, and adds N(0, σ²C²) to them from its own stream.
S_1 … S_R are a partition of the coordinates, so the joint release is Σ_i w_i g_i + N(0, σ²C²I): sensitivity C, event
Gaussian(σ), as in one process. Nothing of the size of the network is held by one worker, but one parameter at a time.

What is proved here is proved for that: the identity geometry with a rule whose bound does not move, parameters split along
one dimension of a one-dimensional mesh of all workers. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.clipping import AdaptiveQuantile
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.geometry import Geometry
from erlangen.mechanisms.noise import NoiseSource
from erlangen.workers import Workers

if TYPE_CHECKING:
    from erlangen.private import PrivateTraining


class ShardedGaussian(GaussianMechanism):
    """The Gaussian mechanism in the identity geometry on sharded parameters; sums, noise and release are DTensors."""

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        for name, p in parameters.items():
            refuse_layout(name, p)
        super().bind(parameters, expected_batch)

    def _zeros(self) -> dict[str, Tensor]:
        return {n: torch.zeros_like(_local(p), dtype=torch.float32) for n, p in self._like.items()}

    def accumulate(self, gradients: PerSampleGradients) -> None:
        """Collective: every worker comes here equally often, with or without records."""
        if gradients.owners and gradients.names:
            super().accumulate(gradients)
        else:
            self._add(gradients, {})

    def _add(self, gradients: PerSampleGradients, weights: Mapping[str, Tensor]) -> None:
        for name, like in self._like.items():
            if name in weights:
                total = gradients.of(name).weighted_sum({name: weights[name]})[name].to(torch.float32)
            else:
                total = torch.zeros(like.shape, dtype=torch.float32, device=_local(like).device)
            self._sum[name] += reduced(total.contiguous(), like)

    def merge(self, add_up: Any) -> None:
        """Sums were added up as they came."""

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        """On every worker: its own coordinates, with its own noise."""
        local = super().finish(expected_batch)
        return {name: _as_shard(t, self._like[name]) for name, t in local.items()}

    def covariance(self, name: str) -> Tensor:
        return self.std**2 * torch.eye(self.shapes[name].numel(), dtype=torch.float64)


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
    """The sharded form of a mechanism, with a noise stream of this worker's own; refused where there is none."""
    plain = type(mechanism) is GaussianMechanism and type(mechanism.geometry) is Geometry  # type: ignore[attr-defined]
    if not plain or isinstance(mechanism.clipping, AdaptiveQuantile):  # type: ignore[attr-defined]
        raise ValueError(
            f"mechanism {mechanism.name!r} with this clipping rule is not proved for sharded parameters (FSDP): use mechanism "
            "'iso' with a fixed bound, or pass the plain module (with max_physical_batch to save memory)"
        )
    assert isinstance(mechanism, GaussianMechanism)
    if workers.alone:
        raise ValueError("the module is sharded but the engine trains alone (distributed=False): pass the plain module")
    return ShardedGaussian(mechanism.noise_multiplier, mechanism.clipping, None, noise, mechanism.name)


def record_gathered(module: nn.Module, tape: Tape) -> None:
    """Let the tape know the tensors into which shards are gathered for a forward pass."""
    from torch.distributed.fsdp import FSDPModule

    shells = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for shell in shells:
        shell.unshard()
    for name, parameter in module.named_parameters():
        if name in tape.parameters:
            tape.stand_in(name, parameter)
        else:
            tape.ignore([parameter])
    for shell in shells:
        shell.reshard()


def release(training: PrivateTraining) -> dict[str, Tensor]:
    """The first worker writes the release down; only then does anybody add noise."""
    from erlangen.joint import alike

    workers, mechanism = training.workers, training.mechanism
    told = alike(training)
    sigma = workers.decide(lambda: _accounted(training, told))
    if not workers.first:
        if sigma != mechanism.noise_multiplier:
            raise ValueError(f"the noise multiplier is {mechanism.noise_multiplier} here and {sigma} on the first worker")
        training.account()
    return mechanism.finish(training.sampler.expected_batch)


def _accounted(training: PrivateTraining, told: Callable[[], None]) -> float:
    told()
    training.account()
    return training.mechanism.noise_multiplier
