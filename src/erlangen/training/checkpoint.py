"""Checkpoints: one safetensors file, tensors and a JSON header, replaced atomically. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = "erlangen-checkpoint-1"
_TENSOR = "__tensor__"


class CheckpointError(RuntimeError):
    """The file is no checkpoint of ours, or is damaged."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a nested state of dicts, lists, tensors and plain values; a crash leaves the old file or the new one."""
    from safetensors.torch import save as to_bytes

    tensors: dict[str, Tensor] = {}
    tree = _strip(state, "", tensors)
    header = {"format": FORMAT, "state": json.dumps(tree)}
    write_atomically(path, to_bytes({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, header))


def load(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not an Erlangen checkpoint (format {header.get('format')!r})")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
        tree = json.loads(header["state"])
        restored = _restore(tree, tensors)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(restored, dict):
        raise CheckpointError(f"{path} holds no state")
    return restored


def write_atomically(path: Path, content: bytes) -> None:
    """Temporary file, flush to disk, rename, flush the folder."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # name the file that was wanted, not the temporary one, or none at all
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The same tree with tensors replaced by their names."""
    if isinstance(value, Tensor):
        tensors[path] = value.clone()
        return {_TENSOR: path}
    if isinstance(value, dict):
        pairs = [[_key(k), _strip(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {"pairs": pairs}
    if isinstance(value, (list, tuple)):
        return [_strip(v, f"{path}/{k}", tensors) for k, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"state at {path or '/'} is a {type(value).__name__}; checkpoints hold tensors and plain values only"
    )


def _key(key: Any) -> Any:
    if isinstance(key, (str, int)):
        return key
    raise TypeError(f"state has a key of type {type(key).__name__}; use strings or integers")


def _restore(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return tensors[tree[_TENSOR]]
        return {key: _restore(value, tensors) for key, value in tree["pairs"]}
    if isinstance(tree, list):
        return [_restore(value, tensors) for value in tree]
    return tree
