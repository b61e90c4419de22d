"""Errors of the private gradient in a run: those of the same batch, clipped record by record; not private, and said so."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from erlangen.mechanisms.diagnostics import efficiency, gradient_error
from erlangen.training.config import TrainConfig
from erlangen.training.diagnostics import NAMES
from erlangen.training.session import Session
from erlangen.training.summary import non_private

SMALL = TrainConfig(
    data="digits", model="logistic", epsilon=None, noise_multiplier=2.0, max_grad_norm=0.5, batch=60, steps=4, evaluations=2,
    lr=0.3, seed=3, device="cpu", non_private=True, max_physical_batch=25,
)  # fmt: skip
FORMS = {
    "iso": {}, "auto-s": {"clipping": "auto-s"}, "spectral": {"mechanism": "spectral", "model": "cnn", "steps": 2},
    "direction": {"mechanism": "geodp"},
    "gredp as published": {"mechanism": "gredp", "mechanism_options": {"as_published": "real"}},
}  # fmt: skip


def clean_mean(session: Session, rows: torch.Tensor) -> torch.Tensor:
    """Σ min(1, C/‖g_i‖)·g_i / B, one record after the other."""
    total: torch.Tensor | None = None
    model = session._model()
    model.load_state_dict(session.model.state_dict())
    for k in rows.tolist():
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(session.x[k : k + 1]), session.y[k : k + 1]).backward()
        g = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        g = g * min(1.0, session.config.max_grad_norm / float(g.norm()))
        total = g if total is None else total + g
    assert total is not None
    return total / session.config.batch


@pytest.mark.parametrize("form", FORMS)
def test_what_is_logged_is_the_error_of_that_step(form):
    config = dataclasses.replace(SMALL, **FORMS[form])
    session = Session(config, run_id="r")
    optimum = {n: torch.zeros_like(p) for n, p in session.model.named_parameters()}
    session.diagnostics.optimum = optimum
    while session.step_count + 1 < config.steps // 2:
        session.step()
        assert not set(session.non_private) & set(NAMES), "no evaluation follows that step"
    drawn = Session(config, run_id="r").sampler
    for _ in range(session.step_count):
        drawn.draw()
    clean = clean_mean(session, drawn.draw())
    start = torch.cat([p.detach().flatten() for p in session.model.parameters()])
    released: list[torch.Tensor] = []
    kept = session.optimizer.zero_grad
    session.optimizer.zero_grad = lambda: (
        released.append(torch.cat([p.grad.flatten() for p in session.model.parameters()])), kept(),
    )  # fmt: skip
    session.step()
    noisy, seen = released[-1].double(), session.non_private
    want = gradient_error(noisy, clean)
    for name in NAMES[:4]:
        assert seen[name] == pytest.approx(getattr(want, name), rel=1e-3, abs=1e-5)
    items = efficiency(start, torch.zeros_like(start), clean, noisy, 0.3)
    assert seen["item_a"] == pytest.approx(items.item_a, rel=1e-3, abs=1e-6)
    assert seen["item_b"] == pytest.approx(items.item_b, rel=1e-3, abs=1e-6)


def test_without_noise_there_is_no_error():
    session = Session(dataclasses.replace(SMALL, noise_multiplier=0.0, evaluations=4), run_id="r")
    session.step()
    assert session.non_private["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert session.non_private["gradient_mse"] < 1e-10
    assert "item_b" not in session.non_private  # nobody said where the optimum is


@pytest.mark.parametrize("form", ["iso", "direction"])
def test_looking_changes_nothing_that_is_released(form):
    weights = []
    for looked in (True, False):
        session = Session(dataclasses.replace(SMALL, **FORMS[form], non_private=looked), run_id="r")
        for _ in range(session.config.steps):
            session.step()
        weights.append(session.weights())
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def test_they_are_off_unless_asked_for_and_named_where_they_are_on():
    off = dataclasses.replace(SMALL, non_private=False)
    session = Session(off, run_id="r")
    session.step()
    session.step()
    assert session.diagnostics is None
    assert session.non_private == {}
    assert non_private(off) == []
    assert set(NAMES) < set(non_private(SMALL))


def test_an_empty_batch_is_compared_with_nothing():
    """Then the private gradient is noise alone, and its direction has no true one."""
    session = Session(dataclasses.replace(SMALL, evaluations=4), run_id="r")
    session.sampler.draw = lambda: torch.zeros(0, dtype=torch.long)
    session.step()
    assert session.non_private["cosine"] == 0.0
    assert math.isfinite(session.non_private["direction_mse"])
    assert session.non_private["item_a"] > 0
