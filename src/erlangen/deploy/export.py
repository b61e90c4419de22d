"""``erlangen export``: a trained model as plain PyTorch source with safetensors weights, or as ONNX.

Either way the exported network takes pixels in [0, 1] (the constants of the run are inside), and its outputs were
compared with the run's own model before this returns.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, fx, nn

from erlangen.deploy.averaged import Averaged
from erlangen.deploy.card import ModelCard, load_run
from erlangen.deploy.claim import claim
from erlangen.deploy.fold import ExportError, plain
from erlangen.deploy.plain_layers import Normalise
from erlangen.deploy.source import run_source, source, state
from erlangen.extras import require

#: largest difference to the run's own logits, relative to 1 + the largest logit
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the run's own."""

    format: str
    files: tuple[Path, ...]
    difference: float
    checked_with: str

    def to_json(self) -> dict[str, Any]:
        files = [str(f) for f in self.files]
        return {"format": self.format, "files": files, "difference": self.difference, "checked_with": self.checked_with}


class _Pipeline(nn.Module):
    """Pixels → network input → logits."""

    def __init__(self, card: ModelCard, model: nn.Module) -> None:
        super().__init__()
        prep = card.preprocessing
        takes_pixels = prep is not None and prep.kind == "image"
        self.normalise = Normalise(prep.mean, prep.std) if prep is not None and takes_pixels else nn.Identity()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        return self.model(self.normalise(image))


def export(
    run: str | Path, format: str = "torch", out: str | Path | None = None, average_views: bool | None = None
) -> Exported:  # fmt: skip
    """Export the model of a run folder; ``out`` is a folder for torch, a file for ONNX.

    ``average_views`` puts the mean over views into the file; by default as the run was told to.
    """
    if format not in ("torch", "onnx"):
        raise ExportError(f"format is {format!r}; choose torch or onnx")
    model, card = load_run(run, average_views)
    network = plain(_Pipeline(card, model))
    reference = _Pipeline(card, model).eval()
    facts = describe(card, Path(run))
    if isinstance(model, Averaged):
        facts["answers"] = f"averaged over {model.count} views of each image"
    if format == "torch":
        return _torch(network, reference, card, facts, Path(out or Path(run) / "export"))
    return _onnx(network, reference, card, facts, Path(out or Path(run) / "model.onnx"))


def describe(card: ModelCard, run: Path) -> dict[str, Any]:
    """What somebody who gets the file has to know: input, classes, and the guarantee in one line."""
    prep = card.preprocessing
    pixels = prep is not None and prep.kind == "image"
    facts: dict[str, Any] = {
        "input": {
            "shape": ["batch", *card.input_shape],
            "pixels": "red, green, blue in [0, 1]" if card.input_shape[0] == 3 else "grey in [0, 1]",
        }
        if pixels
        else {"shape": ["batch", *card.input_shape], "pixels": "scaled as the training data was"},
        "output": "one logit for each class",
        "classes": list(card.labels),
        "model": card.model,
    }
    facts["privacy"] = claim(run)
    return facts


def _torch(
    network: fx.GraphModule, reference: nn.Module, card: ModelCard, facts: dict[str, Any], folder: Path
) -> Exported:
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"out is {folder}, which is a file; give a folder for model.py and weights.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    shape = "[batch, " + ", ".join(map(str, card.input_shape)) + "]"
    text = source(network, shape, str(facts["input"]["pixels"]), card.labels)
    (folder / "model.py").write_text(text, encoding="utf-8")
    (folder / "weights.safetensors").write_bytes(to_bytes(state(network)))
    (folder / "model.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    files = tuple(folder / name for name in ("model.py", "weights.safetensors", "model.json"))
    with _or_remove(files):
        difference = _compared(reference, card, run_source(folder))
    return Exported("torch", files, difference, f"torch {torch.__version__}")


def _onnx(
    network: fx.GraphModule, reference: nn.Module, card: ModelCard, facts: dict[str, Any], path: Path
) -> Exported:
    if path.is_dir():
        raise ExportError(f"out is {path}, which is a folder; give a file such as {path / 'model.onnx'}")
    require("ONNX", "export", "onnx", "onnxruntime", "onnxscript")  # the last is for torch's exporter
    import onnx
    import onnxruntime

    path.parent.mkdir(parents=True, exist_ok=True)
    argument = next(str(node.target) for node in network.graph.nodes if node.op == "placeholder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                network, (torch.rand(3, *card.input_shape),), dynamo=True, input_names=["image"], output_names=["logits"],
                dynamic_shapes={argument: {0: torch.export.Dim("batch", min=1)}}, verbose=False,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            raise ExportError(
                f"PyTorch {torch.__version__} cannot write this network as ONNX: {_first_cause(error)}; install a newer PyTorch, "
                "or export with format torch"
            ) from error
    assert program is not None
    proto = program.model_proto
    _without_remarks(proto)
    for key, value in facts.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())
    with _or_remove((path,)):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answer = lambda x: torch.from_numpy(session.run(["logits"], {"image": x.numpy()})[0])  # noqa: E731
        difference = _compared(reference, card, answer)
    return Exported("onnx", (path,), difference, f"onnxruntime {onnxruntime.__version__}")


def _without_remarks(message: Any) -> None:
    """Takes off what the exporter noted about where each part came from, at any depth: it names folders of this machine."""
    for field, value in message.ListFields():
        if field.name in ("doc_string", "metadata_props"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if isinstance(value, Iterable) else [value]:
                _without_remarks(part)


def _first_cause(error: BaseException) -> str:
    """The first line of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0].rstrip(".")


@contextmanager
def _or_remove(files: tuple[Path, ...]) -> Iterator[None]:
    """A model that failed its check is not left lying about."""
    try:
        yield
    except Exception:
        for path in files:
            path.unlink(missing_ok=True)
        raise


@torch.no_grad()
def _compared(reference: nn.Module, card: ModelCard, answer: Callable[[Tensor], Tensor]) -> float:
    """The largest relative difference over noise, gradients and sparse strokes, in batches of one and of several.

    Images of one value are not among them: a norm divides their rounding errors by √ε, in any runtime.
    """
    rng = np.random.default_rng(0)
    channels, height, width = card.input_shape
    noise = torch.from_numpy(rng.uniform(0, 1, (6, *card.input_shape)).astype(np.float32))
    ramp = torch.linspace(0, 1, height)[:, None] * torch.linspace(0, 1, width)
    strokes = (noise > 0.9).float()
    batches = (noise, noise[:1], ramp.expand(2, channels, height, width).contiguous(), strokes)
    worst = 0.0
    for x in batches:
        expected, found = reference(x), answer(x)
        if found.shape != expected.shape:
            raise ExportError(f"the exported model gives {tuple(found.shape)} where {tuple(expected.shape)} was expected")
        worst = max(worst, float((found - expected).abs().max() / (1 + expected.abs().max())))
    if not worst <= TOLERANCE:
        raise ExportError(f"the exported model's outputs differ by {worst:.2g}, more than {TOLERANCE:g}: it is not usable")
    return worst
