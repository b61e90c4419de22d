"""ISO and its parts: what is released, with which covariance, at which sensitivity, whatever the gradients are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.accounting import epsilon, gaussian
from erlangen.gradients import PerSampleGradients
from erlangen.mechanisms import Diagonal, GaussianMechanism, Geometry, StreamNoise, mechanisms
from erlangen.mechanisms.clipping import PSAC, AdaptiveQuantile, AutoS, Flat, PerLayer, clipping_rules, make_clipping
from erlangen.mechanisms.denoise import JamesStein

SHAPES = {"w": (3, 2), "b": (4,)}


def gradients(n: int, scale: float = 1.0, dtype=torch.float32, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return {k: (scale * torch.randn(n, *s, generator=g, dtype=torch.float64)).to(dtype) for k, s in SHAPES.items()}


def make_rule(name: str):
    return make_clipping(name, 1.5)


def test_without_noise_iso_is_the_clipped_mean():
    g = gradients(5)
    out = GaussianMechanism(0.0, 0.7).release(g, expected_batch=4)
    flat = torch.cat([g["w"].flatten(1), g["b"]], 1)
    clipped = flat * (0.7 / flat.norm(dim=1, keepdim=True)).clamp(max=1)
    want = clipped.sum(0) / 4
    torch.testing.assert_close(torch.cat([out["w"].flatten(), out["b"]]), want, rtol=1e-4, atol=1e-5)


HOSTILE = {
    "huge": 1e18, "beyond-squares": 1e30, "tiny": 1e-30, "denormal": 1e-42, "zero": 0.0, "nan": math.nan, "inf": math.inf,
    "minus-inf": -math.inf, "plain": 1.0, "at-the-bound": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("rule", sorted(clipping_rules()))
def test_no_contribution_exceeds_the_sensitivity(rule, value, dtype):
    """One sample alone: the norm of what it adds, taken in float64, never exceeds C; non-finite ones add exactly 0."""
    for seed in range(3):
        direction = gradients(1, 1.0, torch.float64, seed)
        norm = torch.cat([d.flatten() for d in direction.values()]).norm()
        g = {k: (d / norm * HOSTILE[value]).to(dtype) for k, d in direction.items()}
        if value in ("nan", "inf", "minus-inf"):
            g = {"w": torch.randn(1, 3, 2).to(dtype), "b": torch.randn(1, 4).to(dtype)}
            g["w"][0, 1, 1] = HOSTILE[value]
        mechanism = GaussianMechanism(0.0, make_rule(rule))
        out = mechanism.release(g)
        total = torch.cat([o.double().flatten() for o in out.values()]).norm()
        assert total <= 1.5, (rule, value, float(total))
        if value in ("nan", "inf", "minus-inf"):
            assert total == 0


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(1e-3, 1e6), seed=st.integers(0, 10**6), d=st.integers(1, 3000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_rounding_never_lets_a_contribution_out(scale, seed, d, dtype):
    g = {"w": (scale * torch.randn(1, d, generator=torch.Generator().manual_seed(seed))).to(dtype)}
    out = GaussianMechanism(0.0, 1.0).release(g)["w"]
    assert out.double().norm() <= 1.0


def test_a_broken_twin_that_clips_in_bf16_is_caught():
    """Without the outward rounding and float32 weights the bound is broken; the search above would see it."""
    worst = 0.0
    for seed in range(50):
        g = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)).bfloat16()
        w = (1.0 / g.norm()).bfloat16()
        worst = max(worst, float((g * w).double().norm()))
    assert worst > 1.0


def test_a_non_finite_sample_does_not_touch_the_others():
    good = gradients(3)
    bad = {k: torch.cat([v, torch.full_like(v[:1], math.nan)]) for k, v in good.items()}
    a, b = GaussianMechanism(0.0, 1.0).release(good, 1), GaussianMechanism(0.0, 1.0).release(bad, 1)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_padding_owners_do_not_count():
    g = gradients(4)
    valid = torch.tensor([True, False, True, False])
    some = PerSampleGradients.from_dense(g, valid)
    kept = {k: v[valid] for k, v in g.items()}
    for rule in (Flat(1.0), AutoS(1.0), AdaptiveQuantile(1.0, count_std=1.0)):
        one = GaussianMechanism(0.0, rule)
        one.bind({k: v[0] for k, v in g.items()})
        a = one.release(some, 1)
        state = rule.bound
        rule.bound = 1.0
        b = GaussianMechanism(0.0, rule).release(kept, 1)
        assert rule.bound == pytest.approx(state)
        for k in a:
            torch.testing.assert_close(a[k], b[k])


def released_noise(mechanism, draws: int) -> torch.Tensor:
    """Noise of many releases of an empty batch, flattened."""
    mechanism.bind({k: torch.zeros(s, dtype=torch.float64) for k, s in SHAPES.items()})
    rows = []
    for _ in range(draws):
        rows.append(torch.cat([v.flatten() for v in mechanism.finish(1.0).values()]))
    return torch.stack(rows)


@pytest.mark.parametrize("geometry", ["iso", "diagonal"])
def test_the_released_covariance_is_the_declared_one(geometry):
    m = {
        k: torch.rand(s, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
        for k, s in SHAPES.items()
    }
    mechanism = GaussianMechanism(2.0, 1.5, Diagonal(m) if geometry == "diagonal" else None, StreamNoise(seed=3))
    z = released_noise(mechanism, 4000)
    declared = torch.block_diag(*[mechanism.covariance(k) for k in SHAPES])
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(declared), z.T, upper=False).T
    eigenvalues = torch.linalg.eigvalsh(whitened.T @ whitened / len(z))
    assert eigenvalues.min() > 0.85  # 1 ± 2√(d/n) = 1 ± 0.1
    assert eigenvalues.max() < 1.15
    std = torch.cat([torch.as_tensor(mechanism.noise_std(k)).expand(s).flatten() for k, s in SHAPES.items()])
    torch.testing.assert_close(declared.diagonal().sqrt(), std.double())


class Skewed(Geometry):
    """T⁺ is a fixed dense matrix on each parameter; it says nothing of its energy."""

    def _matrix(self, size, like):
        random = torch.randn(size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        return (torch.eye(size, dtype=torch.float64) + 0.3 * random).to(like)

    def forward(self, name, g):
        d = torch.Size(SHAPES[name]).numel()
        return (g.flatten(-len(SHAPES[name])) @ torch.linalg.inv(self._matrix(d, g)).T).view(g.shape)

    def inverse(self, name, c):
        d = torch.Size(SHAPES[name]).numel()
        return (c.flatten(-len(SHAPES[name])) @ self._matrix(d, c).T).view(c.shape)


def test_a_geometry_that_does_not_say_its_energy_is_measured(monkeypatch):
    """Attacks and denoisers go by `noise_std`: a geometry that only says how to map back must not look isotropic."""
    mechanism = GaussianMechanism(2.0, 1.5, Skewed(), StreamNoise(seed=3))
    mechanism.bind({k: torch.zeros(s) for k, s in SHAPES.items()})
    for k in SHAPES:
        std = mechanism.noise_std(k)
        torch.testing.assert_close(std.flatten().double(), mechanism.covariance(k).diagonal().sqrt(), rtol=1e-5, atol=1e-6)
        assert float(std.max() / std.min()) > 1.05
    monkeypatch.setattr("erlangen.mechanisms.geometry.MEASURED", 3)
    fresh = GaussianMechanism(2.0, 1.5, Skewed())
    fresh.bind({k: torch.zeros(s) for k, s in SHAPES.items()})
    with pytest.raises(NotImplementedError, match=r"define energy\(name, like\)"):
        fresh.noise_std("w")


def test_diagonal_geometry_clips_in_its_own_norm():
    m = {"w": torch.tensor([[1.0, 4.0], [0.5, 2.0], [1.0, 1.0]]), "b": torch.ones(4)}
    g = gradients(3, 5.0)
    out = GaussianMechanism(0.0, 1.0, Diagonal(m)).release(g, 1)
    white = torch.cat([(g["w"] / m["w"]).flatten(1), g["b"]], 1)
    w = (1 / white.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(out["w"], torch.einsum("n,n...->...", w, g["w"]), rtol=1e-4, atol=1e-5)
    described = GaussianMechanism(2.0, 1.0, Diagonal(m))
    described.bind({k: torch.zeros(s) for k, s in SHAPES.items()})
    assert described.describe()["covariance"] == "4·diag(m²), m from 0.5 to 4"
    with pytest.raises(ValueError, match="'w' has shape"):
        GaussianMechanism(1.0, 1.0, Diagonal({"w": torch.ones(2), "b": torch.ones(4)})).release(g)
    with pytest.raises(ValueError, match="not positive"):
        Diagonal({"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="not positive and finite"):
        Diagonal({"w": -1.0})


def test_one_number_is_the_metric_of_all_coordinates():
    g = {"w": torch.randn(5, 3, 2, dtype=torch.float64), "b": torch.randn(5, 4, dtype=torch.float64)}
    whole = {"w": torch.full((3, 2), 0.5), "b": torch.full((4,), 2.0)}
    numbers = GaussianMechanism(1.0, 1.0, Diagonal({"w": 0.5, "b": torch.tensor(2.0)}), StreamNoise(seed=3))
    spelt = GaussianMechanism(1.0, 1.0, Diagonal(whole), StreamNoise(seed=3))
    one, other = numbers.release(g, 5), spelt.release(g, 5)
    for name in g:
        assert torch.equal(one[name], other[name])
        assert torch.equal(numbers.covariance(name), spelt.covariance(name))


def test_noise_is_drawn_once_per_logical_batch_and_never_again():
    mechanism = GaussianMechanism(1.0, 1.0, noise=StreamNoise(seed=0))
    z = released_noise(mechanism, 50)
    assert len({tuple(row.tolist()) for row in z}) == 50
    g = gradients(6, 0.01)
    whole, split = (GaussianMechanism(1.0, 1.0, noise=StreamNoise(seed=0)) for _ in range(2))
    for one in (whole, split):
        one.bind({k: v[0] for k, v in g.items()})
    whole.accumulate(PerSampleGradients.from_dense(g))
    for part in (slice(0, 2), slice(2, 6)):
        split.accumulate(PerSampleGradients.from_dense({k: v[part] for k, v in g.items()}))
    a, b = whole.finish(6), split.finish(6)
    for k in a:
        torch.testing.assert_close(a[k], b[k])


def test_events_and_bad_values():
    assert epsilon(GaussianMechanism(0.0, 1.0).event(), 1e-5) == math.inf
    assert epsilon(GaussianMechanism(1.0, 1.0).event(), 1e-5) < 10
    for bad in (-1.0, math.nan, math.inf, "1"):
        with pytest.raises(ValueError, match="noise_multiplier"):
            GaussianMechanism(bad, 1.0)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_grad_norm"):
            GaussianMechanism(1.0, bad)
    with pytest.raises(ValueError, match="choose one of"):
        make_clipping("soft", 1.0)


def test_clipping_formulas():
    norms = torch.tensor([[0.0, 0.5, 2.0, 10.0]], dtype=torch.float64)
    torch.testing.assert_close(Flat(1.0).weights(norms), torch.tensor([[1.0, 1.0, 0.5, 0.1]], dtype=torch.float64))
    torch.testing.assert_close(AutoS(2.0, 0.5).weights(norms), 2.0 / (norms + 0.5))
    torch.testing.assert_close(PSAC(2.0, 0.1).weights(norms), 2.0 / (norms + 0.1 / (norms + 0.1)))
    two = torch.tensor([[2.0], [10.0]], dtype=torch.float64)
    torch.testing.assert_close(PerLayer([3.0, 4.0]).weights(two), torch.tensor([[1.0], [0.4]], dtype=torch.float64))
    assert PerLayer([3.0, 4.0]).sensitivity == 5.0
    torch.testing.assert_close(PerLayer(1.0).weights(two), 2**-0.5 / two)


def test_layers_are_modules_where_asked_and_tensors_otherwise():
    names = ["conv.weight", "conv.bias", "head.weight", "head.bias", "scale"]
    assert PerLayer(1.0).groups(names) == [[name] for name in names]
    assert PerLayer(1.0, groups="tensors").groups(names) == [[name] for name in names]
    assert PerLayer(1.0, groups="layers").groups(names) == [names[:2], names[2:4], names[4:]]
    with pytest.raises(ValueError, match="2 bounds for 3 layers"):
        PerLayer([1.0, 2.0], groups="layers").groups(names)
    with pytest.raises(ValueError, match="'tensors' or 'layers'"):
        make_clipping("per-layer", 1.0, groups="modules")


@pytest.mark.parametrize(("rule", "takes"), [("flat", "none"), ("per-layer", "groups"), ("auto-s", "gamma"), ("psac", "r")])
def test_an_unknown_option_of_a_rule_is_named(rule, takes):
    with pytest.raises(ValueError, match=rf"no option \['group'\]; it takes {takes}"):
        make_clipping(rule, 1.0, group=1)


@pytest.mark.parametrize(("groups", "words"), [("tensors", "tensor by itself"), ("layers", "weight and bias together")])
def test_either_grouping_is_sound_at_sigma_and_said(groups, words):
    """C shared by the groups: whatever they are, the whole contribution has norm at most C and the event is σ's."""
    mechanism = GaussianMechanism(1.5, PerLayer(2.0, groups=groups))
    quiet = GaussianMechanism(0.0, PerLayer(2.0, groups=groups))
    huge = {"a.weight": torch.full((1, 3, 2), 1e6), "a.bias": torch.full((1, 3), -1e6), "b.weight": torch.full((1, 4), 1e6)}
    whole = torch.cat([g.flatten() for g in quiet.release(huge).values()])
    assert float(whole.norm()) == pytest.approx(2.0, rel=1e-4)
    assert mechanism.event() == gaussian(1.5)
    assert words in mechanism.describe()["clipped"]


def test_adaptive_quantile_pays_for_its_count_and_finds_the_quantile():
    rule = AdaptiveQuantile(0.01, quantile=0.6, rate=0.3, count_std=5.0)
    mechanism = GaussianMechanism(1.0, rule, noise=StreamNoise(seed=0))
    assert rule.gradient_multiplier(1.0) == pytest.approx((1 - 1 / 100) ** -0.5)
    joint = (rule.gradient_multiplier(1.0) ** -2 + (2 * 5.0) ** -2) ** -0.5
    assert joint == pytest.approx(1.0)
    g = gradients(400, 1.0)
    for _ in range(80):
        mechanism.release(g, 400)
    norms = torch.cat([v.flatten(1) for v in g.values()], 1).norm(dim=1)
    assert float((norms <= rule.bound).float().mean()) == pytest.approx(0.6, abs=0.1)
    with pytest.raises(ValueError, match="count_std"):
        AdaptiveQuantile(1.0, count_std=0.4).prepare(1.0, 10)
    restored = AdaptiveQuantile(1.0)
    restored.load_state_dict(rule.state_dict())
    assert restored.bound == rule.bound


def test_state_continues_the_noise_stream():
    a = GaussianMechanism(1.0, 1.0, noise=StreamNoise(seed=5))
    z = released_noise(a, 3)
    b = GaussianMechanism(1.0, 1.0, noise=StreamNoise(seed=5))
    released_noise(b, 1)
    c = GaussianMechanism(1.0, 1.0, noise=StreamNoise(seed=5))
    c.load_state_dict(b.state_dict())
    assert torch.equal(released_noise(c, 1)[0], z[1])


def test_james_stein_lowers_the_error_and_spares_strong_signals():
    torch.manual_seed(0)
    signal = {"w": 0.05 * torch.ones(500), "b": 10.0 * torch.ones(500)}
    noisy = {k: v + torch.randn(500) for k, v in signal.items()}
    out = JamesStein()(noisy, {"w": 1.0, "b": torch.ones(500)})
    error = lambda x, k: float((x[k] - signal[k]).square().sum())  # noqa: E731
    assert error(out, "w") < 0.2 * error(noisy, "w")
    assert error(out, "b") < 1.05 * error(noisy, "b")


def test_every_registered_mechanism_is_found():
    assert "iso" in mechanisms()


@pytest.mark.parametrize("build", [
    lambda: Flat(1e-24), lambda: PerLayer([1.0, 1e-20]), lambda: AutoS(1.0, gamma=1e-30), lambda: PSAC(1.0, r=1e-50),
    lambda: AdaptiveQuantile(1e-30),
])  # fmt: skip
def test_constants_that_float32_cannot_measure_are_refused(build):
    """A norm of 1e-23 has a square of 0 in float32: AUTO-S with γ = 1e-30 would blow it up to ten million times C."""
    with pytest.raises(ValueError, match="give at least 1e-12"):
        build()


def test_an_adaptive_bound_stays_where_norms_can_be_measured():
    rule = AdaptiveQuantile(1.0, rate=2.0)
    rule.prepare(1.0, 10.0)
    for _ in range(100):
        rule.update(10.0, 10.0)
    assert rule.bound == 1e-12
    for _ in range(100):
        rule.update(-10.0, 10.0)
    assert rule.bound == 1e12


def test_the_bound_may_move_between_steps_only():
    """Parts clipped at one bound and noised for a smaller one would have too little noise."""
    gradients = {"w": torch.ones(2, 4)}
    mechanism = GaussianMechanism(1.0, 1.0)
    mechanism.release(gradients)
    mechanism.clipping.bound = 0.5  # a schedule: the noise follows
    assert mechanism.std == 0.5
    mechanism.release(gradients)
    mechanism.accumulate(PerSampleGradients.from_dense(gradients))
    mechanism.clipping.bound = 0.1
    with pytest.raises(RuntimeError, match="between steps only"):
        mechanism.accumulate(PerSampleGradients.from_dense(gradients))
    with pytest.raises(RuntimeError, match="between steps only"):
        mechanism.finish(2.0)


@pytest.mark.parametrize(("rule", "name"), [(AutoS, "gamma"), (PSAC, "r")])
def test_constants_that_make_every_weight_zero_are_refused(rule, name):
    for value in (math.inf, math.nan, 0.0):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            rule(1.0, value)
