"""In which precision products are computed, and a refusal to compute in a lower one than the bounds were made for.

float32: rounding is absorbed by the outward margins. TF32 and bfloat16 round the *factors* of a product by a relative
u; the bounds grow accordingly (`Activation.roundoff`), and sums are accumulated in float32 by the hardware. float16 is
refused: cotangents that overflow or vanish have no relative error bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from erlangen.lipschitz.base import ROUNDOFF


def _float32_products(device: torch.device) -> str:
    """What products of float32 tensors may be rounded to."""
    try:
        setting = torch.get_float32_matmul_precision()
        convolutions = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    except RuntimeError:  # newer releases refuse to read the old settings once the new ones were used
        return "bf16"
    if setting == "medium":
        return "bf16"
    return "tf32" if setting == "high" or convolutions else "fp32"


def current(device: torch.device) -> str:
    """The lowest precision that products on this device may use now."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        if dtype == torch.bfloat16:
            return "bf16"
        if dtype != torch.float32:
            raise RuntimeError(f"autocast to {dtype} has no certified bounds; use torch.bfloat16 or none")
    return _float32_products(device)


def require(precision: str, device: torch.device) -> None:
    """Raise if products may now be rounded more than the bounds allow."""
    now = current(device)
    if ROUNDOFF[now] > ROUNDOFF[precision]:
        raise RuntimeError(
            f"products are computed in {now} but the sensitivities were certified for {precision}: pass "
            f"mechanism_options={{'precision': {now!r}}}, or switch {now} off"
        )


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32, for certificates: no TF32, no bfloat16, no autocast."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # the newer settings are in use, and refuse to be mixed with the older
            with _ieee():
                yield
            return
        if before == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee() -> Iterator[None]:
    products: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [p.fp32_precision for p in products]
    for p in products:
        p.fp32_precision = "ieee"
    try:
        yield
    finally:
        for p, value in zip(products, before, strict=True):
            p.fp32_precision = value
