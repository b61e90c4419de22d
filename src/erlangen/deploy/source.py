"""A flat graph of torch layers as Python source that needs nothing but torch and safetensors.

Weights are in a safetensors file beside it. There is no pickle: what runs is text that can be read first.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx, nn

from erlangen.deploy.fold import ExportError

_TEMPLATE = '''"""A plain PyTorch network, written by ``erlangen export``. It needs torch and safetensors only.

    from model import CLASSES, load
    logits = load()(images)

Images are {shape}, {pixels}. The answer is one logit for each of CLASSES.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

CLASSES = {classes}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{layers}

    def forward(self, {argument}):
{body}


def load(folder=None):
    """The network with its weights, ready to predict."""
    model = Model()
    model.load_state_dict(load_file(str(Path(folder or Path(__file__).parent) / "weights.safetensors")))
    return model.eval()
'''


def source(network: fx.GraphModule, shape: str, pixels: str, classes: tuple[str, ...]) -> str:
    """The text of ``model.py``."""
    for node in network.graph.nodes:
        node.type = None  # annotations would ask for imports
    _rename(network)
    code = network.graph.python_code("self")
    lines = code.src.strip().splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def forward"))
    argument = next(str(node.target) for node in network.graph.nodes if node.op == "placeholder")
    body = [re.sub(r";\s+(\w+ = )+None.*$", "", line) for line in lines[start + 1 :]]
    body = [line.replace("torch._C._nn.", "torch.nn.functional.") for line in body]  # where torch binds some of them
    used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", " ".join(body)))
    strange = sorted((used & set(code.globals)) - {"torch"})
    if strange:
        raise ExportError(f"the forward pass calls {', '.join(strange)}, which plain torch does not have")
    return _TEMPLATE.format(
        shape=shape, pixels=pixels, classes=repr(list(classes)), argument=argument,
        layers="\n".join(f"        {line}" for line in _layers(network)),
        body="\n".join(f"        {line.strip()}" for line in body if line.strip()),
    )  # fmt: skip


def _rename(network: fx.GraphModule) -> None:
    """Intermediate values are x1, x2, …, in order."""
    values = [node for node in network.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    for number, node in enumerate(values, start=1):
        node.name = f"x{number}"


def _layers(network: fx.GraphModule) -> list[str]:
    lines = [f"self.{name} = nn.{_constructor(layer)}" for name, layer in network.named_children()]
    for name, value in network.named_buffers(recurse=False):
        lines.append(f'self.register_buffer("{name}", torch.zeros({tuple(value.shape)}, dtype={value.dtype}))')
    return lines


def _constructor(layer: nn.Module) -> str:
    """torch's own layers describe themselves as the call that makes them."""
    if not type(layer).__module__.startswith("torch.nn.modules") or list(layer.children()):
        raise ExportError(
            f"{type(layer).__name__} cannot be written as one plain layer of torch; the run's weights.safetensors fits your own "
            "module all the same: module.load_state_dict(safetensors.torch.load_file(…))"
        )
    text = repr(layer)
    return re.sub(r"padding_mode=(\w+)", r"padding_mode='\1'", text)


def run_source(folder: Path) -> nn.Module:
    """The network that the text in ``folder`` makes: the check that it stands on its own."""
    space: dict[str, object] = {"__file__": str(folder / "model.py"), "__name__": "exported_model"}
    exec(compile((folder / "model.py").read_text(encoding="utf-8"), str(folder / "model.py"), "exec"), space)
    model = space["load"](folder)  # type: ignore[operator]
    assert isinstance(model, nn.Module)
    return model


def state(network: fx.GraphModule) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
