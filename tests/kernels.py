"""What the tests of kernels share: where they run, and how near two results must be."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16 matrices


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    error = (a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).to(memory_format=torch.channels_last)
