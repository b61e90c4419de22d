"""Learning from made-up images: it learns, repeats itself, keeps lengths that do not matter, and reads no data."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from safetensors import safe_open
from torch import nn

import erlangen.data.base
from erlangen.models import make_model
from erlangen.models.standardised import StandardisedConv2d
from erlangen.prior import PriorOptions, learn_prior, save_prior
from erlangen.prior import learn as room
from erlangen.prior.learn import bank, contrast, features, last_linear, view

FEW = PriorOptions(steps=3, batch=8, images=16)


def network(seed: int = 0, name: str = "cnn", **options) -> nn.Module:
    torch.manual_seed(seed)
    return make_model(name, (1, 8, 8), 3, **options)


def test_twins_are_found_far_better_than_by_guessing():
    losses = []
    learn_prior(network(width=8), (1, 8, 8), PriorOptions(steps=60, batch=32, images=256), told=lambda _, loss: losses.append(loss))
    assert len(losses) == 60
    assert losses[0] > 0.9 * math.log(63)
    assert sum(losses[-10:]) / 10 < 0.82 * math.log(63)


def test_contrast_is_the_cross_entropy_of_finding_the_twin():
    torch.manual_seed(0)
    found = torch.randn(6, 4)
    z = found / found.norm(dim=1, keepdim=True)
    by_hand = 0.0
    for i in range(6):
        others = [k for k in range(6) if k != i]
        scores = torch.stack([z[i] @ z[k] / 0.5 for k in others])
        by_hand -= float(scores[others.index((i + 3) % 6)] - scores.logsumexp(0)) / 6
    assert float(contrast(found, 0.5)) == pytest.approx(by_hand, rel=1e-5)


def test_a_seed_repeats_the_prior_whatever_came_before():
    state = torch.random.get_rng_state()
    first = learn_prior(network(), (1, 8, 8), FEW).state_dict()
    torch.manual_seed(7)
    second = learn_prior(network(), (1, 8, 8), FEW).state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)
    torch.random.set_rng_state(state)
    other = learn_prior(network(), (1, 8, 8), PriorOptions(steps=3, batch=8, images=16, seed=1)).state_dict()
    assert any(not torch.equal(first[n], other[n]) for n in first)


def test_no_data_set_is_read(monkeypatch):
    for name in list(erlangen.data.base._DATASETS):
        monkeypatch.setitem(erlangen.data.base._DATASETS, name, lambda: pytest.fail("a prior reads no records"))
    learn_prior(network(), (1, 8, 8), FEW)


def test_the_head_learns_nothing_and_is_not_written(tmp_path):
    model = network()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    learn_prior(model, (1, 8, 8), FEW)
    head, _ = last_linear(model)
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved
    assert not any(n.startswith(head) for n in moved)
    save_prior(model, tmp_path / "p.safetensors", {"steps": 3})
    with safe_open(tmp_path / "p.safetensors", "pt") as file:
        assert set(file.keys()) == {n for n in before if not n.startswith(f"{head}.")}
        assert json.loads(file.metadata()["erlangen-prior"]) == {"steps": 3}


def standardised_network() -> nn.Module:
    torch.manual_seed(0)
    conv = StandardisedConv2d(1, 8, 3, padding=1)
    return nn.Sequential(conv, nn.Mish(), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))


def test_standardised_filters_keep_their_length_and_the_network_its_outputs(monkeypatch):
    """Steps of a later training turn a filter by its length; a network that grew in learning would learn more slowly."""
    model = standardised_network()
    length, fast = model[0].weight.norm().item(), PriorOptions(steps=10, batch=8, images=16, rate=0.1)
    kept = learn_prior(copy.deepcopy(model), (1, 8, 8), fast)
    monkeypatch.setattr(room, "standardised", lambda _: [])
    grown = learn_prior(copy.deepcopy(model), (1, 8, 8), fast)
    assert kept[0].weight.norm().item() == pytest.approx(length, rel=1e-5)
    assert grown[0].weight.norm().item() > 1.2 * length, "without the rule this network grows"
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(features(kept, x), features(grown, x), rtol=1e-3, atol=1e-4)


def test_equivariant_networks_stay_equivariant():
    torch.manual_seed(0)
    model = make_model("eq-resnet9", (3, 16, 16), 10, field_counts=(1, 2, 2), restriction=False)
    learn_prior(model, (3, 16, 16), PriorOptions(steps=2, batch=4, images=8))
    assert model.eval().check_equivariance(size=16).on_grid < 1e-5


def test_views_are_parts_of_their_image_in_range():
    generator = torch.Generator().manual_seed(0)
    images = bank(5, 3, 16, generator)
    assert images.dtype == torch.uint8
    seen = view(images, 8, generator)
    assert seen.shape == (5, 3, 8, 8)
    assert float(seen.min()) >= -1
    assert float(seen.max()) <= 1
    white = view(torch.full((4, 1, 16, 16), 128, dtype=torch.uint8), 8, generator)
    assert float(white.flatten(1).std(1).max()) < 1e-5, "a plain image has plain views"


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((1, 8, 9), {}, "1x8x9"), ((8, 8), {}, "square"), ((1, 3, 3), {}, "4 pixels"),
        ((1, 8, 8), {"steps": 0}, "steps is 0"), ((1, 8, 8), {"batch": 1}, "batch is 1"), ((1, 8, 8), {"rate": 0.0}, "rate is 0.0"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(shape, options, says):
    with pytest.raises(ValueError, match=says):
        learn_prior(network(), shape, PriorOptions(**{"steps": 1, "batch": 4, "images": 4, **options}))


def test_a_network_without_a_linear_end_is_refused():
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        learn_prior(nn.Sequential(nn.Conv2d(1, 2, 3)), (1, 8, 8), FEW)
