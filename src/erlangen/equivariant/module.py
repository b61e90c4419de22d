"""The base of equivariant layers: ordinary modules on plain tensors, with a declared input and output type."""

from __future__ import annotations

import copy

from torch import nn

from erlangen.equivariant.checks import EquivarianceReport, check_equivariance
from erlangen.equivariant.constants import ConstantsModule
from erlangen.equivariant.fields import FieldType


def bound_off_grid(distance: float) -> float:
    """Largest relative error at other angles, on smooth images of 33×33, of a layer whose taps or outputs are so far apart.

    Images that are smooth on the scale of a pixel are less so on that of ``distance`` pixels: the error grows as its square.
    """
    return 0.1 * max(1.0, (distance / 2) ** 2)


def bound_in_a_row(*layers: nn.Module) -> float:
    """The bound of layers one after the other: the sum of theirs (`benchmarks/equivariance.py` draws chains)."""
    return sum(getattr(layer, "off_grid_bound", 0.0) for layer in layers)


class Exportable:
    """Knows its plain form; `export` asks for it."""

    def export(self) -> nn.Module:
        raise NotImplementedError


class EquivariantModule(ConstantsModule, Exportable):
    """A map from features of type ``in_type`` to features of type ``out_type`` that commutes with the group.

    Inputs and outputs are plain tensors [batch, channels, height, width]. The types are attributes, not tensors, so
    state dictionaries, deep copies, ``torch.func`` and ``torch.compile`` see an ordinary module.
    """

    #: largest relative error off the grid on smooth images of 33×33; infinite where none is promised
    off_grid_bound: float = bound_off_grid(1)

    def __init__(self, in_type: FieldType, out_type: FieldType) -> None:
        super().__init__()
        self.in_type = in_type
        self.out_type = out_type

    def check_equivariance(
        self, size: int | None = None, tolerance: float = 1e-5, off_grid_tolerance: float | None = None
    ) -> EquivarianceReport:
        """Compare f(g·x) with g·f(x) over the group of the output; see :func:`check_equivariance`.

        Angles off the grid are held to ``off_grid_bound`` of the layer, unless another tolerance is given.
        """
        bound = self.off_grid_bound if off_grid_tolerance is None else off_grid_tolerance
        return check_equivariance(self, size=size, tolerance=tolerance, off_grid_tolerance=bound)

    def export(self) -> nn.Module:
        """A plain torch layer with the same outputs on feature maps; a layer without one of its own keeps its class."""
        return _export_children(self)

    def extra_repr(self) -> str:
        return f"{self.in_type} → {self.out_type}"


def export(network: nn.Module) -> nn.Module:
    """A copy of ``network`` in which every equivariant layer has become a plain torch layer with the same outputs.

    Layers of this package and the networks of ``erlangen.models`` leave nothing of theirs behind: no types, no
    representations; ``torch.export``, ``torch.jit.trace`` and pickle take the result.
    """
    exported = network.export() if isinstance(network, Exportable) else _export_children(network)
    like = next(network.parameters(), None)
    return exported if like is None else exported.to(like)


def _export_children(network: nn.Module) -> nn.Module:
    exported = copy.deepcopy(network)
    for name, child in network.named_children():
        setattr(exported, name, export(child))
    return exported


def require_permutation(field_type: FieldType, purpose: str) -> None:
    """Refuse fields on which a pointwise function is not equivariant."""
    for rho in field_type.distinct:
        if not rho.permutation:
            raise ValueError(
                f"{purpose} acts on each channel and needs permutation representations (trivial, regular, quotient), "
                f"got {rho}; use a norm, gated or Fourier nonlinearity"
            )
