"""PrivacyEngine: an ordinary loop, unchanged, is private, and costs what its accountant says."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.rows import RowMap
from erlangen.mechanisms import GaussianMechanism, StreamNoise
from erlangen.training.adam_bc import AdamBC
from tests.engines import B, N, data, loop, net, private


def test_the_module_is_the_users_module():
    model = net()
    keys = list(model.state_dict())
    engine, got, optimizer, _ = private(model)
    assert got is model
    assert list(got.state_dict()) == keys
    assert isinstance(got[0], nn.Conv2d)
    assert type(optimizer) is torch.optim.SGD
    engine.remove()
    x = torch.randn(2, 2, 4, 4)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert "step" not in optimizer.__dict__


def test_noiseless_steps_are_clipped_gradient_descent_over_the_expected_batch():
    model = net()
    reference = copy.deepcopy(model)
    engine, model, optimizer, loader = private(model, noise_multiplier=0.0, max_grad_norm=0.5)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        total = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
        for i in range(len(x)):
            reference.zero_grad()
            nn.functional.cross_entropy(reference(x[i : i + 1]), y[i : i + 1]).backward()
            norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
            for n, p in reference.named_parameters():
                total[n] += p.grad * min(1.0, 0.5 / float(norm))
        with torch.no_grad():
            for n, p in reference.named_parameters():
                p -= 0.1 * total[n] / B
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert engine.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.Adam(p, 0.01),
        lambda p: torch.optim.AdamW(p, 0.01), lambda p: torch.optim.RMSprop(p, 0.01), lambda p: AdamBC(p, 0.01),
    ],
)  # fmt: skip
def test_any_optimizer_and_scheduler(make, recwarn):
    model = net()
    optimizer = make(model.parameters())
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine, model, optimizer, loader = private(model, optimizer)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    start = [p.detach().clone() for p in model.parameters()]
    loop(model, optimizer, loader)
    before.step()
    after.step()
    assert all(
        not torch.equal(a, b) and torch.isfinite(b).all() for a, b in zip(start, model.parameters(), strict=True)
    )
    assert engine.accountant.steps == N // B
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_closures_work():
    _, model, optimizer, loader = private()
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert isinstance(optimizer.step(closure), torch.Tensor)


def test_an_empty_poisson_batch_is_a_noise_only_step():
    engine, model, optimizer, loader = private(batch=1, dataset=data(3))
    empty = 0
    for _ in range(12):
        for x, y in loader:
            before = model[3].bias.detach().clone()
            empty += engine.training.tape.rows.owners == 0
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert not torch.equal(before, model[3].bias)
            assert torch.isfinite(model[3].bias).all()
    assert empty > 0
    assert engine.accountant.steps == 36


@pytest.mark.parametrize("limit", [1, 5, 1000, "auto"])
def test_physical_batches_change_nothing(limit):
    results = []
    for physical in (None, limit):
        _, model, optimizer, loader = private(max_physical_batch=physical)
        loop(model, optimizer, loader, epochs=2)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_leaving_a_logical_batch_halfway_releases_nothing_of_it():
    engine, model, optimizer, loader = private(max_physical_batch=2, noise_multiplier=0.0)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.accountant.steps == 0
    engine.training.announce(erlangen.RowMap.regular(0))
    model(x[:0]).sum().backward()
    before = model[3].bias.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[3].bias)


@pytest.mark.parametrize("clipping", ["flat", "per-layer", "per_layer", "auto-s", "psac", "adaptive"])
def test_every_clipping_rule_trains(clipping):
    engine, model, optimizer, loader = private(clipping=clipping)
    loop(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) == pytest.approx(private_epsilon(5), rel=1e-6)


def private_epsilon(steps: int) -> float:
    from erlangen.accounting import epsilon, gaussian, poisson

    return epsilon([(poisson(B / N, gaussian(1.0)), steps)], 1e-5)


def test_epsilon_is_met_and_hardly_missed():
    model = net()
    engine = erlangen.PrivacyEngine()
    loader = DataLoader(data(), batch_size=B)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=2.0,
        target_delta=1e-4,
        epochs=3,
        max_grad_norm=1.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(model, optimizer, loader, epochs=3)
    assert 1.98 < engine.get_epsilon(1e-4) <= 2.0
    assert engine.get_epsilon(1e-4, "rdp") > engine.get_epsilon(1e-4)
    with pytest.warns(UserWarning, match="more than the target ε = 2") as said:
        loop(model, optimizer, loader)
    assert len(said) == 1
    assert engine.get_epsilon(1e-4) > 2.0


def test_a_delta_that_promises_nothing_is_said():
    model, loader = net(), DataLoader(data(), batch_size=B)
    options = {"target_epsilon": 2.0, "target_delta": 0.05, "epochs": 1, "max_grad_norm": 1.0}
    with pytest.warns(UserWarning, match=f"target_delta is 0.05, above 1/{N}"):
        erlangen.PrivacyEngine().make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, **options
        )


def test_a_target_holds_for_all_that_the_engine_spends():
    """Two trainings at ε = 3 each would cost 4 together, where 3 was asked for."""
    engine, options = erlangen.PrivacyEngine(seed=0), {"target_delta": 1e-5, "epochs": 1, "max_grad_norm": 1.0}

    def trained(target):
        model = net()
        loader = DataLoader(data(), batch_size=B)
        made = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, target_epsilon=target, **options
        )
        loop(*made)
        engine.remove()
        return engine.get_epsilon(1e-5)

    assert trained(2.0) == pytest.approx(2.0, rel=1e-2)
    assert 2.9 < trained(3.0) <= 3.0
    with pytest.raises(ValueError, match="is spent already"):
        trained(2.5)


def test_without_poisson_no_amplification_is_claimed():
    from erlangen.accounting import epsilon, gaussian

    engine, model, optimizer, loader = private(poisson_sampling=False)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert sizes == [B] * (N // B)
    assert engine.get_epsilon(1e-5) == pytest.approx(epsilon([(gaussian(1.0), 5)], 1e-5))


def test_patients_are_clipped_as_one():
    """All images of one patient together contribute at most C; a broken twin with record-level clipping would not."""
    torch.manual_seed(0)
    x = 100 * torch.randn(40, 2, 4, 4)
    y = torch.zeros(40).long()
    patient = [0] * 20 + list(range(1, 21))
    engine, model, optimizer, loader = private(
        dataset=TensorDataset(x, y),
        unit=patient,
        batch=21,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        max_physical_batch=7,
    )
    assert engine.training.sampler.units == 21
    assert len(loader) == 1
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    loop(model, optimizer, loader)
    moved = (torch.cat([p.detach().flatten() for p in model.parameters()]) - start).norm()
    assert moved <= 0.1 * 21 * 1.0 / 21 + 1e-6

    class Keyed(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return {"x": torch.zeros(2, 4, 4), "patient": i // 2}

    engine, *_ = private(dataset=Keyed(), unit="patient", batch=2, check=False)
    assert engine.training.sampler.units == 3


def test_secure_mode():
    engine, model, optimizer, loader = private(engine=erlangen.PrivacyEngine(secure=True))
    loop(model, optimizer, loader)
    assert engine.training.mechanism.noise.secure
    assert engine.training.sampler.secure
    with pytest.raises(ValueError, match="exclude each other"):
        erlangen.PrivacyEngine(secure=True, seed=1)


def test_a_mechanism_object_and_its_mistakes():
    own = GaussianMechanism(2.0, 0.5, noise=StreamNoise(seed=0))
    engine, model, optimizer, loader = private(mechanism=own, noise_multiplier=None, max_grad_norm=None)
    loop(model, optimizer, loader)
    assert engine.training.mechanism is own
    for options, match in (
        ({"noise_multiplier": 1.0}, "built with 2.0"),
        ({"max_grad_norm": 3.0}, "sensitivity is 0.5"),
    ):
        with pytest.raises(ValueError, match=match):
            private(mechanism=own, **{"noise_multiplier": None, "max_grad_norm": None, **options})
    with pytest.raises(ValueError, match="'nope'; choose one of"):
        private(mechanism="nope")
    with pytest.raises(TypeError, match="registered name or a Mechanism"):
        private(mechanism=3)


def test_denoisers_see_the_true_variance():
    seen = {}

    def spy(gradients, variances):
        seen.update(variances)
        return gradients

    _, model, optimizer, loader = private(denoiser=spy, noise_multiplier=2.0, max_grad_norm=3.0)
    loop(model, optimizer, loader)
    assert seen["0.weight"] == pytest.approx((2.0 * 3.0 / B) ** 2)


def test_the_same_seed_gives_the_same_weights():
    runs = []
    for _ in range(2):
        _, model, optimizer, loader = private(engine=erlangen.PrivacyEngine(seed=3))
        loop(model, optimizer, loader)
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*runs)


def test_validate_and_fix():
    bad = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    assert erlangen.PrivacyEngine.validate(bad)
    with pytest.raises(ValueError, match="BatchNorm2d at '1'"):
        erlangen.PrivacyEngine.validate(bad, strict=True)
    assert erlangen.PrivacyEngine.is_compatible(erlangen.PrivacyEngine.fix(bad))


def test_eval_and_no_grad_forward_are_plain():
    _, model, optimizer, loader = private()
    model.eval()
    with torch.no_grad():
        out = model(torch.randn(2, 2, 4, 4))
    assert not out.requires_grad
    model.train()
    loop(model, optimizer, loader)


def test_workers_and_collate_functions():
    dataset = data()
    plain = DataLoader(
        dataset, batch_size=B, num_workers=1, collate_fn=lambda rows: tuple(map(torch.stack, zip(*rows, strict=True)))
    )
    engine = erlangen.PrivacyEngine(seed=0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=plain,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch=4,
    )
    loop(model, optimizer, loader)
    assert engine.accountant.steps == N // B


def test_a_schedule_of_noise_is_accounted_as_it_goes():
    engine, model, optimizer, loader = private(noise_multiplier=10.0)
    loop(model, optimizer, loader)
    cheap = engine.get_epsilon(1e-5)
    engine.training.mechanism.noise_multiplier = 0.5
    loop(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) > 5 * cheap


def test_a_second_training_of_a_seeded_engine_draws_other_noise():
    engine = erlangen.PrivacyEngine(seed=0)
    ends = []
    for _ in range(2):
        _, model, optimizer, loader = private(engine=engine, noise_multiplier=100.0)
        loop(model, optimizer, loader)
        ends.append(model[3].bias.detach().clone())
        engine.remove()
    assert not torch.allclose(*ends, atol=0.1)


def test_a_step_inside_autocast_keeps_the_bound():
    torch.manual_seed(0)
    data_ = TensorDataset(100 * torch.randn(1, 2, 4, 4), torch.zeros(1).long())
    _, model, optimizer, loader = private(dataset=data_, batch=1, noise_multiplier=0.0)
    before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step()
    total = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    assert total <= 1.0
    assert not torch.equal(before, torch.cat([p.detach().double().flatten() for p in model.parameters()]))


def test_a_huge_activation_cannot_hide_behind_a_tiny_cotangent():
    """Squares of 2.5e-23 vanish in float32; the product with 1.5e19 does not."""
    x = torch.zeros(256, 1)
    x[0] = 1.5e19
    model = nn.Linear(1, 10000, bias=False)
    _, model, optimizer, loader = private(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        TensorDataset(x),
        batch=256,
        noise_multiplier=0.0,
        clipping="auto-s",
    )
    for (batch,) in loader:
        (model(batch) * (2.5e-23 * 256)).sum(1).mean().backward()
        optimizer.step()
    assert model.weight.grad.double().norm() * 256 <= 1.0


def test_a_schedule_of_batch_sizes_is_accounted_as_it_goes():
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = erlangen.PrivacyEngine(seed=0)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=2), noise_multiplier=1.0, max_grad_norm=1.0
    )
    small = engine.event()
    engine.training.sampler.expected_batch = 10.0
    assert engine.event() != small
    assert engine.event().sampling_probability == 0.5


def test_a_batch_that_was_left_in_the_middle_takes_its_event_with_it():
    """GReDP's noise for each sample is made for the expected batch of the moment: a smaller one since means less noise after
    a loop was left, and an event from before would count five times as much of it."""
    model, x = nn.Linear(8, 4), torch.randn(400, 8)
    data = TensorDataset(x, torch.zeros(400, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = erlangen.PrivacyEngine(seed=0)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=100), noise_multiplier=1.0, max_grad_norm=1.0,
        mechanism="gredp", mechanism_options={"as_published": "per-sample"},
    )  # fmt: skip
    training = engine.training
    training.sampler.expected_batch = 4.0
    for last in (True, False, True):
        training.announce(RowMap.regular(2), True, last)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:2]), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.step()
        if last:
            event = [event for event, _ in engine.accountant.history][-1]  # announced by hand: not amplified
            assert event.noise_multiplier == pytest.approx(float(training.mechanism.noise_std("weight").max()))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_charged_at_the_rate_at_which_it_was_drawn(num_workers):
    """A schedule that lowers the rate while a batch is in hand, or while a loader has drawn ahead, saves nothing on it."""
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, loading = erlangen.PrivacyEngine(seed=0), {"num_workers": num_workers}
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=20, **loading), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    sampler, rates, draw = engine.training.sampler, [], engine.training.sampler.draw
    sampler.draw = lambda: (rates.append(sampler.sample_rate), draw())[1]
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        sampler.expected_batch = sampler.expected_batch / 2
        optimizer.step()
    charged = [e.sampling_probability for e, count in engine.accountant.history for _ in range(count)]
    assert charged == rates[: len(charged)]
    assert charged[0] == 0.5
    assert engine.event().sampling_probability == sampler.sample_rate < charged[-1]
