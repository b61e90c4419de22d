"""A step belongs to the batch that was drawn for it: whoever draws ahead is caught before anything is released."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.sampling.tickets import Tickets


def private(batch=10, patients=None, **options):
    """Twenty records, perhaps of patients with several rows each."""
    torch.manual_seed(0)
    x = torch.randn(20, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Linear(6, 2)
    engine = erlangen.PrivacyEngine(seed=0)
    unit = None if patients is None else (torch.arange(20) // patients).tolist()
    loader = DataLoader(data, batch_size=batch)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "unit": unit, **options}
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, **options
    )
    return engine, model, optimizer, loader


def train(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def one_ahead(loader):
    """What a prefetcher does: fetch the next batch, hand out the last one."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


def apart(loader):
    """As a prefetcher that copies to a device would: the tensors that arrive are not those that were drawn."""
    for x, y in one_ahead(loader):
        yield x.clone() + 0, y.clone()


@pytest.mark.parametrize("prefetch", [one_ahead, apart, list, lambda loader: zip(loader, loader)])
@pytest.mark.parametrize("patients", [None, 2])
def test_a_loop_that_draws_ahead_is_refused_before_its_first_release(prefetch, patients):
    """q = 1, cut into parts of four rows: no length gives away that a batch was taken for its successor."""
    engine, model, optimizer, loader = private(20 // (patients or 1), patients, max_physical_batch=4)
    before = model.weight.detach().clone()
    batches = iter(prefetch(loader))
    batch = next(batches)
    if isinstance(batch[0], list):
        batch = batch[0]
    with pytest.raises(RuntimeError, match="batches were drawn since the last step"):
        train(model, optimizer, batch)
    assert engine.accountant.steps == 0
    assert torch.equal(before, model.weight)


def test_without_tickets_the_attack_would_succeed(monkeypatch):
    """The broken twin: rows of two patients pass for rows of others, and nothing is said."""
    monkeypatch.setattr(Tickets, "take", lambda self: None)
    engine, model, optimizer, loader = private(10, 2, max_physical_batch=4)
    batches = one_ahead(loader)
    for _ in range(4):
        train(model, optimizer, next(batches))
    assert engine.accountant.steps == 1, "the release of five parts was made after four"


def test_a_batch_drawn_between_forward_and_backward_is_refused():
    engine, model, _, loader = private(max_physical_batch=5)
    batches = iter(loader)
    x, y = next(batches)
    loss = cross_entropy(model(x), y)
    next_x, next_y = next(batches)
    with pytest.raises(RuntimeError, match="between the forward and the backward pass"):
        loss.backward()
    late = cross_entropy(model(next_x), next_y)
    model(next(batches)[0])  # both went forward: the first must still not pass for the second
    with pytest.raises(RuntimeError, match="between the forward and the backward pass"):
        late.backward()
    assert engine.accountant.steps == 0


def test_a_skipped_batch_is_noticed_and_the_loop_can_go_on():
    engine, model, optimizer, loader = private(max_physical_batch=5)
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="one was skipped"):
        train(model, optimizer, next(batches))
    for batch in loader:
        train(model, optimizer, batch)
    assert engine.accountant.steps == 2


def test_looking_leaving_and_trying_again_are_no_mistakes():
    engine, model, optimizer, loader = private()
    next(iter(loader))  # a look at one batch
    list(loader)  # at all of them
    for batch in loader:
        if engine.accountant.steps:
            break  # left after the draw
        train(model, optimizer, batch)
    for x, _ in loader:
        with torch.no_grad():
            model(x)
    for x, _ in loader:
        model(x)  # given up after the forward pass, as when memory runs out
    for batch in loader:
        train(model, optimizer, batch)
    assert engine.accountant.steps == 3


def test_a_batch_that_is_given_up_for_what_it_holds_is_said():
    """Weights that did not move told that a record was drawn, at no cost: the accountant had seen nothing."""
    engine, model, optimizer, loader = private()
    before = model.weight.detach().clone()
    batches = iter(loader)
    x, y = next(batches)
    loss = cross_entropy(model(x), y)
    assert loss > 0.1  # where a loop would go on with the next batch
    assert engine.accountant.steps == 0
    assert torch.equal(before, model.weight)
    with pytest.warns(UserWarning, match="given up before its step"):
        train(model, optimizer, next(batches))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise MemoryError("as if the device were full")


class Two(nn.Module):
    """Fails backwards between its layers on demand: the second layer is on the tape by then, the first is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fail = nn.Linear(6, 4), nn.Linear(4, 2), False

    def forward(self, x):
        x = self.first(x)
        return self.second(Fails.apply(x) if self.fail else x)


def test_zero_grad_after_an_exception_in_backward_makes_the_engine_usable():
    torch.manual_seed(0)
    x = torch.randn(20, 6)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=10)
    results = []
    for failures in (0, 2):
        torch.manual_seed(1)
        model, engine = Two(), erlangen.PrivacyEngine(seed=0)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=data, noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip
        for x_, y in loader:
            for model.fail in [True] * failures:
                with pytest.raises(MemoryError):
                    cross_entropy(model(x_), y).backward()
                optimizer.zero_grad()
            model.fail = False
            cross_entropy(model(x_), y).backward()
            optimizer.step()
        assert engine.accountant.steps == 2
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results), "what the failed passes recorded must not count"


def test_a_release_that_fails_after_it_was_accounted_stays_accounted():
    engine, model, optimizer, loader = private()
    finish = engine.training.mechanism.finish

    def broken(expected_batch):
        raise MemoryError("between the noise and the update")

    batches = iter(loader)
    engine.training.mechanism.finish = broken
    with pytest.raises(MemoryError):
        train(model, optimizer, next(batches))
    engine.training.mechanism.finish = finish
    optimizer.zero_grad()
    train(model, optimizer, next(batches))
    assert engine.accountant.steps == 2


def drawn_one_by_one(marked: bool, look) -> tuple[int, int]:
    """(steps, batches given up) of a loop of next(iter(loader)) that skips a batch by what ``look`` sees in it."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    x[0] += 100.0 * marked
    model = nn.Linear(6, 2)
    engine = erlangen.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, torch.zeros(40, dtype=torch.long)), batch_size=10),
    )  # fmt: skip
    given_up = 0
    for _ in range(40):
        batch = next(iter(loader))
        if look(model, *batch):
            given_up += 1
        else:
            train(model, optimizer, batch)
    return engine.accountant.steps, given_up


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x, y: bool(x.abs().max() > 50),
        lambda model, x, y: bool(model(x).abs().max() > 20),
        lambda model, x, y: bool(cross_entropy(model.eval()(x), y).detach() > 2 or x.max() > 50),
    ],
    ids=["values", "answers", "loss"],
)
def test_batches_that_a_loop_of_single_draws_gives_up_are_counted(look):
    """One record among 40 decided which batches were trained on: 9 of 40 were skipped for it, at a finite ε, in silence."""
    with pytest.warns(UserWarning, match=r"1 batch\(es\) were drawn by next\(iter\(loader\)\) and given up"):
        steps, given_up = drawn_one_by_one(True, look)
    assert given_up > 4
    assert steps == 40 - given_up


@pytest.mark.filterwarnings("error")
def test_loops_of_single_draws_and_looks_at_batches_are_accepted():
    assert drawn_one_by_one(True, lambda *_: False) == (40, 0)
    _, model, optimizer, loader = private(5)
    model(next(iter(loader))[0])  # a look before the first step
    next(iter(loader))
    for _ in range(3):
        for k, batch in enumerate(loader):
            if k == 2:  # as many steps as somebody wants
                break
            train(model, optimizer, batch)
        next(iter(loader))  # for a picture
        with torch.no_grad():
            for x, _ in loader:
                model(x)


def test_a_loop_that_is_left_after_it_saw_a_batch_is_said():
    _, model, optimizer, loader = private(5)
    for k, (x, y) in enumerate(loader):
        loss = cross_entropy(model(x), y)
        if k == 1:  # or loss > 10
            break
        loss.backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="given up before its step"):
        train(model, optimizer, next(iter(loader)))
