"""What exported layers become where ``torch.nn`` has no twin: small modules that know channels and no representations.

Fields are sums over channels and back, so they are fixed 1×1 convolutions. Feature maps [batch, channels, height, width]
only; no control flow on shapes, no autocast, no custom gradients: every exporter can read them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def pointwise_conv(matrix: Tensor) -> nn.Conv2d:
    """The 1×1 convolution with this matrix [out, in], which is not trained."""
    conv = nn.Conv2d(matrix.shape[1], matrix.shape[0], 1, bias=False).to(matrix)
    conv.weight.copy_(matrix[..., None, None])
    return conv.requires_grad_(False)


def permutation_conv(order: Tensor, like: Tensor) -> nn.Conv2d:
    """A 1×1 convolution whose output channel c is input channel ``order[c]``."""
    return pointwise_conv(torch.eye(len(order)).to(like)[order])


def members(field_of: Tensor, fields: int, like: Tensor) -> Tensor:
    """[fields, channels]: 1 where the channel belongs to the field."""
    return F.one_hot(field_of, fields).T.to(like)


def above_zero(eps: float, x: Tensor) -> float:
    """ε, or the smallest number that the precision of ``x`` tells from zero well: float16 has no 1e-10."""
    return max(eps, torch.finfo(x.dtype).tiny)


class Scale(nn.Module):
    """A constant times the input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return str(self.factor)


class FieldNorm(nn.Module):
    """Instance normalisation of fields: means over space and 1×1 convolutions between channels and fields.

    ``invariants`` [channels, n] are removed from the mean, ``spread`` [channels, fields] averages over each field, ``scale``
    [channels, fields] brings it back, and ``bias`` [channels] is added.
    """

    bias: Tensor

    def __init__(self, invariants: Tensor, spread: Tensor, scale: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.mean, self.energy = pointwise_conv(invariants @ invariants.T), pointwise_conv(spread.T)
        self.scale = pointwise_conv(scale)
        self.register_buffer("bias", bias.view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean(x.mean((2, 3), keepdim=True))
        energy = self.energy(centred.square().mean((2, 3), keepdim=True))
        return centred * self.scale(torch.rsqrt(energy + self.eps)) + self.bias


@torch.no_grad()
def fourier(samples: Tensor, gain: float, fields: int, function: nn.Module) -> nn.Sequential:
    """To samples on the group, the function, and back: two grouped 1×1 convolutions."""
    count, size = samples.shape
    there, back = (
        nn.Conv2d(fields * n, fields * m, 1, groups=fields, bias=False).to(samples)
        for n, m in ((size, count), (count, size))
    )
    there.weight.copy_((samples * gain).repeat(fields, 1)[..., None, None])
    back.weight.copy_((samples / gain).T.repeat(fields, 1)[..., None, None])
    return nn.Sequential(there.requires_grad_(False), function, back.requires_grad_(False))


class FieldNorms(nn.Module):
    """√(‖x_f‖² + ε) of each field; ``members`` [fields, channels] says which channels are its."""

    def __init__(self, members: Tensor, eps: float) -> None:
        super().__init__()
        self.sum, self.eps = pointwise_conv(members), above_zero(eps, members)

    def forward(self, x: Tensor) -> Tensor:
        return (self.sum(x.square()) + self.eps).sqrt()


class NormGate(nn.Module):
    """Each field times f(‖x_f‖ + b)/‖x_f‖, f the ReLU, or times sigmoid(‖x_f‖ + b)."""

    bias: Tensor

    def __init__(self, members: Tensor, bias: Tensor, eps: float, relu: bool) -> None:
        super().__init__()
        self.norms, self.spread, self.relu = FieldNorms(members, eps), pointwise_conv(members.T), relu
        self.register_buffer("bias", bias.view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        norms = self.norms(x)
        shifted = norms + self.bias
        return x * self.spread(torch.relu(shifted) / norms if self.relu else torch.sigmoid(shifted))


class Gate(nn.Module):
    """Each field times the sigmoid of its gate; the gates are the last channels."""

    def __init__(self, members: Tensor) -> None:
        super().__init__()
        self.size, self.spread = members.shape[1], pointwise_conv(members.T)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.size] * self.spread(torch.sigmoid(x[:, self.size :]))


class DropFields(nn.Module):
    """In training each field is dropped, everywhere, with probability ``p``; the rest is scaled up."""

    def __init__(self, members: Tensor, p: float) -> None:
        super().__init__()
        self.spread, self.p = pointwise_conv(members.T), p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        ones = torch.ones(x.shape[0], self.spread.in_channels, 1, 1, dtype=x.dtype, device=x.device)
        return x * self.spread(F.dropout(ones, self.p))


class PreActivation(nn.Module):
    """A pre-activation residual block: the shortcut reads what the first convolution reads; both are pooled."""

    def __init__(
        self, enter: nn.Module, conv1: nn.Module, between: nn.Module, conv2: nn.Module, shortcut: nn.Module | None, pool: nn.Module
    ) -> None:  # fmt: skip
        super().__init__()
        self.enter, self.conv1, self.between, self.conv2 = enter, conv1, between, conv2
        self.shortcut, self.pool = shortcut, pool

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        skip = x if self.shortcut is None else self.shortcut(y)
        return self.pool(skip) + self.conv2(self.between(self.pool(self.conv1(y))))
