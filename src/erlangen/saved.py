"""Training with `PrivacyEngine`, written down and gone on with: weights, optimizer, what was spent, where noise and batches stand.

One safetensors file, replaced atomically and read without unpickling anything. It holds no seed, no record and no sum of records.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from erlangen import joint, sharded
from erlangen.accounting import Accountant
from erlangen.private import PrivateTraining
from erlangen.training import checkpoint

KIND = "engine"


def save(path: str | os.PathLike[str], training: PrivateTraining, module: nn.Module, optimizer: Optimizer | None,
         accountant: Accountant, extra: Mapping[str, Any]) -> None:  # fmt: skip
    """Everything that going on needs, the same whatever is wrapped around the module. Of several processes the first writes."""
    _refuse_sharded(training)
    if training.workers.rank:
        return
    state = {
        "kind": KIND,
        "module": dict(joint.unwrapped(module).state_dict()),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "accountant": accountant.state_dict(),
        "mechanism": training.mechanism.state_dict(),
        "mechanism_name": training.mechanism.name,
        "noise_multiplier": training.mechanism.noise_multiplier,
        "sampler": {**training.sampler.state_dict(), "step": training.place},
        "extra": dict(extra),
    }
    checkpoint.save(Path(path), state)


def load(path: str | os.PathLike[str], training: PrivateTraining, module: nn.Module, optimizer: Optimizer | None,
         accountant: Accountant) -> dict[str, Any]:  # fmt: skip
    """Set everything to what was saved; what was spent here and is not in the file is an error, before anything changes."""
    _refuse_sharded(training)
    state = checkpoint.load(Path(path))
    mechanism = training.mechanism
    if state.get("kind") != KIND:
        raise checkpoint.CheckpointError(
            f"{path} is the checkpoint of a run (erlangen train --resume goes on with it), not one of PrivacyEngine.save_checkpoint"
        )
    if state["mechanism_name"] != mechanism.name:
        raise ValueError(
            f"{path} was saved with mechanism {state['mechanism_name']!r}, not {mechanism.name!r}: make_private with the same one"
        )
    if optimizer is not None and state["optimizer"] is None:
        raise ValueError(f"{path} was saved without an optimizer: leave optimizer out here too")
    if state["noise_multiplier"] != mechanism.noise_multiplier:
        warnings.warn(
            f"σ was {state['noise_multiplier']:g} when {path} was saved and is {mechanism.noise_multiplier:g} now; each step is "
            "accounted at the σ that it is made with",
            stacklevel=3,
        )
    accountant.load_state_dict(state["accountant"], training.protected)
    joint.unwrapped(module).load_state_dict(state["module"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    training.set_noise_multiplier(mechanism.noise_multiplier)  # forgets what a batch left behind
    mechanism.load_state_dict(state["mechanism"])
    training.sampler.load_state_dict(state["sampler"])
    training.place = training.sampler.step
    extra: dict[str, Any] = state["extra"]
    return extra


def _refuse_sharded(training: PrivateTraining) -> None:
    if sharded.is_sharded(training.module):
        raise ValueError(
            "sharded parameters (FSDP) are saved by torch.distributed.checkpoint, each process its own; keep "
            "engine.accountant.state_dict() beside them"
        )
