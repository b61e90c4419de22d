"""Steerable convolutions: ordinary convolutions whose kernel is a linear function of basis coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.equivariant.expansion import KernelExpansion
from erlangen.equivariant.fields import FieldType
from erlangen.equivariant.kernels import KernelGrid
from erlangen.equivariant.module import EquivariantModule, bound_off_grid
from erlangen.gradients.kernels.conv2d import conv2d
from erlangen.gradients.tracing import as_on_gpu


class SteerableConv2d(EquivariantModule):
    """The most general convolution between two field types that commutes with the group, band-limited.

    Parameters, and how they act:

    * ``weight`` [n]: coefficients θ of the kernel basis. The kernel is ``kernel() = expand(θ)``, linear in θ; with
      ``standardise=True`` it is expand(θ̂), see :meth:`KernelExpansion.standardise`.
    * ``bias`` [number of trivial irreps of the output]: added along the invariant vectors of the fields.

    ``dilation`` moves the taps of the kernel apart. By default (``stretch=True``) the continuous filter is stretched with
    them: rings, widths and band limits count in distances between taps, and the dense kernel is that of the undilated
    layer. ``stretch=False`` is escnn's convention: rings move out, but keep a width of 0.4 to 0.6 pixels and get
    frequencies in proportion to their radius, which taps so far apart cannot carry; equivariance off the grid is lost.

    ``coefficient_gradient`` and ``bias_gradient`` take gradients w.r.t. the dense kernel and bias, with any leading
    dimensions, to gradients w.r.t. the parameters; they are all that a per-sample rule needs beyond one for Conv2d.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        basis: str = "steerable",
        cutoff: float | Callable[[float], float] | None = None,
        rings: tuple[float, ...] | None = None,
        widths: tuple[float, ...] | None = None,
        stretch: bool = True,
        standardise: bool = False,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(in_type, out_type)
        if in_type.group != out_type.group:
            raise ValueError(f"types of different groups {in_type.group} and {out_type.group}; insert Restrict between")
        for name, value, least in (
            ("kernel_size", kernel_size, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1),
            ("groups", groups, 1),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; give one whole number of at least {least}: both directions are alike here")
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation
        self.groups, self.padding_mode, self.standardise, self.eps = groups, padding_mode, standardise, eps
        grid = KernelGrid.build(kernel_size, 1 if stretch else dilation, rings, widths, cutoff)
        usual = (stretch or dilation == 1) and cutoff is None and rings is None and widths is None
        self.off_grid_bound = bound_off_grid(max(dilation, stride)) if usual else math.inf
        self.expansion = KernelExpansion(_one_group(in_type, groups), _check_groups(out_type, groups), grid, basis)
        self.weight = nn.Parameter(torch.empty(self.expansion.dimension))
        invariants = out_type.invariants()
        self.register_constant("invariants", invariants if bias else None)
        self.bias = nn.Parameter(torch.zeros(invariants.shape[1])) if bias and invariants.shape[1] else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """θ ~ N(0, init_std²), bias zero."""
        self.weight.normal_().mul_(self.expansion.init_std().to(self.weight))
        if self.bias is not None:
            self.bias.zero_()

    def coefficients(self) -> Tensor:
        """θ, standardised if asked for."""
        return self.expansion.standardise(self.weight, self.eps) if self.standardise else self.weight

    def kernel(self) -> Tensor:
        """The dense kernel [C_out, C_in/groups, k, k], in the precision of θ also under autocast."""
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.expansion.expand(self.coefficients())

    def dense_bias(self) -> Tensor | None:
        """The bias of every output channel, [C_out]."""
        return None if self.bias is None else self.invariants @ self.bias  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros" and padding:
            x, padding = F.pad(x, (padding,) * 4, mode=self.padding_mode), 0
        return conv2d(x, self.kernel(), self.dense_bias(), self.stride, padding, self.dilation, self.groups)

    def coefficient_gradient(self, gradient: Tensor) -> Tensor:
        """Gradients w.r.t. ``weight`` [..., n] from those w.r.t. the dense kernel [..., C_out, C_in/groups, k, k]."""
        with torch.autocast(self.weight.device.type, enabled=False):
            pulled = self.expansion.pullback(gradient.to(self._products(gradient)))
            return self.standardised_gradient(pulled.to(self.weight.dtype))

    def standardised_gradient(self, pulled: Tensor) -> Tensor:
        """Gradients w.r.t. ``weight`` [..., n] from those w.r.t. the coefficients that the kernel is expanded from."""
        return self.expansion.standardise_vjp(self.weight, pulled, self.eps) if self.standardise else pulled

    def contracted_gradient(self, windows: Tensor, cotangents: Tensor) -> Tensor:
        """Gradients w.r.t. ``weight`` [n, θ] from input windows [n, T, C_in·k·k] and cotangents [n, T, C_out]; no groups."""
        with torch.autocast(self.weight.device.type, enabled=False):
            windows, cotangents = (t.to(self._products(cotangents)) for t in (windows, cotangents))
            return self.standardised_gradient(self.expansion.contract(windows, cotangents).to(self.weight.dtype))

    def _products(self, gradient: Tensor) -> torch.dtype:
        """What a gradient meets the basis in: on a GPU 16 bits stay 16 bits, for which its matrix units are ten times as fast."""
        return torch.bfloat16 if gradient.dtype == torch.bfloat16 and as_on_gpu(gradient) else self.weight.dtype

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Gradients w.r.t. ``bias`` from gradients w.r.t. the dense bias [..., C_out]."""
        return gradient @ self.invariants  # type: ignore[operator]

    def init_std(self) -> dict[str, Tensor]:
        """The initial standard deviation of every entry (ones for the bias): a data-independent metric."""
        return self._metric(self.expansion.init_std())

    def paper_metric(self) -> dict[str, Tensor]:
        """√(2/(n_in·E‖B_i∗x‖²)) for the coefficients, ones for the bias."""
        return self._metric(self.expansion.paper_scale())

    def _metric(self, weight: Tensor) -> dict[str, Tensor]:
        metric = {"weight": weight.to(self.weight)}
        if self.bias is not None:
            metric["bias"] = torch.ones_like(self.bias)
        return metric

    @torch.no_grad()
    def export(self) -> nn.Module:
        """An ``nn.Conv2d`` with the expanded kernel and bias."""
        conv = nn.Conv2d(
            self.in_type.size, self.out_type.size, self.kernel_size, self.stride, self.padding, self.dilation,
            self.groups, self.bias is not None, self.padding_mode,  # type: ignore[arg-type]
        )  # fmt: skip
        conv.to(self.weight)
        conv.weight.copy_(self.kernel())
        dense = self.dense_bias()
        if conv.bias is not None and dense is not None:
            conv.bias.copy_(dense)
        return conv.train(self.training)

    def extra_repr(self) -> str:
        shape = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return f"{super().extra_repr()}, {shape}, basis={self.expansion.basis}, standardise={self.standardise}"


def _one_group(in_type: FieldType, groups: int) -> FieldType:
    """The type of one group's input channels; all groups must have the same."""
    if len(in_type) % groups:
        raise ValueError(f"{len(in_type)} input fields do not divide into {groups} groups")
    count = len(in_type) // groups
    parts = {in_type.representations[g * count : (g + 1) * count] for g in range(groups)}
    if len(parts) > 1:
        raise ValueError(f"the {groups} groups of {in_type} differ; reorder the fields so that each group has the same")
    return FieldType(in_type.group, in_type.representations[:count])


def _check_groups(out_type: FieldType, groups: int) -> FieldType:
    """The output type, whose groups of fields must have as many channels each: no field lies across two groups."""
    count, rest = divmod(len(out_type), groups)
    sizes = [rho.size for rho in out_type.representations]
    if rest or len({sum(sizes[g * count : (g + 1) * count]) for g in range(groups)}) > 1:
        raise ValueError(f"{out_type} does not divide into {groups} equal groups of fields; reorder or pad the fields")
    return out_type
