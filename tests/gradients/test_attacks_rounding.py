"""Records that use rounding: what float32 or 16 bits lose of a norm must not let a contribution grow, and what one record
brings into a sum must not be rounded away, or blown up, by the others."""

import pytest
import torch
from torch import Tensor

from erlangen.circulant import CirculantOuter, spectrum
from erlangen.gradients import RowMap, Tape, attach, pieces
from erlangen.gradients.attach import detach
from erlangen.gradients.kernels.stacked_rows import reference_energy
from erlangen.gradients.pieces import Dense, Lookup, Outer, Piece
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rules import conv
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.standardised import Projection, Standardised
from erlangen.gradients.sums import squared_norms
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.clipping import make_clipping
from erlangen.mechanisms.geometry import Diagonal
from erlangen.models.standardised import StandardisedConv2d, standardise

POINT = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)


def clipped(piece: Piece) -> Tensor:
    """Weights that clip at 1 what the piece measures."""
    return (1.0 / piece.norms_squared().sqrt()).clamp(max=1.0)


@pytest.mark.parametrize("entries", [10_000, 1_000_000])
@pytest.mark.parametrize("leading", [1, 8, 16, 64])
def test_many_small_entries_count_beside_a_large_one(entries, leading):
    """Squares just below half a rounding error of what was added up before them: one by one they would all be lost."""
    for small in (2.0e-4, 2.3e-4, 2.43e-4):
        g = torch.full((1, entries), small)
        g[0, :leading] = 1.0
        for shaped in (g, g.view(1, -1, 100), g.view(1, 100, -1).mT):
            assert float(squared_norms(shaped)) >= float(g.double().square().sum()) * (1 - 1e-5)
        of_ensembles = reference_energy(torch.stack([g, g]), torch.full((2, entries), 0.5))
        assert float(of_ensembles.min()) >= 4 * float(g.double().square().sum()) * (1 - 1e-5)
    matrix = Outer(g[:, None, : entries // 100], torch.ones(1, 1, 3))
    assert float(matrix.weighted_sum(clipped(matrix)).double().norm()) <= 1 + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_filters_of_16_bits_are_standardised_in_more(dtype):
    """‖w‖² and the mean of w in 16 bits are wrong by parts in a thousand; gradients along w, and a little beside it, would
    be measured as next to nothing."""
    for seed in range(5):
        torch.manual_seed(seed)
        conv = StandardisedConv2d(8, 1, 3, bias=False).to(dtype)
        unit = standardise(conv.weight.detach().float())[0]
        unit = unit / unit.norm()
        for rest in (1e-1, 2e-2, 5e-3):
            other = torch.randn_like(unit)
            other -= other.mean()
            other -= unit * (other * unit).sum()
            image = (unit + rest * other / other.norm()).to(dtype)  # one window: the gradient is the image
            tape = Tape(dict(conv.named_parameters()), "sum")
            attach(conv, tape)
            tape.rows = RowMap.regular(1)
            conv(image).sum().backward()
            mechanism = GaussianMechanism(0.0, 1e-3)
            mechanism.bind(dict(conv.named_parameters()))
            with torch.no_grad():
                mechanism.accumulate(tape.gradients())
            detach(conv)
            assert 0 < float(mechanism.clipped_sum()["weight"].norm()) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize("what", ["mean", "direction"])
def test_what_standardisation_removes_does_not_drown_the_others(formed, what):
    """Records whose gradients lie along a filter's mean or direction, with hardly anything left after the projection, enter
    the sum before it: they may not be so large there that its rounding moves one record's part."""
    for huge in (1e3, 1e6):
        torch.manual_seed(0)
        projection = Projection(*standardise(torch.randn(32, 64, 1, 1)))
        x, d = torch.randn(512, 64, 2, 1), torch.randn(512, 32, 2, 1).abs()
        if what == "mean":
            x[1:] += huge
        else:
            x[1:] += huge * projection.filters[0].view(-1, 1, 1)
            d[1:, 1:] *= 1e-3
        piece: Piece = Standardised(Conv(x, d, 1, (32, 64, 1, 1), POINT), projection)
        piece = piece.formed() if formed else piece
        weights = clipped(piece)
        assert not formed or isinstance(piece.inner, Dense)
        without = weights.clone()
        without[0] = 0.0
        moved = piece.weighted_sum(weights) - piece.weighted_sum(without)
        assert float(moved.norm()) <= 1 + 5e-4, f"{huge:g}: {float(moved.norm()):.3g} times the bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scalar_parameter_of_16_bits_is_measured_in_more(dtype):
    """A metric of no dimensions does not lift 16 bits to 32 by itself."""
    for m in torch.linspace(0.5, 2.0, 40):
        for value in (1.0, 1.01, 93.0, 1023.0):
            mechanism = GaussianMechanism(0.0, 1e-3, Diagonal({"scale": m}))
            mechanism.bind({"scale": torch.zeros((), dtype=dtype)})
            mechanism.accumulate(PerSampleGradients.from_dense({"scale": torch.tensor([value], dtype=dtype)}))
            assert float(mechanism.geometry.forward("scale", mechanism.clipped_sum()["scale"])) <= 1e-3 * (1 + 1e-6)


def precisions() -> list[str]:
    backends = torch.backends
    return [
        k.fp32_precision
        for k in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    ]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="before PyTorch 2.9")
@pytest.mark.parametrize("asked", ["medium", "high", "bf16 on a CPU", "tf32 everywhere"])
def test_norms_and_sums_are_exact_whatever_precision_was_asked_for(asked):
    """Products of float32 in fewer bits, asked for in the old way or in the new one: not inside, and as before afterwards."""
    unset = precisions()
    try:
        if asked in ("medium", "high"):
            torch.set_float32_matmul_precision(asked)
        elif asked == "bf16 on a CPU":
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        else:
            torch.backends.fp32_precision = "tf32"
        before = precisions()
        with exact_float32():
            assert precisions() == ["ieee"] * 4
        assert precisions() == before != ["ieee"] * 4
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        knobs = (
            torch.backends.cuda.matmul,
            torch.backends.cudnn.conv,
            torch.backends.mkldnn.matmul,
            torch.backends.mkldnn.conv,
        )
        for knob, value in zip(knobs, unset, strict=True):
            knob.fp32_precision = value


def nearly_opposite(owners: int, width: int) -> Tensor:
    """Pairs of positions of equal entries, the second nearly the first. Gram matrices of them err by one rounding per
    product, always the same way, by far more than what is left of ‖a₀‖² − 2⟨a₀, a₁⟩ + ‖a₁‖²."""
    torch.manual_seed(0)
    size, ratio = torch.rand(owners, 1, 1) + 0.5, 1 + 10 ** (-5 + 3 * torch.rand(owners, 1, 1))
    return torch.cat([size, size * ratio], 1).expand(owners, 2, width).contiguous()


@pytest.mark.parametrize("width", [64, 512, 4608])
@pytest.mark.parametrize("kind", ["outer", "lookup", "circulant"])
def test_equal_entries_that_nearly_cancel_are_clipped(kind, width):
    a, sign = nearly_opposite(40, width), torch.tensor([1.0, -1.0])[None, :, None]
    d = sign.expand(40, 2, 300 if kind == "outer" else 16).contiguous()
    pieces: dict[str, Piece] = {
        "outer": Outer(a, d),
        "lookup": Lookup(torch.zeros(40, 2, dtype=torch.long), a * sign, 3),
        "circulant": CirculantOuter(spectrum(a, 2), spectrum(d.repeat(1, 1, 10), 2), 2),
    }
    piece = pieces[kind]
    if kind != "lookup":
        assert not piece.prefers_dense
    weights = 0.01 / piece.norms_squared().sqrt()
    added = torch.stack([piece.weighted_sum(w) for w in torch.diag(weights)])
    assert float(added.double().flatten(1).norm(dim=1).max()) <= 0.01 * (1 + 1e-6)


#: cotangents and activations whose product is in range, and whose squares or weighted cotangents are not
FAR_APART = [
    (1e38, 1e-40), (3e38, 1e-41), (3e38, 0.0), (0.0, 3e38), (1e-44, 1e38), (1e-40, 1e38), (1e-38, 3e38), (1e25, 1e-30),
    (1e19, 1e-22), (1e18, 1e-23), (1e15, 1e-18), (1.0, 1.0),
]  # fmt: skip


def product(kind: str, tokens: int, width: int, a: float, d: float) -> tuple[Piece, tuple[int, ...]]:
    """A piece of equal entries, and the shape of its parameter."""
    rows, cotangents = torch.full((1, tokens, width), a), torch.full((1, tokens, width), d)
    if kind == "linear":
        return Outer(rows, cotangents), (width, width)
    if kind == "circulant":
        return CirculantOuter(spectrum(rows, 4), spectrum(cotangents, 4), 4), (width // 4, width // 4, 4)
    shape = torch.Size((width, width, 1, 1))
    return Conv(rows.mT[:, :, None], cotangents.mT[:, :, None], 1, shape, POINT), shape


@pytest.mark.parametrize("rule", ["flat", "auto-s", "psac"])
@pytest.mark.parametrize("bound", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("kind", ["linear", "circulant", "convolution"])
def test_weights_neither_overflow_nor_lose_their_bits(kind, bound, rule):
    """w·d alone would be infinite (AUTO-S has weights above 1), or a small multiple of the least number."""
    for width in (4, 400):
        for tokens in (1, 2):
            for d, a in FAR_APART:
                piece, shape = product(kind, tokens, width, a, d)
                mechanism = GaussianMechanism(0.0, make_clipping(rule, bound))
                mechanism.bind({"w": torch.zeros(shape)})
                mechanism.accumulate(PerSampleGradients({"w": piece}, 1))
                assert float(mechanism.clipped_sum()["w"].double().norm()) <= bound, (width, tokens, d, a)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 4608), (4608, 8), (64, 2000)])
def test_equal_entries_in_a_metric_are_clipped(inputs, outputs):
    """A product that adds thousands of equal squares errs by hundreds of epsilons."""
    torch.manual_seed(0)
    a, d = ((torch.rand(60, 1, 1) + 0.5).expand(60, 1, n).contiguous() for n in (inputs, outputs))
    omega = torch.full((outputs, inputs), 0.7)
    measured = Outer(a, d).norms_squared(omega).double().sqrt()
    exact = a[:, 0].double().norm(dim=1) * d[:, 0].double().norm(dim=1) * omega[0, 0].double()
    assert bool((exact <= measured * (1 + 1e-6)).all())


def test_parameters_of_two_precisions_leave_room_for_the_coarser():
    """The first parameter is float64, the others are not: their rounding counts."""
    torch.manual_seed(0)
    for width in range(1, 400, 3):
        gradients = {"fine": torch.randn(1, 3).double() * 1e-3, "coarse": torch.randn(1, width)}
        mechanism = GaussianMechanism(0.0, 1e-3)
        mechanism.bind({name: g[0] for name, g in gradients.items()})
        mechanism.accumulate(PerSampleGradients.from_dense(gradients))
        added = torch.cat([total.double() for total in mechanism.clipped_sum().values()])
        assert float(added.norm()) <= 1e-3


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_an_owner_of_weight_zero_poisons_no_sum_that_skips_it(poison, monkeypatch):
    """Where sums skip owners of weight zero, nobody has looked at what these hold."""
    for module in (pieces, conv):
        monkeypatch.setattr(module, "skips_zero_weights", lambda *like: True)
    w = torch.tensor([1.0, 0.0, 0.5])
    a, d, views, maps = torch.randn(3, 4, 6), torch.randn(3, 4, 5), torch.randn(6, 2, 5, 5), torch.randn(6, 3, 3, 3)
    index = torch.randint(0, 7, (3, 4))

    def made() -> list[Piece]:
        same = [t.clone() for t in (a, d, d, views, maps)]
        convolution = Conv(*same[3:], 2, (3, 2, 3, 3), Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1))
        return [Outer(*same[:2]), Lookup(index, same[2], 7), convolution]

    clean = [piece.weighted_sum(w) for piece in made()]
    a[1, 1, 1], d[1, 0, 0], views[3, 1, 1, 1], maps[2, 0, 0, 0] = (poison,) * 4
    for piece, sum_of_others in zip(made(), clean, strict=True):
        assert piece.guarded
        assert torch.equal(piece.weighted_sum(w), sum_of_others), type(piece).__name__


@pytest.mark.parametrize("standardised", [False, True])
def test_a_record_that_is_not_finite_changes_no_order_of_summation(standardised):
    """Every second channel of a channels-last map: what is copied without the bad record lies otherwise in memory. Huge terms
    that cancel in the norm of another record must cancel in the sum just so; in another order they left 48 bounds."""
    projection = Projection(*standardise(torch.randn(16, 8, 1, 1, generator=torch.Generator().manual_seed(0))))
    worst = 0.0
    for seed in (0, 7, 51, 80, 159, 484):
        g = torch.Generator().manual_seed(seed)
        x = torch.zeros(2, 16, 6, 6).to(memory_format=torch.channels_last)[:, ::2]
        huge = torch.randn(18, generator=g) * 10 ** (torch.rand(18, generator=g) * 4 + 4)
        x[0, 0] = torch.cat([huge, -huge])[torch.randperm(36, generator=g)].view(6, 6)
        d = torch.zeros(2, 16, 6, 6)
        d[0, 0], d[1] = 1.0, float("nan")
        conv = Conv(x, d, 1, (16, 8, 1, 1), POINT)
        assert conv.prefers_dense
        mechanism = GaussianMechanism(0.0, 1.0)
        mechanism.bind({"w": torch.zeros(16, 8, 1, 1)})
        mechanism.accumulate(PerSampleGradients({"w": Standardised(conv, projection) if standardised else conv}, 2))
        worst = max(worst, float(mechanism.clipped_sum()["w"].double().norm()))
    assert 0 < worst <= 1 + 1e-5
