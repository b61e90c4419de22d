"""What `TrainConfig` settles when it is not told: from public facts alone, and with little noise in the weights."""

from __future__ import annotations

import dataclasses
import math

import pytest

from erlangen.accounting import noise_multiplier
from erlangen.training.config import LARGEST_RATE, WALK, ConfigError, TrainConfig


def walk(config: TrainConfig, records: int) -> float:
    """How far the noise of the whole run carries a weight: η·C·σ√T/B, with the σ that is really used."""
    assert config.epsilon is not None
    assert config.delta is not None
    sigma = noise_multiplier(config.epsilon, config.delta, config.batch / records, config.steps)
    effective = config.lr / (1 - config.momentum)
    return effective * config.max_grad_norm * sigma * math.sqrt(config.steps) / config.batch


@pytest.mark.parametrize(("records", "epsilon"), [(300, 1.0), (300, 8.0), (1500, 3.0), (5000, 1.0)])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"max_grad_norm": 0.1}])
def test_the_automatic_rate_keeps_the_noise_of_a_run_small(records, epsilon, options):
    config = TrainConfig(epsilon=epsilon, **options).settled(records)
    assert walk(config, records) == pytest.approx(WALK, rel=0.25)


def test_one_rate_for_all_would_not_do_that():
    """The broken twin: the same rate at every ε and size gives walks a factor 50 apart."""
    walks = []
    for records, epsilon in ((300, 1.0), (20_000, 8.0)):
        config = TrainConfig(epsilon=epsilon)
        walks.append(walk(dataclasses.replace(config, lr=config.usual_rate()).settled(records), records))
    assert walks[0] > 50 * walks[1]


def test_the_rate_is_bounded_where_there_is_hardly_any_noise():
    for config in (TrainConfig(epsilon=8.0), TrainConfig(epsilon=None, noise_multiplier=0.0)):
        assert config.settled(1_000_000).lr == pytest.approx(LARGEST_RATE * config.usual_rate())


def test_a_given_noise_counts_as_the_target_that_needs_it():
    target = TrainConfig(epsilon=2.0).settled(1000)
    sigma = noise_multiplier(2.0, target.delta, target.batch / 1000, target.steps)
    given = TrainConfig(epsilon=None, noise_multiplier=sigma).settled(1000)
    assert given.lr == pytest.approx(target.lr, rel=0.25)


def test_what_is_given_stays_and_settling_twice_changes_nothing():
    config = TrainConfig(lr=0.7, batch=50, steps=9, delta=1e-6).settled(1000)
    assert (config.lr, config.batch, config.steps, config.delta) == (0.7, 50, 9, 1e-6)
    once = TrainConfig().settled(1000)
    assert once.settled(1000) == once
    assert TrainConfig(optimizer="adam").settled(1000).lr == 1e-3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"selective_options": {"bound": 0.1}}, "selective is off"),
        ({"optimizer": "adam-bc", "weight_decay": 0.1}, "weight_decay is 0.1; adam-bc has none"),
        ({"mechanism": "clipless", "clipping": "auto-s"}, "clips nothing"),
        ({"mechanism": "clipless", "clipping": "per-layer"}, "clips nothing"),
        ({"mechanism": "clipless", "clipping": "adaptive"}, "clips nothing"),
        ({"mechanism": "clipless", "clipping_options": {"gamma": 0.1}}, "clips nothing"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        TrainConfig(**options)


def test_the_same_options_where_they_do_something():
    assert TrainConfig(selective=True, selective_options={"bound": 0.1}).selective
    assert TrainConfig(mechanism="clipless").clipping == "flat"
    assert TrainConfig(optimizer="adam", weight_decay=0.1).weight_decay == 0.1


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_weight_decay_is_a_finite_number_that_is_not_negative(value):
    with pytest.raises(ConfigError, match=r"weight_decay is .*; give a number ≥ 0"):
        TrainConfig(weight_decay=value)


@pytest.mark.parametrize("name", ["record", "Records", " record"])
def test_groups_of_records_are_not_called_records(name):
    """Pairs that an array called "record" named were promised ε = 3 "for each record"; of one of a pair, 4.6 is true."""
    with pytest.raises(ConfigError, match="what is protected without units"):
        TrainConfig(unit=name)
    assert TrainConfig(unit="recording").unit == "recording"
