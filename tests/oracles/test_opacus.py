"""Against Opacus, on the layers it supports: per-sample gradients, and a whole noiseless private step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from tests.gradients.reference import recorded, seeded_loss

opacus = pytest.importorskip("opacus")
from opacus.grad_sample import GradSampleModule  # noqa: E402

LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear-tokens": (lambda: nn.Linear(6, 4), (5, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, stride=2), (3, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, dilation=2), (4, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=2), (2, 4, 4, 4)),
    "groupnorm": (lambda: nn.GroupNorm(2, 6), (6, 4, 4)),
    "layernorm": (lambda: nn.LayerNorm(6), (3, 6)),
    "instancenorm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "rmsnorm": (lambda: nn.RMSNorm(6), (3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_per_sample_gradients_agree(name):
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    module = build().double()
    x = torch.randn(5, *shape, dtype=torch.float64)
    theirs = GradSampleModule(copy.deepcopy(module), loss_reduction="mean")
    seeded_loss(theirs(x)).mean().backward()
    ours = recorded(module, (x,))
    for n, p in theirs._module.named_parameters():
        torch.testing.assert_close(ours.dense(n), p.grad_sample, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_noiseless_epoch_agrees(clipping):
    """Same fixed batches, σ = 0: the same weights after an epoch."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 2, 5, 5), torch.randint(0, 3, (24,))
    start = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    bound = 0.3
    names = len(list(start.parameters()))
    results = []
    for library in ("opacus", "erlangen"):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        c = [bound / names**0.5] * names if clipping == "per_layer" else bound
        if library == "opacus":
            engine = opacus.PrivacyEngine()
            model, optimizer, _ = engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=c,
                poisson_sampling=False, clipping=clipping,
            )  # fmt: skip
        else:
            engine = erlangen.PrivacyEngine()
            engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=c,
                poisson_sampling=False, clipping=clipping,
            )  # fmt: skip
        for i in range(3):
            if library == "erlangen":
                engine.training.announce(erlangen.RowMap.regular(8))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[8 * i : 8 * i + 8]), y[8 * i : 8 * i + 8]).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_accounting_agrees_with_their_rdp():
    from opacus.accountants import RDPAccountant

    theirs = RDPAccountant()
    for _ in range(100):
        theirs.step(noise_multiplier=1.1, sample_rate=0.02)
    from erlangen.accounting import epsilon, gaussian, poisson

    ours = epsilon([(poisson(0.02, gaussian(1.1)), 100)], 1e-5, "rdp")
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=0.02)


def test_a_script_moves_over_by_changing_its_import():
    """The calls of an Opacus script, word for word."""
    source = """
import torch
from {library} import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data_loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=16)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, data_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=data_loader, epochs=2, target_epsilon=5.0, target_delta=1e-3,
    max_grad_norm=1.0)
for epoch in range(2):
    for x, y in data_loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(delta=1e-3)
"""
    for library in ("opacus", "erlangen"):
        scope: dict = {}
        exec(source.format(library=library), scope)
        assert 4.0 < scope["epsilon"] <= 5.01, library
