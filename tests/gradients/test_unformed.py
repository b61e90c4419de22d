"""Norms and sums of kernel gradients that are never stored: what is measured bounds what is added up, whatever comes."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.gradients import RowMap, Tape, attach, detach, kernels
from erlangen.gradients.kernels import conv_gradient, conv_unformed, tuned
from erlangen.gradients.pieces import Dense
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.standardised import Projection, Standardised
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.geometry import Diagonal
from erlangen.models.standardised import StandardisedConv2d, standardise

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in")  # NumPy, about values that are meant not to be finite
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16 matrices
SAME = ((3, 3), (1, 1), (1, 1), (1, 1))
POINT = ((1, 1), (1, 1), (0, 0), (1, 1))
#: channels, outputs, height (width is one more), views, (kernel, stride, padding, dilation)
SHAPES = [
    (40, 16, 3, 1, SAME),
    (24, 72, 6, 2, ((3, 3), (2, 2), (1, 1), (1, 1))),
    (16, 16, 6, 1, ((2, 3), (1, 2), (2, 0), (1, 2))),
    (16, 24, 5, 3, POINT),
]


@pytest.fixture
def forced(monkeypatch):
    """Use the kernels on this device, whatever it is, with built-in tiles."""
    monkeypatch.setattr(kernels, "FORCED", True)
    monkeypatch.setattr(tuned, "_table", lambda device: {})


def operands(channels, outputs, size, views, plane, owners=3, dtype=HALF) -> tuple[Tensor, Tensor]:
    kernel, stride, padding, dilation = plane
    x = torch.randn(owners * views, channels, size, size + 1, device=DEVICE)
    out = [
        (s + 2 * p - e * (k - 1) - 1) // t + 1 for s, p, e, k, t in zip(x.shape[2:], padding, dilation, kernel, stride)
    ]
    d = torch.randn(owners * views, outputs, *out, device=DEVICE)
    return tuple(t.to(dtype).to(memory_format=torch.channels_last) for t in (x, d))  # type: ignore[return-value]


def products(x: Tensor, d: Tensor, views: int, plane) -> Tensor:
    """Every owner's product as `weighted_sum` forms it."""
    units = torch.eye(len(x) // views, device=x.device)
    return torch.stack([conv_unformed.weighted_sum(x, d, one, views, *plane) for one in units])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("channels", "outputs", "size", "views", "plane"), SHAPES)
def test_norms_are_those_of_unfolding_and_bound_what_is_summed(channels, outputs, size, views, plane, centred):
    torch.manual_seed(0)
    x, d = operands(channels, outputs, size, views, plane)
    inverse = torch.rand(outputs, device=DEVICE) * 0.9 + 0.1 if centred else None
    exact, magnitude = conv_unformed.reference(x, d, views, *plane, inverse)
    value = conv_unformed.squared_norms(x, d, views, *plane, inverse, rounded=False)
    assert float(((value - exact).abs() / magnitude.square()).max()) < (1e-5 if DEVICE == "cuda" else 2e-6)
    bound = conv_unformed.squared_norms(x, d, views, *plane, inverse)
    g = products(x, d, views, plane).double().flatten(2, 3)
    g = (g - g.mean(2, keepdim=True)) * inverse.double()[:, None] if inverse is not None else g
    assert bool((g.square().sum((1, 2)) <= bound).all())
    assert bool((bound <= exact + 2e-4 * magnitude.square()).all()), "a bound that is far off costs accuracy"


@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize(("channels", "outputs", "size", "views", "plane"), SHAPES)
def test_sums_are_those_of_unfolding_without_owners_of_weight_zero(channels, outputs, size, views, plane, programs):
    torch.manual_seed(1)
    x, d = operands(channels, outputs, size, views, plane, owners=4)
    w = torch.tensor([0.3, 0.0, 1.7, 0.0], device=DEVICE)
    g = conv_gradient.reference(x.double(), d.double(), views, *plane)
    wanted = torch.einsum("n,notc->otc", w.double(), g)
    x[views : 2 * views], d[3 * views :] = torch.nan, torch.inf
    found = conv_unformed.weighted_sum(x, d, w, views, *plane, setting=tuned.Sum(32, 32, 4, 3, programs))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    assert torch.equal(
        found, conv_unformed.weighted_sum(x, d, w, views, *plane, setting=tuned.Sum(32, 32, 4, 3, programs))
    )
    assert float(conv_unformed.weighted_sum(x, d, torch.zeros_like(w), views, *plane).abs().max()) == 0


def attacks() -> Iterator[tuple[Tensor, Tensor]]:
    """Two positions whose products cancel exactly until something rounds them, and a third of ordinary size; then equal
    cotangents that, clipped and rounded to 16 bits, may all be rounded up."""
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        base, cotangent = (
            torch.randint(1, 64, (64,), generator=g) * 2.0 ** torch.randint(-5, 5, (64,), generator=g) for _ in range(2)
        )
        x, d = torch.zeros(1, 64, 1, 3), torch.zeros(1, 64, 1, 3)
        x[0, :, 0, 0], d[0, :, 0, 0], x[0, :, 0, 1], d[0, :, 0, 1] = 3 * base, cotangent, -base, 3 * cotangent
        x[0, 0, 0, 2], d[0, 0, 0, 2] = 7.3, 1.0
        yield x, d
    for entries in range(1, 20):
        yield (torch.arange(64) < entries).float().view(1, 64, 1, 1), torch.ones(1, 64, 1, 1)


def excess(norms, total) -> float:
    """How far a clipped owner gets, in units of the bound, over all attacks."""
    worst = 0.0
    for attack in attacks():
        x, d = (t.to(DEVICE, HALF).to(memory_format=torch.channels_last) for t in attack)
        w = (1.0 / norms(x, d).sqrt()).clamp(max=1.0)
        worst = max(worst, float(total(x, d, w).double().norm()))
    return worst


def bounded(x: Tensor, d: Tensor) -> Tensor:
    return conv_unformed.squared_norms(x, d, 1, *POINT)


def summed(x: Tensor, d: Tensor, w: Tensor) -> Tensor:
    return conv_unformed.weighted_sum(x, d, w, 1, *POINT)


def test_terms_that_cancel_in_the_norm_cancel_in_the_sum():
    assert 0 < excess(bounded, summed) <= 1 + 1e-6


def test_the_attack_finds_norms_that_are_not_rounded_and_cotangents_that_are():
    """Twins that lack one half of the guarantee: Gram matrices as they come out, and the usual way to sum after ghost
    norms, an ordinary backward pass of cotangents that were weighed and rounded again."""
    as_computed = lambda x, d: conv_unformed.squared_norms(x, d, 1, *POINT, rounded=False).clamp(min=1e-12)  # noqa: E731
    rounded_again = lambda x, d, w: summed(x, (d.float() * w).to(d.dtype), torch.ones_like(w))  # noqa: E731
    assert excess(as_computed, summed) > 1.01
    assert excess(bounded, rounded_again) > 1 + 1e-4


@pytest.mark.parametrize("huge", [2.0**20, 2.0**60])
def test_entries_whose_squares_vanish_are_not_forgotten(huge):
    """A huge position with no cotangent beside a tiny one with a huge cotangent; and both far outside float32's squares."""
    x, d = torch.zeros(3, 64, 1, 2, device=DEVICE), torch.zeros(3, 64, 1, 2, device=DEVICE)
    x[0, :, 0, 0], x[0, :, 0, 1], d[0, :, 0, 1] = huge, 2.0**-75, huge
    x[1, :, 0, 0], d[1, :, 0, 0] = 2.0**100, 2.0**100
    x[2, :, 0, 0], d[2, :, 0, 0] = 2.0**-75, 2.0**-75
    bound = conv_unformed.squared_norms(x, d, 1, *POINT)
    formed = products(x, d, 1, POINT).double().flatten(1).square().sum(1)
    assert float(formed[0]) <= float(bound[0])
    assert not bool(torch.isfinite(bound[1])), "an owner whose norm cannot be known contributes nothing"
    assert float(formed[2]) == 0.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_norms_of_what_is_not_finite_are_not_finite(bad):
    torch.manual_seed(2)
    for which in (0, 1):
        for inverse in (None, torch.ones(16, device=DEVICE)):
            pair = operands(16, 16, 4, 1, SAME)
            pair[which][1, 3, 2, 2] = bad
            norms = conv_unformed.squared_norms(*pair, 1, *SAME, inverse)
            assert torch.isfinite(norms).tolist() == [True, False, True]


def wide(standardised: bool = False) -> nn.Module:
    kind = StandardisedConv2d if standardised else nn.Conv2d
    first, second = kind(64, 72, 2, 2), kind(72, 64, (1, 2), padding=(0, 1))
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(384, 4))


def recorded(
    model: nn.Module, x: Tensor, y: Tensor, views: int, metric=None, strategy: str = "auto"
) -> PerSampleGradients:
    tape = Tape(dict(model.named_parameters()), "sum", strategy)
    tape.rows = RowMap.regular(len(x) // views, views)
    tape.metric = tape.metric if metric is None else metric
    attach(model, tape)
    try:
        with torch.autocast(DEVICE, HALF):
            loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
    finally:
        detach(model)
    return tape.gradients()


@torch.no_grad()
def batch(records: int, views: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(records * views, 64, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    return x, torch.randint(0, 4, (records,), device=DEVICE).repeat_interleave(views)


@torch.no_grad()
def compared(found: PerSampleGradients, stored: PerSampleGradients, slack: float) -> None:
    norms, wanted = found.norms_squared(), stored.norms_squared()
    w = torch.tensor([0.5, 0.0, 1.0], device=DEVICE)
    sums, others = (g.weighted_sum(dict.fromkeys(g.names, w)) for g in (found, stored))
    alone = [found.weighted_sum(dict.fromkeys(found.names, one)) for one in torch.eye(3, device=DEVICE)]
    for name in found.names:
        ratio = norms[name] / wanted[name]
        assert float(ratio.min()) > 0.99, name
        assert float(ratio.max()) < slack, name
        assert float((sums[name] - others[name]).norm() / others[name].norm()) < 0.01, name
        contributed = torch.stack([one[name].double().square().sum() for one in alone])
        assert bool((contributed <= norms[name] * (1 + 1e-6)).all()), name


@pytest.mark.parametrize("standardised", [False, True])
def test_layers_with_few_positions_are_never_formed(forced, standardised):
    """Against the same layers with every gradient stored, through the tape, with views."""
    torch.manual_seed(3)
    model = wide(standardised).to(DEVICE).to(memory_format=torch.channels_last)
    x, y = batch(3, 2)
    found, stored = recorded(model, x, y, 2), recorded(model, x, y, 2, strategy="materialise")
    kept = [found._pieces[name] for name in ("0.weight", "2.weight")]
    assert all(isinstance(piece.inner if standardised else piece, Conv) for piece in kept)
    assert found.guarded
    compared(found, stored, 1.05 if standardised else 1.01)


def test_a_weighted_geometry_forms_them_at_once(forced):
    """Gram matrices know the Euclidean norm alone; forming late would take float32 and twice the time."""
    torch.manual_seed(4)
    model = wide().to(DEVICE).to(memory_format=torch.channels_last)
    x, y = batch(2, 1)
    scale = {name: torch.rand_like(p) + 0.5 for name, p in model.named_parameters()}
    found = recorded(model, x, y, 1, Diagonal(scale).weight)
    assert isinstance(found._pieces["0.weight"], Dense)
    plain = recorded(model, x, y, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FORCED", False)
        exact = recorded(model.float(), x, y, 1, strategy="materialise")
    for name in ("0.weight", "2.weight"):
        for metric in (lambda n: scale[n], lambda n: lambda t: t * scale[n]):
            late, now, wanted = (g.of(name).norms_squared(metric)[name].detach() for g in (plain, found, exact))
            assert float((late / wanted - 1).abs().max()) < 0.01
            assert float((now / wanted - 1).abs().max()) < 0.01


def test_a_record_that_is_not_finite_leaves_no_trace(forced):
    torch.manual_seed(5)
    model = wide().to(DEVICE).to(memory_format=torch.channels_last)
    x, y = batch(4, 1)
    x[1, 7, 2, 1] = torch.nan

    def released(rows: list[int]) -> Tensor:
        mechanism = GaussianMechanism(0.0, 1.0)
        mechanism.bind(dict(model.named_parameters()), 4)
        gradients = recorded(model, x[rows], y[rows], 1)
        with torch.no_grad():
            mechanism.accumulate(gradients)
        return torch.cat([g.flatten() for g in mechanism.finish(4).values()])

    with_nan, without = released([0, 1, 2, 3]), released([0, 2, 3])
    assert float((with_nan - without).norm() / without.norm()) < 1e-2
    assert float(without.norm()) <= 3 / 4


def test_standardised_filters_forget_no_part_of_a_gradient(forced):
    """Gradients that are almost all mean, which standardisation takes out, and a little of something else."""
    torch.manual_seed(6)
    sizes = torch.linspace(0.1, 3, 64, device=DEVICE).view(-1, 1, 1, 1)
    projection = Projection(*standardise(torch.randn(64, 64, 1, 1, device=DEVICE) * sizes))
    for rest in (1.0, 0.1, 0.01, 0.0):
        x = (1 + rest * torch.randn(3, 64, 2, 2, device=DEVICE)).to(HALF).to(memory_format=torch.channels_last)
        d = torch.randn(3, 64, 2, 2, device=DEVICE).to(HALF).to(memory_format=torch.channels_last)
        piece = Standardised(Conv(x, d, 1, (64, 64, 1, 1), Geometry(*POINT, 1)), projection)
        assert piece.euclidean_only
        measured = piece.norms_squared().sqrt()
        exact = projection.pull(piece.inner.precise().dense().double()).flatten(1).norm(dim=1)
        assert bool((exact <= measured).all())
        for i, one in enumerate(torch.eye(3, device=DEVICE)):
            assert float(piece.weighted_sum(one).double().norm()) <= float(measured[i]) * (1 + 1e-6)


def test_which_layers_are_stored_is_a_question_of_bytes():
    assert all(conv_unformed.cheaper(tokens, 256, 256) for tokens in (4, 16, 49, 64, 128))
    assert not conv_unformed.cheaper(128, 64, 64), "as many positions as channels: Gram matrices are no shorter"
    assert not conv_unformed.cheaper(256, 512, 512)
    assert not conv_unformed.cheaper(16, 16, 256), "a small gradient is stored"


def test_measured_tiles_are_kept_by_device_and_nonsense_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "path", lambda: tmp_path / "deep" / "kernels.json")
    monkeypatch.setattr(tuned, "machine", lambda: "a device")
    tuned._table.cache_clear()
    try:
        assert tuned.weighing(64, 256, 256) == tuned.SUMS[64]
        mine = tuned.Sum(64, 64, 4, 3, 100, stored=True)
        tuned.keep("a device", "sums", "64x256x256", mine)
        tuned.keep("another", "norms", "16", tuned.Norms(64, 2, 2))
        assert tuned.weighing(64, 256, 256) == mine
        assert [file.name for file in tuned.path().parent.iterdir()] == ["kernels.json"]
        assert tuned.norms(16) == tuned.NORMS[16]
        assert not conv_unformed.cheaper(64, 256, 256)
        assert conv_unformed.cheaper(64, 128, 256)
        good = tuned.path().read_text()
        nonsense: list[object] = [{"outputs": 77}, {"outputs": "x"}, 3, {"depth": 1}, None]
        nonsense += [{**asdict(mine), "outputs": 64.0}, {**asdict(mine), "programs": 792.5}]  # sizes of a launch are whole
        for entry in nonsense:
            table = json.loads(good)
            table["a device"]["sums"]["64x256x256"] = entry
            tuned.path().write_text(json.dumps(table))
            tuned._table.cache_clear()
            assert tuned.weighing(64, 256, 256) == tuned.SUMS[64]
        for text in ("[]", "{", '{"a device": 3}', '{"a device": {"sums": []}}'):
            tuned.path().write_text(text)
            tuned._table.cache_clear()
            assert tuned.weighing(64, 256, 256) == tuned.SUMS[64]
    finally:
        tuned._table.cache_clear()
