"""Steerable convolutions: equivariance on and off the grid, an independent group convolution, gradients, export."""

import copy

import pytest
import torch
import torch.nn.functional as F

from erlangen.equivariant import (
    EquivarianceError,
    FieldType,
    Group,
    SteerableConv2d,
    check_equivariance,
    cyclic,
    dihedral,
    export,
    fields,
    group_by_name,
    irrep,
    o2,
    quotient,
    regular,
    regular_fields,
    spectral,
    trivial,
    trivial_fields,
)
from erlangen.gradients.tracing import followed


def main_type(group: Group, count: int = 2) -> FieldType:
    return regular_fields(group, count) if group.is_finite else fields(spectral(group, 2), count)


def randomised(conv: SteerableConv2d) -> SteerableConv2d:
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_()
    return conv


ALL = ["C1", "C2", "C3", "C4", "C6", "C8", "C16", "D1", "D2", "D3", "D4", "D6", "D8", "SO(2)", "O(2)"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("standardise", [False, True])
def test_equivariance(name: str, standardise: bool) -> None:
    """≤ 1e-5 in float32 for every grid symmetry of the group; ≤ 5 % at other angles on smooth inputs (3×3 kernels)."""
    torch.manual_seed(0)
    group = group_by_name(name)
    inner = main_type(group)
    mixed = fields([trivial(group)]) + inner
    conv = randomised(SteerableConv2d(mixed, inner + fields([trivial(group)]), 3, padding=1, standardise=standardise))
    report = conv.check_equivariance(tolerance=1e-5, off_grid_tolerance=0.05)
    assert report.on_grid <= 1e-5


@pytest.mark.parametrize("name", ["C3", "C8", "D6", "D8", "SO(2)", "O(2)"])
@pytest.mark.parametrize(("dilation", "bound"), [(2, 0.1), (3, 0.225), (4, 0.4)])
def test_dilated_kernels_keep_their_bound(name: str, dilation: int, bound: float) -> None:
    """The filter is stretched with its taps; a filter that is not, escnn's, loses equivariance off the grid only."""
    group = group_by_name(name)
    for inp in (trivial_fields(group, 2), main_type(group)):
        torch.manual_seed(0)
        conv = SteerableConv2d(inp, main_type(group), 3, padding=dilation, dilation=dilation)
        assert conv.off_grid_bound == pytest.approx(bound)
        stretched = conv.check_equivariance()
        torch.manual_seed(0)
        theirs = SteerableConv2d(inp, main_type(group), 3, padding=dilation, dilation=dilation, stretch=False)
        measured = theirs.check_equivariance()  # on the grid as exact; elsewhere reported, with no bound
        assert measured.off_grid > 2 * max(stretched.off_grid, 0.1)
        with pytest.raises(EquivarianceError, match="off the pixel grid"):
            theirs.check_equivariance(off_grid_tolerance=bound)


@pytest.mark.parametrize("name", ["C5", "C8", "D3", "D7", "O(2)"])
@pytest.mark.parametrize(("options", "size", "bound"), [
    ({"stride": 2}, 33, 0.1), ({"stride": 3}, 34, 0.225), ({"stride": 4}, 33, 0.4), ({"stride": 2, "dilation": 3}, 33, 0.225),
])  # fmt: skip
def test_strided_convolutions_keep_their_bound(name: str, options: dict, size: int, bound: float) -> None:
    torch.manual_seed(0)
    inner = main_type(group_by_name(name))
    conv = SteerableConv2d(inner, inner, 3, padding=options.get("dilation", 1), **options)
    assert conv.off_grid_bound == pytest.approx(bound)
    conv.check_equivariance(size=size)


def test_filters_of_ones_own_have_no_bound_but_are_measured() -> None:
    """Frequency 3 on the ring of radius 1 is more than eight taps around it carry."""
    torch.manual_seed(0)
    inner = regular_fields(cyclic(8), 2)
    conv = SteerableConv2d(inner, inner, 3, padding=1, cutoff=3.0)
    assert conv.check_equivariance().off_grid > SteerableConv2d(inner, inner, 3, padding=1).check_equivariance().off_grid


def test_a_dilated_kernel_has_the_taps_of_the_undilated_one() -> None:
    torch.manual_seed(0)
    inner = regular_fields(cyclic(8), 2)
    near = SteerableConv2d(inner, inner, 5, cutoff=1.5)
    far = SteerableConv2d(inner, inner, 5, cutoff=1.5, dilation=3)
    far.load_state_dict(near.state_dict())
    assert torch.equal(near.kernel(), far.kernel())
    x = torch.randn(1, 16, 17, 17)
    assert torch.allclose(far(x)[..., ::3, ::3], near(x[..., ::3, ::3]), atol=1e-5)


def test_a_kernel_for_quarter_turns_only_is_caught_at_other_angles() -> None:
    """A cross-shaped kernel commutes with C4 exactly and with C8 not at all."""
    cross = torch.nn.Conv2d(1, 1, 9, padding=4, bias=False)
    with torch.no_grad():
        cross.weight.zero_()
        cross.weight[..., 4, :] = cross.weight[..., :, 4] = 1
        cross.weight -= torch.eye(9) + torch.eye(9).flip(0)
    check_equivariance(cross, trivial_fields(cyclic(4), 1), trivial_fields(cyclic(4), 1))
    with pytest.raises(EquivarianceError, match="off the pixel grid"):
        check_equivariance(cross, trivial_fields(cyclic(8), 1), trivial_fields(cyclic(8), 1))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": 1},
        {"kernel_size": 2},
        {"kernel_size": 4},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 3, "padding": 1, "groups": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "bias": False},
        {"kernel_size": 3, "padding": 1, "basis": "pixel"},
        {"kernel_size": 3, "padding": 1, "cutoff": 4.0},
    ],
)
def test_options_keep_equivariance_and_export(options: dict) -> None:
    torch.manual_seed(1)
    group = dihedral(4)
    conv = randomised(SteerableConv2d(regular_fields(group, 2), regular_fields(group, 4), **options))
    conv.check_equivariance()
    plain = export(conv)
    assert type(plain) is torch.nn.Conv2d
    x = torch.randn(2, 16, 9, 9)
    assert torch.allclose(plain(x), conv(x), atol=1e-6)


def test_a_broken_kernel_is_caught() -> None:
    torch.manual_seed(0)
    group = dihedral(4)

    class Broken(SteerableConv2d):
        def kernel(self) -> torch.Tensor:
            kernel = super().kernel().clone()
            kernel[0, 0, 0, 0] += 1e-2
            return kernel

    with pytest.raises(EquivarianceError, match="breaks D4"):
        Broken(regular_fields(group, 1), regular_fields(group, 1), 3, padding=1).check_equivariance()
    # a reflection acting on the wrong side is as wrong, and only reflections show it
    conv = SteerableConv2d(regular_fields(cyclic(4), 1), regular_fields(cyclic(4), 1), 3, padding=1)
    conv.check_equivariance()
    with pytest.raises(EquivarianceError, match="on the pixel grid"):
        SteerableConv2d(
            regular_fields(cyclic(4), 1), regular_fields(cyclic(4), 1), 3, padding=1, stride=2
        ).check_equivariance(size=8)


@pytest.mark.parametrize("name", ["C4", "D4"])
def test_pixel_basis_is_the_group_convolution(name: str) -> None:
    """(f ⋆ ψ)(h) = Σ_g f(g) ⋆ ψ(h⁻¹g), rotated by h: written as loops over the group, with torch.rot90 alone."""
    torch.manual_seed(0)
    group = group_by_name(name)
    order, fields_in, fields_out = group.order, 2, 3
    conv = SteerableConv2d(
        regular_fields(group, fields_in), regular_fields(group, fields_out), 3, padding=1, basis="pixel", bias=False
    )
    filters = conv.weight.detach().view(fields_out, fields_in, order, 3, 3)
    x = torch.randn(2, fields_in, order, 8, 8)
    out = torch.zeros(2, fields_out, order, 8, 8)
    for h, element in enumerate(group.elements):
        turns = element.quarter_turns()
        assert turns is not None
        for g in range(order):
            psi = filters[:, :, group.table[group.inverses[h], g]]
            moved = torch.rot90(psi.flip(-1) if element.flip else psi, turns, (-2, -1))
            out[:, :, h] += F.conv2d(x[:, :, g], moved, padding=1)
    assert torch.allclose(conv(x.flatten(1, 2)), out.flatten(1, 2), atol=1e-5)


@pytest.mark.parametrize("basis", ["steerable", "pixel"])
@pytest.mark.parametrize("standardise", [False, True])
def test_per_sample_gradients_from_kernel_gradients(basis: str, standardise: bool) -> None:
    """coefficient_gradient and bias_gradient against autograd, one sample at a time, and against torch.func."""
    torch.manual_seed(0)
    group = dihedral(4)
    conv = SteerableConv2d(
        regular_fields(group, 2), regular_fields(group, 3) + trivial_fields(group, 2), 3, padding=1, basis=basis,
        standardise=standardise,
    ).double()  # fmt: skip
    randomised(conv)
    x, d = torch.randn(4, 16, 6, 6, dtype=torch.float64), torch.randn(4, 26, 6, 6, dtype=torch.float64)
    kernel = conv.kernel().detach()
    rows = zip(x.split(1), d.split(1))
    dense = torch.stack([torch.nn.grad.conv2d_weight(a, kernel.shape, b, padding=1) for a, b in rows])
    weights, biases = conv.coefficient_gradient(dense), conv.bias_gradient(d.sum((2, 3)))

    def loss(parameters: dict, row: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(conv, parameters, (row[None],)) * cotangent).sum()

    parameters = {name: p.detach() for name, p in conv.named_parameters()}
    expected = torch.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, d)
    assert torch.allclose(weights, expected["weight"], atol=1e-9)
    assert torch.allclose(biases, expected["bias"], atol=1e-9)


@pytest.mark.parametrize("name", ["C4", "C8", "D4", "SO(2)"])
def test_initial_outputs_have_the_variance_of_the_inputs(name: str) -> None:
    """The rule behind init_std: white inputs of unit variance give outputs of unit variance, on average over θ."""
    torch.manual_seed(0)
    group = group_by_name(name)
    inner = main_type(group, 6)
    conv = SteerableConv2d(inner, inner, 3, bias=False)
    energy = 0.0
    for _ in range(20):
        conv.reset_parameters()
        energy += float(conv.kernel().detach().square().sum() / inner.size) / 20
    assert energy == pytest.approx(1.0, rel=0.1)


def test_it_is_an_ordinary_module() -> None:
    group = cyclic(8)
    conv = SteerableConv2d(trivial_fields(group, 1), regular_fields(group, 2), 5)
    assert set(conv.state_dict()) == {"weight", "bias"}
    twin = copy.deepcopy(conv)
    assert hash(conv) != hash(twin)
    assert torch.equal(twin.kernel(), conv.kernel())
    other = SteerableConv2d(trivial_fields(group, 1), regular_fields(group, 2), 5)
    other.load_state_dict(conv.state_dict())
    assert torch.equal(other.kernel(), conv.kernel())
    assert conv.init_std()["weight"].shape == conv.weight.shape
    assert conv.paper_metric()["bias"].shape == conv.bias.shape


def test_autocast_keeps_the_kernel_precise() -> None:
    torch.manual_seed(0)
    inner = regular_fields(cyclic(8), 2)
    conv = SteerableConv2d(inner, inner, 3, standardise=True)
    expected = conv.kernel()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(conv.kernel(), expected)
        assert conv(torch.randn(1, 16, 5, 5)).dtype == torch.bfloat16
        gradient = torch.randn(2, *expected.shape)
        pulled = conv.coefficient_gradient(gradient)
    assert torch.equal(pulled, conv.coefficient_gradient(gradient))


@pytest.mark.parametrize("name", ["C8", "D4", "SO(2)"])
@pytest.mark.parametrize("standardise", [False, True])
def test_on_a_gpu_products_with_the_basis_are_of_16_bits(name: str, standardise: bool) -> None:
    """Where kernels' gradients are: a rounding away from float32, which is what comes of it. A CPU, slower in 16 bits, is exact."""
    torch.manual_seed(0)
    inner = main_type(group_by_name(name), 4)
    conv = SteerableConv2d(inner, inner, 3, padding=1, standardise=standardise)
    kernels = torch.randn(5, *conv.kernel().shape).bfloat16()
    windows, cotangents = torch.randn(5, 4, inner.size * 9).bfloat16(), torch.randn(5, 4, inner.size).bfloat16()
    # kernels that are constant on orbits of the grid are not contracted
    dense = all(block.dense is not None for block in conv.expansion.blocks.values())
    ways = [lambda wide: conv.coefficient_gradient(kernels.float() if wide else kernels)]
    if dense:
        ways.append(lambda wide: conv.contracted_gradient(*(t.float() if wide else t for t in (windows, cotangents))))
    for way in ways:
        exact = way(True)
        assert torch.equal(way(False), exact)
        with followed():  # computes as on a GPU
            rounded = way(False)
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - exact).norm() / exact.norm() < 4 * torch.finfo(torch.bfloat16).eps


def test_changing_precision_keeps_the_basis_exact() -> None:
    inner = regular_fields(cyclic(8), 2)
    conv = SteerableConv2d(inner, inner, 3).double()
    assert conv.check_equivariance(tolerance=1e-12).on_grid < 1e-13


def test_errors_name_the_cure() -> None:
    d4, c4 = dihedral(4), cyclic(4)
    with pytest.raises(ValueError, match="insert Restrict"):
        SteerableConv2d(regular_fields(d4, 1), regular_fields(c4, 1), 3)
    with pytest.raises(ValueError, match="do not divide into 2 groups"):
        SteerableConv2d(regular_fields(d4, 3), regular_fields(d4, 2), 3, groups=2)
    with pytest.raises(ValueError, match="reorder"):
        SteerableConv2d(fields([regular(d4), trivial(d4)]), regular_fields(d4, 2), 3, groups=2)
    with pytest.raises(ValueError, match="does not divide into 2 equal groups"):  # 9 and 3 channels: a field in both halves
        SteerableConv2d(trivial_fields(c4, 2), fields([trivial(c4), regular(c4), regular(c4)] + 3 * [trivial(c4)]), 3, groups=2)
    with pytest.raises(ValueError, match="basis='steerable'"):
        SteerableConv2d(fields(irrep(d4, 1)), regular_fields(d4, 1), 3, basis="pixel")
    with pytest.raises(ValueError, match="restrict it first"):
        FieldType(c4, (regular(d4),))
    SteerableConv2d(fields(quotient(d4, dihedral(1))), regular_fields(d4, 1), 3, basis="pixel").check_equivariance()
    SteerableConv2d(fields(spectral(o2(), 1)), fields(irrep(o2(), 0, 1)), 3).check_equivariance()


@pytest.mark.slow
def test_it_compiles() -> None:
    torch.manual_seed(0)
    inner = regular_fields(dihedral(4), 2)
    conv = SteerableConv2d(inner, inner, 3, padding=1, standardise=True)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 16, 8, 8)
    assert torch.allclose(compiled(x), conv(x), atol=1e-6)
