"""What all mechanisms share: how they are built by name, and what training asks of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from erlangen.gradients.tape import Tape
from erlangen.mechanisms import Context, GaussianMechanism, StreamNoise, make_clipping, make_mechanism, mechanisms


def context(**options) -> Context:
    return Context(1.0, make_clipping("flat", 1.0), StreamNoise(0), nn.Conv2d(1, 2, 3), 4.0, options)


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_an_option_that_would_do_nothing_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=rf"mechanism '{name}' has no option \['colour'\]; it takes \w"):
        make_mechanism(name, context(colour="red"))


@pytest.mark.parametrize(("name", "wrong", "meant"), [("clipless", "splitt", "split"), ("geodp", "from", "form")])
def test_a_misspelt_option_says_what_was_meant(name, wrong, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        make_mechanism(name, context(**{wrong: "x"}))


class Recording(GaussianMechanism):
    def recorder(self, tape: Tape) -> Tape:
        return Tape(tape.parameters, "sum")


def test_a_mechanism_with_a_recorder_of_its_own_has_no_per_sample_gradients():
    tape = Tape({}, "sum")
    plain, own = GaussianMechanism(1.0), Recording(1.0)
    assert plain.recorder(tape) is tape
    assert plain.clips_samples
    assert own.recorder(tape) is not tape
    assert not own.clips_samples


@pytest.mark.parametrize(
    ("gradients", "batch", "words"),
    [
        ({"w": torch.zeros(3, 7)}, 1.0, r"'w' have shape \[3, 7\]; give one gradient of shape \[4\] for each record"),
        ({"w": torch.zeros(3, 4), "v": torch.zeros(3, 2)}, 1.0, r"name 'v', and the mechanism is bound to \['w'\]"),
        ({"w": torch.zeros(3, 4)}, 0.0, "expected_batch is 0.0; sums are divided by it"),
        ({"w": torch.zeros(3, 4)}, math.nan, "expected_batch is nan"),
    ],
)
def test_a_release_alone_refuses_what_it_cannot_mean(gradients, batch, words):
    mechanism = GaussianMechanism(1.0, 1.0)
    mechanism.bind({"w": torch.zeros(4)})
    with pytest.raises(ValueError, match=words):
        mechanism.release(gradients, batch)
    assert mechanism.release({"w": torch.zeros(3, 4)}, 3.0)["w"].shape == (4,)
