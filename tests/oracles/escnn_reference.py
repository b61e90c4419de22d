"""Reference values for the steerable layers, computed by escnn alone.

Run it in an environment of its own (escnn 1.0.11, numpy < 2, a Fortran compiler for its dependencies):

    python tests/oracles/escnn_reference.py tests/oracles/escnn_reference.npz

It imports escnn and not erlangen. The output holds, for several groups and types, the sampled kernel basis, the initial
scale of every coefficient, and a convolution with its input, coefficients, kernel and output. The SHA-256 of the arrays
is printed, and stored beside the file with the suffix .sha256.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from escnn import gspaces, nn
from escnn.nn.init import _generalized_he_init_variances


def cases() -> dict[str, tuple[nn.FieldType, nn.FieldType, int, dict]]:
    """Name → (input type, output type, kernel size, options)."""
    found = {}
    spaces = {
        "C4": gspaces.rot2dOnR2(4),
        "C8": gspaces.rot2dOnR2(8),
        "D4": gspaces.flipRot2dOnR2(4),
        "SO2": gspaces.rot2dOnR2(-1, maximum_frequency=3),
    }
    for name, space in spaces.items():
        group = space.fibergroup
        main = group.bl_regular_representation(2) if name == "SO2" else space.regular_repr
        regular = nn.FieldType(space, [main] * 2)
        lifted = nn.FieldType(space, [space.trivial_repr] * 3)
        vector = space.irrep(1, 1) if name == "D4" else space.irrep(1)
        mixed = nn.FieldType(space, [space.trivial_repr, vector, space.trivial_repr, vector])
        found[f"{name}.regular.3"] = (regular, regular, 3, {})
        found[f"{name}.lift.3"] = (lifted, regular, 3, {})
        found[f"{name}.lift.5"] = (lifted, regular, 5, {})
        found[f"{name}.mixed.3"] = (mixed, mixed, 3, {})
        found[f"{name}.mixed.7"] = (nn.FieldType(space, [vector]), mixed, 7, {})
        found[f"{name}.lift.3.cutoff3"] = (lifted, regular, 3, {"frequencies_cutoff": 3.0})
        found[f"{name}.lift.3.dilated"] = (lifted, regular, 3, {"dilation": 2})
    return found


def reference(in_type: nn.FieldType, out_type: nn.FieldType, size: int, options: dict) -> dict[str, np.ndarray]:
    """The basis between the first fields of each kind, the scale of every coefficient, and a forward pass."""
    torch.manual_seed(size + 10 * in_type.size)
    conv = nn.R2Conv(in_type, out_type, size, padding=size // 2, bias=True, **options)
    conv.bias.data.normal_()
    conv.eval()
    expansion = conv.basisexpansion
    values = {
        "weights": conv.weights.detach().numpy(),
        "bias": conv.bias.detach().numpy(),
        "scale": _generalized_he_init_variances(expansion).numpy(),
        "kernel": conv.filter.detach().numpy(),
    }
    # Every basis element between the first field of each kind, with the scale of its coefficient.
    first_in = {rho.name: p for p, rho in reversed(list(enumerate(in_type.representations)))}
    first_out = {rho.name: p for p, rho in reversed(list(enumerate(out_type.representations)))}
    kept = [
        k
        for k, info in enumerate(expansion.get_basis_info())
        if info["in_field_position"] == first_in[info["in_repr"]]
        and info["out_field_position"] == first_out[info["out_repr"]]
    ]
    unit = torch.eye(expansion.dimension())[kept]
    basis = torch.stack([expansion(u).reshape(out_type.size, in_type.size, size, size) for u in unit])
    rows, columns = _span(out_type, first_out.values()), _span(in_type, first_in.values())
    values["basis"] = basis.numpy()[:, rows][:, :, columns]
    values["basis_scale"] = values["scale"][kept]
    values["basis_rows"], values["basis_columns"] = np.array(rows), np.array(columns)
    x = torch.randn(1, in_type.size, 9, 9)
    values["input"] = x.numpy()
    values["output"] = conv(nn.GeometricTensor(x, in_type)).tensor.detach().numpy()
    return {key: np.asarray(value, dtype=np.float32) for key, value in values.items()}


def _span(field_type: nn.FieldType, positions: object) -> list[int]:
    """Channels of the given fields."""
    channels: list[int] = []
    for position in sorted(positions):  # type: ignore[call-overload]
        start = sum(rho.size for rho in field_type.representations[:position])
        channels += range(start, start + field_type.representations[position].size)
    return channels


def digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 over the names, shapes and bytes of all arrays, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].shape}".encode())
        sha.update(np.ascontiguousarray(arrays[name]).tobytes())
    return sha.hexdigest()


def main(path: str) -> None:
    arrays = {}
    for name, case in cases().items():
        for key, value in reference(*case).items():
            arrays[f"{name}/{key}"] = value
    np.savez_compressed(path, **arrays)
    fingerprint = digest(arrays)
    Path(path).with_suffix(".sha256").write_text(fingerprint + "\n")
    print(fingerprint)


if __name__ == "__main__":
    main(sys.argv[1])
