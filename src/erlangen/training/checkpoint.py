"""Checkpoints: one safetensors file, tensors and a JSON header, replaced atomically. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from erlangen.atomic import write_atomically

FORMAT = "erlangen-checkpoint-1"
_TENSOR = "__tensor__"


class CheckpointError(RuntimeError):
    """The file is no checkpoint of ours, or is damaged."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a nested state of dicts, lists, tensors and plain values; a crash leaves the old file or the new one."""
    from safetensors.torch import save as to_bytes

    tree, tensors = taken_apart(state)
    header = {"format": FORMAT, "state": json.dumps(tree)}
    write_atomically(path, to_bytes(tensors, header))


def load(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not an Erlangen checkpoint (format {header.get('format')!r})")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
        tree = json.loads(header["state"])
        restored = put_together(tree, tensors)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(restored, dict):
        raise CheckpointError(f"{path} holds no state")
    return restored


def taken_apart(state: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A tree that JSON can hold, and copies of the tensors it names, in host memory."""
    tensors: dict[str, Tensor] = {}

    def note(path: str, value: Tensor) -> dict[str, str]:
        tensors[path] = value.detach().clone().cpu().contiguous()
        return {_TENSOR: path}

    return _walk(state, "", note, pairs=True), tensors


def with_tensors(state: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """The same state with every tensor replaced by ``change(path, tensor)``, in a fixed order."""
    changed: dict[str, Any] = _walk(state, "", change, pairs=False)
    return changed


def _walk(value: Any, path: str, visit: Callable[[str, Tensor], Any], pairs: bool) -> Any:
    """The same tree with tensors replaced; with ``pairs`` dictionaries become lists of pairs, which keep integer keys."""
    if isinstance(value, Tensor):
        return visit(path, value)
    if isinstance(value, dict):
        inner = {_key(k): _walk(v, f"{path}/{k}", visit, pairs) for k, v in value.items()}
        return {"pairs": [list(item) for item in inner.items()]} if pairs else inner
    if isinstance(value, (list, tuple)):
        return [_walk(v, f"{path}/{k}", visit, pairs) for k, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"state at {path or '/'} is a {type(value).__name__}; checkpoints hold tensors and plain values only"
    )


def _key(key: Any) -> Any:
    if isinstance(key, (str, int)):
        return key
    raise TypeError(f"state has a key of type {type(key).__name__}; use strings or integers")


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was `taken_apart`."""
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return tensors[tree[_TENSOR]]
        return {key: put_together(value, tensors) for key, value in tree["pairs"]}
    if isinstance(tree, list):
        return [put_together(value, tensors) for value in tree]
    return tree
