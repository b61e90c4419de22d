"""Records that try to put more than C into the sum: huge terms that cancel in the norm, values that are not finite,
batches and weights that were exchanged. Each goes through the real pieces, and none may get through."""

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.circulant import CirculantOuter
from erlangen.gradients import RowMap, Tape, attach, kernels
from erlangen.gradients.pieces import Dense, Lookup, Outer, Piece
from erlangen.gradients.rules.conv import Conv, Geometry, Windows
from erlangen.gradients.rules.standardised import Projection, Standardised
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.geometry import Diagonal
from erlangen.models.standardised import standardise

WIDTH = 24
POINT = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)


def cancelling(size: float, seed: int) -> tuple[Tensor, Tensor]:
    """Two tokens whose products cancel exactly until something scales them, and a third of ordinary size."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randint(1, 1000, (WIDTH,), generator=g) * size
    cotangent = torch.randint(1, 8, (WIDTH,), generator=g).float()
    a, d = torch.zeros(1, 3, WIDTH), torch.zeros(1, 3, WIDTH)
    a[0, 0], d[0, 0], a[0, 1], d[0, 1] = 3 * base, cotangent, -base, 3 * cotangent
    a[0, 2, 0], d[0, 2, 0] = 7.3, 1.0
    return a, d


def image(t: Tensor) -> Tensor:
    return t.mT[..., None].contiguous()


PIECES = {
    "linear": lambda a, d: Outer(a, d),
    "conv": lambda a, d: Conv(image(a), image(d), 1, (WIDTH, WIDTH, 1, 1), POINT),
    "circulant": lambda a, d: CirculantOuter(*(torch.fft.rfft(t.unflatten(-1, (-1, 4)), norm="ortho") for t in (a, d)), 4),
    "embedding": lambda a, d: Lookup(torch.zeros(1, 6, dtype=torch.long), torch.cat([a * 3, -a[:, :2] * 3, -a[:, 2:] * 2], 1), 2),
}  # fmt: skip


@pytest.mark.parametrize("metric", ["none", "diagonal", "function"])
@pytest.mark.parametrize("name", PIECES)
def test_terms_that_cancel_in_the_norm_cancel_in_the_sum(name, metric):
    for size in (1.0, 1e2, 1e4):
        for seed in range(6):
            piece: Piece = PIECES[name](*cancelling(size, seed))
            shape = piece.dense().shape[1:]
            scale = torch.linspace(0.5, 2.0, shape.numel()).view(shape) if metric == "diagonal" else torch.ones(shape)
            weight = {"none": None, "diagonal": scale, "function": lambda g: g}[metric]
            norm = piece.norms_squared(weight).sqrt()
            added = piece.weighted_sum((1.0 / norm).clamp(max=1.0)) * scale
            assert float(added.norm()) <= 1 + 1e-5, f"{name}: {float(added.norm()):.3g} times the bound"


@pytest.mark.parametrize("name", ["linear", "conv", "circulant"])
def test_a_huge_value_without_a_cotangent_hides_nothing(name):
    """One position holds a huge value and has no cotangent (a ReLU is off there): beside it the squares of ordinary values
    would vanish from Gram matrices, and with them the measured norm."""
    for huge in (1e6, 1e10, 1e18, 1e20, 1e22, 1e25, 1e30, 3e37):
        for turned in (False, True):
            a, d = torch.zeros(1, 3, WIDTH), torch.zeros(1, 3, WIDTH)
            a[0, 0], a[0, 1], d[0, 1], a[0, 2, 3], d[0, 2, 5] = huge, 1.0, 1e3, 0.1, -2.0
            piece: Piece = PIECES[name](*((d, a) if turned else (a, d)))
            norm = piece.norms_squared().sqrt()
            if bool(torch.isfinite(norm)):  # else the owner contributes nothing
                assert float(piece.weighted_sum((1.0 / norm).clamp(max=1.0)).norm()) <= 1 + 1e-6, huge


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_huge_activation_does_not_hide_behind_a_tiny_cotangent(dtype):
    """Squares of either may leave the precision; the gradient, their product, does not."""
    top = 36 if dtype != torch.float64 else 152
    for power in range(0, top + 1, 4):
        huge, tiny = 10.0**power, 10.0**-power
        for a, d in ((huge, tiny), (tiny, huge), (huge, 0.0), (0.0, huge)):
            piece = Outer(torch.full((1, 1, WIDTH), a, dtype=dtype), torch.full((1, 1, WIDTH), d, dtype=dtype))
            norm, exact = piece.norms_squared().sqrt(), WIDTH * float(piece.a[0, 0, 0]) * float(piece.d[0, 0, 0])
            assert float(norm) == pytest.approx(exact, rel=1e-5), power
            assert float(piece.weighted_sum((1.0 / norm).clamp(max=1.0)).norm()) <= 1 + 1e-5


def test_a_metric_does_not_let_cancelling_tokens_through():
    """The same through the mechanism, with an owner beside it whose gradient is not finite."""
    a, d = cancelling(1e4, 0)
    a, d = torch.cat([a, torch.full_like(a, torch.inf)]), torch.cat([d, d])
    mechanism = GaussianMechanism(0.0, 1.0, Diagonal({"w": torch.full((WIDTH, WIDTH), 0.5)}))
    mechanism.bind({"w": torch.zeros(WIDTH, WIDTH)})
    mechanism.accumulate(PerSampleGradients({"w": Outer(a, d)}, 2))
    assert float((mechanism.clipped_sum()["w"] / 0.5).norm()) <= 1 + 1e-5


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
def test_standardisation_forgets_no_part_of_a_gradient(offset):
    """Gradients made of a filter's mean and direction, which standardisation takes out, and a little of something else;
    filters far from zero, whose mean rounding leaves a part of."""
    torch.manual_seed(0)
    projection = Projection(*standardise(torch.randn(4, 8, 3, 3) + offset))
    unit = projection.filters.flatten(1) / projection.filters.flatten(1).norm(dim=1, keepdim=True)
    flat = torch.ones_like(unit) / unit.shape[1] ** 0.5
    for rest in (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 0.0):
        for angle in torch.linspace(-1.5, 1.5, 21):
            g = (torch.cos(angle) * flat + torch.sin(angle) * unit + rest * torch.randn_like(unit)).view(1, 4, 8, 3, 3)
            formed = Standardised(Dense(g), projection)
            cotangent = torch.zeros(1, 4, 1, 1)
            cotangent[0, 1] = 1.0
            few = Conv(g[:, 1].contiguous(), cotangent, 1, (4, 8, 3, 3), Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1))
            assert not few.prefers_dense
            for piece in (formed, Standardised(few, projection)):
                measured = piece.norms_squared().sqrt()
                exact = projection.pull(piece.inner.dense().double()).norm()
                assert float(exact) <= float(measured) * (1 + 1e-5)
                assert float(piece.weighted_sum(torch.ones(1)).norm()) <= float(measured) * (1 + 1e-5)


def test_a_scalar_parameter_has_a_sum():
    g, w = torch.randn(5), torch.rand(5)
    assert torch.allclose(Dense(g).weighted_sum(w), (g * w).sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_weight_zero_keeps_nan_out_in_every_precision(dtype, monkeypatch):
    """A sum that says it never reads owners of weight zero must not."""
    pytest.importorskip("triton")
    if not kernels.INTERPRETED and dtype != torch.float64:
        pytest.skip("the kernel itself runs under Triton's interpreter (TRITON_INTERPRET=1)")
    monkeypatch.setattr(kernels, "FORCED", True)
    for piece in (
        Dense(torch.randn(3, 4, 5).to(dtype).index_fill(0, torch.tensor([1]), torch.nan)),
        Outer(*(torch.randn(3, 2, k).to(dtype).index_fill(0, torch.tensor([1]), torch.nan) for k in (5, 4))),
    ):
        mechanism = GaussianMechanism(0.0, 1.0)
        mechanism.bind({"w": torch.zeros(4, 5, dtype=dtype)})
        mechanism.accumulate(PerSampleGradients({"w": piece}, 3))
        total = mechanism.clipped_sum()["w"]
        assert bool(torch.isfinite(total).all())
        assert 0 < float(total.norm()) <= 2


class Scaled(nn.Module):
    """A layer without a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_layer_without_a_rule_does_not_take_an_earlier_batch_for_this_one():
    """Going forward with two batches and back with the first would train on its records again and again."""
    model = Scaled()
    tape = Tape(dict(model.named_parameters()), "sum")
    attach(model, tape)
    tape.next_batch()
    tape.rows = RowMap.regular(2)
    kept = model(torch.randn(2, 3)).sum()
    tape.next_batch()
    tape.rows = RowMap.regular(2)
    model(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="another batch was drawn"):
        kept.backward()


def test_kernels_are_expanded_anew_for_every_logical_batch(monkeypatch):
    """An optimizer that writes to ``p.data`` leaves no trace in the version of a parameter."""
    pytest.importorskip("triton")
    from erlangen.equivariant import SteerableConv2d, cyclic, regular_fields
    from erlangen.gradients.rules.steerable import _expanded

    monkeypatch.setattr(kernels, "FORCED", True)
    fields = regular_fields(cyclic(4), 1)
    conv = SteerableConv2d(fields, fields, 3)
    tape, x = Tape(dict(conv.named_parameters())), torch.randn(1, 4, 5, 5)
    own, size = set(vars(conv)), len(pickle.dumps(conv))
    before = _expanded(conv, tape, x)[0]
    assert _expanded(conv, tape, x)[0] is before, "physical parts of a batch share the kernel"
    assert set(vars(conv)) == own, "tables of copies stay beside it: a file would name the device on which it was trained"
    assert abs(len(pickle.dumps(conv)) - size) < 100  # a private module is saved as any other
    conv.weight.data.mul_(2.0)
    tape.logical += 1
    torch.testing.assert_close(_expanded(conv, tape, x)[0], 2 * before)


@pytest.mark.parametrize("views", [1, 2])
def test_an_empty_batch_of_images_of_few_channels_adds_nothing(views):
    """Nobody is drawn now and then: a step that fails there would say so."""
    piece = Windows(torch.zeros(0, 6, 32), torch.zeros(0, 5, 2, 3), views, (5, 4, 3, 2))
    assert piece.norms_squared().shape == (0,)
    assert piece.formed().dense().shape == (0, 5, 4, 3, 2)
    assert torch.equal(piece.weighted_sum(torch.zeros(0)), torch.zeros(5, 4, 3, 2))


class Causal(nn.Module):
    """Attention with weights of its own, which no rule knows, and a mask that is the same for all."""

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Parameter(2 * torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x, mask):
        seen = (x @ self.query @ x.transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1)
        return seen @ (x @ self.value)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = Causal(), nn.Linear(4, 2)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.attention(x, mask).mean(1))


def test_a_mask_is_not_taken_for_records_where_as_many_are_drawn():
    """Eight records of eight tokens: row i of the mask would be record i's, and one record more would move it to another."""
    x = torch.randn(9, 8, 4, generator=torch.Generator().manual_seed(0))
    labels = (x[:, :, 0].sum(1) > 0).long()

    def total(x, labels):
        torch.manual_seed(0)
        model = Reads()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, labels), batch_size=len(x)),
            noise_multiplier=1e-9, max_grad_norm=1.0,
        )  # fmt: skip
        for batch, answers in loader:
            nn.functional.cross_entropy(model(batch), answers).backward()
            optimizer.step()
        return len(x) * (before - torch.cat([p.detach().flatten() for p in model.parameters()]))

    assert float((total(x, labels) - total(x[1:], labels[1:])).norm()) <= 1 + 1e-3
