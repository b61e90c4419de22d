"""Noise of released counts is finite whatever the system's generator answers."""

from __future__ import annotations

import os

import numpy as np
import pytest

from erlangen.accounting import metrics


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_the_ends_of_the_range_are_finite(monkeypatch, byte):
    monkeypatch.setattr(os, "urandom", lambda count: byte * count)
    assert np.isfinite(metrics._normal((4,), None)).all()
    assert 5.0 < abs(metrics._normal((1,), None)[0]) < 9.0
