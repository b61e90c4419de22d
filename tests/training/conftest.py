"""What tests of stacked models share."""

from __future__ import annotations

import pytest

from erlangen.gradients import kernels


@pytest.fixture(params=["twins", "kernels"])
def path(request, monkeypatch):
    """Both ways of the same sums: plain torch, and the kernels (interpreted where there is no GPU)."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(kernels, "FORCED", True)
    else:
        monkeypatch.setattr(kernels, "HAS_TRITON", False)
    return request.param
