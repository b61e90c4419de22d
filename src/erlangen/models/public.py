"""Weights that were public before training began: where a network may start from without any cost in privacy.

That they are public is the owner's word. A run says which file it began with, by its digest, and that nothing it tells is counted.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn


def find(weights: str) -> Path:
    """The file of that path, or of that name in ``$ERLANGEN_DATA``."""
    root = os.environ.get("ERLANGEN_DATA")
    places = [Path(weights), *([Path(root) / f"{weights}.safetensors"] if root else [])]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        raise ValueError(
            f"weights is {weights!r}, and there is no such file; give the path of a .safetensors or torch file of public "
            "weights, or make one without any data: erlangen prior"
        )
    return path


def digest(weights: str) -> str:
    """SHA-256 of the file."""
    return hashlib.sha256(find(weights).read_bytes()).hexdigest()


def load_public(model: nn.Module, weights: str) -> nn.Module:
    """Every tensor of the file must fit by name and shape, but for the last linear layer, which keeps its own weights where the
    file has another number of classes or none. Nothing is unpickled but tensors."""
    path = find(weights)
    found, own = read(path), model.state_dict()
    heads = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1:]
    fits = {n: t for n, t in found.items() if n in own and own[n].shape == t.shape}
    wrong = sorted((set(own) | set(found)) - set(fits) - {f"{head}.{part}" for head in heads for part in ("weight", "bias")})
    if wrong:
        raise ValueError(
            f"weights is {str(path)!r}, which does not fit the model: {', '.join(wrong[:4])}{' …' if len(wrong) > 4 else ''} are "
            f"missing, unknown or of another shape; give weights of the same network, with the same options{_made_for(path)}"
        )
    model.load_state_dict(fits, strict=False)
    return model


def _made_for(path: Path) -> str:
    """What a prior was learnt for, where the file says so."""
    if path.suffix != ".safetensors":
        return ""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = (file.metadata() or {}).get("erlangen-prior")
    try:
        facts = json.loads(told or "{}")
        made = f"{facts['model']} on images of {'x'.join(map(str, facts['input_shape']))}"
    except (ValueError, KeyError, TypeError):
        return ""
    return f". The file is a prior for {made}; make another with erlangen prior --model … --shape …"


def read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
        tensors = found.get("state_dict", found)
        if not all(isinstance(t, Tensor) for t in tensors.values()):
            raise ValueError("it holds more than tensors by name")
        return dict(tensors)
    except (SafetensorError, OSError, RuntimeError, ValueError, AttributeError, EOFError, ImportError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # unpickling raises what it likes
        if type(error).__module__ not in ("pickle", "_pickle"):
            raise
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    cause = str(error).strip().splitlines()
    return ValueError(f"weights is {str(path)!r}, which cannot be read: {(cause or [type(error).__name__])[0][:200]}; give a "
                      ".safetensors file, or one of torch.save with tensors by name")  # fmt: skip
