"""Small gradients in one matrix: the same norms and sums as one by one, whatever the metric, the weights and the rows."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.gradients import bundle, kernels
from erlangen.gradients.bundle import Bundle
from erlangen.gradients.pieces import Dense
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.clipping import PerLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"a": (7,), "b": (3, 2), "c": (), "wide": (bundle.SMALL + 1,), "d": (5,)}


@pytest.fixture(autouse=True, params=[True, False], ids=["kernels", "no kernels"])
def forced(request, monkeypatch):
    """With the kernel that never reads an owner of weight zero, and as on a CPU, where such owners are set to zero."""
    if DEVICE == "cuda" and not request.param:
        pytest.skip("kernels run wherever there is a GPU")
    monkeypatch.setattr(kernels, "FORCED", request.param)
    return request.param


def gradients(owners: int = 4, factor: float = 3.0) -> tuple[PerSampleGradients, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    half = {"a": torch.bfloat16, "d": torch.float16}
    raw = {n: torch.randn(owners, *s, device=DEVICE).to(half.get(n, torch.float32)) for n, s in SHAPES.items()}
    return PerSampleGradients({n: Dense(g) for n, g in raw.items()}, owners, factor), raw


@pytest.mark.parametrize("weighted", [(), ("b",), ("a", "c")])
def test_norms_and_sums_are_those_of_each_alone(weighted):
    found, raw = gradients()
    scale = {n: torch.rand(s, device=DEVICE) + 0.5 for n, s in SHAPES.items()}
    norms = found.norms_squared(lambda n: scale[n] if n in weighted else None)
    assert set(found._bundle.shapes) == {"a", "b", "c", "d"} - set(weighted)
    for name, g in raw.items():
        g = g.double().flatten(1) if g.ndim > 1 else g.double()[:, None]
        g = g * scale[name].double().flatten() if name in weighted else g
        exact = 9 * g.square().sum(1)
        torch.testing.assert_close(norms[name].double(), exact, rtol=1e-5, atol=0)
        if name in found._bundle.shapes:
            assert bool((norms[name].double() >= exact).all())
    for apart in (False, True):  # one clipping group, then one for each parameter
        w = {n: torch.rand(4, device=DEVICE) for n in raw} if apart else dict.fromkeys(raw, torch.rand(4, device=DEVICE))
        sums = found.weighted_sum(w)
        for name, g in raw.items():
            assert sums[name].shape == SHAPES[name]
            wanted = 3 * torch.einsum("n,n...->...", w[name].double(), g.double())
            torch.testing.assert_close(sums[name].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clipping", [1.0, PerLayer(1.0)])
def test_a_row_that_is_not_finite_is_left_out_of_every_parameter(clipping):
    _, raw = gradients()
    raw["b"][2, 1, 1] = torch.nan
    raw["d"][1] = torch.inf
    mechanism = GaussianMechanism(0.0, clipping)
    mechanism.bind({n: torch.zeros(s, device=DEVICE) for n, s in SHAPES.items()})
    mechanism.accumulate(PerSampleGradients({n: Dense(g) for n, g in raw.items()}, 4))
    with_bad = {n: s.clone() for n, s in mechanism.clipped_sum().items()}
    mechanism.finish(1)
    good = {n: Dense(g[[0, 3]]) for n, g in raw.items()}
    mechanism.accumulate(PerSampleGradients(good, 2))
    for name, total in mechanism.clipped_sum().items():
        torch.testing.assert_close(with_bad[name], total, rtol=1e-5, atol=1e-6)
    assert float(torch.cat([s.flatten() for s in with_bad.values()]).norm()) <= 2


def test_what_cannot_be_bundled_is_not(forced):
    _, raw = gradients()
    assert Bundle.of({"a": Dense(raw["a"])}) is None, "one alone"
    double = Bundle.of({n: Dense(raw[n].double()) for n in ("a", "b")})
    assert (double is None) == (DEVICE == "cuda"), "no kernel sums float64"
    mixed = {"a": Dense(raw["a"].double()), "b": Dense(raw["b"]), "d": Dense(raw["d"])}
    found = Bundle.of(mixed)
    assert found is None or "a" not in found.shapes, "norms in float64 leave no room for the rounding of float32 sums"
    assert Bundle.of({n: Dense(raw[n][:0]) for n in ("a", "b")}) is None
    assert Bundle.of({n: Dense(raw[n], torch.ones(4)) for n in ("a", "b")}) is None, "their norms are known"
    middling = {n: Dense(torch.ones(4, bundle.SMALL_ON_CPU + 1, device=DEVICE)) for n in ("a", "b")}
    assert (Bundle.of(middling) is not None) == forced, "on a CPU the copy costs more than the calls"
