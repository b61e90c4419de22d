"""How precisely products and sums of gradients are taken: never in less than float32, whatever the user has asked for elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 inside, no autocast, and no bfloat16 for float32 on a CPU: products of ten bits or eight could lift a contribution
    above its bound by one part in a thousand, and a sum that is rounded to eight bits before its noise may move by many bounds
    for one record. Whichever way the user has asked for them is as it was afterwards."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), no_ten_bits():
        yield


@contextlib.contextmanager
def no_ten_bits() -> Iterator[None]:
    """Products of float32 are products of float32 inside, in all threads."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before PyTorch 2.9
        with _exact_as_of_old():
            yield
        return
    knobs = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [knob.fp32_precision for knob in knobs]
    legacy = _legacy_precision()
    try:
        if legacy not in (None, "highest"):
            torch.set_float32_matmul_precision("highest")
        for knob in knobs:
            knob.fp32_precision = "ieee"
        yield
    finally:
        if legacy not in (None, "highest"):
            torch.set_float32_matmul_precision(legacy)
        for knob, value in zip(knobs, before, strict=True):
            knob.fp32_precision = value


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Products of float32 are products of float32 inside, and convolutions of the same shape add up in the same order each time: a
    GPU may share one out among programs that finish as they like, and in 16 bits another order is another result."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic
    cudnn.deterministic = True
    try:
        with no_ten_bits():
            yield
    finally:
        cudnn.deterministic = before


def rounds_products(device: torch.device) -> bool:
    """Whether products of float32 on this device may be taken in fewer bits, as the user has set it up."""
    backends: Any = torch.backends
    on_gpu = device.type == "cuda"
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before PyTorch 2.9
        return torch.get_float32_matmul_precision() != "highest" or (on_gpu and torch.backends.cudnn.allow_tf32)
    knobs = (backends.cuda.matmul, backends.cudnn.conv) if on_gpu else (backends.mkldnn.matmul, backends.mkldnn.conv)
    set_otherwise = any(knob.fp32_precision not in ("none", "ieee") for knob in knobs)
    return set_otherwise or _legacy_precision() not in (None, "highest")


def few_bits(values: Tensor) -> bool:
    """Whether float32 numbers have been 16-bit ones on their way: the last 13 bits of all of them are zero.

    Whole numbers are what a sum sends back, and so few others that chance could have done it say nothing. Nor do those that are not
    finite: their last bits are zero, and one record's must not stop a training.
    """
    if values.dtype != torch.float32 or int(((values != values.round()) & values.isfinite()).sum()) < 4:
        return False
    return not bool((values.contiguous().view(torch.int32) & 0x1FFF).any())


def _legacy_precision() -> str | None:
    """None where the user has set precisions backend by backend: PyTorch then refuses to give one answer."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextlib.contextmanager
def _exact_as_of_old() -> Iterator[None]:
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision("highest")
    try:
        if not torch.cuda.is_available():
            yield
            return
        with cudnn.flags(
            enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def accumulate_dtype(t: Tensor) -> torch.dtype:
    """Norms and sums are never taken in less than float32."""
    return t.dtype if t.dtype in _PRECISE else torch.complex64 if t.is_complex() else torch.float32


_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
