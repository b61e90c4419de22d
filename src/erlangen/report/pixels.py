"""Small images as pixels and as PNG data."""

from __future__ import annotations

import base64
import io

import numpy as np

#: signed values: one colour for each sign, more opaque for larger values, so that zero shows the page behind
POSITIVE, NEGATIVE = (232, 114, 42), (59, 123, 224)


def rgba(pixels: np.ndarray, signed: bool = False) -> np.ndarray:
    """uint8 [H, W, 4] from [H, W] or [H, W, 3] in [0, 1], or from signed values in [−1, 1]."""
    values = np.nan_to_num(np.asarray(pixels, dtype=float))
    out = np.zeros((*values.shape[:2], 4), dtype=np.uint8)
    if signed:
        out[..., :3] = np.where(values[..., None] >= 0, POSITIVE, NEGATIVE)
        out[..., 3] = np.round(255 * np.clip(np.abs(values), 0, 1))
        return out
    scaled = np.round(255 * np.clip(values, 0, 1)).astype(np.uint8)
    out[..., :3] = scaled if values.ndim == 3 else scaled[..., None]
    out[..., 3] = 255
    return out


def data_uri(pixels: np.ndarray, signed: bool = False) -> str:
    """A PNG inside the page: nothing is fetched."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(rgba(pixels, signed), "RGBA").save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
