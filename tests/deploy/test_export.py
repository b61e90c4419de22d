"""Exported networks answer as the run's own: layer by layer, model by model, and in onnxruntime."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx, nn

import erlangen
from erlangen import equivariant as eq
from erlangen import lipschitz as lip
from erlangen.circulant import make_circulant
from erlangen.data.preprocessing import Preprocessing
from erlangen.deploy import export as exporting
from erlangen.deploy.card import ModelCard
from erlangen.deploy.claim import OTHERS, claim
from erlangen.deploy.export import _Pipeline, export
from erlangen.deploy.fold import ExportError, fold, plain
from erlangen.deploy.source import run_source, source, state
from erlangen.extras import MissingExtra
from erlangen.lipschitz.backward_clip import BackwardClip
from erlangen.models import make_model
from erlangen.training import TrainConfig, run
from erlangen.training.validate import validate

C4 = eq.cyclic(4)
SO2 = eq.so2()


def stirred(model: nn.Module) -> nn.Module:
    """With parameters that are nowhere special."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model.eval()


def is_plain(network: nn.Module) -> bool:
    return all(type(m).__module__.startswith("torch.nn.modules") for m in network.children())


def compare(model: nn.Module, x: torch.Tensor, tolerance: float = 1e-5) -> None:
    model = stirred(model)
    network = plain(model)
    assert is_plain(network)
    with torch.no_grad():
        expected = model(x)
        assert (network(x) - expected).abs().max() <= tolerance * (1 + expected.abs().max())
        assert (network(x[:1]) - expected[:1]).abs().max() <= tolerance * (1 + expected.abs().max())


FIELD = eq.fields(eq.spectral(SO2, 2), 3)
REGULAR = eq.regular_fields(C4, 4)
EQUIVARIANT = {
    "steerable": eq.SteerableConv2d(eq.trivial_fields(C4, 2), REGULAR, 3, padding=1, standardise=True),
    "group norm": eq.EquivariantGroupNorm(REGULAR, 2),
    "group norm per element": eq.EquivariantGroupNorm(REGULAR, 2, per_element=True),
    "field norm": eq.FieldInstanceNorm(FIELD),
    "field norm, plain": eq.FieldInstanceNorm(FIELD, affine=False),
    "fourier": eq.FourierNonlinearity(SO2, 2, 3, nn.ELU()),
    "norm, relu": eq.NormNonlinearity(FIELD),
    "norm, sigmoid": eq.NormNonlinearity(FIELD, "sigmoid", bias=False),
    "gated": eq.GatedNonlinearity(FIELD),
    "pool max": eq.GroupPool(REGULAR, "max"),
    "pool mean": eq.GroupPool(REGULAR, "mean"),
    "pool norm": eq.GroupPool(FIELD, "norm"),
    "dropout": eq.FieldDropout(REGULAR),
    "restrict": eq.Restrict(REGULAR, eq.cyclic(2)),
    "disentangle": eq.Disentangle(REGULAR),
    "max pool": eq.SpatialMaxPool(REGULAR, 2),
}


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_equivariant_layers(name):
    layer = EQUIVARIANT[name]
    compare(layer, torch.randn(3, layer.in_type.size, 8, 8))


IMAGE, TOKENS = (4, 6, 6), (5, 4)
LIPSCHITZ = {
    "dense": (lip.SpectralDense(4, 3, bias=True), TOKENS),
    "conv": (lip.SpectralConv2d(4, 6, 3, stride=2, bias=True), IMAGE),
    "maxmin": (lip.MaxMin(), IMAGE),
    "maxmin, tokens": (lip.MaxMin(-1), TOKENS),
    "group sort": (lip.GroupSort(4), IMAGE),
    "full sort": (lip.FullSort(), IMAGE),
    "relu": (lip.ReLU(), IMAGE),
    "householder": (lip.Householder(4), IMAGE),
    "householder, tokens": (lip.Householder(4, -1), TOKENS),
    "bias": (lip.Bias(4), IMAGE),
    "bias, tokens": (lip.Bias(4, dim=-1), TOKENS),
    "average pool": (lip.AvgPool2d(2, scaled=True), IMAGE),
    "max pool": (lip.MaxPool2d(3, 2), IMAGE),
    "l2 pool": (lip.L2NormPool2d(2), IMAGE),
    "global pool": (lip.GlobalAvgPool(scaled=True), IMAGE),
    "global pool, plain": (lip.GlobalAvgPool(), IMAGE),
    "token mean": (lip.TokenMean(scaled=True), TOKENS),
    "centring": (lip.LayerCentering(), IMAGE),
    "centring per channel": (lip.LayerCentering(per_channel=True), IMAGE),
    "downsampling": (lip.InvertibleDownsampling(2), IMAGE),
    "tokens": (lip.Tokens(), IMAGE),
    "permute": (lip.Permute(2, 1), TOKENS),
    "residual": (lip.Residual(lip.SpectralConv2d(4, 4, 3), lip.MaxMin()), IMAGE),
    "backward clip": (lip.Sequential(lip.SpectralDense(4, 4), BackwardClip(1.0)), TOKENS),
}


@pytest.mark.parametrize("name", LIPSCHITZ)
def test_lipschitz_layers(name):
    layer, shape = LIPSCHITZ[name]
    compare(layer, torch.randn(3, *shape))


@pytest.mark.parametrize("mode", ["ball", "sphere"])
@pytest.mark.parametrize("colour", ["rgb", "hsv", "yiq", "grayscale"])
@pytest.mark.parametrize("centre", [False, True])
def test_the_input_layer(mode, colour, centre):
    layer = lip.BoundedInput((3, 5, 5), 2.0, mode, colour, centre=centre, scale=0.3)
    x = torch.rand(6, 3, 5, 5) * torch.tensor([1e-3, 0.1, 1.0, 10.0, 1e30, 1.0]).view(-1, 1, 1, 1)
    x[5, 0, 0, 0] = math.nan
    x[5, 1, 2, 2] = math.inf
    with torch.no_grad():
        torch.testing.assert_close(plain(layer)(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [
    "cnn", "lenet", "resnet9", "eq-resnet9-tuned", "c8-cnn", "resnet20", "geodp-cnn", "lipschitz-lenet", "lipschitz-mixer",
    "lipschitz-resnet", "wrn-16-4", "mlp",
])  # fmt: skip
def test_models_become_plain_source(name, tmp_path):
    """The text runs in a fresh namespace with torch and safetensors, and answers the same."""
    from safetensors.torch import save_file

    shape = (1, 28, 28) if name in ("lenet", "geodp-cnn") else (3, 16, 16)
    torch.manual_seed(0)
    model = stirred(make_model(name, shape, 5))
    network = plain(model)
    (tmp_path / "model.py").write_text(source(network, str(shape), "in [0, 1]", ("a", "b", "c", "d", "e")))
    save_file(state(network), tmp_path / "weights.safetensors")
    text = (tmp_path / "model.py").read_text()
    assert "import erlangen" not in text
    assert "pickle" not in text
    assert "torch._" not in text
    x = torch.rand(3, *shape)
    with torch.no_grad():
        expected = model(x)
        difference = (run_source(tmp_path)(x) - expected).abs().max()
    assert difference <= 1e-5 * (1 + expected.abs().max())


def test_circulant_models():
    model = make_circulant(make_model("lenet", (1, 28, 28), 10), 4)
    compare(model, torch.rand(2, 1, 28, 28))


def test_parametrized_weights():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    compare(nn.Sequential(layer, nn.Tanh()), torch.randn(3, 4))


def test_constants_of_public_data_become_batch_norms_again():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4, affine=False))
    model(torch.randn(9, 1, 4, 4) + 2)
    compare(erlangen.fix(model, public_statistics=True), torch.rand(2, 1, 4, 4))


def test_folding_leaves_the_model_alone():
    model = make_model("c8-cnn", (1, 16, 16), 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fold(model)
    assert type(model).__name__ == "EquivariantClassifier"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Foreign(nn.Module):
    def forward(self, x):
        return helper(x)


@torch.fx.wrap
def helper(x):
    return x + 1


def test_what_has_no_plain_form_is_named():
    with pytest.raises(ExportError, match="branches on values"):
        plain(Branches())
    with pytest.raises(ExportError, match=r"calls .*helper"):
        source(plain(Foreign()), "", "", ())


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = {"normalise": "0.3/0.4"}
    config = TrainConfig(model="cnn", steps=5, batch=256, epsilon=None, noise_multiplier=2.0, evaluations=1, data_options=options)
    run.train(config, folder)
    return folder


def test_an_exported_file_claims_what_verifies(trained, tmp_path):
    """It repeated ε = 0.1 from an edited summary.json, ε = 3 with the weights of another training, and left validation out."""
    def claimed(folder):
        export(folder, "torch", tmp_path / "out")
        return json.loads((tmp_path / "out" / "model.json").read_text())["privacy"]

    sound = claimed(trained)
    assert any("whoever is in the test set" in words for words in sound["not_covered"])
    names = ("edited", "others", "validated", "bare")
    edited, others, validated, bare = (shutil.copytree(trained, tmp_path / name) for name in names)
    summary = json.loads((edited / "summary.json").read_text())
    summary["guarantee"]["epsilon"] = {"pld": 0.1, "rdp": 0.1}
    (edited / "summary.json").write_text(json.dumps(summary))
    assert claimed(edited) == sound
    run.train(TrainConfig(model="cnn", steps=1, batch=256, seed=1, epsilon=None, noise_multiplier=0.0), tmp_path / "no-privacy")
    shutil.copy(tmp_path / "no-privacy" / "weights.safetensors", others)
    with pytest.raises(ExportError, match=r"does not hold.*is not the model of this certificate"):
        export(others, "torch", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    validate(validated, "digits", 1.0)
    found = claimed(validated)
    assert found["epsilon_with_validation"] > 2 * sound["epsilon"]["pld"]
    assert "on the records of the training" in found["validation"]
    (bare / "certificate.json").unlink()
    assert claimed(bare)["epsilon"] is None


def test_an_exported_file_claims_nothing_of_weights_that_no_certificate_names(trained, tmp_path):
    """The ε of a certificate went with any weights, where it named none and its ledger, which says that it does, was gone."""
    run_folder = shutil.copytree(trained, tmp_path / "run")
    for name in ("ledger.jsonl", "ledger.jsonl.copy"):
        (run_folder / name).unlink()
    named = claim(run_folder)
    assert (named["ledger_compared"], claim(trained)["ledger_compared"]) == (False, True)
    document = json.loads((run_folder / "certificate.json").read_text())
    del document["weights"]
    (run_folder / "certificate.json").write_text(json.dumps(document))
    assert named["epsilon"] is not None
    assert claim(run_folder) == {"epsilon": None, "note": OTHERS}


def test_a_run_exports_to_source_that_stands_alone(trained, tmp_path):
    done = export(trained, "torch", tmp_path / "plain")
    assert done.difference <= 1e-5
    facts = json.loads((tmp_path / "plain" / "model.json").read_text())
    assert facts["classes"] == [str(k) for k in range(10)]
    assert facts["privacy"]["epsilon"]["pld"] < 2
    assert (facts["privacy"]["randomness"], facts["privacy"]["non_private"]) == ("pseudo-random, unseeded", [])
    pixels = np.random.default_rng(0).uniform(0, 1, (2, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", pixels)
    code = (
        "import sys, numpy, torch; sys.modules['erlangen'] = None; from model import CLASSES, load; "
        "x = torch.from_numpy(numpy.load('../x.npy')); print(load()(x).tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "plain", check=True, capture_output=True, text=True
    )
    from erlangen.deploy.card import load_run

    model, card = load_run(trained)
    with torch.no_grad():
        expected = model(torch.from_numpy(card.preprocessing.normalise(pixels.copy())))
    torch.testing.assert_close(torch.tensor(json.loads(out.stdout)), expected, rtol=1e-5, atol=1e-5)


def test_a_wrong_export_is_refused(trained, tmp_path, monkeypatch):
    """The check has teeth: a network with one weight changed does not pass."""
    honest = exporting.state
    monkeypatch.setattr(exporting, "state", lambda n: {k: v + 1e-3 if "linear" in k else v for k, v in honest(n).items()})
    with pytest.raises(ExportError, match="not usable"):
        export(trained, "torch", tmp_path / "plain")
    assert not list((tmp_path / "plain").iterdir())


def test_an_export_that_does_not_run_is_not_left_lying_about(trained, tmp_path, monkeypatch):
    def fails(folder):
        raise RuntimeError("layers and weights do not fit")

    monkeypatch.setattr(exporting, "run_source", fails)
    with pytest.raises(RuntimeError, match="do not fit"):
        export(trained, "torch", tmp_path / "plain")
    assert not list((tmp_path / "plain").iterdir())


def test_misuse(trained, tmp_path):
    with pytest.raises(ExportError, match="torch or onnx"):
        export(trained, "tflite")
    with pytest.raises(ValueError, match="no folder at"):
        export(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="which is a file"):
        export(trained, "torch", tmp_path / "file")


onnx = pytest.mark.skipif(
    any(__import__("importlib.util").util.find_spec(m) is None for m in ("onnx", "onnxruntime", "onnxscript")),
    reason="onnx, onnxruntime and onnxscript are not installed: pip install 'erlangen[export]'",
)


@onnx
def test_a_run_exports_to_onnx(trained, tmp_path):
    import onnx as format
    import onnxruntime

    done = export(trained, "onnx", tmp_path / "m.onnx")
    assert done.difference <= 1e-5
    proto = format.load(tmp_path / "m.onnx")
    assert json.loads({e.key: e.value for e in proto.metadata_props}["classes"])[3] == "3"
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for rows in (1, 7):
        assert session.run(None, {"image": np.zeros((rows, 1, 8, 8), np.float32)})[0].shape == (rows, 10)


def foreign(folder, home):
    """The folders of this machine, as the files of ``folder`` name them."""
    places = [str(Path(torch.__file__).parents[1]), str(Path(erlangen.__file__).parent), str(home), str(Path.home())]
    said = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return {p for p in places if p != "/" for content in said if p.encode() in content}


@onnx
def test_a_model_given_away_does_not_say_where_it_was_made(trained, tmp_path, monkeypatch):
    """The exporter notes the files and lines of the code behind every node; the broken twin lets that through."""
    export(trained, "torch", tmp_path / "clean")
    export(trained, "onnx", tmp_path / "clean" / "m.onnx")
    assert foreign(tmp_path / "clean", trained.parent) == set()
    assert b'File "' not in (tmp_path / "clean" / "m.onnx").read_bytes()
    monkeypatch.setattr(exporting, "_without_remarks", lambda message: None)
    export(trained, "onnx", tmp_path / "broken" / "m.onnx")
    assert foreign(tmp_path / "broken", trained.parent) != set()


@onnx
def test_remarks_are_taken_off_at_any_depth():
    from onnx import AttributeProto, ModelProto

    model = ModelProto(doc_string="here")
    branch = AttributeProto(name="then_branch", type=AttributeProto.GRAPH)
    inner = branch.g.node.add(op_type="Relu", doc_string="/home/owner")
    inner.metadata_props.add(key="trace", value="/home/owner")
    model.graph.node.add(op_type="If").attribute.append(branch)
    model.functions.add(name="f").node.add(doc_string="/home/owner")
    model.graph.initializer.add(doc_string="/home/owner", dims=[2], float_data=[1.0, 2.0])
    assert model.SerializeToString().count(b"/home/owner") == 4
    exporting._without_remarks(model)
    assert b"owner" not in model.SerializeToString()
    assert model.graph.node[0].attribute[0].g.node[0].op_type == "Relu"
    assert list(model.graph.initializer[0].float_data) == [1.0, 2.0]


class Airy(nn.Module):
    """An operation that has no form in ONNX."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(image).flatten(1)


@onnx
def test_what_onnx_cannot_say_is_named(tmp_path):
    card = ModelCard("airy", {}, (1, 2, 2), 4, (), Preprocessing(1, 2, 2))
    with pytest.raises(ExportError, match=r"cannot write this network as ONNX: .*airy_ai.*; .* export with format torch"):
        exporting._onnx(fx.symbolic_trace(Airy()), Airy(), card, {}, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param("c8-cnn", marks=pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 has no AdaptiveMaxPool2d")),
    "eq-resnet9-tuned", "lipschitz-lenet", "lipschitz-mixer", "lipschitz-resnet", "wrn-16-4",
])  # fmt: skip
def test_models_in_onnxruntime(name, tmp_path):
    shape = (3, 16, 16)
    torch.manual_seed(0)
    model = stirred(make_model(name, shape, 5))
    card = ModelCard(name, {}, shape, 5, (), Preprocessing(*shape))
    done = exporting._onnx(plain(_Pipeline(card, model)), _Pipeline(card, model), card, {}, tmp_path / "m.onnx")
    assert done.difference <= 1e-5


def test_without_onnx_the_message_names_the_extra(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("erlangen.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"ONNX needs onnx and .*erlangen\[export\]"):
        export(trained, "onnx", tmp_path / "m.onnx")
