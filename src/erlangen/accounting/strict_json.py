"""Reading JSON that somebody else may have written: bounded, no duplicate keys, no NaN, one kind of error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 1024 * 1024


class DocumentError(ValueError):
    """The bytes are not the JSON document they should be."""


def loads(data: str | bytes, what: str = "document") -> Any:
    """Parse `data`; every way it can be wrong raises `DocumentError`."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer, parse_float=_real
        )
    except DocumentError as error:
        raise DocumentError(f"{what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{what} is not valid JSON ({str(error)[:120]})") from None


def read(path: Path, what: str) -> Any:
    """Parse the file at `path`."""
    return loads(read_bytes(path, what), f"{what} {path}")


def read_bytes(path: Path, what: str) -> bytes:
    """The bytes of a file of sane size; a clear `DocumentError` where there is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DocumentError(f"{what} {path} is larger than {MAX_BYTES} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}") from None


def dumps(value: Any) -> str:
    """One compact line of JSON; NaN and infinity are refused."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise DocumentError("a key appears twice in one object")
    return out


def _integer(digits: str) -> int:
    if len(digits) > 30:
        raise DocumentError("a whole number has more than 30 digits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_constant(digits[:30])


def _no_constant(name: str) -> Any:
    raise DocumentError(f"{name} is not a JSON number")
