"""A chain of layers whose types must fit."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from erlangen.equivariant.checks import EquivarianceReport, check_equivariance
from erlangen.equivariant.fields import FieldType
from erlangen.equivariant.module import EquivariantModule, Exportable, bound_in_a_row, export


class EquivariantSequential(nn.Sequential, Exportable):
    """``nn.Sequential`` of equivariant layers, with the type of its first input and last output.

    Layers whose types do not fit are refused at construction, by name.
    """

    in_type: FieldType
    out_type: FieldType

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        kinds = (EquivariantModule, EquivariantSequential)
        typed = [(name, layer) for name, layer in self.named_children() if isinstance(layer, kinds)]
        if not typed:
            raise ValueError("EquivariantSequential needs at least one layer with types; use nn.Sequential otherwise")
        for (before, first), (after, second) in pairwise(typed):
            if first.out_type != second.in_type:
                raise ValueError(f"layer {before} gives {first.out_type} but layer {after} takes {second.in_type}")
        self.in_type = typed[0][1].in_type
        self.out_type = typed[-1][1].out_type
        self.off_grid_bound = bound_in_a_row(*self)

    def export(self) -> nn.Sequential:
        """``nn.Sequential`` of the exported layers."""
        return nn.Sequential(*(export(layer) for layer in self)).train(self.training)

    def check_equivariance(
        self, size: int | None = None, tolerance: float = 1e-5, off_grid_tolerance: float | None = None
    ) -> EquivarianceReport:
        """Compare f(g·x) with g·f(x) over the group of the output; off the grid to the sum of the layers' bounds."""
        bound = self.off_grid_bound if off_grid_tolerance is None else off_grid_tolerance
        return check_equivariance(self, size=size, tolerance=tolerance, off_grid_tolerance=bound)
