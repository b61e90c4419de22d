"""Networks of escnn's own layers train privately: gradients, engine and refusals, where escnn is installed.

It forces numpy < 2 and needs a Fortran compiler, so it has an environment of its own: ``sh tests/oracles/escnn.sh FOLDER``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

escnn = pytest.importorskip("escnn", reason="escnn is not installed; see tests/oracles/escnn.sh")

from erlangen import PrivacyEngine  # noqa: E402
from erlangen.gradients import RowMap  # noqa: E402
from erlangen.gradients.attach import plan  # noqa: E402
from erlangen.gradients.fallback import functional  # noqa: E402
from erlangen.mechanisms.rep import convolution_weights, shuffled, structural_metric  # noqa: E402
from tests.gradients.reference import assert_same, one_by_one, recorded  # noqa: E402
from tests.oracles import escnn_reference  # noqa: E402

pytestmark = pytest.mark.slow

SPACES = {
    "C4": lambda: escnn.gspaces.rot2dOnR2(4),
    "C8": lambda: escnn.gspaces.rot2dOnR2(8),
    "D4": lambda: escnn.gspaces.flipRot2dOnR2(4),
    "SO2": lambda: escnn.gspaces.rot2dOnR2(-1, maximum_frequency=2),
}


class Net(nn.Module):
    """Two R2Convs with a nonlinearity between, invariant features, a linear head."""

    def __init__(self, space: Any, between: Any = None, **options: Any) -> None:
        super().__init__()
        group = space.fibergroup
        main = group.bl_regular_representation(2) if group.order() < 0 else space.regular_repr
        self.in_type = escnn.nn.FieldType(space, [space.trivial_repr])
        hidden = escnn.nn.FieldType(space, [main] * 2)
        act = escnn.nn.NormNonLinearity(hidden, bias=False) if group.order() < 0 else escnn.nn.ReLU(hidden)
        layers = [escnn.nn.R2Conv(self.in_type, hidden, 3, padding=1, **options), act]
        layers += [between(hidden)] if between is not None else []
        layers += [escnn.nn.R2Conv(hidden, hidden, 3, stride=2), escnn.nn.NormPool(hidden)]
        self.body = escnn.nn.SequentialModule(*layers)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(escnn.nn.GeometricTensor(x, self.in_type)).tensor.mean((2, 3)))


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
@pytest.mark.parametrize("name", SPACES)
def test_gradients_of_a_network_are_those_of_one_sample_at_a_time(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    net, x = Net(SPACES[name]()), torch.randn(4, 1, 9, 9)
    assert [rule for _, module, rule in plan(net) if isinstance(module, escnn.nn.R2Conv)].count(functional) == 0
    alone = one_by_one(net, (x,))
    assert_same(recorded(net, (x,), strategy=strategy), alone, torch.float32)
    views = recorded(net, (x,), rows=RowMap.regular(2, 2), strategy=strategy)
    assert_same(views, {n: g.unflatten(0, (2, 2)).mean(1) for n, g in alone.items()}, torch.float32)


@pytest.mark.parametrize("options", [{"padding_mode": "circular"}, {"dilation": 2}, {"bias": False}])
def test_options_of_the_layer(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = Net(SPACES["C4"](), **options), torch.randn(3, 1, 9, 9)
    assert_same(recorded(net, (x,)), one_by_one(net, (x,)), torch.float32)


def test_a_network_trains_through_the_engine_and_stays_equivariant() -> None:
    torch.manual_seed(0)
    net = Net(SPACES["C4"]())
    x, y = torch.randn(120, 1, 9, 9), torch.randint(0, 3, (120,))
    x += 2 * y.view(-1, 1, 1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    engine = PrivacyEngine(seed=0)
    net, optimizer, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=40),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    before = nn.functional.cross_entropy(net(x), y).item()
    for _ in range(8):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
    assert nn.functional.cross_entropy(net(x), y).item() < before
    assert 0 < engine.get_epsilon(1e-5) < 20
    net.eval()
    with torch.no_grad():
        assert torch.allclose(net(x), net(x.rot90(1, (2, 3))), atol=1e-4)


def test_the_metric_of_rep_is_the_initial_spread_of_the_layer() -> None:
    net = Net(SPACES["C8"]())
    scales = structural_metric(net)
    layers = {n: m for n, m in net.named_modules() if isinstance(m, escnn.nn.R2Conv)}
    for name, layer in layers.items():
        draws = []
        for _ in range(400):
            escnn.nn.init.generalized_he_init(layer.weights.data, layer.basisexpansion)
            draws.append(layer.weights.data.clone())
        spread = torch.stack(draws).square().mean(0).sqrt()
        ratio = scales[f"{name}.weights"] / spread
        assert bool(((ratio / ratio.mean() - 1).abs() < 0.25).all())  # the same up to one factor for the layer
    assert len(layers) == 2


def test_shuffle_permutes_their_entries_and_other_metrics_are_refused() -> None:
    net = Net(SPACES["C8"]())
    names = [f"{n}.weights" for n, m in net.named_modules() if isinstance(m, escnn.nn.R2Conv)]
    assert convolution_weights(net) == names
    before = structural_metric(net)
    after = shuffled(before, names)
    entries = [torch.cat([metric[n] for n in names]) for metric in (before, after)]
    assert not torch.equal(*entries)
    assert torch.equal(entries[0].sort().values, entries[1].sort().values)
    assert all(torch.equal(before[n], after[n]) for n in before if n not in names)
    with pytest.raises(ValueError, match="not known for escnn's layers"):
        structural_metric(net, "paper")


def test_batch_norm_of_escnn_is_refused() -> None:
    net = Net(SPACES["C4"](), between=escnn.nn.InnerBatchNorm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(20, 1, 9, 9), torch.zeros(20).long()), batch_size=5)
    with pytest.raises(Exception, match=r"(?i)batch.?norm|mix"):
        PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
        )


def test_the_committed_reference_values_come_from_this_escnn() -> None:
    stored = np.load(Path(escnn_reference.__file__).with_name("escnn_reference.npz"))
    for name, case in escnn_reference.cases().items():
        for key, value in escnn_reference.reference(*case).items():
            np.testing.assert_allclose(value, stored[f"{name}/{key}"], atol=2e-5, err_msg=f"{name}/{key}")
