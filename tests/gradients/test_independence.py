"""Modules that mix samples are caught and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence
from erlangen.gradients.problems import known_problems


class Whiten(nn.Module):
    """A trick of one's own: centre by the batch mean."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class BatchScale(nn.Module):
    def forward(self, x):
        return x / x.abs().max()


@pytest.mark.parametrize(
    "culprit", [Whiten(), BatchScale(), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_unknown_mixing_is_named(culprit):
    torch.manual_seed(0)  # a dead ReLU before the culprit would hide it
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), culprit), nn.Linear(4, 2))
    with pytest.raises(MixesSamples, match=r"at '1\.1' mixes samples"):
        check_independence(net, (torch.randn(3, 4),))


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(3, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.randn(3, 2, 4)),
        (nn.Sequential(nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4), nn.MaxPool1d(2)), torch.randn(3, 2, 4)),
    ],
)
def test_honest_modules_pass_and_are_untouched(module, x):
    before = torch.random.get_rng_state()
    check_independence(module, (x,))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_probe_leaves_buffers_alone():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mean = net[1].running_mean.clone()
    with pytest.raises(MixesSamples):
        check_independence(net, (torch.randn(3, 4),))
    assert torch.equal(net[1].running_mean, mean)


def test_known_problems_name_module_and_cure():
    net = nn.ModuleDict({"bn": nn.BatchNorm2d(3), "inst": nn.InstanceNorm2d(3, track_running_stats=True),
                         "emb": nn.Embedding(3, 2, max_norm=1.0), "bag": nn.EmbeddingBag(3, 2, max_norm=1.0),
                         "fine": nn.GroupNorm(1, 3)})  # fmt: skip
    problems = known_problems(net)
    assert len(problems) == 4
    assert not known_problems(erlangen.fix(net))
    assert problems[0] == "BatchNorm2d at 'bn' mixes samples; use GroupNorm, or call erlangen.fix(model)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_with_the_cure():
    (problem,) = known_problems(torch.jit.script(nn.Linear(2, 2)))
    assert "the nn.Module that it was made from" in problem


def test_fix_replaces_them_and_keeps_affine_parameters():
    bn = nn.BatchNorm2d(48)
    net = erlangen.fix(nn.Sequential(nn.Conv2d(3, 48, 3), bn, nn.InstanceNorm2d(48, track_running_stats=True)))
    assert isinstance(net[1], nn.GroupNorm)
    assert net[1].num_groups == 24
    assert net[1].weight is bn.weight
    assert not known_problems(net)
    check_independence(net, (torch.randn(3, 3, 6, 6),))
    assert isinstance(erlangen.fix(nn.BatchNorm1d(7)), nn.GroupNorm)


def trained_norms():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3), nn.BatchNorm1d(3))
    for _ in range(5):
        net(3 * torch.randn(16, 2, 4, 4) + 1)
    return net


def test_statistics_of_public_data_are_kept_as_constants():
    net, x = trained_norms(), torch.randn(5, 2, 4, 4)
    keys, expected = list(net.state_dict()), net.eval()(x)
    (problem, _) = known_problems(net)
    assert "erlangen.fix(model, public_statistics=True) keeps its statistics" in problem
    net = erlangen.fix(net.train(), public_statistics=True)
    assert torch.equal(net(x), expected), "in training mode, too"
    assert not known_problems(net)
    check_independence(net, (x,))
    assert list(net.state_dict()) == keys
    plain = trained_norms()
    plain.load_state_dict(net.state_dict())
    engine, optimizer = erlangen.PrivacyEngine(), torch.optim.SGD(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(30, 2, 4, 4), torch.arange(30) % 3), 10)
    net, optimizer, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    before = {name: t.clone() for name, t in net.state_dict().items()}
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    moved = {name for name, t in net.state_dict().items() if not torch.equal(t, before[name])}
    assert moved == {name for name, _ in net.named_parameters()}


def test_statistics_are_not_dropped_in_silence_nor_made_up(recwarn):
    erlangen.fix(nn.BatchNorm2d(4))
    assert not recwarn
    with pytest.warns(UserWarning, match="public_statistics=True"):
        erlangen.fix(trained_norms())
    for fresh in (nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)):
        with pytest.raises(ValueError, match="no statistics of a training to keep"):
            erlangen.fix(fresh, public_statistics=True)


class Sorted(nn.Module):
    """Rows are reordered for one layer and put back: every output is independent, the layer's rows are not the owners'."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.b(torch.relu(self.a(x))[order])[order.argsort()]


class Positions(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.table, self.head = nn.Embedding(length, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head((x[..., None] + self.table(torch.arange(x.shape[1]))).mean(1))


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x
        return x - self.mean


class TrainOnly(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Sorted(), "another order"),
        (Positions(6), "rows where the batch has"),
        (Positions(5), "rows where the batch has|another order"),
        (nn.Sequential(RunningMean(), nn.Linear(4, 2)), "buffer '0.mean' is updated from the data"),
        (nn.Sequential(nn.Linear(4, 4), TrainOnly()).eval(), "TrainOnly at '1' mixes samples"),
    ],
)
def test_quieter_ways_of_mixing_are_caught_too(module, match):
    x = torch.randn(3, module.table.num_embeddings) if isinstance(module, Positions) else torch.randn(3, 4)
    modes = [m.training for m in module.modules()]
    with pytest.raises(MixesSamples, match=match):
        check_independence(module, (x,))
    assert modes == [m.training for m in module.modules()]


class Backwards(nn.Module):
    """One layer sees the records in reverse; what comes out is in order again."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.first, self.second, self.returns = nn.Linear(4, 8), nn.Linear(8, 2), returns

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x.flip(0)).flip(0)
        out = self.second(hidden)
        kinds = {"dict": {"logits": out}, "list": [out], "scalar first": (hidden.mean(), out), "scalar": out.sum()}
        return kinds[self.returns]


@pytest.mark.parametrize("returns", ["dict", "list", "scalar first"])
def test_the_order_of_rows_is_seen_in_whatever_a_module_returns(returns):
    with pytest.raises(MixesSamples, match="another order"):
        check_independence(Backwards(returns), (torch.randn(3, 4),))


def test_an_order_that_cannot_be_seen_is_said():
    with pytest.warns(UserWarning, match="order of the batch was not checked"):
        check_independence(Backwards("scalar"), (torch.randn(3, 4),))


def test_a_state_of_as_many_layers_as_rows_is_not_taken_for_rows():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 3, num_layers=5, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            out, state = self.gru(x)
            return {"out": out[:, -1], "state": state}

    check_independence(Recurrent(), (torch.randn(3, 6, 4),))


# -- what only the backward pass mixes ------------------------------------------------------------------------------------


class Scales(torch.autograd.Function):
    """Identity forwards; backwards the cotangent is divided by its norm over the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent / cotangent.norm()


class Returns(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.last = how, nn.Linear(4, 6), nn.Linear(6, 2)
        if how == "module hook":
            self.last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / inputs[0].norm(),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.how == "tensor hook" and h.requires_grad:
            h.register_hook(lambda g: g / g.norm())
        if self.how == "rows":  # each by itself
            h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-6)) if h.requires_grad else None
        return self.last(Scales.apply(h) if self.how == "function" else h)


@pytest.mark.parametrize("how", ["tensor hook", "module hook", "function"])
def test_a_backward_pass_that_mixes_is_refused(how):
    """One record among 31 others moved the sum by 30 bounds: its own cotangent made all others small."""
    torch.manual_seed(0)
    x = torch.randn(4).expand(32, 4).clone()
    sums = []
    for count in (32, 31):
        module = Returns(how)
        module.last.requires_grad_(False)
        weights = torch.ones(count)
        weights[31:] = 1e4
        _, optimizer, loader = erlangen.PrivacyEngine(seed=0).make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), 1.0), noise_multiplier=0.0, max_grad_norm=0.05,
            data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:count]), batch_size=count), check=False,
            loss_reduction="sum",
        )  # fmt: skip
        (rows,) = next(iter(loader))
        (module(rows)[:, 0] * weights).sum().backward()
        optimizer.step()
        sums.append(count * torch.cat([p.grad.flatten() for p in module.first.parameters()]))
    assert float((sums[0] - sums[1]).norm()) > 20 * 0.05
    with pytest.raises(MixesSamples, match="on its way back"):
        check_independence(Returns(how), (torch.randn(3, 4),))


def test_hooks_that_treat_each_row_by_itself_pass():
    check_independence(Returns("rows"), (torch.randn(3, 4),))
    check_independence(Returns("none"), (torch.randn(3, 4),))


class Remembers(nn.Module):
    """Statistics of the records in a parameter that does not train: read when the model is used, released with it."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.inside, self.last, self.reads = nn.Linear(4, 4, bias=False), nn.Linear(4, 2), reads
        self.inside.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            moved = (x.t() @ x).detach() if self.reads else self.inside.weight.detach()
            self.inside.weight.data.mul_(0.9).add_(moved, alpha=0.1)
            return self.last(x)
        return self.last(self.inside(x))


def test_statistics_in_a_parameter_are_no_better_than_in_a_buffer():
    module = Remembers()
    before = module.inside.weight.clone()
    with pytest.raises(MixesSamples, match=r"parameter 'inside\.weight' is updated from the data"):
        check_independence(module, (torch.randn(3, 4),))
    assert torch.equal(module.inside.weight, before)
    check_independence(Remembers(reads=False), (torch.randn(3, 4),))


def test_a_scalar_of_one_s_own_is_looked_at_as_every_parameter():
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.temperature = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t() * self.temperature

    check_independence(Tempered(), (torch.randn(3, 4),))


class ByLength(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / len(x)


def test_a_module_that_knows_how_many_records_were_drawn_is_refused():
    """19 gradients that fill the bound at 19 records are shorter at 20: a record in their way moved the sum by 1.95 bounds."""
    with pytest.raises(MixesSamples, match=r"ByLength at '1' .* how many records"):
        check_independence(nn.Sequential(nn.Linear(4, 2), ByLength()), (torch.randn(3, 4),))
    moved = []
    for count in (20, 19):
        x = torch.full((20, 4), 0.05)
        x[19] *= -1000
        model = nn.Sequential(nn.Linear(4, 1, bias=False), ByLength())
        model[0].weight.data.zero_()
        _, optimizer, loader = erlangen.PrivacyEngine(seed=0).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=0.0, max_grad_norm=0.1 / 19,
            data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:count]), batch_size=count), check=False,
            loss_reduction="sum",
        )  # fmt: skip
        (rows,) = next(iter(loader))
        model(rows).sum().backward()
        optimizer.step()
        moved.append(count * model[0].weight.grad)
    assert 1.9 < float((moved[0] - moved[1]).norm()) * 19 / 0.1 < 2


class Keeps(nn.Module):
    """A layer that keeps ``what`` of its batches: as a buffer, or as a state of its own."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what = nn.Linear(4, 2), what
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.kept = self.kept + self.what(x)
        return self.linear(x)


class KeepsApart(Keeps):
    def __init__(self, what):
        super().__init__(what)
        del self.kept
        self.kept = torch.zeros(())

    def get_extra_state(self):
        return {"kept": self.kept}

    def set_extra_state(self, state):
        self.kept = state["kept"]


@pytest.mark.parametrize("kind", [Keeps, KeepsApart])
@pytest.mark.parametrize(
    ("what", "match"),
    [(lambda x: x.detach().mean(), "updated from the data"), (lambda x: torch.tensor(float(len(x))), "counts the records")],
    ids=["mean", "count"],
)
def test_what_is_saved_with_the_weights_is_no_function_of_the_batch(kind, what, match):
    """A sum of batch sizes alone: Bin(NT, q) and Bin((N+1)T, q) are a standard deviation apart where T = N/q."""
    with pytest.raises(MixesSamples, match=match):
        check_independence(kind(what), (torch.randn(3, 4),))


@pytest.mark.parametrize("kind", [Keeps, KeepsApart])
def test_a_count_of_batches_is_no_secret_and_is_set_back(kind):
    module = kind(lambda x: torch.ones(()))
    check_independence(module, (torch.randn(3, 4),))
    assert float(module.kept) == 0


def test_a_memory_that_grows_is_refused():
    class Bank(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("bank", torch.zeros(0, 4))

        def forward(self, x):
            self.bank = torch.cat([self.bank, x.detach()])
            return super().forward(x)

    with pytest.raises(MixesSamples, match="'bank' is updated from the data"):
        check_independence(Bank(), (torch.randn(3, 4),))


def test_experiments_ask_for_convolutions_that_add_up_in_one_order():
    """Inside, and no longer; whatever the module does."""
    seen: list[bool] = []

    class Asks(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.cudnn.deterministic)
            return super().forward(x)

    class Mixes(Asks):
        def forward(self, x):
            return super().forward(x) + x.mean(0)

    check_independence(Asks(3, 3), (torch.randn(4, 3),))
    with pytest.raises(MixesSamples):
        check_independence(Mixes(3, 3), (torch.randn(4, 3),))
    assert all(seen)
    assert not torch.backends.cudnn.deterministic
