"""Bases, initial scales and forward passes against escnn 1.0.11 (values from ``tests/oracles/escnn_reference.py``)."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from erlangen.equivariant import (
    FieldType,
    SteerableConv2d,
    cyclic,
    dihedral,
    fields,
    irrep,
    regular,
    so2,
    spectral,
    trivial,
)

FILE = Path(__file__).parents[1] / "oracles" / "escnn_reference.npz"
VALUES = np.load(FILE)
GROUPS = {"C4": cyclic(4), "C8": cyclic(8), "D4": dihedral(4), "SO2": so2()}
CASES = sorted({name.split("/")[0] for name in VALUES.files})


def types(case: str) -> tuple[FieldType, FieldType]:
    group = GROUPS[case.split(".")[0]]
    main = regular(group) if group.is_finite else spectral(group, 2)
    vector = irrep(group, 1)
    mixed = fields([trivial(group), vector], 2)
    kind = case.split(".")[1]
    if kind == "regular":
        return fields(main, 2), fields(main, 2)
    if kind == "lift":
        return fields(trivial(group), 3), fields(main, 2)
    return (fields(vector) if case.endswith(".7") else mixed), mixed


def layer(case: str) -> SteerableConv2d:
    size = int(case.split(".")[2])
    cutoff = 3.0 if case.endswith("cutoff3") else None
    dilation = 2 if case.endswith("dilated") else 1
    conv = SteerableConv2d(*types(case), size, padding=size // 2, cutoff=cutoff, dilation=dilation, stretch=False)
    return conv.double()


def basis_of(conv: SteerableConv2d) -> torch.Tensor:
    """The dense kernel of every coefficient, [n, C_out, C_in, k, k]."""
    unit = torch.eye(conv.weight.numel(), dtype=torch.float64)
    return torch.stack([conv.expansion.expand(u) for u in unit])


def test_values_are_the_ones_that_were_written() -> None:
    sha = hashlib.sha256()
    for name in sorted(VALUES.files):
        sha.update(f"{name}{VALUES[name].shape}".encode())
        sha.update(np.ascontiguousarray(VALUES[name]).tobytes())
    assert sha.hexdigest() == FILE.with_suffix(".sha256").read_text().strip()
    assert {case.split(".")[0] for case in CASES} == set(GROUPS)


@pytest.mark.parametrize("case", CASES)
def test_basis_and_scales(case: str) -> None:
    """Every basis element of escnn is one of ours up to sign, with the same scale, and none is left over."""
    conv = layer(case)
    rows, columns = VALUES[f"{case}/basis_rows"].astype(int), VALUES[f"{case}/basis_columns"].astype(int)
    theirs, scales = VALUES[f"{case}/basis"].astype(float), VALUES[f"{case}/basis_scale"].astype(float)
    ours = basis_of(conv)[:, rows][:, :, columns].numpy()
    inside = np.abs(ours).reshape(len(ours), -1).max(1) > 0  # those between the first fields of each kind
    ours, std = ours[inside], conv.init_std()["weight"].numpy()[inside]
    assert len(ours) == len(theirs) == len(scales)
    a, b = theirs.reshape(len(theirs), -1), ours.reshape(len(ours), -1)
    distance = np.minimum(np.abs(a[:, None] - b[None]).max(2), np.abs(a[:, None] + b[None]).max(2))
    match = distance.argmin(1)
    assert distance.min(1).max() < 1e-5
    assert len(set(match)) == len(match)
    assert np.allclose(scales, std[match], atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_all_scales_agree(case: str) -> None:
    ours = np.sort(layer(case).init_std()["weight"].numpy())
    assert np.allclose(ours, np.sort(VALUES[f"{case}/scale"]), atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_forward(case: str) -> None:
    """The kernel that escnn expanded lies in our span; with its coefficients our layer gives escnn's output."""
    conv = layer(case)
    kernel = torch.as_tensor(VALUES[f"{case}/kernel"]).double()
    design = basis_of(conv).flatten(1)
    theta = torch.linalg.lstsq(design.T, kernel.reshape(-1, 1)).solution.squeeze(1)
    with torch.no_grad():
        conv.weight.copy_(theta)
        assert conv.bias is not None
        conv.bias.copy_(torch.as_tensor(VALUES[f"{case}/bias"]))
        found = conv(torch.as_tensor(VALUES[f"{case}/input"]).double())
        assert (conv.kernel() - kernel).abs().max() < 1e-5
    expected = torch.as_tensor(VALUES[f"{case}/output"]).double()
    assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
