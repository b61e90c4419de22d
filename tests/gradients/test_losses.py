"""Losses that mix samples, or remember them, are caught and named: those of the loop and those inside a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence
from erlangen.gradients.losses import check_loss, check_some_loss
from tests.engines import private


def test_losses():
    logits, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    check_loss(nn.CrossEntropyLoss(), logits, targets, "mean")
    check_loss(nn.CrossEntropyLoss(reduction="sum"), logits, targets, "sum")
    with pytest.raises(ValueError, match="reduces by 'sum'; pass loss_reduction='sum'"):
        check_loss(nn.CrossEntropyLoss(reduction="sum"), logits, targets, "mean")
    with pytest.raises(ValueError, match="use 'mean' or 'sum'"):
        check_loss(nn.CrossEntropyLoss(reduction="none"), logits, targets, "mean")

    def contrastive(z, y):
        return (z @ z.T).logsumexp(1).mean()

    with pytest.raises(MixesSamples, match="the loss function mixes"):
        check_loss(contrastive, logits, targets, "mean")


def test_losses_whose_denominator_is_the_batch():
    logits, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(MixesSamples):
        check_loss(nn.CrossEntropyLoss(weight=torch.tensor([0.1, 5.0, 1.0, 1.0])), logits, targets, "mean")
    check_loss(nn.CrossEntropyLoss(weight=torch.tensor([0.1, 5.0, 1.0, 1.0]), reduction="sum"), logits, targets, "sum")
    with pytest.raises(MixesSamples):
        check_loss(nn.CrossEntropyLoss(), logits, torch.tensor([0, -100, 2]), "mean")
    with pytest.raises(MixesSamples):  # a sum that was announced as a mean
        check_loss(lambda z, y: nn.functional.cross_entropy(z, y, reduction="sum"), logits, targets, "mean")


class PerPositive(nn.Module):
    """A detector's loss: the sum over all answers divided by how many of them are positive in the batch."""

    def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum") / y.sum().clamp(min=1)


def test_a_loss_that_divides_by_the_positive_answers_of_the_batch_is_refused():
    """Where each of three records had one positive answer, there were as many of them as rows: nothing showed."""
    logits, targets = torch.randn(3, 4), torch.eye(4)[:3]
    with pytest.raises(MixesSamples, match="PerPositive"):
        check_loss(PerPositive(), logits, targets, "mean")
    check_loss(nn.BCEWithLogitsLoss(reduction="sum"), logits, targets, "sum")
    check_loss(lambda z, y: nn.functional.mse_loss(z, y, reduction="sum") / len(z), logits, targets, "mean")


def test_a_loss_that_runs_along_the_batch_is_refused():
    """The first record's share is its own; the last one's is everybody's."""
    logits, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])

    def along(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(z.detach().cumsum(0) - z.detach() + z, y)

    with pytest.raises(MixesSamples, match="mixes"):
        check_loss(along, logits, targets, "mean")


class Running(nn.Module):
    """Weights of the classes by how often each was seen so far."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.reduction, self.buffer = "sum", buffer
        self.register_buffer("seen", torch.ones(4)) if buffer else setattr(self, "counts", torch.ones(4))

    def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts = self.seen if self.buffer else self.counts
        counts += torch.bincount(y, minlength=4)
        return nn.functional.cross_entropy(z, y, weight=(1 / counts).clone(), reduction="sum")


@pytest.mark.parametrize("buffer", [True, False])
def test_a_loss_that_remembers_earlier_batches_is_refused(buffer):
    loss = Running(buffer)
    with pytest.raises(MixesSamples, match="Running remembers the batches before"):
        check_loss(loss, torch.randn(3, 4), torch.tensor([0, 1, 2]), "sum")
    assert torch.equal(loss.seen if buffer else loss.counts, torch.ones(4))


def test_a_loss_with_a_random_part_of_its_own_is_accepted():
    def noisy(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(z + 0.1 * torch.randn(4), y)

    check_loss(noisy, torch.randn(3, 4), torch.tensor([0, 1, 2]), "mean")


class Answers(nn.Module):
    """Logits of each token, and their loss."""

    def __init__(self, loss):
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(10, 8), nn.Linear(8, 10), loss

    def forward(self, tokens, labels):
        logits = self.head(self.table(tokens))
        return {"loss": self.loss(logits, labels), "logits": logits}


def over_all_labels(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def over_each_record(logits, labels):
    each = nn.functional.cross_entropy(logits.movedim(2, 1), labels, reduction="none")
    return (each.sum(1) / (labels != -100).sum(1)).mean()


def texts(lengths, words=10):
    tokens = torch.randint(0, words, (len(lengths), 6), generator=torch.Generator().manual_seed(0))
    return tokens, torch.where(torch.arange(6) < torch.tensor(lengths)[:, None], tokens, -100)


@pytest.mark.parametrize("lengths", [[1, 3, 6], [4, 4, 4]], ids=["of several lengths", "of one length"])
def test_a_loss_inside_the_module_that_divides_by_the_labels_of_the_batch_is_refused(lengths):
    with pytest.raises(MixesSamples, match="a loss of the whole batch"):
        check_independence(Answers(over_all_labels), texts(lengths))
    check_independence(Answers(over_each_record), texts(lengths))


@pytest.mark.parametrize(("loss", "least", "most"), [(over_all_labels, 2.0, 99.0), (over_each_record, 0.0, 1.0)])
def test_what_it_would_move(loss, least, most):
    """One long text more makes short ones count for less: the sum of the others moves by more than a bound."""

    def total(lengths):
        torch.manual_seed(0)
        model = Answers(loss)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        records = TensorDataset(*texts(lengths, words=1))
        model, optimizer, loader = erlangen.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(records, batch_size=len(records)), noise_multiplier=1e-9,
            max_grad_norm=4.0, check=False,
        )  # fmt: skip
        for tokens, labels in loader:
            model(tokens, labels)["loss"].backward()
            optimizer.step()
        return len(records) / 4.0 * (before - torch.cat([p.detach().flatten() for p in model.parameters()]))

    short = [1] * 40
    assert least <= float((total([*short, 6]) - total(short)).norm()) <= most + 1e-3


# -- what the loss is computed on, where nobody says ------------------------------------------------------------------------


class Gives(nn.Module):
    """``kind`` of what the module returns."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(6, 2)

    def forward(self, x):
        z = self.head(x)
        return {"tensor": z, "tuple": (z, z.detach()), "mapping": {"logits": z}, "number": z.sum(1).mean()}[self.kind]


def announced(kind, named, criterion, **options):
    x, y = torch.randn(12, 6), torch.arange(12) // 6
    data = [{"x": a, "label": b} for a, b in zip(x, y, strict=True)] if named else TensorDataset(x, y)
    module = Gives(kind)
    erlangen.PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), 0.1), data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0, max_grad_norm=1.0, criterion=criterion, **options,
    )  # fmt: skip


def of_first(z, y):
    """A loss that takes all that the module returns."""
    return nn.functional.cross_entropy(z[0] + z[1], y, weight=torch.tensor([1.0, 1000.0]))


WEIGHTS = torch.tensor([1.0, 1000.0])
EVERYWHERE = [("tensor", False), ("tensor", True), ("tuple", False), ("tuple", True), ("mapping", True)]


@pytest.mark.parametrize(("kind", "named"), EVERYWHERE)
def test_an_announced_loss_is_checked_whatever_batches_and_answers_are(kind, named, recwarn):
    """Where batches are mappings or the module returned a tuple, class weights passed: one record moved the sum by 163 bounds."""
    for mixes in (nn.CrossEntropyLoss(weight=WEIGHTS), nn.CrossEntropyLoss(ignore_index=1)):
        with pytest.raises(MixesSamples, match="the loss CrossEntropyLoss"):
            announced(kind, named, mixes)
    announced(kind, named, nn.CrossEntropyLoss())
    announced(kind, named, nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), loss_reduction="sum")
    assert not recwarn.list


def test_a_loss_of_all_answers_is_checked():
    with pytest.raises(MixesSamples):
        announced("tuple", False, of_first)
    announced("tuple", False, lambda z, y: nn.functional.cross_entropy(z[0] + z[1], y))


def test_a_loss_that_cannot_be_computed_is_judged_by_its_type_or_said():
    for mixes in (nn.CrossEntropyLoss(weight=WEIGHTS), nn.NLLLoss(ignore_index=1)):
        with (
            pytest.raises(MixesSamples, match=r"(class weights|ignore_index=1) and takes a mean"),
            pytest.warns(UserWarning, match="order of the batch"),
        ):
            announced("number", False, mixes)
    with pytest.warns(UserWarning, match="whether the loss CrossEntropyLoss mixes samples was not checked"):
        announced("number", True, nn.CrossEntropyLoss(weight=torch.ones(2)))
    with pytest.warns(UserWarning, match="whether the loss BCEWithLogitsLoss mixes samples was not checked"):
        announced("tensor", False, nn.BCEWithLogitsLoss())


def test_shapes_that_are_stretched_to_fit_mix_unless_they_are_a_guess():
    """Answers [n, 1] and labels [n] make n² errors."""
    z, y = torch.randn(3, 1), torch.randn(3)
    with pytest.raises(MixesSamples), pytest.warns(UserWarning, match="target size"):
        check_some_loss(nn.MSELoss(), z, [y], "mean")
    assert not check_some_loss(nn.MSELoss(), (z,), [y], "mean")
    assert check_some_loss(nn.MSELoss(), (z,), [torch.zeros(()), y, z], "mean")


def test_labels_of_several_parts_are_exchanged_too():
    z, labels = torch.randn(3, 2), {"y": torch.tensor([0, 1, 1]), "name": "of no row"}
    with pytest.raises(MixesSamples):
        check_loss(lambda z, y: nn.functional.cross_entropy(z, y["y"], weight=WEIGHTS), z, labels, "mean")
    check_loss(lambda z, y: nn.functional.cross_entropy(z, y["y"]), z, labels, "mean")


def hardest(k):
    def loss(z, y):
        return nn.functional.cross_entropy(z, y, reduction="none").topk(min(k, len(z))).values.sum()

    return loss


@pytest.mark.parametrize("k", [3, 8, 20])
def test_a_choice_of_the_hardest_records_is_refused(k):
    """Of the three answers on which a loss is looked at first, the k hardest are all of them. In a batch a record that comes in
    sends another one out: two clipped gradients move."""
    z, y = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 4

    def chosen(rows):
        leaf = z[:rows].clone().requires_grad_()
        hardest(k)(leaf, y[:rows]).backward()
        return nn.functional.normalize(leaf.grad)  # clipped at 1, as all these are longer than the bound

    moved = max(float((chosen(n)[: n - 1] - chosen(n - 1)).norm()) for n in range(k + 2, 31))
    assert moved > 0.99  # beside the newcomer's own gradient
    with pytest.raises(MixesSamples, match="a choice of its hardest records"):
        private(criterion=hardest(k), loss_reduction="sum")


def test_more_rows_are_no_false_alarm(recwarn):
    for reduction in ("mean", "sum"):
        for options in ({}, {"label_smoothing": 0.1}):
            private(criterion=nn.CrossEntropyLoss(reduction=reduction, **options), loss_reduction=reduction)
    y = torch.rand(7, 5)
    for loss in (nn.MSELoss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss(), nn.HuberLoss(), nn.GaussianNLLLoss()):
        many = (lambda z, y, loss=loss: loss(z, y, torch.ones_like(z))) if isinstance(loss, nn.GaussianNLLLoss) else loss
        assert check_some_loss(many, torch.randn(7, 5), [y], "mean", 5000)
    assert check_some_loss(nn.MSELoss(), torch.randn(7), [torch.rand(7)], "mean", 64)
    assert check_some_loss(nn.BCELoss(), torch.rand(7, 5), [y], "mean", 64)  # its answers lie between 0 and 1
    large = torch.randn(3, 8, 300, 300)  # as many rows as memory is taken for
    assert check_some_loss(nn.MSELoss(), large, [torch.zeros_like(large)], "mean", 1000)
