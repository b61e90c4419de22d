"""Windows in parts, by one copy or two, with channels or positions innermost, are the windows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.unfolding import WAYS, Unfolding, Way, cheapest, cost

GEOMETRIES = [
    (1, Geometry((3,), (2,), (1,), (1,), 1)),
    (1, Geometry((4,), (1,), (0,), (2,), 3)),
    (2, Geometry((3, 2), (1, 1), (1, 0), (1, 1), 1)),
    (2, Geometry((4, 3), (2, 1), (0, 2), (1, 2), 1)),
    (2, Geometry((2, 3), (1, 3), (1, 1), (2, 1), 3)),
    (3, Geometry((2, 1, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1)),
    (3, Geometry((1, 2, 2), (1, 1, 2), (0, 1, 0), (1, 2, 1), 3)),
]


def example(spatial: int, geometry: Geometry, owners: int, views: int, channels: int, last: bool) -> Conv:
    torch.manual_seed(0)
    x = torch.randn(owners * views, channels, *(8, 9, 7)[:spatial])
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    g = geometry
    sizes = zip(x.shape[2:], g.kernel, g.stride, g.padding, g.dilation, strict=True)
    out = [(s + 2 * p - e * (k - 1) - 1) // t + 1 for s, k, t, p, e in sizes]
    d = torch.randn(len(x), 2 * g.groups, *out)
    return Conv(x, d, views, (2 * g.groups, channels // g.groups, *g.kernel), g)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("spatial", "geometry"), GEOMETRIES)
def test_every_way_copies_the_same_windows(spatial, geometry, way: Way, views, last):
    if way.last and geometry.groups > 1:
        pytest.skip("windows of groups have positions innermost")
    for channels in {geometry.groups, 3}:
        piece = example(spatial, geometry, 5, views, channels, last)
        view = piece._windows_last() if way.last else piece._windows()
        unfold = Unfolding(piece.x, views, piece.d.shape[2:], geometry, way, 2)
        for start in range(0, 5, 2):  # the last part is smaller than the buffers, which held other images before
            want = view[start : start + 2]
            assert torch.equal(unfold(start, min(5, start + 2)).reshape(want.shape), want)


def test_windows_of_an_image_without_a_border_are_read_from_the_image_itself():
    piece = example(2, Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1), 4, 1, 1, False)
    for way in WAYS:  # one channel is first and last
        unfold = Unfolding(piece.x, 1, piece.d.shape[2:], piece.geometry, way, 4)
        assert unfold._padded(piece.x).data_ptr() == piece.x.data_ptr()


def runs(t: Tensor) -> int:
    """Runs of neighbours in a view of numbered entries, read in its order."""
    return 1 + int((t.flatten().diff() != 1).sum())


@pytest.mark.parametrize(("kernel", "stride", "channels"), [(8, 2, 1), (3, 1, 4), (5, 1, 2), (3, 2, 3)])
def test_the_cost_of_one_copy_is_that_of_its_runs(kernel, stride, channels, monkeypatch):
    """Counted in a numbered image: with entries for nothing, what a copy costs is how many runs it has."""
    from erlangen.gradients.rules import unfolding

    geometry = Geometry((kernel,) * 2, (stride,) * 2, (0, 0), (1, 1), 1)
    size = (15, 17)
    out = [(s - kernel) // stride + 1 for s in size]
    for way in (Way(True, False), Way(False, False)):
        stored = (1, *size, channels) if way.last else (1, channels, *size)
        row = math.prod(stored[2:]) if way.last else size[1]  # rows are far from each other
        x = torch.arange(math.prod(stored)).view(-1, row) + 1000.0 * torch.arange(math.prod(stored) // row)[:, None]
        x = x.view(stored).movedim(-1, 1) if way.last else x.view(stored)
        piece = Conv(x, torch.zeros(1, 1, *out, dtype=x.dtype), 1, (1, channels, kernel, kernel), geometry)
        view = piece._windows_last() if way.last else piece._windows()
        price = lambda: cost(way, x.shape[1:], False, out, geometry)  # noqa: B023, E731
        monkeypatch.setattr(unfolding, "RUN", 0)
        entries = price()
        monkeypatch.setattr(unfolding, "RUN", 1)
        apart = stride > 1 and not way.last
        assert entries == view.numel() * (unfolding.APART if apart else 1)
        assert price() - entries == pytest.approx(view.numel() / out[1] if apart else runs(view))


def test_groups_have_positions_innermost_and_short_runs_go_through_rows():
    wide = Geometry((8, 8), (2, 2), (3, 3), (1, 1), 1)
    assert cheapest(torch.zeros(1, 1, 28, 28), (14, 14), wide) == Way(last=True, rows=True)
    assert not cheapest(torch.zeros(1, 4, 9, 9), (7, 7), Geometry((3, 3), (1, 1), (0, 0), (1, 1), 2)).last
    line = Geometry((9,), (1,), (0,), (1,), 1)
    assert not cheapest(torch.zeros(1, 2, 30), (22,), line).rows  # one axis has no rows to go through
