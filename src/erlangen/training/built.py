"""What a configuration names, made: records, network, optimizer, mechanism."""

from __future__ import annotations

import math

import torch
from torch import nn

from erlangen.data import Dataset, load
from erlangen.gradients.attach import remark_on_swallowed
from erlangen.gradients.fewer import check_parts
from erlangen.gradients.independence import check_independence
from erlangen.mechanisms import Context, Mechanism, SecureNoise, StreamNoise, make_clipping, make_mechanism, mechanisms
from erlangen.mechanisms.base import reads_clipping
from erlangen.mechanisms.clipping import clipping_rules
from erlangen.models import make_model, models
from erlangen.prepare import refuse_module
from erlangen.spelling import hint
from erlangen.streams import Stream, seed_layers
from erlangen.training.adam_bc import optimizers
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import refuse_own_weights


def require_known(config: TrainConfig) -> None:
    """Names that nothing answers to are refused here, before anything is read or computed."""
    require_optimizer(config)
    known = {"model": ["auto", *models()], "mechanism": sorted(mechanisms()), "clipping": sorted(clipping_rules())}
    for option, names in known.items():
        given = getattr(config, option)
        if given not in names:
            raise ConfigError(
                f"{option} is {given!r}; choose one of {', '.join(names)}, or name the file that registers it: --plugin FILE."
                f"{hint(given, names)}"
            )


def require_optimizer(config: TrainConfig) -> None:
    name, known = config.optimizer, sorted(optimizers())
    if name not in known:
        raise ConfigError(f"optimizer is {name!r}; choose one of {', '.join(known)}.{hint(name, known)}")


def load_data(config: TrainConfig) -> Dataset:
    """The records of a configuration."""
    return load(config.data, config.unit, **config.data_options)


def network(config: TrainConfig, dataset: Dataset, run_id: str) -> nn.Module:
    """With the first weights of a run, which its streams give, or public ones."""
    refuse_own_weights(config, dataset)
    with torch.random.fork_rng(devices=[]):
        seed_layers(Stream("init", config.seed, run_id).at(0).initial_seed())
        return make_model(config.model, dataset.input_shape, dataset.classes, config.weights, **config.model_options)


def optimizer_of(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    require_optimizer(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return optimizers()[config.optimizer](parameters, config.lr, config.momentum, config.weight_decay)


def share_of_rate(config: TrainConfig, step: int) -> float:
    """The learning rate at a step, as a share of the configured one."""
    begun = min(1.0, (step + 1) / (config.warm_up + 1))
    if config.schedule == "cosine":
        return begun * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, config.steps))))
    return begun


def mechanism_for(config: TrainConfig, model: nn.Module, shape: tuple[int, ...], run_id: str, in_parts: bool) -> Mechanism:
    """For a model as it was built, after a look at whether it mixes records, of a whole batch or of parts of one."""
    refuse_module(model)
    remark_on_swallowed(model)
    made_up = (torch.randn(3, *shape, device=next(model.parameters()).device),)
    clips = reads_clipping(config.mechanism)  # what does not sees to what comes back itself
    with torch.no_grad():
        check_independence(model, made_up, reduction="sum" if clips else None)
        if in_parts:
            check_parts(model, made_up)
    noise = SecureNoise() if config.secure else StreamNoise(config.seed, run_id)
    rule = make_clipping(config.clipping, config.max_grad_norm, **config.clipping_options)
    sigma = 1.0 if config.noise_multiplier is None else config.noise_multiplier
    return make_mechanism(config.mechanism, Context(sigma, rule, noise, model, config.batch, config.mechanism_options, shape))
