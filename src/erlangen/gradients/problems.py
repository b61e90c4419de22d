"""Modules that are known, by their type, to mix samples or to keep statistics, and what is put in their place."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from erlangen.gradients.constant_norm import ConstantNorm, learned

_STATEFUL_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def where(path: str, m: nn.Module) -> str:
    """A module as errors name it."""
    return f"{type(m).__name__} at {path!r}" if path else f"{type(m).__name__} (the module itself)"


def known_problems(module: nn.Module) -> list[str]:
    """Modules that are known to mix samples or to keep un-noised statistics, with the cure."""
    problems = []
    if isinstance(module, torch.jit.ScriptModule):
        return ["a ScriptModule hides its layers; pass the nn.Module that it was made from, and script it after training"]
    for path, m in module.named_modules():
        place = where(path, m)
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, _STATEFUL_NORMS):
            keep = "; if it was trained on public data, erlangen.fix(model, public_statistics=True) keeps its statistics"
            cure = f"use GroupNorm, or call erlangen.fix(model){keep if learned(m) else ''}"
            problems.append(f"{place} mixes samples; {cure}")
        elif isinstance(m, _STATEFUL_NORMS) and m.track_running_stats:
            problems.append(f"{place} keeps running statistics of private records; set track_running_stats=False, "
                            "or call erlangen.fix(model)")  # fmt: skip
        elif isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and (m.max_norm is not None or m.scale_grad_by_freq):
            problems.append(
                f"{place} uses max_norm or scale_grad_by_freq, which depend on the whole batch; turn them off"
            )
        elif isinstance(m, nn.modules.lazy.LazyModuleMixin) and m.has_uninitialized_params():  # type: ignore[misc]
            problems.append(f"{place} has no parameters yet; run one forward pass before making it private")
    return problems


def fix(module: nn.Module, public_statistics: bool = False) -> nn.Module:
    """The module with every known problem replaced: BatchNorm → GroupNorm, running statistics off. In place.

    ``public_statistics`` is for networks that were trained on *public* data: BatchNorm keeps its running statistics as constants
    (`ConstantNorm`), so that the network computes what it did in evaluation mode.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, _STATEFUL_NORMS)]
    if not public_statistics and any(map(learned, norms)):
        warnings.warn(
            "the running statistics of a trained BatchNorm are dropped: with GroupNorm in its place the network computes something "
            "else, and has to learn again. If it was trained on public data, erlangen.fix(model, public_statistics=True) keeps "
            "them as constants.",
            stacklevel=2,
        )
    return _fixed(module, public_statistics)


def _fixed(module: nn.Module, keep: bool) -> nn.Module:
    replacement = _replacement(module, keep)
    if replacement is not None:
        return replacement
    for name, child in module.named_children():
        setattr(module, name, _fixed(child, keep))
    return module


def _replacement(m: nn.Module, keep: bool) -> nn.Module | None:
    if keep and isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, _STATEFUL_NORMS):
        return ConstantNorm(m)
    if isinstance(m, _STATEFUL_NORMS):
        new: nn.Module = type(m)(m.num_features, m.eps, affine=m.affine, track_running_stats=False)
    elif isinstance(m, nn.modules.batchnorm._BatchNorm):
        groups = max(g for g in range(1, min(32, m.num_features) + 1) if m.num_features % g == 0)
        new = nn.GroupNorm(groups, m.num_features, m.eps, affine=m.affine)
    elif isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and (m.max_norm is not None or m.scale_grad_by_freq):
        m.max_norm, m.scale_grad_by_freq = None, False
        return m
    else:
        return None
    if m.affine:
        new.weight, new.bias = m.weight, m.bias
    return new.train(m.training)
