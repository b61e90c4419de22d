"""Monte Carlo on real releases: the papers' figures, the vectorised path, foreign code, the command line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from erlangen import accounting
from erlangen.audit.montecarlo import Releaser, Subject, audit_releases
from erlangen.audit.named import audit_named, default_trials
from erlangen.audit.neighbours import directions, portfolio
from erlangen.audit.recipes import Recipe
from erlangen.audit.verdict import CONSISTENT, VIOLATED
from erlangen.cli.main import app
from erlangen.mechanisms import Fourier, GaussianMechanism, PublishedGReDP, StreamNoise


def test_gredp_complex_is_refuted_and_its_exact_price_is_not():
    found = audit_named("gredp", {"as_published": "complex"}, claim_epsilon=1.0, trials=3_000_000)
    assert found.verdict == VIOLATED
    assert found.exact == pytest.approx(1.465, abs=1e-3)
    assert 0.9 < found.lower_bound["99.9%"] < found.exact
    assert 1.42 < found.gdp_lower_bound["99.9%"] < found.exact
    assert found.facts["vectorised"]


def test_gredp_real_reaches_the_ceiling():
    found = audit_named("gredp", {"as_published": "real"}, claim_epsilon=1.0, trials=50_000)
    assert found.verdict == VIOLATED
    assert math.isinf(found.exact)
    assert found.lower_bound == found.ceiling


def test_geodp_as_published():
    options = {"as_published": True, "beta": 0.1}
    found = audit_named("geodp", options, sigma=8.0, d=500, batch=4096.0, bound=0.1, trials=1200)
    assert found.claim == pytest.approx(0.434, abs=1e-3)
    assert found.verdict == VIOLATED
    assert found.lower_bound["99.9%"] > 4.5


@pytest.mark.slow
def test_geodp_as_published_at_full_size():
    options = {"as_published": True, "beta": 0.1}
    assert audit_named("geodp", options, sigma=8.0, d=500, batch=4096.0, bound=0.1).lower_bound["99.9%"] >= 6.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iso", "rep", "shuffle", "spectral", "gredp", "clipless"])
def test_sound_linear_mechanisms_are_consistent_and_nearly_tight(name):
    options = {"loss": 1.0} if name == "clipless" else {}
    found = audit_named(name, options, claim_epsilon=4.0, trials=10_000 if name == "clipless" else 200_000)
    assert found.verdict == CONSISTENT
    assert 3.4 < found.gdp_lower_bound["99.9%"] <= found.claim


@pytest.mark.parametrize("make", [
    lambda: GaussianMechanism(1.0, 0.7, Fourier(0.5), StreamNoise(1)),
    lambda: PublishedGReDP(1.0, 0.7, Fourier(), StreamNoise(1), split=(0.8, 0.6)),
])  # fmt: skip
def test_rows_are_releases(make):
    """The vectorised path and the loop have the same mean and covariance, and rows are independent of each other."""
    shapes = {"conv": torch.Size([1, 1, 5])}

    def build():
        mechanism = make()
        mechanism.bind({"conv": torch.zeros(1, 1, 5)}, 4.0)
        return mechanism

    gradients = {"conv": torch.tensor([[[[1.0, 2.0, -1.0, 0.5, 3.0]]]])}
    fast, slow = Releaser(Subject("m", build, shapes)), Releaser(Subject("m", build, shapes))
    assert fast.row_wise
    rows, calls = fast.draw(gradients, 40_000).double(), slow._loop(gradients, 4_000).double()
    scale = calls.std(0).clamp(min=1e-9)
    assert ((rows.mean(0) - calls.mean(0)) / scale).abs().max() < 0.1
    assert (torch.cov(rows.T) - torch.cov(calls.T)).abs().max() < 0.15 * scale.max() ** 2
    centred = rows - rows.mean(0)
    between = (centred[:-1] * centred[1:]).mean(0) / centred.var(0).clamp(min=1e-12)
    assert between.abs().max() < 0.03


def test_vectorised_releases_are_a_million_a_minute():
    releaser = Releaser(Recipe("iso", {}).subject())
    releaser.draw({n: torch.zeros(0, *s) for n, s in Recipe("iso", {}).build().shapes.items()}, 200_000)
    assert releaser.row_wise
    assert releaser.count / releaser.seconds > 1e6 / 60
    assert default_trials(Recipe("geodp", {}).subject()) < default_trials(Recipe("iso", {}).subject())


def test_directions_are_unit_vectors_that_cover_every_coordinate():
    shapes = {"a": torch.Size([2, 1, 3]), "b": torch.Size([2])}
    found = dict(directions(shapes))
    assert all(abs(float(v.norm()) - 1) < 1e-5 for v in found.values())
    assert torch.linalg.matrix_rank(torch.stack(list(found.values()))) == 8
    assert any(math.isnan(float(p.canary["a"].sum())) for p in portfolio(shapes))


def test_opacus_is_consistent_on_finite_gradients_and_not_on_others():
    pytest.importorskip("opacus")
    from erlangen.audit.table import audit_opacus

    finite, hostile = audit_opacus(trials=1500)
    assert finite.verdict == CONSISTENT
    assert finite.gdp_lower_bound["99.9%"] > 2.5
    assert hostile.verdict == VIOLATED


class Foreign:
    """Somebody's own mechanism; ``factor`` times the noise it claims."""

    shapes = {"w": (4,)}  # noqa: RUF012

    def __init__(self, factor: float = 1.0) -> None:
        self.generator, self.factor = torch.Generator().manual_seed(0), factor

    def release(self, gradients):
        g = gradients["w"].nan_to_num(0.0, 0.0, 0.0)
        clipped = g * (1.0 / g.norm(dim=1).clamp(min=1.0))[:, None]
        return {"w": clipped.sum(0) + self.factor * torch.randn(4, generator=self.generator)}

    def event(self):
        return accounting.gaussian(1.0)


def half():
    return Foreign(0.5)


def test_a_users_own_mechanism_by_import_path():
    from erlangen.audit.foreign import imported_subject

    here = f"{__name__}:"
    assert audit_releases(imported_subject(here + "Foreign"), 1500).verdict == CONSISTENT
    assert audit_releases(imported_subject(here + "half"), 1500).verdict == VIOLATED
    with pytest.raises(ValueError, match="does not name a function"):
        imported_subject("nothing")


# --- command line ----------------------------------------------------------------------------------------------------


def _json(*args: str):
    result = CliRunner().invoke(app, ["audit", *args, "--json"])
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, result.output
    return result.exit_code, json.loads(lines[0])


def test_mechanism_command():
    code, found = _json(
        "mechanism", "gredp", "--as-published", "complex", "--claim-epsilon", "1", "--trials", "1000000"
    )
    assert code == 1
    assert found["verdict"] == "violated"
    assert found["exact"] == pytest.approx(1.465, abs=1e-3)
    assert found["lower_bound"] == found["lower_bounds"]["99.9%"] > 0.8
    code, found = _json("mechanism", "gredp", "--claim-epsilon", "1", "--trials", "20000")
    assert (code, found["verdict"]) == (0, "consistent")


def test_as_published_without_a_value():
    args = ("--as-published", "--d", "50", "--batch", "4096", "--beta", "0.1", "--sigma", "8", "--trials", "600")
    code, found = _json("mechanism", "geodp", *args)
    assert code == 1
    assert found["claim"] == pytest.approx(0.434, abs=1e-3)
    assert found["exact"] == "inf"


def test_too_few_trials_are_inconclusive():
    code, found = _json("mechanism", "iso", "--claim-epsilon", "4", "--trials", "5")
    assert (code, found["verdict"]) == (3, "inconclusive")
    assert np.isfinite(found["ceiling"])


def test_misuse_is_named():
    result = CliRunner().invoke(app, ["audit", "mechanism", "nope"])
    assert result.exit_code == 2
    assert "nope" in result.output
