"""Block-circulant layers: b times fewer parameters, so b times fewer coordinates to noise.

A b×b block is given by its first row w: W[r, c] = w[(c − r) mod b] (GReDP, Eq. 18). Its product with x is the circular
correlation of w and x, a product of spectra: ŷ = conj(ŵ)·x̂. Sizes that b does not divide are padded with zeros.

The gradient of the free parameters is ĝ = Σ_tokens conj(d̂)·x̂, per pair of blocks. Per-sample norms follow from the
spectra by Parseval, and the dense matrix is never formed: neither for the batch nor for a sample.
"""

from __future__ import annotations

from erlangen.circulant.algebra import blocks_for, expand, nearest, spectrum
from erlangen.circulant.conversion import make_circulant
from erlangen.circulant.layers import CirculantConv2d, CirculantLinear
from erlangen.circulant.rules import CirculantOuter

__all__ = [
    "CirculantConv2d", "CirculantLinear", "CirculantOuter", "blocks_for", "expand", "make_circulant", "nearest", "spectrum",
]  # fmt: skip
