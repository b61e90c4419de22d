"""GeoDP: sound forms are sums of bounded per-sample terms; the published one is refuted and priced at infinity."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.accounting import epsilon, gaussian
from erlangen.gradients import PerSampleGradients
from erlangen.mechanisms import Angles, Direction, PublishedGeoDP, Shrink, StreamNoise
from erlangen.mechanisms.clipping import PSAC, AutoS, Flat, PerLayer
from erlangen.mechanisms.hyperspherical import angle_difference, from_spherical, to_spherical
from tests.mechanisms.attacks import attack_geodp, clopper_pearson, exact, lower_bound
from tests.mechanisms.test_spectral import HOSTILE, build

FORMS = ["direction", "shrink", "angles"]


def gradients(n: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(n, 3, 4, generator=g), "b": torch.randn(n, 5, generator=g) * 3}


def flat(g: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten(1) for t in g.values()], 1)


def test_without_noise_the_direction_form_is_its_formula():
    g = gradients()
    x = flat(g)
    out = build("geodp", 0.0, Flat(2.0)).release(g, 10.0)
    u = (x / x.norm(dim=1, keepdim=True)).sum(0)
    want = x.norm(dim=1).clamp(max=2.0).sum() / 10 * u / u.norm()
    torch.testing.assert_close(torch.cat([t.flatten() for t in out.values()]), want, rtol=1e-4, atol=1e-6)
    scaled = build("geodp", 0.0, Flat(2.0), magnitude="scaled").release(g, 10.0)
    torch.testing.assert_close(
        torch.cat([t.flatten() for t in scaled.values()]), want * u.norm() / 10, rtol=1e-4, atol=1e-6
    )


def test_scaled_directions_are_auto_s_without_its_constant():
    """With every norm above C and as many records as expected: C/‖g‖ for each, whatever its length."""
    g = gradients()
    g["b"][0] *= 100.0
    assert float(flat(g).norm(dim=1).min()) > 0.5
    ours = build("geodp", 0.0, Flat(0.5), magnitude="scaled").release(g, 6.0)
    theirs = build("iso", 0.0, AutoS(0.5, gamma=1e-9)).release(g, 6.0)
    for name in g:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_both_queries_together_cost_sigma():
    """(σ_dir⁻² + σ_mag⁻²)^(−½) = σ, and a factor of 10 leaves the direction 1.005σ."""
    for factor in (2.0, 10.0):
        mechanism = build("geodp", 1.5, Flat(0.3), magnitude_multiplier=factor)
        direction, magnitude = 1 / mechanism.direction_std, 0.3 / mechanism.magnitude_std
        assert (direction**2 + magnitude**2) ** -0.5 == pytest.approx(1.5)
        assert mechanism.direction_std / mechanism.sensitivity == pytest.approx(1.5)
        assert mechanism.event() == gaussian(1.5)
    assert mechanism.direction_std == pytest.approx(1.005 * 1.5, rel=1e-3)


def test_noise_of_the_queries_is_what_is_declared():
    """The full covariance of the noised direction, its smallest eigenvalue, and the magnitude's variance."""
    rows = []
    mechanism = build("geodp", 1.2, Flat(0.5), seed=3)
    g = gradients(2)
    mechanism.bind({k: v[0] for k, v in g.items()})
    magnitudes = []
    for _ in range(4000):
        mechanism.accumulate(PerSampleGradients.from_dense({k: v * 1e6 for k, v in g.items()}))
        u, m = mechanism.query()
        rows.append(torch.cat([t.flatten() for t in u.values()]))
        magnitudes.append(m)
        mechanism._reset()
    noise = torch.stack(rows).double()
    noise = noise - noise.mean(0)
    covariance = noise.T @ noise / 4000
    want = mechanism.direction_std**2
    assert float(torch.linalg.eigvalsh(covariance)[0]) > 0.8 * want
    assert float((covariance - want * torch.eye(17)).abs().max()) < 5 * want * math.sqrt(2 / 4000)
    assert float(mechanism.covariance("w")[0, 0]) == pytest.approx(want)
    clamped = torch.tensor(magnitudes)  # mean 1, std 6: clamped at zero
    assert float((clamped == 0).double().mean()) == pytest.approx(0.434, abs=0.04)


@pytest.mark.parametrize("rule", [Flat, AutoS, PSAC])
@pytest.mark.parametrize("value", HOSTILE)
def test_sensitivity_search_on_directions_and_magnitudes(value, rule):
    """Whatever one sample holds: its direction adds at most 1, its magnitude at most C, and nothing if not finite."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        g = {k: (v * value).to(dtype) for k, v in gradients(1, seed=2).items()}
        if not math.isfinite(value):
            g = {k: v.to(dtype) for k, v in gradients(1).items()}
            g["w"][0, 1, 1] = value
        mechanism = Direction(0.0, rule(0.7))
        mechanism.bind({k: v[0] for k, v in g.items()})
        mechanism.accumulate(PerSampleGradients.from_dense(g))
        u, m = mechanism.pending()
        length = math.sqrt(sum(float(t.double().square().sum()) for t in u.values()))
        assert length <= 1.0
        assert 0 <= m <= 0.7
        if not math.isfinite(value):
            assert length == 0
            assert m == 0


@pytest.mark.parametrize("value", HOSTILE)
def test_sensitivity_search_on_angles(value):
    for beta in (0.05, 1.0):
        mechanism = Angles(1.0, 0.7, StreamNoise(0), beta=beta)
        g = {k: v * value if math.isfinite(value) else v for k, v in gradients(1, seed=2).items()}
        if not math.isfinite(value):
            g["w"][0, 1, 1] = value
        mechanism.bind({k: v[0] for k, v in g.items()})
        mechanism.release(gradients(5))  # a reference that is not the equator
        mechanism.accumulate(PerSampleGradients.from_dense(g))
        assert float(mechanism._angles.double().norm()) <= mechanism.angle_sensitivity
        assert mechanism.angle_sensitivity == pytest.approx(beta * math.pi / 2 * math.sqrt(19))


def test_padding_and_invalid_owners_contribute_nothing():
    g = gradients(4)
    valid = torch.tensor([True, False, True, False])
    kept = {k: v[valid] for k, v in g.items()}
    for form in FORMS:
        outs = []
        for data in (PerSampleGradients.from_dense(g, valid), PerSampleGradients.from_dense(kept)):
            mechanism = build("geodp", 0.0, Flat(1.0), form=form)
            mechanism.bind({k: v[0] for k, v in g.items()})
            outs.append(mechanism.release(data, 4.0))
        for k in g:
            torch.testing.assert_close(outs[0][k], outs[1][k])


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch_is_a_noise_only_step(form):
    mechanism = build("geodp", 1.0, Flat(1.0), form=form)
    mechanism.bind({"w": torch.zeros(4)})
    mechanism.accumulate(PerSampleGradients.from_dense({"w": torch.zeros(0, 4)}))
    assert all(bool(torch.isfinite(t).all()) for t in mechanism.finish(5.0).values())


def test_physical_batches_add_up():
    g = gradients(6)
    for form in FORMS:
        whole, parts = (build("geodp", 1.0, Flat(1.0), form=form, seed=4) for _ in range(2))
        for mechanism in (whole, parts):
            mechanism.bind({k: v[0] for k, v in g.items()})
        want = whole.release(g, 6.0)
        for k in range(0, 6, 2):
            parts.accumulate(PerSampleGradients.from_dense({n: v[k : k + 2] for n, v in g.items()}))
        got = parts.finish(6.0)
        for name in g:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)


def test_shrinkage_is_its_formula_and_only_sees_private_directions():
    mechanism, plain = (kind(2.0, 1.0, StreamNoise(7), magnitude_multiplier=1.5) for kind in (Shrink, Direction))
    g = gradients(30)
    first, same = mechanism.release(g, 30.0), plain.release(g, 30.0)
    torch.testing.assert_close(first["w"], same["w"])  # no reference yet
    ref = torch.cat([t.flatten() for t in first.values()])
    ref = ref / ref.norm()
    plain.accumulate(PerSampleGradients.from_dense(g))
    parts, m = plain.query()
    u = torch.cat([t.flatten() for t in parts.values()])
    along = u @ ref
    o = u - along * ref
    keep = max(0.0, 1 - (u.numel() - 1) * mechanism.direction_std**2 / float(o.norm()) ** 2)
    want = along * ref + keep * o
    got = mechanism.release(g, 30.0)
    torch.testing.assert_close(
        torch.cat([t.flatten() for t in got.values()]), m / 30 * want / want.norm(), rtol=1e-3, atol=1e-5
    )


def test_simulated_cosines_order_the_forms():
    """Isotropic samples around one direction, d = 2000: S3 beats S2 beats S1, at the same true privacy."""
    torch.manual_seed(0)
    d, batch, sigma = 2000, 512, 2.0
    truth = torch.randn(d)
    truth = truth / truth.norm()
    found = {}
    for form in FORMS:
        mechanism = build("geodp", sigma, Flat(1.0), form=form, seed=1)
        cosines = []
        for _ in range(6):
            g = truth + 0.1 * torch.randn(batch, d)
            out = mechanism.release({"w": g}, batch)["w"]
            cosines.append(float(out @ truth / out.norm()))
        found[form] = sum(cosines[2:]) / 4
    assert found["shrink"] > found["direction"] + 0.02 > found["angles"] + 0.3


def test_the_published_form_has_no_guarantee():
    """Claimed ε = 0.434 at σ = 8; the attack proves more than ten times that with a few thousand trials."""
    mechanism = build("geodp", 8.0, Flat(0.1), as_published=True, beta=0.1)
    assert epsilon(mechanism.event(), 1e-5) == math.inf
    assert epsilon(mechanism.event(100.0), 1e-5) == math.inf
    assert "β bounds nothing" in mechanism.describe()["guarantee"]
    assert exact(8.0) == pytest.approx(0.434, abs=0.01)
    assert attack_geodp(8.0, 0.1, 500, 4096, 3000) > 10 * exact(8.0)
    assert attack_geodp(8.0, 0.1, 500, 4096, 3000, sound=True) < exact(8.0)


def test_statistics_that_never_overlap_show_all_that_their_number_can():
    """No alarm is false, though the trials that price the threshold go a little beyond those that chose it."""
    without = torch.linspace(0, 1, 2000)
    found, ceiling = lower_bound(without + 10, without), clopper_pearson(0, 1000)[1]
    assert found == pytest.approx(math.log((1 - ceiling - 1e-5) / ceiling), rel=1e-3)


def test_the_published_form_is_algorithm_one():
    g = gradients(5)
    x = flat(g)
    mean = (x * (2.0 / x.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 5
    quiet = PublishedGeoDP(0.0, 2.0, 0.1).release(g, 5.0)
    torch.testing.assert_close(torch.cat([t.flatten() for t in quiet.values()]), mean, rtol=1e-4, atol=1e-6)
    loud = PublishedGeoDP(0.01, 2.0, 0.1, StreamNoise(0))
    angles, lengths = [], []
    for _ in range(800):
        out = torch.cat([t.flatten() for t in loud.release(g, 5.0).values()])
        r, phi = to_spherical(out)
        angles.append(phi)
        lengths.append(r)
    spread = math.sqrt(17 + 2) * 0.1 * math.pi / 5 * 0.01
    assert float(torch.stack(angles)[:, :10].std(0).mean()) == pytest.approx(spread, rel=0.05)
    assert float(torch.stack(lengths).std()) == pytest.approx(2.0 / 5 * 0.01, rel=0.1)


def test_options_are_checked():
    for options, message in (
        ({"form": "polar"}, "form is"),
        ({"beta": 0.1}, "leave beta out"),
        ({"as_published": True}, "bounding factor"),
        ({"as_published": True, "beta": 0.1, "form": "shrink"}, "no option"),
        ({"form": "angles", "beta": 1.5}, r"\(0, 1\]"),
        ({"magnitude_multiplier": 1.0}, "above 1"),
        ({"magnitude_multiplier": math.inf}, "finite number above 1"),
        ({"magnitude": "none"}, "magnitude is"),
    ):
        with pytest.raises(ValueError, match=message):
            build("geodp", 1.0, **options)
    with pytest.raises(ValueError, match="one direction"):
        build("geodp", 1.0, PerLayer(1.0))
    with pytest.raises(ValueError, match="two trained numbers at least, and there are 1"):
        build("geodp", 1.0, form="angles").bind({"w": torch.zeros(1)})


@pytest.mark.parametrize("form", FORMS)
def test_state_is_json_and_resumes_exactly(form):
    g = gradients()
    first = build("geodp", 1.0, Flat(1.0), seed=5, form=form)
    first.release(g, 6.0)
    first.release(g, 6.0)
    again = build("geodp", 1.0, Flat(1.0), seed=5, form=form)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again.bind({k: v[0] for k, v in g.items()})
    want, got = first.release(g, 6.0), again.release(g, 6.0)
    for k in g:
        assert torch.equal(want[k], got[k])


@pytest.mark.parametrize("options", [{"form": f} for f in FORMS] + [{"as_published": True, "beta": 0.1}])
def test_training_through_the_engine(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    data = TensorDataset(torch.randn(40, 1, 8), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0, max_grad_norm=1.0, mechanism="geodp", mechanism_options=options, max_physical_batch=4,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert (engine.get_epsilon(1e-5) == math.inf) == bool(options.get("as_published"))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_long_vectors_are_summed_as_if_every_angle_were_clipped(scale):
    """The way without clipping, taken where no angle can reach its bound, against the plain formula; some owners empty."""
    torch.manual_seed(0)
    d, n = 3000, 6
    g = torch.randn(n, d) * scale
    g[2] = 0.0
    mechanism = Angles(0.0, 1.0, StreamNoise(0), beta=0.2)
    mechanism.bind({"w": g[0]}, n)
    mechanism._refer(0.01 * torch.randn(d - 1))
    mechanism.accumulate(PerSampleGradients.from_dense({"w": g}))
    moved = angle_difference(to_spherical(g.double())[1], mechanism._reference.double().expand(n, -1).clone())
    limit = torch.full((d - 1,), 0.2 * math.pi / 2, dtype=torch.float64)
    limit[-1] *= 2
    want = torch.minimum(torch.maximum(moved, -limit), limit)[[0, 1, 3, 4, 5]]
    torch.testing.assert_close(mechanism._angles.double(), want.sum(0), rtol=1e-4, atol=2e-6)
    assert float(want.norm(dim=1).max()) <= mechanism.angle_sensitivity


@pytest.mark.parametrize("form", FORMS)
def test_a_scalar_parameter_is_one_coordinate(form):
    """A learnt temperature has shape (): it is released as the vector of one entry would be."""
    g = gradients()
    scalar, vector = ({**g, "t": g["b"][:, :1].reshape(6, *shape)} for shape in ((), (1,)))
    ours, theirs = (build("geodp", 0.0, Flat(2.0), form=form).release(each, 6.0) for each in (scalar, vector))
    assert ours["t"].shape == ()
    for name in theirs:
        assert torch.equal(ours[name].reshape(-1), theirs[name].reshape(-1))


@pytest.mark.parametrize(("d", "beta"), [(2, 0.1), (5, 0.1), (6, 0.7)])
def test_the_noise_on_the_angles_has_the_stated_covariance(d, beta):
    """From what is released: every angle alike, independent, and none without noise (the smallest eigenvalue)."""
    records, batch, trials = 200, 1e4, 3000
    mechanism = Angles(2.0, 1.0, StreamNoise(5), beta=beta)
    pole = from_spherical(torch.ones((), dtype=torch.float64), torch.zeros(d - 1, dtype=torch.float64))
    rows = pole.expand(records, d).contiguous()
    mechanism.bind({"w": rows[0]}, batch)
    reference, noise = torch.zeros(d - 1, dtype=torch.float64), []
    for _ in range(trials):
        _, angles = to_spherical(mechanism.release({"w": rows}, batch)["w"][None].double())
        noise.append(angle_difference(angles[0], reference) * batch + records * reference)  # the records pull it back
        reference = angles[0]
    found = torch.stack(noise)
    found = found.T @ found / trials
    want = mechanism.covariance("w")[: d - 1, : d - 1]
    scale = float(want[0, 0])
    torch.testing.assert_close(want, scale * torch.eye(d - 1, dtype=want.dtype))
    assert math.sqrt(scale) == pytest.approx(mechanism.direction_std * mechanism.angle_sensitivity)
    assert float((found / scale - torch.eye(d - 1)).abs().max()) < 5 * math.sqrt(2 / trials)
    assert float(torch.linalg.eigvalsh(found)[0]) > 0.85 * scale
