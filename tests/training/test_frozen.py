"""A frozen trunk's features computed once: the same run, only faster."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from erlangen.data import Dataset
from erlangen.models import register_model
from erlangen.training.config import TrainConfig
from erlangen.training.frozen import FrozenTrunk, is_steady, trunk_of
from erlangen.training.session import Session


def chain(*extra: nn.Module, trainable_first: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), *extra, nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    for layer in net[: 3 + len(extra)]:
        layer.requires_grad_(trainable_first)
    return net


def features(net: nn.Module, x: torch.Tensor) -> FrozenTrunk | None:
    return FrozenTrunk.of(net, x, nullcontext)


def test_the_trunk_ends_before_the_first_layer_that_trains():
    trunk = trunk_of(chain())
    assert trunk is not None
    assert [type(layer) for layer in trunk] == [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.MaxPool2d]


@pytest.mark.parametrize(
    "net",
    [
        chain(trainable_first=True),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),  # nothing frozen: images are as good as features
        nn.Sequential(chain(), nn.Identity())[0].requires_grad_(False),  # nothing trains
        nn.ModuleList([chain()]),
    ],
    ids=["trains at once", "no weights", "all frozen", "not a chain"],
)
def test_no_trunk(net):
    assert trunk_of(net) is None


def test_tail_of_features_is_the_model():
    net, x = chain(), torch.randn(1100, 1, 8, 8)
    frozen = features(net, x)
    assert frozen is not None
    assert frozen.features.shape == (1100, 4, 4, 4)
    torch.testing.assert_close(frozen.tail(frozen.features), net(x), rtol=1e-5, atol=1e-6)
    assert frozen.tail[0] is net[4]  # the layers themselves: what they learn is the model's


def test_what_changes_from_step_to_step_is_not_kept():
    x = torch.randn(8, 1, 8, 8)
    assert features(chain(nn.Dropout(0.5)), x) is None
    running = chain(nn.BatchNorm2d(4))
    assert not is_steady(running[:4], x)
    assert features(running, x) is None
    assert features(running.eval(), x) is not None


def test_a_trunk_that_widens_too_much_is_not_kept():
    wide = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1).requires_grad_(False), nn.Conv2d(64, 1, 3), nn.Flatten())
    assert trunk_of(wide) is not None
    assert features(wide, torch.randn(4, 1, 8, 8)) is None


# -- in a run -----------------------------------------------------------------------------------------------------------


register_model("small-chain", lambda shape, classes, **options: chain(**options))


def run(*, cached: bool = True, **changes: Any) -> Session:
    """Six steps of fine-tuning the last convolution and the head of a small chain."""
    rng = np.random.default_rng(0)
    data = Dataset("small", rng.normal(size=(40, 1, 8, 8)).astype("float32"), rng.integers(0, 3, 40), None, None, 3)
    options = {
        "model": "small-chain", "epsilon": None, "noise_multiplier": 1.0, "batch": 16, "steps": 6, "lr": 0.5, "seed": 3,
        "device": "cpu",
    }  # fmt: skip
    session = Session(TrainConfig(**{**options, **changes}), data)
    if not cached:
        session.inputs, session.forward = session.x, session.model
    while session.step_count < session.config.steps:
        session.step()
    return session


@pytest.mark.parametrize("changes", [{}, {"pad": True, "max_physical_batch": 8}, {"mechanism": "rep"}, {"clipping": "auto-s"}])
def test_a_run_on_features_ends_where_the_run_on_images_ends(changes):
    images, kept = run(cached=False, **changes), run(**changes)
    assert kept.inputs.shape == (40, 4, 4, 4)
    assert kept.epsilon() == images.epsilon()
    for (name, one), other in zip(kept.model.state_dict().items(), images.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"augment": "flip-crop", "views": 2},  # every step sees other views
        {"steps": 2},  # fewer rows than records: nothing would be used twice
        {"model_options": {"trainable_first": True}},  # everything trains
    ],
    ids=["views", "short", "trains"],
)
def test_images_stay_where_features_would_not_do(changes):
    session = run(**changes)
    assert session.inputs is session.x
    assert session.forward is session.model
