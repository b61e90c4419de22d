"""PrivacyEngine: mistakes are errors at once that name their cure, and change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import erlangen
from erlangen.gradients.joined import join
from tests.engines import B, data, loop, net, private


class Stream_(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2, 4, 4), 0


def stranger():
    return torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)


BAD = {
    "negative sigma": (lambda: private(noise_multiplier=-1.0), ValueError, "noise_multiplier is -1.0"),
    "zero bound": (lambda: private(max_grad_norm=0.0), ValueError, "max_grad_norm is 0.0"),
    "no sigma": (lambda: private(noise_multiplier=None), ValueError, "noise_multiplier is missing"),
    "batch larger than the data": (lambda: private(batch=100), ValueError, "100 is larger than the data set"),
    "empty data": (lambda: private(dataset=TensorDataset(torch.zeros(0, 2))), ValueError, "empty"),
    "iterable loader": (lambda: private(dataset=Stream_()), TypeError, "iterable-style"),
    "wrong reduction": (
        lambda: private(criterion=nn.CrossEntropyLoss(reduction="sum")), ValueError, "pass loss_reduction='sum'"),
    "unknown reduction": (lambda: private(loss_reduction="none"), ValueError, "loss_reduction is 'none'"),
    "strange parameters": (lambda: private(optimizer=stranger()), ValueError, "not the module's"),
    "dtype": (lambda: private(model=net().double()), TypeError, "the data is torch.float32"),
    "batch norm": (lambda: private(model=nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2))), ValueError,
                   "BatchNorm2d at '0' mixes samples"),
    "unit": (lambda: private(unit=[1, 2]), ValueError, "2 labels for 60 records"),
    "unit name": (lambda: private(unit="patient"), ValueError, "neither an attribute"),
    "physical": (lambda: private(max_physical_batch=0), ValueError, "max_physical_batch is 0"),
    "clipping": (lambda: private(clipping="soft"), ValueError, "clipping is 'soft'"),
    "strategy": (lambda: private(strategy="fast"), ValueError, "strategy is 'fast'"),
    "ghost": (lambda: private(grad_sample_mode="ghost"), ValueError, "not needed"),
    "a generator for the noise": (lambda: private(noise_generator=torch.Generator()), ValueError, r"PrivacyEngine\(seed=…\)"),
    "lbfgs": (lambda: private(optimizer=torch.optim.LBFGS(net().parameters())), ValueError, "LBFGS"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_clear_error_and_nothing_is_half_applied(case):
    make, kind, match = BAD[case]
    with pytest.raises(kind, match=match):
        make()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = erlangen.PrivacyEngine()
    with pytest.raises((ValueError, TypeError)):
        engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data(), batch_size=4),
            noise_multiplier=-1,
            max_grad_norm=1,
        )
    assert "forward" not in model[0].__dict__
    assert "step" not in optimizer.__dict__


def test_a_loader_that_is_private_already_is_named_as_such():
    """A cell of a notebook that is run twice: the answer spoke of a custom batch sampler."""
    engine, model, optimizer, loader = private()
    with pytest.raises(ValueError, match="data_loader is private already"):
        engine.make_private(module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)


def test_mistakes_in_the_loop():
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    with pytest.raises(RuntimeError, match="without a backward"):
        optimizer.step()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="second time"):
        nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(RuntimeError, match="private already"):
        private(model)
    with pytest.raises(ValueError, match="delta"):
        engine.get_epsilon(1.5)
    for bad in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match="epochs"):
            erlangen.PrivacyEngine().make_private_with_epsilon(
                module=net(), optimizer=optimizer, data_loader=loader, target_epsilon=1, target_delta=1e-5, epochs=bad
            )


def test_an_impossible_epsilon_leaves_everything_as_it_was():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="epsilon"):
        erlangen.PrivacyEngine().make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=DataLoader(data(), batch_size=B), target_epsilon=-1,
            target_delta=1e-5, epochs=1, max_grad_norm=1.0,
        )  # fmt: skip
    assert "forward" not in model[0].__dict__
    assert "step" not in optimizer.__dict__


def test_a_batch_that_was_not_drawn_is_refused():
    """Accounting says Poisson: the user's old loader, or one batch used over and over, is an error."""
    _, model, optimizer, loader = private()
    for x, y in DataLoader(data(), batch_size=B):
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match="not drawn by the data loader"):
            optimizer.step()
        break
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="used twice"):
        optimizer.step()


def test_a_frozen_parameter_never_steps_on_a_raw_gradient():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(32, 4), nn.ParameterList([nn.Parameter(torch.randn(2, 4))])

        def forward(self, x):
            return nn.functional.linear(torch.relu(self.body(x.flatten(1))), self.head[0])

    model = Raw()
    model.head.requires_grad_(False)
    _, model, optimizer, loader = private(model, torch.optim.SGD(model.parameters(), 0.1))
    model.head.requires_grad_(True)
    before = model.head[0].detach().clone()
    x, y = next(iter(loader))
    with pytest.raises(RuntimeError, match="make_private again"):
        nn.functional.cross_entropy(model(x), y).backward()
    assert torch.equal(before, model.head[0].detach())
    stale = net()
    nn.functional.cross_entropy(stale(data()[:4][0]), data()[:4][1]).backward()
    stale[0].requires_grad_(False)
    _, stale, optimizer, loader = private(stale, torch.optim.SGD(stale.parameters(), 0.1))
    x, y = next(iter(loader))
    nn.functional.cross_entropy(stale(x), y).backward()
    with pytest.raises(RuntimeError, match="gradient without noise"):
        optimizer.step()
    whole = Raw()
    _, whole, optimizer, loader = private(whole, torch.optim.SGD(whole.parameters(), 0.1), noise_multiplier=0.0)
    start = whole.head[0].detach().clone()
    loop(whole, optimizer, loader)
    assert not torch.equal(start, whole.head[0].detach()), "parameters in a list train too"


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_scheduler_that_counts_physical_parts_is_refused(rate):
    """How many parts a batch has depends on who was drawn: a rate that follows it would tell, at no cost."""
    model = net()
    engine, model, optimizer, loader = private(model, torch.optim.SGD(model.parameters(), rate), max_physical_batch=4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def one(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def at_every_part():
        for x, y in loader:
            one(x, y)
            scheduler.step()

    with pytest.raises(RuntimeError, match=r"if engine\.stepped"):
        at_every_part()
    assert engine.accountant.steps == 0
    parts, updates = 0, 0
    for x, y in loader:
        before = model[0].weight.detach().clone()
        one(x, y)
        parts += 1
        assert engine.stepped is not torch.equal(before, model[0].weight)
        if engine.stepped:
            updates += 1
            scheduler.step()
    assert parts > updates == engine.accountant.steps == len(loader)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 * 0.5 ** (updates + 1))


def test_gradients_that_are_added_up_over_batches_are_refused():
    """Every second batch would have been dropped, with a warning that speaks of something else."""
    engine, model, optimizer, loader = private()

    def in_pairs():
        for k, (x, y) in enumerate(loader):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"not added up over batches.*max_physical_batch"):
        in_pairs()
    assert engine.accountant.steps == 0
    loop(model, optimizer, loader)
    assert engine.accountant.steps == len(loader)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_refused_by_name(fused, unscale):
    model = net()
    engine, model, optimizer, loader = private(model, torch.optim.Adam(model.parameters(), 0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(loader))
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="bfloat16 needs no scaler"):
        scaler.step(optimizer)
    assert engine.accountant.steps == 0
    loop(model, optimizer, loader)
    engine.remove()
    assert optimizer.__dict__.get("_step_supports_amp_scaling", False) is bool(fused)


def test_a_penalty_on_weights_is_dropped_and_said():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    (nn.functional.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters())).backward()
    with pytest.warns(UserWarning, match="weight_decay"):
        optimizer.step()


def test_gradients_from_before_are_no_penalty(recwarn):
    model = net()
    model(torch.zeros(1, 2, 4, 4)).sum().backward()
    _, model, optimizer, loader = private(model)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not [w for w in recwarn if "weight_decay" in str(w.message)]


def test_a_forward_that_was_set_on_a_layer_is_refused_not_passed_over():
    """The network computed something else while it was private, and what was set was gone after it."""
    model = net()
    layer = model[3]
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
    before = model(data()[:5][0])
    with pytest.raises(ValueError, match=r"Linear at '3' has a forward that was set on it.*Write a subclass"):
        private(model)
    assert torch.equal(model(data()[:5][0]), before)
    del layer.forward
    engine, *_ = private(model)
    copied = copy.deepcopy(model)  # copies of private modules are ordinary ones
    engine.remove()
    private(copied)
    private(join(net()))  # and so are those whose layers run as one kernel


def test_an_accountant_that_nobody_records_with_is_refused():
    """With another one in its place after make_private, two epochs were said to cost ε = 0."""
    history = [(1.0, 0.1, 50)]
    engine = erlangen.PrivacyEngine(seed=0)
    engine.accountant = erlangen.accounting.from_opacus(history)  # before training it is where training goes on from
    before = engine.get_epsilon(1e-5)
    _, model, optimizer, loader = private(engine=engine)
    with pytest.raises(RuntimeError, match=r"50 releases.*load_state_dict"):
        engine.accountant = erlangen.accounting.from_opacus(history)
    loop(model, optimizer, loader)
    assert engine.accountant.steps == 50 + len(loader)
    assert engine.get_epsilon(1e-5) > before
    with pytest.raises(TypeError, match="accountant is a str"):
        engine.accountant = "rdp"


def test_a_step_that_was_broken_off_is_not_taken_again(monkeypatch):
    """It counts; and who tries it again is told why there is nothing to step on, not that a learning rate moved."""
    engine, model, optimizer, loader = private()
    finish, broken = engine.training.mechanism.finish, []

    def interrupted(batch):
        if not broken:
            broken.append(batch)
            raise KeyboardInterrupt
        return finish(batch)

    monkeypatch.setattr(engine.training.mechanism, "finish", interrupted)
    before = model[3].weight.detach().clone()
    x, y = next(batches := iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(RuntimeError, match="without a backward pass"):
        optimizer.step()
    assert torch.equal(model[3].weight, before)
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.accountant.steps == 2


class Force(nn.Module):
    """The gradient of an energy, by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0].flatten(1)[:, :2]


def test_gradients_of_gradients_are_refused():
    """A penalty that was computed before zero_grad() trained in silence without what the weights of layers have in it."""
    with pytest.raises(RuntimeError, match=r"create_graph=True.*are not recorded"):
        private(Force())
    _, model, _, loader = private()
    x, _ = next(iter(loader))
    out = model(x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"create_graph=True.*are not recorded"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
