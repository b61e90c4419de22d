"""Clipless alone: sums against one-by-one gradients, splits, rows, hostile records, precision."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from torch import nn

from erlangen import RowMap
from erlangen.gradients.tape import Tape
from erlangen.lipschitz import BackwardClip, CrossEntropy, MulticlassHinge, backpropagate_bounds
from erlangen.mechanisms import Clipless, Context, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.clipless import noise_split
from tests.mechanisms.lipschitz_runs import LOSS, assert_close, batch, mechanism, network, reference, summed

# -- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backstop", [False, True])
@pytest.mark.parametrize("extra", [(), (BackwardClip(0.3),)], ids=["plain", "clipped"])
def test_one_backward_pass_is_the_sum_over_records(extra, backstop):
    net = network(*copy.deepcopy(extra))
    x, y = batch(5)
    want = {n: g.sum(0) for n, g in reference(net, x, y).items()}
    got, built = summed(net, x, y, backstop=backstop)
    assert_close(got, want)
    assert built.backstop_hits == 0


@pytest.mark.parametrize("backstop", [False, True])
def test_views_groups_and_padding_are_means_over_the_owners_rows(backstop):
    net = network(BackwardClip(0.3))
    x, y = batch(6)
    g = reference(net, x, y)
    views = {n: v.view(3, 2, *v.shape[1:]).mean(1) for n, v in g.items()}
    got, _ = summed(net, x, y, rows=RowMap.regular(3, 2, valid=torch.tensor([True, False, True])), backstop=backstop)
    assert_close(got, {n: v[0] + v[2] for n, v in views.items()})
    owner = torch.tensor([4, 4, 4, 7, -1, 9])
    got, _ = summed(net, x, y, rows=RowMap.of(owner), backstop=backstop)
    assert_close(got, {n: v[:3].mean(0) + v[3] + v[5] for n, v in g.items()})
    with pytest.raises(ValueError, match="no bound that is known"):
        summed(net, x, y, rows=RowMap.of(owner, reduce="sum"))


def test_every_record_stays_within_the_bounds_whatever_the_loss_in_the_loop():
    """A training loop that uses another loss than it declared is cut at the gate."""
    net, (x, y) = network(), batch(4)
    built = mechanism(net)
    recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    (1e6 * nn.functional.cross_entropy(net(x), y)).backward()
    sums = recorder.gradients().sums
    bounds = backpropagate_bounds(net, built.loss_constant)
    assert all(float(g.norm()) <= 4 * bounds[n] for n, g in sums.items())
    assert any(float(g.norm()) > 0.01 * bounds[n] for n, g in sums.items())
    recorder.detach(net)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_that_is_not_finite_moves_the_sum_by_no_more_than_its_bound(value):
    net, (x, y) = network(), batch(4)
    clean, _ = summed(net, x[:3], y[:3])
    x[3] = value
    dirty, built = summed(net, x, y)
    for name, g in dirty.items():
        assert float((g - clean[name]).norm()) <= built.bounds[name]


def test_cotangents_that_are_not_finite_contribute_nothing():
    net, (x, y) = network(), batch(4)

    class Broken(CrossEntropy):
        def forward(self, logits, target):
            scale = torch.ones(len(logits), 1)
            scale[-1] = math.nan
            return super().forward(logits * scale, target)

    clean, _ = summed(net, x[:3], y[:3])
    dirty, _ = summed(net, x, y, loss=Broken(4.0))
    assert_close(dirty, clean)


def test_an_empty_batch_is_noise_alone():
    net, (x, y) = network(), batch(4)
    for loss in (LOSS, MulticlassHinge()):
        got, _ = summed(net, x[:0], y[:0], loss=loss)
        assert all(float(g.abs().max()) == 0.0 for g in got.values())


def test_gradients_from_outside_the_gate_never_enter_the_release():
    net, (x, y) = network(), batch(4)
    want, _ = summed(net, x, y)
    built = mechanism(net)
    recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    leak = 100 * nn.functional.linear(x.flatten(1), net[6].weight[:, :36]).sum()
    (LOSS(net(x), y) + leak).backward()
    built.accumulate(recorder.gradients())
    assert_close(built.finish(1.0), want)
    recorder.detach(net)


def test_a_record_contributes_once_per_step():
    net, (x, y) = network(), batch(4)
    recorder = mechanism(net).recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    with pytest.raises(RuntimeError, match="two forward passes"):
        (LOSS(net(x), y) + LOSS(net(x), y)).backward()
    recorder.clear()
    LOSS(net(x), y).backward()
    with pytest.raises(RuntimeError):
        LOSS(net(x), y).backward()
    recorder.detach(net)


# -- the noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["global", "local", "optimal"])
def test_every_split_is_one_gaussian_of_multiplier_sigma(split):
    built = mechanism(network(), 1.7, split=split)
    squares = sum((built.bounds[n] / s) ** 2 for n, s in built.stds().items())
    assert squares**-0.5 == pytest.approx(1.7)
    assert built.event() == GaussianDpEvent(1.7)
    assert built.event(0.0) == NonPrivateDpEvent()


def test_the_optimal_split_has_the_least_noise_energy():
    bounds = mechanism(network()).bounds
    sizes = {row.name: row.size for row in bounds.rows}

    def energy(stds):
        return sum(sizes[n] * s**2 for n, s in stds.items())

    best = noise_split(bounds, 1.0, "optimal")
    assert energy(best) < min(energy(noise_split(bounds, 1.0, k)) for k in ("global", "local"))
    for name in best:  # no direction improves it
        for factor in (0.97, 1.03):
            other = best | {name: best[name] * factor}
            sigma = sum((bounds[n] / s) ** 2 for n, s in other.items()) ** -0.5
            assert energy({n: s / sigma for n, s in other.items()}) > energy(best)


def test_released_noise_has_the_covariance_it_says():
    net = network()
    built = mechanism(net, 0.8)
    draws = torch.stack([built.finish(1.0)["6.bias"] for _ in range(4000)]).double()
    found = draws.T @ draws / len(draws)
    expected = built.covariance("6.bias")
    assert torch.allclose(found, expected, atol=0.12 * float(expected[0, 0]))
    assert float(torch.linalg.eigvalsh(found)[0]) > 0.85 * float(expected[0, 0])


def test_release_alone_cuts_what_exceeds_the_bounds_and_counts_it():
    net = network()
    built = mechanism(net)
    for value in (1e30, math.nan, math.inf, 1e-30, 1.0):
        gradients = {n: torch.full((1, *p.shape), value) for n, p in net.named_parameters()}
        released = built.release(gradients, 1.0)
        assert all(float(g.double().norm()) <= built.bounds[n] for n, g in released.items())
    assert built.backstop_hits >= 3


# -- precision, order, names -----------------------------------------------------------------------------------------


def test_a_lower_precision_than_certified_is_refused():
    net, (x, y) = network(), batch(2)
    built = mechanism(net)
    recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="certified for fp32"):
        net(x)
    recorder.detach(net)
    low = mechanism(net, precision="bf16")
    assert low.sensitivity > built.sensitivity
    recorder = low.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    with torch.autocast("cpu", torch.bfloat16):
        LOSS(net(x), y).backward()
    assert recorder.gradients().owners == 2
    recorder.detach(net)


@pytest.mark.parametrize("mode", ["pieces", "autograd"])
def test_low_precision_sums_over_the_batch_stay_in_float32(mode):
    """One record more adds its own gradient, not a new rounding of the whole sum, which autograd under autocast does."""
    net, x, labels = network(), batch(257)[0], torch.zeros(257, dtype=torch.long)
    built, total = mechanism(net, precision="bf16"), CrossEntropy(4.0, reduction="sum")
    sums = []
    for n in (256, 257):
        recorder = built.recorder(Tape(dict(net.named_parameters()), "sum"))
        assert recorder.mode == "pieces"
        recorder.mode = mode
        recorder.attach(net)
        with torch.autocast("cpu", torch.bfloat16):
            total(net(x[:n]), labels[:n]).backward()
        with torch.no_grad():
            sums.append(recorder.gradients().sums)
        recorder.detach(net)
    with torch.autocast("cpu", torch.bfloat16):
        alone = reference(net, x[256:], labels[256:])
    off = {name: float((sums[1][name] - sums[0][name] - g[0]).norm() / g[0].norm()) for name, g in alone.items()}
    assert (max(off.values()) < 0.02) == (mode == "pieces"), off


def test_a_forward_pass_between_forward_and_backward_does_no_harm():
    for backstop in (False, True):
        net, (x, y) = network(BackwardClip(0.3)), batch(4)
        want, _ = summed(net, x, y)
        built = mechanism(net, backstop=backstop)
        recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
        recorder.attach(net)
        loss = LOSS(net(x), y)
        net(x)
        loss.backward()
        built.accumulate(recorder.gradients())
        assert_close(built.finish(1.0), want)
        recorder.detach(net)


def test_by_name_from_a_context():
    options = {"loss": "hinge", "split": "local"}
    context = Context(1.0, make_clipping("flat", 1.0), StreamNoise(0), network(), 8.0, options)
    built = make_mechanism("clipless", context)
    assert isinstance(built, Clipless)
    assert built.loss_constant == pytest.approx(math.sqrt(2))


def test_sums_and_noise_are_one_vector_in_the_order_of_the_parameters():
    net = network()
    built = mechanism(net, 0.0)
    gradients = {n: 1e-3 * torch.randn(3, *p.shape) for n, p in net.named_parameters()}
    assert_close(built.release(gradients, 1.0), {n: g.sum(0) for n, g in gradients.items()})
    noisy = mechanism(net, 2.0)
    released = noisy.finish(1.0)
    for name, std in noisy.stds().items():
        if released[name].numel() >= 100:
            assert float(released[name].std()) == pytest.approx(std, rel=0.3)
