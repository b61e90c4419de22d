"""Every layer rule against one sample at a time: gradients, norms, diagonal norms, weighted sums, all strategies."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.gradients import Tape, attach, detach
from erlangen.gradients.attach import remark_on_swallowed
from erlangen.gradients.constant_norm import ConstantNorm
from tests.gradients.reference import assert_same, one_by_one, recorded

STRATEGIES = ("auto", "materialise", "norms-first")


class TimeMajor(nn.Module):
    """Feeds a batch-first tensor to a time-major layer and takes its first output back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x.transpose(0, 1))
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class SelfAttention(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        return self.attention(x, memory, memory)


class LastState(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x):
        out, state = self.cell(x)
        state = state[0] + state[1].sum() * 0 if isinstance(state, tuple) else state
        return out, state.transpose(0, 1)


def constants(norm: nn.Module) -> nn.Module:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return ConstantNorm(norm)


class Custom(nn.Module):
    """Raw parameters around child layers: nothing the registry knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.inner = nn.Linear(4, 5)

    def forward(self, x):
        return torch.tanh(self.inner(x) * self.scale) + self.scale.square().sum() * x.sum(-1, keepdim=True)


class Standardised(nn.Conv2d):
    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, w / (w.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


class Unbatchable(nn.Module):
    """Data-dependent control flow: vmap refuses, the row-by-row fallback does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.w if float(x.detach().tanh().nan_to_num().sum()) > -1e9 else x


CASES = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear-nobias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "linear-tokens": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear-many-dims": (lambda: nn.Linear(5, 3), (2, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6)),
    "conv2d-strided": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (3, 7, 6)),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=2, dilation=2), (4, 6, 5)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 5, 5)),
    "conv2d-same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same"), (2, 5, 6)),
    "conv2d-reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 6)),
    "conv2d-circular": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, 5, 6)),
    "conv2d-replicate": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate", stride=2), (2, 5, 6)),
    "conv2d-wide": (lambda: nn.Conv2d(16, 24, 3, padding=1), (16, 2, 2)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=1, groups=1), (2, 4, 4, 3)),
    "convt1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), (3, 5)),
    "convt2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 4, 5)),
    "convt3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (2, 3, 3, 3)),
    "groupnorm": (lambda: nn.GroupNorm(2, 6), (6, 3, 4)),
    "groupnorm-flat": (lambda: nn.GroupNorm(3, 6), (6,)),
    "layernorm": (lambda: nn.LayerNorm(6), (3, 6)),
    "layernorm-flat": (lambda: nn.LayerNorm(6), (6,)),
    "layernorm-2d": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "instancenorm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "constantnorm": (lambda: constants(nn.BatchNorm2d(3)), (3, 4, 4)),
    "constantnorm-flat": (lambda: constants(nn.BatchNorm1d(5)), (5,)),
    "rmsnorm": (lambda: nn.RMSNorm(6), (3, 6)),
    "attention": (lambda: SelfAttention(), (4, 8)),
    "attention-biases": (lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True), (4, 8)),
    "attention-nobias": (lambda: SelfAttention(bias=False), (4, 8)),
    "lstm": (lambda: LastState(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)), (5, 4)),
    "lstm-projected": (lambda: LastState(nn.LSTM(4, 5, proj_size=3, batch_first=True)), (5, 4)),
    "gru": (lambda: LastState(nn.GRU(4, 3, num_layers=2, batch_first=True)), (5, 4)),
    "rnn": (lambda: LastState(nn.RNN(4, 3, nonlinearity="relu", bias=False, batch_first=True)), (5, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 8)),
    "custom": (Custom, (4,)),
    "custom-conv": (lambda: Standardised(2, 3, 3), (2, 5, 5)),
    "prelu": (lambda: nn.PReLU(3), (3, 4)),
    "bilinear-by-hand": (lambda: nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(5, 2)), (4,)),
    "unbatchable": (Unbatchable, (4,)),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(5, 3)).eval(), (5,)),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), (2, 5, 5)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (2, 4)),
}


def make(name: str, dtype: torch.dtype, rows: int = 4, seed: int = 0):
    torch.manual_seed(seed)
    build, shape = CASES[name]
    module = build().to(dtype)
    for p in module.parameters():
        if p.ndim == 1:  # affine parameters at their defaults would hide mistakes
            p.data.add_(0.3 * torch.randn_like(p))
    return module, torch.randn(rows, *shape, dtype=dtype)


#: norms from Gram matrices of long windows are rounded outwards by the additions that float32 allows for
OUTWARD = {("conv2d-wide", torch.float32): 2e-5}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*cannot be batched")
def test_rule_agrees_with_one_sample_at_a_time(name, strategy):
    for dtype in (torch.float64, torch.float32):
        module, x = make(name, dtype)
        got, want = recorded(module, (x,), strategy=strategy), one_by_one(module, (x,))
        assert_same(got, want, dtype, OUTWARD.get((name, dtype), 0.0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*cannot be batched")
def test_an_empty_batch_records_no_owner(name):
    module, x = make(name, torch.float32)
    got = recorded(module, (x[:0],))
    assert got.owners == 0
    assert all(g.abs().sum() == 0 for g in got.weighted_sum({n: x.new_zeros(0) for n in got.names}).values())


def test_rules_do_not_change_the_forward_pass():
    from erlangen.gradients import Tape, attach, detach

    for name in CASES:
        module, x = make(name, torch.float64)
        want = module(x)
        attach(module, Tape(dict(module.named_parameters())))
        got = module(x)
        detach(module)
        for g, w in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
            torch.testing.assert_close(g, w, msg=name)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4), channels=st.integers(1, 3), out=st.integers(1, 3), groups=st.integers(1, 2),
    kernel=st.integers(1, 3), stride=st.integers(1, 3), padding=st.integers(0, 2), dilation=st.integers(1, 2),
    size=st.integers(5, 8), bias=st.booleans(), strategy=st.sampled_from(STRATEGIES), mode=st.sampled_from(("zeros", "circular")),
)  # fmt: skip
def test_any_convolution(rows, channels, out, groups, kernel, stride, padding, dilation, size, bias, strategy, mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(
        channels * groups, out * groups, kernel, stride, padding, dilation, groups, bias, padding_mode=mode
    ).double()
    x = torch.randn(rows, channels * groups, size, size, dtype=torch.float64)
    assert_same(recorded(conv, (x,), strategy=strategy), one_by_one(conv, (x,)))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4), tokens=st.lists(st.integers(1, 4), max_size=3), width=st.integers(1, 6), out=st.integers(1, 6),
    strategy=st.sampled_from(STRATEGIES), reduction=st.sampled_from(("mean", "sum")),
)  # fmt: skip
def test_any_linear(rows, tokens, width, out, strategy, reduction):
    torch.manual_seed(0)
    module = nn.Linear(width, out).double()
    x = torch.randn(rows, *tokens, width, dtype=torch.float64)
    assert_same(recorded(module, (x,), strategy=strategy, loss_reduction=reduction), one_by_one(module, (x,)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_embedding_with_repeated_and_padding_tokens(strategy):
    torch.manual_seed(0)
    module = nn.Embedding(7, 3, padding_idx=2).double()
    x = torch.tensor([[1, 1, 2, 4], [0, 0, 0, 6], [2, 2, 2, 2]])
    assert_same(recorded(module, (x,), strategy=strategy), one_by_one(module, (x,)))


class Bags(nn.Module):
    """Bags of weighted tokens: token numbers and floats together."""

    def __init__(self, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3, **options)

    def forward(self, tokens, weights):
        bags = self.bag(tokens, per_sample_weights=weights.tanh() if self.bag.mode == "sum" else None)
        return bags + weights.sum(1, keepdim=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "mean"}, {"mode": "mean", "padding_idx": 2}, {"mode": "max"}])
def test_bags_of_tokens(strategy, options):
    torch.manual_seed(0)
    module = Bags(**options).double()
    inputs = torch.tensor([[1, 1, 2, 4], [0, 0, 0, 6], [2, 2, 2, 2]]), torch.randn(3, 4, dtype=torch.float64)
    assert_same(recorded(module, inputs, strategy=strategy), one_by_one(module, inputs))


def test_an_empty_batch_of_bags_adds_nothing():
    module = nn.EmbeddingBag(7, 3, mode="mean")
    gradients = recorded(module, (torch.zeros(0, 4, dtype=torch.long),))
    assert gradients.owners == 0


def test_bags_in_one_long_list_are_refused():
    module = nn.EmbeddingBag(7, 3)
    attach(module, Tape(dict(module.named_parameters())))
    with pytest.raises(ValueError, match="no dimension is the batch"):
        module(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))


class Table(nn.Module):
    """Integers into a module without a rule: vmap does it, and asks for no gradient of token numbers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 3))

    def forward(self, tokens, weights):
        return (self.table[tokens] * weights[..., None]).sum(1)


def test_integers_need_no_row_by_row():
    torch.manual_seed(0)
    module = Table().double()
    inputs = torch.tensor([[1, 1, 2, 4], [0, 0, 0, 6]]), torch.randn(2, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(recorded(module, inputs), one_by_one(module, inputs))


class _WithMore(nn.Module):
    """No rule: a state that is not there, and a number, beside two outputs."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.weight, self.branches = nn.Parameter(torch.randn(3, 4, dtype=torch.float64)), branches

    def forward(self, x):
        y = x @ self.weight.mT
        if self.branches and bool(y.sum() > 0):
            y = 2 * y
        return y, None, {"steps": 3}, y.square()


@pytest.mark.parametrize("branches", [False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore:_WithMore"))])
def test_what_is_no_tensor_comes_back_as_it_is(branches):
    module, x = _WithMore(branches), torch.randn(5, 4, dtype=torch.float64)
    assert_same(recorded(module, (x,)), one_by_one(module, (x,)))
    tape = Tape(dict(module.named_parameters()))
    attach(module, tape)
    first, nothing, numbers, second = module(x)
    detach(module)
    assert nothing is None
    assert numbers == {"steps": 3}
    assert torch.equal(second, first.square())


def test_a_graph_that_is_kept_can_be_asked_twice_row_by_row():
    """The probe of `make_private` asks one graph several times; modules that vmap refuses must stand that."""
    net = nn.Sequential(nn.Linear(4, 4), Unbatchable(), nn.Linear(4, 2))
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.zeros(12, dtype=torch.long)), batch_size=6)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    engine = PrivacyEngine()
    engine.make_private(module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.training is not None


def test_packed_sequences_are_refused_with_a_cure():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    layer = nn.LSTM(4, 4, batch_first=True)
    attach(layer, Tape(dict(layer.named_parameters())))
    with pytest.raises(TypeError, match=r"LSTM got PackedSequence; .* pad every record to one fixed length"):
        layer(packed)
    with pytest.raises(TypeError, match=r"LSTM got \[3, 4\]; .*\[batch, time, features\]"):
        layer(torch.randn(3, 4))


def test_parameters_beside_layers_are_remarked_on():
    with pytest.warns(UserWarning, match=r"Custom at '1' holds scale beside its layers.* all 30 parameters.* module of its own"):
        remark_on_swallowed(nn.Sequential(nn.Linear(4, 4), Custom()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        computed = parametrizations.weight_norm(nn.Linear(4, 2))
        renamed = nn.Module()
        renamed.inner = nn.Linear(2, 2)
        renamed.alias = renamed.inner.weight  # another name for what is the layer's
        remark_on_swallowed(nn.Sequential(nn.Linear(4, 4), Table(), Unbatchable(), nn.LSTM(4, 4), computed, renamed))


def test_cross_attention_with_separate_widths_and_masks():
    class Cross(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

        def forward(self, q, kv):
            causal = torch.triu(torch.ones(q.shape[1], kv.shape[1], dtype=torch.bool), 2)
            return self.attention(q, kv, kv, attn_mask=causal, average_attn_weights=False)

    for options in ({}, {"kdim": 5, "vdim": 5}):
        torch.manual_seed(0)
        module = Cross(**options).double()
        inputs = torch.randn(3, 4, 8).double(), torch.randn(3, 5, options.get("kdim", 8)).double()
        assert_same(recorded(module, inputs), one_by_one(module, inputs))


def test_time_major_sequences():
    for layer in (nn.Linear(4, 3), nn.LayerNorm(4), nn.GRU(4, 3), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)):
        torch.manual_seed(0)
        module = TimeMajor(layer.double())
        x = torch.randn(3, 5, 4, dtype=torch.float64)
        assert_same(recorded(module, (x,), batch_first=False), one_by_one(module, (x,)))


@settings(max_examples=25, deadline=None)
@given(
    owners=st.integers(1, 3), views=st.integers(1, 3), channels=st.integers(1, 8), out=st.integers(1, 3),
    kernel=st.integers(1, 3), stride=st.integers(1, 3), padding=st.integers(0, 2), dilation=st.integers(1, 2),
    last=st.booleans(), room=st.sampled_from([1, 700, 1 << 19]),
)  # fmt: skip
def test_all_ways_of_forming_a_kernel_gradient_agree(
    owners, views, channels, out, kernel, stride, padding, dilation, last, room
):
    """Owner by owner, and im2col with positions or channels innermost, for one owner at a time or many: each is the fastest
    somewhere."""
    from erlangen.gradients.pieces import Dense, gram_norms
    from erlangen.gradients.rules import conv
    from erlangen.gradients.rules.conv import Conv, Geometry

    torch.manual_seed(0)
    x = torch.randn(owners * views, channels, 7, 6, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if last else x
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2, 1)
    weight = torch.randn(out, channels, kernel, kernel, dtype=torch.float64)
    d = torch.randn_like(nn.functional.conv2d(x, weight, None, stride, padding, dilation))
    piece = Conv(x, d, views, weight.shape, geometry)
    want = piece._dense_by_owner()
    mix = torch.rand(owners, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "WINDOW_FLOATS", room)
        by_tap = piece.by_tap().unflatten(2, (kernel, kernel)).movedim(-1, 2)
        by_position = piece._product(last=False).view(want.shape)
        assert any(torch.equal(piece._dense_by_windows(), found) for found in (by_tap, by_position))
    gram = gram_norms(*piece.windows()), gram_norms(*piece.windows_last())
    for got, norms in zip((by_position, by_tap), gram, strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(Dense(got).weighted_sum(mix), torch.einsum("n,n...->...", mix, want))
        torch.testing.assert_close(Dense(got).norms_squared(), want.flatten(1).square().sum(1))
        torch.testing.assert_close(norms, want.flatten(1).square().sum(1))


def test_windows_of_groups_are_those_of_each_group_alone():
    from erlangen.gradients.rules.conv import Conv, Geometry

    torch.manual_seed(0)
    x, d = torch.randn(6, 4, 7, 6, dtype=torch.float64), torch.randn(6, 6, 5, 4, dtype=torch.float64)
    piece = Conv(x, d, 2, (6, 2, 3, 3), Geometry((3, 3), (1, 1), (0, 0), (1, 1), 2))
    torch.testing.assert_close(piece._dense_by_windows(), piece._dense_by_owner())


@pytest.mark.parametrize("columns", [1, 511, 1024, 1537, 4099])
def test_sums_of_rows_are_the_same_whatever_threads_add_them(columns):
    from erlangen.gradients.sums import row_sum

    torch.manual_seed(0)
    before = torch.get_num_threads()
    for owners in (0, 7):
        g, w = torch.randn(owners, columns, dtype=torch.float64), torch.rand(owners)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                torch.testing.assert_close(row_sum(w, g), (w.double()[:, None] * g).sum(0))
            finally:
                torch.set_num_threads(before)


def test_three_bfloat16_parts_are_a_float32_number():
    from erlangen.gradients.sums import _three_parts

    w = torch.randn(1000) * 10 ** torch.empty(1000).uniform_(-6, 6)
    assert torch.equal(_three_parts(w).double().sum(0).float(), w)
