"""Fourier coordinates and Spectral-DP: an isometry, a projector, and noise on all of what is released."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.accounting import epsilon, gaussian
from erlangen.audit.broken.randomness import SameForEveryLayer
from erlangen.circulant.algebra import half_weights
from erlangen.mechanisms import Context, Fourier, GaussianMechanism, StreamNoise, make_mechanism
from erlangen.mechanisms.clipping import AdaptiveQuantile, Flat, PerLayer
from erlangen.mechanisms.frequency import GUARD, hartley, low_pass, parity

SIZES = [(7,), (8,), (3, 3), (4, 4), (3, 4), (5, 2)]
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def build(name: str, sigma: float = 1.0, rule=None, batch: float = 1.0, seed: int | None = 0, **options):
    context = Context(sigma, rule or Flat(1.0), StreamNoise(seed), nn.Identity(), batch, options)
    return make_mechanism(name, context)


def sampled_covariance(mechanism, shape, rows: int = 40_000) -> torch.Tensor:
    """Covariance of released noise: the rows of one large parameter are independent kernels."""
    released = mechanism.release({"k": torch.zeros(1, rows, 1, *shape)}, 1.0)["k"].reshape(rows, -1).double()
    return released.T @ released / rows


def wrong_by(found: torch.Tensor, want: torch.Tensor, rows: int = 40_000) -> float:
    """Largest deviation in units of the sampling error of a covariance entry."""
    return float((found - want).abs().max() / (want.diagonal().max() * math.sqrt(2 / rows)))


@given(sizes)
@settings(max_examples=60, deadline=None)
def test_hartley_is_orthonormal_symmetric_and_its_own_inverse(shape):
    n, dims = math.prod(shape), tuple(range(1, len(shape) + 1))
    units = torch.eye(n, dtype=torch.float64).view(n, *shape)
    matrix = hartley(units, dims).reshape(n, n)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(n, dtype=torch.float64))


@given(st.integers(1, 12))
@settings(max_examples=24, deadline=None)
def test_half_spectrum_norm_needs_its_weights(size):
    """Those with which circulant layers measure: once at DC and Nyquist, twice elsewhere."""
    x = torch.randn(size, dtype=torch.float64)
    half = torch.fft.rfft(x, norm="ortho")
    torch.testing.assert_close((half_weights(size, half) * half.abs().square()).sum(), x.square().sum())


def test_unweighted_half_spectrum_would_clip_at_less_than_the_norm():
    """The broken twin: it measures about 0.71 of the norm, so a gradient √2 too long would pass."""
    x = torch.randn(2000, 64, dtype=torch.float64)
    ratio = torch.fft.rfft(x, norm="ortho").abs().square().sum(1).sqrt() / x.norm(dim=1)
    assert 0.69 < float(ratio.mean()) < 0.74


@given(sizes, st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_low_pass_is_symmetric_holds_enough_and_contains_dc(shape, ratio):
    mask = low_pass(shape, ratio)
    assert torch.equal(mask, parity(mask, range(mask.ndim)))
    assert bool(mask.flatten()[0])
    assert int(mask.sum()) >= ratio * mask.numel() - 1e-6
    assert bool(low_pass(shape, 1.0).all())


def test_low_pass_of_a_3x3_kernel_keeps_whole_rings():
    assert [int(low_pass((3, 3), r).sum()) for r in (0.1, 0.2, 0.5, 0.6, 1.0)] == [1, 5, 5, 9, 9]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0])
def test_forward_and_inverse_are_an_isometry_onto_the_kept_frequencies(shape, ratio):
    geometry = Fourier(ratio)
    geometry.bind({"k": torch.Size((2, 3, *shape))})
    g = torch.randn(5, 2, 3, *shape, dtype=torch.float64)
    c = geometry.forward("k", g)
    assert c.shape == (5, 2, 3, int(geometry.mask["k"].sum()))
    back = geometry.inverse("k", c)
    torch.testing.assert_close(geometry.forward("k", back), c)
    torch.testing.assert_close(back.norm(), c.norm())
    spectrum = torch.fft.fftn(back, dim=tuple(range(3, g.ndim)))
    assert float(spectrum[..., ~geometry.mask["k"]].abs().amax() if not geometry.mask["k"].all() else 0.0) < 1e-10
    if ratio == 1.0:
        torch.testing.assert_close(back, g)


@pytest.mark.parametrize("shape", SIZES)
def test_axes_may_be_any_of_the_parameter(shape):
    geometry = Fourier(0.5, axes={"k": tuple(range(len(shape)))})
    geometry.bind({"k": torch.Size((*shape, 3))})
    g = torch.randn(2, *shape, 3, dtype=torch.float64)
    plain = Fourier(0.5)
    plain.bind({"k": torch.Size((1, 3, *shape))})
    want = plain.inverse("k", plain.forward("k", torch.movedim(g, -1, 1)[:, None]))[:, 0]
    torch.testing.assert_close(geometry.inverse("k", geometry.forward("k", g)), torch.movedim(want, 1, -1))
    weighted = geometry.weight("k")
    if weighted is not None:
        assert weighted(g).flatten(1).norm(dim=1).ge(geometry.forward("k", g).flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("name", ["spectral", "gredp"])
def test_full_covariance_of_what_is_released(name, shape):
    """Eigenvalues σ²C² on every kept coordinate, 0 on the rest: nothing that is released goes without noise."""
    mechanism = build(name, 1.3, Flat(0.5))
    mechanism.bind({"k": torch.zeros(40_000, 1, *shape)})
    small = build(name, 1.3, Flat(0.5))
    small.bind({"k": torch.zeros(1, 1, *shape)})
    want = small.covariance("k")
    found = sampled_covariance(mechanism, shape)
    assert wrong_by(found, want) < 5
    kept = small.geometry.mask["k"].sum()
    values = torch.linalg.eigvalsh(found).flip(0)
    assert float(values[:kept].min()) > 0.95 * (1.3 * 0.5) ** 2
    assert float(values[kept:].abs().max() if kept < values.numel() else 0.0) < 1e-8
    assert float(small.noise_std("k")) ** 2 == pytest.approx(float(want.diagonal()[0]))


#: kernels, circulant rows and circulant kernels, of odd and even sizes, and what has no frequencies
MIXED = {
    "conv.weight": (2, 1, 3, 4), "conv.bias": (2,), "rows.weight": (1, 2, 4), "odd.weight": (1, 1, 5),
    "blocks.weight": (1, 1, 2, 3, 2), "head.weight": (2, 3),
}  # fmt: skip


def whitened(mechanism, trials: int = 2000) -> tuple[torch.Tensor, torch.Tensor]:
    """Releases of nothing, in all parameters together: the sample covariance in coordinates where the stated one is the
    identity, and what came out along directions that are stated to be silent."""
    mechanism.bind({name: torch.zeros(shape) for name, shape in MIXED.items()}, 4.0)
    nothing = {name: torch.zeros(0, *shape) for name, shape in MIXED.items()}
    rows = [torch.cat([t.flatten() for t in mechanism.release(nothing, 1.0).values()]) for _ in range(trials)]
    values, vectors = torch.linalg.eigh(torch.block_diag(*[mechanism.covariance(name) for name in MIXED]))
    live, drawn = values > 1e-9, torch.stack(rows).double()
    white = drawn @ (vectors[:, live] / values[live].sqrt())
    return white.T @ white / trials, drawn @ vectors[:, ~live]


@pytest.mark.parametrize(("name", "rule", "options"), [
    ("spectral", Flat, {}), ("spectral", PerLayer, {}), ("spectral", Flat, {"order": "clip-first"}),
    ("spectral", PerLayer, {"as_published": True}), ("gredp", Flat, {}), ("gredp", PerLayer, {"as_published": "complex"}),
    ("gredp", Flat, {"as_published": "real"}), ("gredp", PerLayer, {"as_published": "per-sample"}),
])  # fmt: skip
def test_full_covariance_of_all_parameters_together(name, rule, options):
    """No direction across parameters has less noise than is stated: one draw for two of them would leave a difference bare."""
    covariance, silent = whitened(build(name, 1.3, rule(0.5), **options))
    d, trials = covariance.shape[0], 2000
    least, limit = float(torch.linalg.eigvalsh(covariance)[0]), (1 - math.sqrt(d / trials) - 4 / math.sqrt(trials)) ** 2
    assert least > limit
    assert wrong_by(covariance, torch.eye(d, dtype=torch.float64), trials) < 5.5
    assert not silent.numel() or float(silent.abs().max()) < 1e-5


def test_one_draw_for_all_parameters_is_caught():
    """The broken twin: every parameter by itself has the noise that is stated."""
    covariance, _ = whitened(make_mechanism("gredp", Context(1.3, Flat(0.5), SameForEveryLayer(0), nn.Identity(), 4.0, {})))
    assert float(covariance.diagonal().min()) > 0.9
    assert float(torch.linalg.eigvalsh(covariance)[0]) < 1e-6


def test_an_un_noised_last_bin_is_caught():
    """The broken twin: noise on all bins of the half spectrum but the last."""
    rows = 40_000
    noise = torch.fft.rfft(torch.randn(rows, 8, dtype=torch.float64), norm="ortho")
    noise[:, -1] = 0
    released = torch.fft.irfft(noise, 8, norm="ortho")
    found = released.T @ released / rows
    assert float(found.diagonal().min()) > 0.8  # marginal variances look fine
    assert float(torch.linalg.eigvalsh(found)[0]) < 1e-8
    assert wrong_by(found, torch.eye(8, dtype=torch.float64)) > 5


HOSTILE = [1e30, 1e18, 1e9, 1.0, 1e-9, 1e-30, 1e-42, 0.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(("name", "options"), [
    ("spectral", {"order": "filter-first"}), ("spectral", {"order": "clip-first"}), ("gredp", {}),
    ("gredp", {"as_published": "complex"}),
])  # fmt: skip
@pytest.mark.parametrize("value", HOSTILE)
def test_nobody_moves_the_sum_by_more_than_the_bound(value, name, options):
    """Neighbouring batches without noise, through the real code: plain, high-frequency and constant gradients."""
    others = {"k": torch.randn(6, 2, 2, 4, 4), "b": torch.randn(6, 3)}
    checker = torch.tensor([1.0, -1.0]).repeat(2).outer(torch.tensor([1.0, -1.0]).repeat(2))
    for shape in (torch.randn(2, 2, 4, 4), checker.expand(2, 2, 4, 4), torch.ones(2, 2, 4, 4)):
        mine = {"k": (shape * value)[None], "b": torch.zeros(1, 3)}
        mechanism = build(name, 0.0, Flat(1.0), **options)
        mechanism.bind({k: v[0] for k, v in others.items()})
        before = mechanism.release(others)
        after = mechanism.release({k: torch.cat([mine[k], others[k]]) for k in others})
        moved = math.sqrt(sum(float((after[k] - before[k]).double().square().sum()) for k in others))
        assert moved <= 1.0 + 3e-5, (value, moved)
        assert all(bool(torch.isfinite(v).all()) for v in after.values())


def test_without_the_guard_a_filtered_giant_would_absorb_the_others():
    """The broken twin: ‖P g‖ = 0 exactly, so it passes unclipped, and the float sum forgets everybody else."""
    checker = torch.tensor([1.0, -1.0, 1.0, -1.0])
    giant, other = 1e20 * checker, torch.tensor([0.3, 0.2, 0.1, 0.4])
    absorbed = hartley(giant + other - 0, (0,))
    keep = low_pass((4,), 0.5)
    assert float(hartley(giant, (0,))[keep].norm()) == 0.0
    assert float((absorbed[keep] - hartley(other, (0,))[keep]).norm()) > 0.4
    geometry = Fourier(0.5)
    geometry.bind({"k": torch.Size((1, 1, 4))})
    assert float(geometry.weight("k")(giant.view(1, 1, 1, 4)).norm()) >= 0.999 * GUARD * float(giant.double().norm())


def test_filtering_first_keeps_more_of_the_signal():
    g = {"k": torch.randn(64, 1, 1, 8) * 10}
    kept = {}
    for order in ("filter-first", "clip-first"):
        mechanism = build("spectral", 0.0, Flat(1.0), ratio=0.3, order=order)
        mechanism.bind({"k": torch.zeros(1, 1, 8)})
        kept[order] = sum(float(mechanism.release({"k": g["k"][i : i + 1]})["k"].norm()) for i in range(64))
    assert kept["filter-first"] > 1.3 * kept["clip-first"]
    assert kept["filter-first"] <= 64


@pytest.mark.parametrize("shape", SIZES)
def test_matrix_and_fft_are_the_same_transform(shape, monkeypatch):
    """Small kernels by matrix product, large ones by FFT."""
    g = torch.randn(4, 2, 3, *shape)
    both = []
    for limit in (256, 0):
        monkeypatch.setattr("erlangen.mechanisms.frequency.MATRIX_SIZE", limit)
        geometry = Fourier(0.4)
        geometry.bind({"k": g.shape[1:]})
        c = geometry.forward("k", g)
        weighted = geometry.weight("k")
        norms = g.flatten(1).norm(dim=1) if weighted is None else weighted(g).flatten(1).norm(dim=1)
        both.append((c, geometry.inverse("k", c), norms))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_an_explicit_mask_is_obeyed_and_checked():
    mask = torch.zeros(8, dtype=torch.bool)
    mask[[1, 7]] = True
    mechanism = build("spectral", 0.0, Flat(100.0), mask={"k": mask})
    g = torch.randn(3, 1, 1, 8)
    out = mechanism.release({"k": g})["k"]
    want = torch.fft.ifft(torch.fft.fft(g.sum(0)) * mask).real
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    listed = build("spectral", 0.0, Flat(100.0), mask={"k": mask.tolist()})  # as a configuration file has it
    torch.testing.assert_close(listed.release({"k": g})["k"], out)
    mask[7] = False
    with pytest.raises(ValueError, match=r"keeps frequency \(1,\) but not its negative"):
        build("spectral", mask={"k": mask}).bind({"k": torch.zeros(1, 1, 8)})
    with pytest.raises(ValueError, match="keeps no frequency"):
        build("spectral", mask={"k": torch.zeros(8)}).bind({"k": torch.zeros(1, 1, 8)})
    with pytest.raises(ValueError, match="not trained"):
        build("spectral", mask={"other": mask}).bind({"k": torch.zeros(1, 1, 8)})


def test_options_are_checked():
    with pytest.raises(ValueError, match="no option"):
        build("spectral", rho=0.5)
    with pytest.raises(ValueError, match="ratio is 0"):
        build("spectral", ratio=0)
    with pytest.raises(ValueError, match="order is"):
        build("spectral", order="backwards")


def test_ratios_by_parameter():
    """Each named parameter keeps its own share, the others all; noise goes where frequencies are kept."""
    shapes = {**{f"{name}.weight": torch.zeros(2, 1, 9) for name in "abc"}, "bias": torch.zeros(2)}
    mechanism = build("spectral", 1.5, ratio={"a.weight": 0.3, "b.weight": 0.6})
    mechanism.bind(shapes)
    for name, share in (("a.weight", 0.3), ("b.weight", 0.6), ("c.weight", 1.0)):
        alone = build("spectral", 1.5, ratio=share)
        alone.bind({name: shapes[name]})
        assert mechanism.geometry.kept(name) == alone.geometry.kept(name)
        torch.testing.assert_close(mechanism.covariance(name), alone.covariance(name))
    assert mechanism.event() == gaussian(1.5)
    with pytest.raises(ValueError, match=r"ratio names \['d'\]"):
        build("spectral", ratio={"d": 0.5}).bind(shapes)
    with pytest.raises(ValueError, match="no frequencies"):
        build("spectral", ratio={"bias": 0.5}).bind(shapes)
    with pytest.raises(ValueError, match="one number in"):
        build("spectral", ratio="half")
    with pytest.raises(ValueError, match="ratio is 2"):
        build("spectral", ratio={"a.weight": 2.0})


def test_events_are_true():
    assert build("spectral", 1.5).event() == gaussian(1.5)
    published = build("spectral", 1.5, PerLayer(2.0), as_published=True)
    published.bind({f"{name}.weight": torch.zeros(1, 1, 3) for name in "abcd"})
    assert published.event() == gaussian(1.5 / 2)
    assert published.sensitivity == pytest.approx(4.0)
    variance = float(published.covariance("a.weight").diagonal().max())
    assert variance == pytest.approx((1.5 * 2.0) ** 2 * published.geometry.kept("a.weight"))
    assert "0.5·σ" in published.describe()["guarantee"]
    with pytest.raises(ValueError, match="fixed bound"):
        build("spectral", 1.5, AdaptiveQuantile(1.0), as_published=True)


def test_layers_clipped_each_are_refuted_and_one_layer_is_not():
    """Twenty layers clipped at c with noise σ·c each: the claim is ε = 1, the truth that of σ/√20."""
    from tests.mechanisms.attacks import attack_spectral, exact

    claimed = exact(3.731)
    assert claimed == pytest.approx(1.0, abs=0.01)
    assert 1.5 * claimed < attack_spectral(3.731, 20_000, 20) < exact(3.731 / math.sqrt(20))
    assert attack_spectral(3.731, 100_000, 1) < claimed


def test_state_resumes_exactly():
    g = {"k": torch.randn(4, 2, 1, 3, 3)}
    first = build("spectral", seed=5)
    first.release(g)
    again = build("spectral", seed=5)
    again.bind({"k": g["k"][0]})
    again.load_state_dict(first.state_dict())
    assert torch.equal(first.release(g)["k"], again.release(g)["k"])


@pytest.mark.parametrize("name", ["spectral", "gredp"])
def test_training_through_the_engine(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    data = TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=10), noise_multiplier=1.0,
        max_grad_norm=1.0, mechanism=name,
    )  # fmt: skip
    start = model[0].weight.detach().clone()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    moved = model[0].weight.detach() - start
    assert bool(torch.isfinite(moved).all())
    assert 0 < engine.get_epsilon(1e-5) < math.inf
    if name == "spectral":  # nothing outside the kept frequencies ever moves
        mask = low_pass((3, 3), 0.5)
        assert float(torch.fft.fft2(moved)[..., ~mask].abs().max()) < 1e-6


def test_epsilon_is_that_of_iso():
    assert epsilon(build("spectral", 2.0).event(), 1e-5) == epsilon(GaussianMechanism(2.0, 1.0).event(), 1e-5)
