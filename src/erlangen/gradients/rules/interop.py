"""Layers of other packages, by name: nothing of them is imported here."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from erlangen.gradients.registry import rule
from erlangen.gradients.rules.conv import Geometry, tapped_convolution
from erlangen.gradients.tape import Tape


@rule("escnn.nn.modules.conv.r2convolution.R2Conv")
def escnn_convolution(module: Any, tape: Tape, input: Any) -> Any:
    """A convolution whose kernel and bias are computed from parameters; the tape pulls gradients back through that."""
    if not module.training:  # there escnn uses a stored kernel, which has no gradient
        return type(module).forward(module, input)
    kernel, bias = module.expand_parameters()
    x, padding = input.tensor, (module.padding,) * 2 if isinstance(module.padding, int) else tuple(module.padding)
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, module.padding_mode), (0, 0)
    pair = lambda v: (v, v) if isinstance(v, int) else tuple(v)  # noqa: E731
    geometry = Geometry(tuple(kernel.shape[2:]), pair(module.stride), padding, pair(module.dilation), module.groups)
    return type(input)(tapped_convolution(tape, x, kernel, bias, geometry), module.out_type)
