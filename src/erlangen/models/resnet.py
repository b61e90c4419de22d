"""Plain residual networks for private training: ResNet-9 and wide ResNets, with group norm and weight standardisation.

No layer mixes samples.
"""

from __future__ import annotations

from torch import Tensor, nn

from erlangen.models.standardised import StandardisedConv2d


def convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, *, bias: bool = False, standardise: bool = False
) -> nn.Conv2d:
    """A "same" convolution, He-initialised, standardised if asked for."""
    kind = StandardisedConv2d if standardise else nn.Conv2d
    conv = kind(inputs, outputs, size, stride, padding=size // 2, bias=bias)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Group norm with the largest number of groups up to ``groups`` that divides the channels."""
    return nn.GroupNorm(next(g for g in range(min(groups, channels), 0, -1) if channels % g == 0), channels)


class Residual(nn.Module):
    """x + f(x), then an optional norm of the sum (ScaleNorm)."""

    def __init__(self, body: nn.Module, scale_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.scale_norm = scale_norm if scale_norm is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_norm(x + self.body(x))


def resnet9(
    num_classes: int = 10,
    in_channels: int = 3,
    layout: tuple[int, int, int] = (64, 128, 256),
    *,
    norm_groups: int = 32,
    scale_norm: bool = False,
    standardise: bool = False,
    activation: str = "mish",
) -> nn.Module:
    """ResNet-9 of Klause et al. (2022): Mish, then group norm; 2.4 million parameters at the default layout."""
    first, second, third = layout
    known = {"mish": nn.Mish, "relu": nn.ReLU}
    if activation not in known:
        raise ValueError(f"activation is {activation!r}; choose {' or '.join(known)}")
    nonlinear = known[activation]

    def block(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
        conv = convolution(inputs, outputs, 3, bias=not standardise, standardise=standardise)
        layers: list[nn.Module] = [conv, nonlinear(), group_norm(outputs, norm_groups)]
        return nn.Sequential(*layers, nn.MaxPool2d(2)) if pool else nn.Sequential(*layers)

    def residual(width: int) -> Residual:
        body = nn.Sequential(block(width, width), block(width, width))
        return Residual(body, group_norm(width, norm_groups) if scale_norm else None)

    return nn.Sequential(
        block(in_channels, first),
        block(first, second, pool=True),
        residual(second),
        block(second, third, pool=True),
        block(third, third, pool=True),
        residual(third),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * third, num_classes),
    )


class WideBlock(nn.Module):
    """Pre-activation block of a wide ResNet: (norm, ReLU, 3×3 convolution) twice, 1×1 shortcut where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm_groups: int, standardise: bool) -> None:
        super().__init__()
        self.norm1 = group_norm(inputs, norm_groups)
        self.conv1 = convolution(inputs, outputs, 3, stride, bias=True, standardise=standardise)
        self.norm2 = group_norm(outputs, norm_groups)
        self.conv2 = convolution(outputs, outputs, 3, bias=True, standardise=standardise)
        self.act = nn.ReLU()
        changes = inputs != outputs or stride != 1
        self.shortcut = convolution(inputs, outputs, 1, stride, bias=True, standardise=standardise) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(x))
        skip = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        return skip + self.conv2(self.act(self.norm2(y)))


def wide_resnet(
    depth: int,
    width: int,
    num_classes: int = 10,
    in_channels: int = 3,
    *,
    norm_groups: int = 16,
    standardise: bool = True,
) -> nn.Module:
    """WRN-depth-width as De et al. (2022) train it privately: group norm of 16 groups, weight standardisation."""
    if depth % 6 != 4:
        raise ValueError(f"a wide ResNet has depth 6n+4, got {depth}; use 16, 22, 28 or 40")
    widths = (16, 16 * width, 32 * width, 64 * width)
    layers: list[nn.Module] = [convolution(in_channels, widths[0], 3, bias=True, standardise=standardise)]
    for stage in range(3):
        for position in range((depth - 4) // 6):
            inputs = widths[stage] if position == 0 else widths[stage + 1]
            stride = 2 if stage and position == 0 else 1
            layers.append(WideBlock(inputs, widths[stage + 1], stride, norm_groups, standardise))
    layers += [group_norm(widths[3], norm_groups), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(widths[3], num_classes))


def wrn_16_4(num_classes: int = 10, in_channels: int = 3, **options: bool | int) -> nn.Module:
    """WRN-16-4: 2.75 million parameters."""
    return wide_resnet(16, 4, num_classes, in_channels, **options)  # type: ignore[arg-type]


def wrn_40_4(num_classes: int = 10, in_channels: int = 3, **options: bool | int) -> nn.Module:
    """WRN-40-4: 8.9 million parameters."""
    return wide_resnet(40, 4, num_classes, in_channels, **options)  # type: ignore[arg-type]
