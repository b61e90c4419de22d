"""What comes back to one record must not tell how many records a mean divides by, nor how long the batch is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from erlangen.gradients.independence import MixesSamples
from erlangen.gradients.precision import rounds_products
from erlangen.lipschitz import BackwardClip
from tests.test_engine_records import private, records


class Hooked(nn.Module):
    def __init__(self, hook=None, behind: nn.Module | None = None, width: int = 3) -> None:
        super().__init__()
        self.layer, self.hook, self.behind = nn.Linear(5, width), hook, nn.Identity() if behind is None else behind

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.hook is not None and out.requires_grad:
            out.register_hook(self.hook)
        return self.behind(out)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return (g * 1000).round() / 1000


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x)


def released(count: int, module: nn.Module, reduction: str, **options) -> Tensor:
    """Without noise, of ``count`` records that are all alike."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.zeros_(p)
    dataset = TensorDataset(torch.full((count, 5), 0.5), torch.zeros(count, dtype=torch.long))
    module, optimizer, loader = private(dataset, module, loss_reduction=reduction, **options)
    for inputs, labels in loader:
        F.cross_entropy(module(inputs), labels, reduction=reduction).backward()
        optimizer.step()
    return count * torch.cat([p.grad.flatten() for p in module.parameters()])


def sparse(g: Tensor) -> Tensor:
    return torch.where(g.abs() > 0.5 / 32.5, g, 0.0)


def test_what_a_hook_with_a_threshold_moves():
    """32 records whose gradients were kept, and 33 of whom nobody's was: one record more moved the sum by 32 bounds."""
    moved = {}
    for reduction in ("mean", "sum"):
        more, fewer = (released(count, Hooked(sparse, width=2), reduction, check=False) for count in (33, 32))
        moved[reduction] = float((more - fewer).norm())
    assert moved["mean"] > 31
    assert moved["sum"] == pytest.approx(1, rel=1e-3)


def thinned(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that leaves out small gradients itself."""
    outputs = outputs.clone()
    outputs.register_hook(sparse)
    return F.cross_entropy(outputs, targets)


def test_a_threshold_inside_a_mean_loss_is_refused():
    with pytest.raises(MixesSamples, match="through the loss function is not in proportion"):
        private(records(), criterion=thinned)
    private(records(), criterion=lambda outputs, targets: F.cross_entropy(outputs, targets))


class Frozen(nn.Module):
    """A layer in 16 bits that does not train: nothing comes back through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.bfloat16()).float()


THRESHOLDS = {
    "sparse": Hooked(sparse), "clamp": Hooked(lambda g: g.clamp(-1e-3, 1e-3)), "sign": Hooked(torch.sign),
    "rounded": Hooked(behind=Rounds()), "by row": Hooked(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-9)),
    "large ones": Hooked(lambda g: g.clamp(-100, 100)), "summed": Hooked(behind=BackwardClip(1.0, "sum")),
    "dropout": nn.Sequential(Hooked(lambda g: g.clamp(-1e-3, 1e-3)), nn.Dropout(0.5)),
    "all but the first": Hooked(lambda g: torch.cat([g[:1], sparse(g[1:])])),
    "behind frozen 16 bits": nn.Sequential(Frozen(), Hooked(sparse)),
}  # fmt: skip


@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds_on_the_way_back_of_a_mean_are_refused(name):
    with pytest.raises(MixesSamples, match=r"not in proportion to what the loss sends.*loss_reduction='sum'"):
        private(records(), copy.deepcopy(THRESHOLDS[name]))
    private(records(), copy.deepcopy(THRESHOLDS[name]), loss_reduction="sum")
    private(records(), copy.deepcopy(THRESHOLDS[name]), poisson_sampling=False)  # as many in every batch


class OwnLoss(nn.Module):
    """Returns a mean loss and nothing else, or keeps one for the loop to add, by a way that its answers do not go."""

    def __init__(self, hook, kept: bool) -> None:
        super().__init__()
        self.body, self.head, self.side, self.hook, self.kept = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3), hook, kept

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        side = self.side(hidden)
        if side.requires_grad and self.hook is not None:
            side.register_hook(self.hook)
        self.aside = loss = side.square().sum(1).mean()
        return self.head(hidden) if self.kept else loss


@pytest.mark.filterwarnings("ignore:whether every layer sees the records")
@pytest.mark.parametrize("kept", [False, True])
def test_thresholds_on_the_way_back_of_a_mean_that_the_module_takes_are_refused(kept):
    with pytest.raises(MixesSamples, match="not in proportion to what the loss sends"):
        private(records(), OwnLoss(sparse, kept))
    private(records(), OwnLoss(lambda g: 3 * g, kept))
    private(records(), OwnLoss(sparse, kept), loss_reduction="sum")


def test_a_threshold_beside_a_cut_for_means_is_refused():
    """One layer that knows what a mean divides by hid all others that do not."""
    for bound in (1e-3, 1.0, 1e3):
        cut = BackwardClip(bound)
        private(records(), nn.Sequential(Hooked(), cut, nn.Linear(3, 3)))
        assert cut.bound == bound
        with pytest.raises(MixesSamples, match="not in proportion to what the loss sends"):
            private(records(), nn.Sequential(Hooked(sparse), BackwardClip(bound), nn.Linear(3, 3)))


COUNTED = {
    "times": Hooked(lambda g: g * len(g)), "divided": Hooked(lambda g: g / g.shape[0]),
    "all but the first": Hooked(lambda g: torch.cat([g[:1], g[1:] * len(g)])),
    "all but the ends": Hooked(lambda g: torch.cat([g[:1], g[1:-1] / len(g), g[-1:]])),
    "by place": Hooked(lambda g: g * torch.arange(1.0, len(g) + 1)[:, None]),
    "the first": Hooked(lambda g: torch.cat([2 * g[:1], g[1:]])),
    "the last": Hooked(lambda g: torch.cat([g[:-1], 2 * g[-1:]])),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", COUNTED)
def test_what_multiplies_by_the_length_of_the_batch_is_refused(name, reduction):
    with pytest.raises(MixesSamples, match="changes with how many records the batch has"):
        private(records(), copy.deepcopy(COUNTED[name]), loss_reduction=reduction)


def test_a_cut_for_means_under_a_sum_is_refused():
    """Everybody was cut to the bound over the length of the batch: at 33 records one moved the sum of short ones by 1.4 bounds."""
    private(records(), Hooked(behind=BackwardClip(1.0)))
    private(records(), Hooked(behind=BackwardClip(1.0, "sum")), loss_reduction="sum")
    with pytest.raises(MixesSamples, match="changes with how many records"):
        private(records(), Hooked(behind=BackwardClip(1.0)), loss_reduction="sum")


PROPORTIONAL = {
    "frozen 16 bits": nn.Sequential(Frozen(), Hooked()),
    "scaled": Hooked(lambda g: 3 * g), "reversed": Hooked(torch.neg), "relu": Hooked(behind=nn.ReLU()),
    "deep": nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(5, 5), nn.Sigmoid()))),
    "softmax": Hooked(behind=nn.Softmax(-1)), "one": nn.Sequential(nn.Linear(5, 1), nn.LayerNorm(1), nn.Linear(1, 3)),
    "norm": Hooked(behind=nn.LayerNorm(3)), "dropout": nn.Sequential(nn.Dropout(0.5), Hooked()),
    "dead": nn.Sequential(Hooked(), nn.Threshold(1e6, 0.0)), "half": nn.Sequential(nn.Linear(5, 4), nn.Hardtanh(), nn.Linear(4, 3)),
    "short": Hooked(lambda g: 1e-25 * g), "long": Hooked(lambda g: 1e30 * g),
    "drawn": nn.Sequential(nn.Linear(5, 3), nn.AlphaDropout(0.2)),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", PROPORTIONAL)
def test_what_is_in_proportion_is_accepted(name, reduction):
    private(records(), copy.deepcopy(PROPORTIONAL[name]), loss_reduction=reduction)


class Kernels(nn.Module):
    """Rounds as a GPU does, by another kernel for batches of another length: where TF32 is on, or in 16 bits by itself."""

    def __init__(self, sixteen: bool) -> None:
        super().__init__()
        self.layer, self.sixteen = nn.Linear(5, 3), sixteen

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.sixteen):
            out = self.layer(x)
        error = 2.0**-7 if self.sixteen else 2.0**-8 if rounds_products(x.device) else 2.0**-24
        if out.requires_grad:
            by_shape = torch.sin(len(x) * torch.tensor([1.0, 2.0, 3.0]))
            out.register_hook(lambda g: (g * (1 + error * by_shape)).to(g.dtype))
        return out


@pytest.mark.parametrize("sixteen", [False, True])
def test_rounding_that_changes_with_the_shape_is_no_dependence(sixteen):
    """A D8 network was refused on a GPU, whose convolutions of five rows and of seven round to ten bits in two ways."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        private(records(), Kernels(sixteen), loss_reduction="sum")
        with pytest.raises(MixesSamples, match="changes with how many records the batch has"):
            private(records(), nn.Sequential(Hooked(lambda g: g * len(g), width=5), Kernels(sixteen)), loss_reduction="sum")
    finally:
        torch.set_float32_matmul_precision(before)
