"""BatchNorm of a network that was trained on public data: its statistics become constants, so that rows do not meet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConstantNorm(nn.Module):
    """What a BatchNorm computes in evaluation mode, in training mode too. Weight and bias are the layer's own and train.

    ``state_dict()`` has the keys of the BatchNorm, so that the weights load into the network as it was before.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        if not learned(norm):
            raise ValueError(
                f"{type(norm).__name__} of {norm.num_features} features has no statistics of a training to keep; load the weights "
                "first, or replace it by GroupNorm: erlangen.fix(model)"
            )
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.num_features, self.eps, self.kind = norm.num_features, norm.eps, type(norm)
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        return self.normalise(input, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"

    def export(self) -> nn.Module:
        """The BatchNorm again, for prediction."""
        kind = self.kind if self.kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) else nn.BatchNorm2d
        norm = kind(self.num_features, self.eps, affine=self.weight is not None).to(self.running_mean)
        norm.load_state_dict(self.state_dict())
        return norm.eval()


def learned(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether there are statistics other than those that every BatchNorm begins with."""
    if norm.running_mean is None or norm.running_var is None:
        return False
    return bool(torch.any(norm.running_mean != 0) or torch.any(norm.running_var != 1))
