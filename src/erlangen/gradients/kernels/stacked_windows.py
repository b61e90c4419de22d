"""What every output of a convolution sends to its window, summed where windows overlap: the adjoint of im2col.

    dx[n, y, x, c] = Σ over taps (i, j) with an output at ((y + p − i·e)/s, (x + p − j·e)/s) of  sent[n, output, (i, j), c]

One program gathers for some entries of one map: every value sent is read once, nothing is scattered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two

Pair = tuple[int, int]


def reference(
    sent: Tensor, shape: torch.Size, size: Pair, stride: int, padding: int, dilation: int
) -> Tensor:  # fmt: skip
    """[N, C, H, W] from sent [N, T, k·k·C and perhaps more], channels innermost."""
    taps = size[0] * size[1]
    parts = sent[..., : taps * shape[1]].reshape(shape[0], -1, taps, shape[1]).permute(0, 3, 2, 1).flatten(1, 2)
    return F.fold(parts, tuple(shape[2:]), size, dilation, padding, stride)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _gather(
        sent, dx, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, C: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, P: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = k < H * W * C
        row = k // C // W + P
        col = k // C % W + P
        source = sent + n * (HO * WO * WIDTH) + k % C
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(KH):
            y = row - i * D
            in_y = inside & (y >= 0) & (y < HO * S) & (y % S == 0)
            for j in range(KW):
                z = col - j * D
                read = in_y & (z >= 0) & (z < WO * S) & (z % S == 0)
                at = ((y // S) * WO + z // S) * WIDTH + (i * KW + j) * C
                total += tl.load(source + at, mask=read, other=0.0).to(tl.float32)
        tl.store(dx + n * (H * W * C) + k, total.to(dx.dtype.element_ty), mask=inside)


def gather(
    sent: Tensor, shape: torch.Size, out: Pair, size: Pair, stride: int, padding: int, dilation: int
) -> Tensor:  # fmt: skip
    """As `reference`, channels-last, for contiguous ``sent`` and output maps of size ``out``."""
    n, channels, height, width = shape
    dx = torch.empty(
        n, channels, height, width, device=sent.device, dtype=sent.dtype, memory_format=torch.channels_last
    )
    entries = channels * height * width
    block = min(1024, power_of_two(entries))
    _gather[(n, -(-entries // block))](
        sent, dx, height, width, *out, channels, *size, stride, padding, dilation, sent.shape[-1], block, num_warps=4
    )
    return dx
