"""Priors that are kept: learnt once for a network and a size of images, and taken from the user's cache from then on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erlangen.models import make_model
from erlangen.models.public import read
from erlangen.places import user_cache
from erlangen.prior.learn import PriorOptions, facts_of, learn_prior, save_prior, square

#: in the place of a file of weights: a prior for the network and the images at hand
MADE_UP = "made-up"
USUAL = PriorOptions()

#: trains a network in place, for images of a shape, on a device
Learn = Callable[[nn.Module, tuple[int, ...], PriorOptions, str], Any]


def learnt(
    model: str, model_options: Mapping[str, Any], shape: tuple[int, ...], options: PriorOptions, device: str, learn: Learn
) -> tuple[nn.Module, Any]:
    """A network by its name that has seen made-up images alone, and what ``learn`` said of it."""
    square(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        network = make_model(model, shape, 2, **model_options)
    return network, learn(network, shape, options, device)


def quietly(network: nn.Module, shape: tuple[int, ...], options: PriorOptions, device: str) -> None:
    learn_prior(network, shape, options, device=device)


def kept_prior(
    model: str, model_options: Mapping[str, Any], shape: tuple[int, ...], device: str, learn: Learn = quietly,
    options: PriorOptions = USUAL,
) -> Path:  # fmt: skip
    """The file of a prior for this network and these images. Nothing decides it but its arguments: no record is read."""
    facts = facts_of(model, dict(model_options), shape, options)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    place = _folder() / f"{model}-{'x'.join(map(str, shape))}-{name}.safetensors"
    if not _is_whole(place):
        network, _ = learnt(model, model_options, shape, options, device, learn)
        place.parent.mkdir(parents=True, exist_ok=True)
        save_prior(network, place, facts)
    return place


def _is_whole(file: Path) -> bool:
    """Whether it is there and can be read: what a full disk or a copy left behind is learnt again, as if it were not."""
    try:
        read(file)
    except ValueError:
        return False
    return True


def is_kept(weights: Any) -> bool:
    """Whether a run that began with these weights began with a prior of this user."""
    return isinstance(weights, str) and Path(weights).parent == _folder()


def _folder() -> Path:
    return user_cache() / "priors"


__all__ = ["MADE_UP", "Learn", "is_kept", "kept_prior", "learnt"]
