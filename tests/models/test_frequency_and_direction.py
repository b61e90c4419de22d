"""The networks of the GReDP and GeoDP papers: layers, parameters, shapes, and no layer that mixes samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.circulant import CirculantConv2d, nearest
from erlangen.gradients.problems import known_problems
from erlangen.models import geodp, gredp, make_model

COUNTS = {
    # name: (builder, input, k×k convolutions, linear layers, parameters)
    "lenet5": (gredp.lenet5, (1, 28, 28), 2, 3, 61_706),
    "resnet20": (gredp.resnet20, (3, 32, 32), 19, 1, 269_722),
    "model3": (gredp.model3, (3, 32, 32), 6, 2, 534_098),
    "alexnet": (gredp.alexnet, (3, 32, 32), 5, 3, 2_293_438),
    "resnet18": (gredp.resnet18, (3, 32, 32), 17, 1, 11_179_850),
    "logistic": (geodp.logistic_regression, (1, 28, 28), 0, 1, 7_850),
    "cnn": (geodp.cnn, (1, 28, 28), 2, 2, 21_840),
    "resnet3": (geodp.resnet3, (3, 32, 32), 7, 1, 77_818),
}


def layers(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, kind)]


@pytest.mark.parametrize("name", COUNTS)
def test_layers_and_parameters(name):
    builder, shape, convolutions, linears, parameters = COUNTS[name]
    model = builder(shape, 10)
    assert sum(max(c.kernel_size) > 1 for c in layers(model, nn.Conv2d)) == convolutions
    assert len(layers(model, nn.Linear)) == linears
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert not known_problems(model)
    with torch.no_grad():
        out = model(torch.randn(2, *shape))
        assert out.shape == (2, 10)


@pytest.mark.parametrize("name", COUNTS)
def test_other_sizes_and_classes(name):
    builder = COUNTS[name][0]
    with torch.no_grad():
        assert builder((2, 32, 32), 7)(torch.randn(1, 2, 32, 32)).shape == (1, 7)


def test_resnet20_is_seven_plus_six_plus_six():
    widths = [c.out_channels for c in layers(gredp.resnet20(), nn.Conv2d)]
    assert [widths.count(w) for w in (16, 32, 64)] == [7, 6, 6]


def test_lenet_as_its_table_says_literally():
    assert [c.out_channels for c in layers(gredp.lenet5(channels=(6, 6)), nn.Conv2d)] == [6, 6]


@pytest.mark.parametrize("count", [1, 2])
def test_fine_tuning_the_last_convolutions(count):
    model = gredp.fine_tune(gredp.resnet18(), count)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == count + 2
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count * 512 * 512 * 9 + 5130
    assert not any(p.requires_grad for p in gredp.fine_tune(gredp.lenet5(), 0, head=False).parameters())
    with pytest.raises(ValueError, match="has 2 convolutions"):
        gredp.fine_tune(gredp.lenet5(), 3)


def test_a_public_checkpoint_is_loaded_and_fine_tuned(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    public = make_model("resnet18", (3, 32, 32), 10)
    save_file(public.state_dict(), str(tmp_path / "there.safetensors"))
    torch.save({"state_dict": public.state_dict()}, tmp_path / "there.pt")
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    for weights, convolutions, wanted in (
        ("there", 1, 512 * 512 * 9 + 512 * 100 + 100),
        (str(tmp_path / "there.pt"), 2, 2 * 512 * 512 * 9 + 512 * 100 + 100),
    ):
        model = make_model("resnet18", (3, 32, 32), 100, weights=weights, convolutions=convolutions)
        own, theirs = model.state_dict(), public.state_dict()
        same = [n for n in own if own[n].shape == theirs[n].shape]
        assert len(same) == len(own) - 2, "all but the head of another number of classes"
        assert all(torch.equal(own[n], theirs[n]) for n in same)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == wanted
    with pytest.raises(ValueError, match="no such file"):
        make_model("resnet18", (3, 32, 32), 10, weights="elsewhere")
    save_file({k: v for k, v in public.state_dict().items() if "4.conv1" not in k}, str(tmp_path / "holes.safetensors"))
    with pytest.raises(ValueError, match="does not fit"):
        make_model("resnet18", (3, 32, 32), 10, weights="holes")


def test_pretraining_learns_and_halves_are_apart(monkeypatch):
    import numpy as np

    import erlangen.data.base
    from erlangen.data.base import Dataset
    from erlangen.experiments.pretrain import half, pretrain

    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = (rng.normal(0, 0.3, (120, 1, 8, 8)) + (2 * y - 1)[:, None, None, None]).astype(np.float32)
    monkeypatch.setitem(erlangen.data.base._DATASETS, "cifar10", lambda: Dataset("cifar10", x, y, x, y, 2))
    first, second = half(0), half(1)
    assert len(first) + len(second) == 120
    assert not np.intersect1d(first.x_train[:, 0, 0, 0], second.x_train[:, 0, 0, 0]).size
    whole = Dataset("toy", x, y, x, y, 2)
    _, scores = pretrain(whole, "mlp", epochs=3, batch=20)
    assert scores["test_accuracy"] > 0.9


@pytest.mark.parametrize("name", ["lenet", "model3", "alexnet", "resnet20", "resnet18"])
def test_circulant_networks_have_fewer_parameters_and_the_same_outputs_shape(name):
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    dense, few = make_model(name, shape, 10), make_model(name, shape, 10, circulant=4)
    assert few(torch.zeros(2, *shape)).shape == (2, 10)
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    assert count(few) < 0.3 * count(dense)


def test_circulant_fine_tuning_starts_at_the_public_weights(tmp_path):
    """Only what is trained is converted, and to its nearest twin: random weights would throw the checkpoint away."""
    torch.manual_seed(0)
    public = make_model("resnet18", (3, 32, 32), 10)
    torch.save(public.state_dict(), tmp_path / "public.pt")
    options = {"weights": str(tmp_path / "public.pt"), "convolutions": 1}
    model = make_model("resnet18", (3, 32, 32), 10, circulant=4, **options)
    converted = {n: m for n, m in model.named_modules() if isinstance(m, CirculantConv2d)}
    ((name, layer),) = converted.items()
    torch.testing.assert_close(layer.weight, nearest(public.get_submodule(name).weight, 4))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 512 * 512 * 9 // 4 + 5130
    theirs = public.state_dict()
    assert all(torch.equal(t, theirs[n]) for n, t in model.state_dict().items() if not n.startswith(name))
