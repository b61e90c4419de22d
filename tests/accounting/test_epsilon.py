"""ε against reference values, closed forms and the papers' own figures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import erlangen.accounting as acc
from tests.starting import compared

CASES = json.loads((Path(__file__).parent / "reference.json").read_text())["cases"]


def steps(q: float, sigma: float, count: int):
    return [(acc.poisson(q, acc.gaussian(sigma)), count)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"q{c['q']:.4g}-s{c['sigma']}-T{c['steps']}-d{c['delta']}")
def test_reference_values(case):
    history = steps(case["q"], case["sigma"], case["steps"])
    assert acc.epsilon(history, case["delta"]) == pytest.approx(case["eps_pld_pessimistic"], rel=1e-3)
    assert acc.epsilon(history, case["delta"], "rdp") == pytest.approx(case["eps_rdp"], rel=1e-6)
    if "eps_analytic_gaussian" in case:
        assert acc.epsilon(history, case["delta"]) == pytest.approx(case["eps_analytic_gaussian"], rel=1e-8)


@pytest.mark.parametrize(
    ("q", "sigma", "count", "delta", "rdp", "pld"),
    [
        # The steerable-CNN paper's privacy column: N = 60000, B = 64, 20 epochs.
        (1 / 938, 1.4, 18760, 1e-5, 0.4838, 0.418),
        (1 / 938, 1.2, 18760, 1e-5, 0.6442, 0.525),
        (1 / 938, 1.0, 18760, 1e-5, 0.9410, 0.712),
        (1 / 938, 0.8, 18760, 1e-5, 1.6057, 1.142),
        (1 / 938, 0.6, 18760, 1e-5, 3.9669, 3.148),
        # The equivariant-ResNet paper: CIFAR-10.
        (8192 / 50000, 5.0, 2160, 1e-5, 7.871, 7.303),
        (1 / 6, 5.0, 2160, 1e-5, 8.035, 7.455),
        (0.16384, 12.5, 12000, 8e-7, 7.997, 7.505),
    ],
)
def test_published_privacy_columns(q, sigma, count, delta, rdp, pld):
    history = steps(q, sigma, count)
    assert acc.epsilon(history, delta, "rdp") == pytest.approx(rdp, abs=6e-4)
    assert acc.epsilon(history, delta) == pytest.approx(pld, abs=1.5e-3)


@pytest.mark.parametrize(("q", "sigma", "count"), [(1e-4, 4.0, 100_000), (1e-3, 10.0, 100_000), (1e-3, 1.4, 18760)])
def test_many_small_steps_are_priced_tightly(q, sigma, count):
    """A 1e-3 grid overstates these by 12 % and more, 1e-4 by up to 9 %: the chosen grid must not."""
    from dp_accounting.pld import PLDAccountant

    chosen = acc.epsilon(steps(q, sigma, count), 1e-5)
    coarse = PLDAccountant(value_discretization_interval=1e-3)
    coarse.compose(acc.poisson(q, acc.gaussian(sigma)), count)
    assert coarse.get_epsilon(1e-5) > 1.1 * chosen
    fine = PLDAccountant(value_discretization_interval=q / sigma / 60)
    fine.compose(acc.poisson(q, acc.gaussian(sigma)), count)
    assert fine.get_epsilon(1e-5) == pytest.approx(chosen, rel=1e-3)
    assert chosen >= fine.get_epsilon(1e-5) * (1 - 1e-6)


def test_extreme_but_valid_histories_fit_in_memory():
    for q, sigma, count in [(1.0, 1.0, 1000), (0.5, 0.5, 1000), (0.9, 0.01, 10), (1e-6, 0.5, 10**6), (0.01, 1e4, 10)]:
        value = acc.epsilon(steps(q, sigma, count), 1e-5)
        assert 0 <= value < math.inf


def test_non_private_is_infinite_wherever_it_hides():
    bad = [
        acc.gaussian(0.0),
        acc.laplace(0.0),
        acc.non_private("clip rates were printed"),
        acc.poisson(0.01, acc.gaussian(0.0)),
        acc.composed(acc.poisson(0.5, acc.non_private("x")), 3),
        acc.sequence([acc.gaussian(5.0), acc.non_private("x")]),
        acc.repeat_and_select(acc.non_private("x"), 3.0),
    ]
    for event in bad:
        for method in ("pld", "rdp"):
            assert acc.epsilon(event, 1e-5, method) == math.inf
            assert acc.epsilon([(acc.gaussian(1.0), 4), (event, 1)], 1e-5, method) == math.inf
        assert acc.delta(event, 1.0) == 1.0
        assert acc.tradeoff(event, 0.01) == 1.0
        assert acc.gdp_mu(event, 1e-5) == math.inf


def test_nothing_costs_nothing():
    for nothing in ([], acc.no_op(), acc.poisson(0.0, acc.gaussian(1.0)), acc.composed(acc.gaussian(1.0), 0)):
        assert acc.epsilon(nothing, 1e-5) == 0
        assert acc.delta(nothing, 0.0) == 0
        assert acc.tradeoff(nothing, 0.1) == 0.1


def test_normal_form_does_not_change_the_price():
    g = acc.gaussian
    layers = acc.sequence([g(3.0), g(4.0), g(12.0)])
    joint = (3.0**-2 + 4.0**-2 + 12.0**-2) ** -0.5
    assert acc.epsilon(layers, 1e-5) == pytest.approx(acc.epsilon(g(joint), 1e-5), rel=1e-9)
    assert acc.epsilon(acc.poisson(0.1, layers), 1e-5) == pytest.approx(
        acc.epsilon(acc.poisson(0.1, g(joint)), 1e-5), rel=1e-9
    )
    nested = acc.composed(acc.composed(acc.poisson(0.02, g(1.0)), 10), 10)
    assert acc.epsilon(nested, 1e-5) == acc.epsilon(steps(0.02, 1.0, 100), 1e-5)
    twice = acc.poisson(0.2, acc.poisson(0.1, g(1.0)))
    assert acc.epsilon(twice, 1e-5) == pytest.approx(acc.epsilon(acc.poisson(0.02, g(1.0)), 1e-5))
    ab = [(acc.poisson(0.02, g(1.0)), 5), (acc.poisson(0.01, g(2.0)), 7)]
    assert acc.epsilon(ab, 1e-5) == acc.epsilon(ab[::-1], 1e-5)
    assert acc.epsilon([ab[0], ab[1], ab[0]], 1e-5) == acc.epsilon([(ab[0][0], 10), ab[1]], 1e-5)


def test_replace_one_doubles_the_sensitivity():
    """The sum moves by 2C when a record is replaced; an accountant that ignores the relation under-counts."""
    for method in ("pld", "rdp"):
        replaced = acc.epsilon(acc.gaussian(2.0), 1e-5, method, "replace-one")
        assert replaced == pytest.approx(acc.epsilon(acc.gaussian(1.0), 1e-5, method), rel=1e-9)
    history = steps(0.1, 2.0, 10)
    assert acc.epsilon(history, 1e-5, "pld", "replace-one") > acc.epsilon(history, 1e-5)
    with pytest.raises(acc.AccountingError, match="use method='pld'"):
        acc.epsilon(history, 1e-5, "rdp", "replace-one")
    with pytest.raises(acc.AccountingError, match="replace-one"):
        acc.epsilon(acc.laplace(1.0), 1e-5, "pld", "replace-one")


def test_repeat_and_select_is_rdp_only():
    search = acc.repeat_and_select(acc.composed(acc.poisson(0.01, acc.gaussian(1.0)), 100), mean=10.0)
    once = acc.epsilon(steps(0.01, 1.0, 100), 1e-5, "rdp")
    ten = acc.epsilon(steps(0.01, 1.0, 1000), 1e-5, "rdp")
    assert once < acc.epsilon(search, 1e-5, "rdp") < 10 * once
    assert ten > once
    with pytest.raises(acc.AccountingError, match="RDP only"):
        acc.epsilon(search, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf, True, "1e-5", None])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(acc.AccountingError, match="delta"):
        acc.epsilon(acc.gaussian(1.0), delta)


def test_unresolvable_delta_names_the_cure():
    with pytest.raises(acc.AccountingError, match="method='rdp'"):
        acc.epsilon(steps(0.01, 1.0, 10), 1e-14)
    assert acc.epsilon(steps(0.01, 1.0, 10), 1e-14, "rdp") > 0


def test_rdp_never_rounds_a_cost_to_zero():
    """A billion tiny releases: each divergence is below the accountant's rounding error, their sum is not."""
    history = steps(1e-8, 1000.0, 10**9)
    with pytest.raises(acc.AccountingError, match="use method='pld'"):
        acc.epsilon(history, 1e-9, "rdp")
    assert acc.epsilon(steps(1e-8, 1.0, 10), 1e-5, "rdp") == 0  # truly negligible


def test_unknown_method_relation_and_event():
    with pytest.raises(acc.AccountingError, match="'pld' or 'rdp'"):
        acc.epsilon([], 1e-5, "gdp")  # type: ignore[arg-type]
    with pytest.raises(acc.AccountingError, match="add-or-remove-one"):
        acc.epsilon([], 1e-5, "pld", "swap")  # type: ignore[arg-type]
    from dp_accounting import UnsupportedDpEvent

    with pytest.raises(acc.EventError, match="UnsupportedDpEvent"):
        acc.epsilon(UnsupportedDpEvent(), 1e-5)
    with pytest.raises(acc.EventError):
        acc.epsilon([(acc.gaussian(1.0), -1)], 1e-5)


# --- the curve -----------------------------------------------------------------------------------------------------


def gaussian_power(mu: float, fpr: float) -> float:
    return float(norm.cdf(mu - norm.ppf(1 - fpr)))


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("fpr", [1e-3, 0.01, 0.1, 0.5, 0.9])
def test_tradeoff_of_a_gaussian_is_exact(mu, fpr):
    assert acc.tradeoff(acc.gaussian(1 / mu), fpr) == pytest.approx(gaussian_power(mu, fpr), rel=1e-5)


@pytest.mark.parametrize("fpr", [0.01, 0.1, 0.5])
def test_tradeoff_through_the_pld_is_pessimistic_and_tight(fpr):
    """q = 1 − 1e-9 takes the numerical path, and is a Gaussian for all purposes."""
    power = acc.tradeoff([(acc.poisson(1 - 1e-9, acc.gaussian(10.0)), 100)], fpr)
    exact = gaussian_power(1.0, fpr)
    assert exact * (1 - 1e-7) <= power <= exact * 1.001


def test_tradeoff_of_subsampling_against_quadrature():
    """One Poisson-sampled Gaussian: the Neyman–Pearson test thresholds x, in either direction."""
    q, sigma, fpr = 0.3, 1.0, 0.1
    threshold = norm.ppf(1 - fpr) * sigma
    present = (1 - q) * fpr + q * norm.sf((threshold - 1) / sigma)  # H0: absent
    t = brentq(lambda x: (1 - q) * norm.cdf(x) + q * norm.cdf(x - 1) - fpr, -10, 10)
    absent = norm.cdf(t)  # H0: present, decide "absent" below t
    power = acc.tradeoff(acc.poisson(q, acc.gaussian(sigma)), fpr)
    assert max(present, absent) <= power * (1 + 1e-6)
    assert power <= max(present, absent) * 1.02


def test_delta_inverts_epsilon():
    for history in (steps(0.02, 1.0, 200), [(acc.gaussian(1.3), 2)], [(acc.laplace(2.0), 3)]):
        eps = acc.epsilon(history, 1e-5)
        assert acc.delta(history, eps) == pytest.approx(1e-5, rel=1e-3)
        assert acc.delta(history, 1.1 * eps) < 1e-5 < acc.delta(history, 0.9 * eps)


def test_gdp_mu():
    assert acc.gdp_mu(acc.gaussian(2.0), 1e-5) == pytest.approx(0.5, rel=1e-6)
    assert acc.gdp_mu([(acc.gaussian(2.0), 16)], 1e-6) == pytest.approx(2.0, rel=1e-6)
    mu = acc.gdp_mu(steps(0.01, 1.0, 1000), 1e-5)
    assert acc.epsilon(acc.gaussian(1 / mu), 1e-5) == pytest.approx(acc.epsilon(steps(0.01, 1.0, 1000), 1e-5), rel=1e-6)


situations = given(
    q=st.floats(1e-3, 1.0),
    sigma=st.floats(0.8, 8.0),
    count=st.integers(1, 300),
    delta=st.sampled_from([1e-7, 1e-5, 1e-3]),
    method=st.sampled_from(["pld", "rdp"]),
)


@settings(max_examples=3, deadline=None)
@situations
def test_monotone(q, sigma, count, delta, method):
    check_monotone(q, sigma, count, delta, method)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@situations
def test_monotone_at_length(q, sigma, count, delta, method):
    check_monotone(q, sigma, count, delta, method)


def check_monotone(q, sigma, count, delta, method):
    """More noise, fewer steps, less sampling or a larger δ never costs more (2e-3 for the grid)."""
    here = acc.epsilon(steps(q, sigma, count), delta, method)
    slack = 1 + (2e-3 if method == "pld" else 1e-9)
    assert acc.epsilon(steps(q, sigma * 1.3, count), delta, method) <= here * slack
    assert acc.epsilon(steps(q, sigma, count + 7), delta, method) * slack >= here
    assert acc.epsilon(steps(q * 0.7, sigma, count), delta, method) <= here * slack
    assert acc.epsilon(steps(q, sigma, count), delta * 3, method) <= here
    assert here <= acc.epsilon(steps(q, sigma, count), delta, "rdp") * slack or method == "rdp"


def test_import_is_cheap_and_free_of_torch():
    ours = "import erlangen.accounting"
    heavy = f"import sys; {ours}; assert not {{'torch', 'dp_accounting', 'scipy', 'numpy'}} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", heavy], check=True)
    assert compared(ours, "import dp_accounting", enough=0.3) < 0.3, "of what waits for the first ε"


def test_gaussians_that_compose_to_no_privacy_cost_infinity():
    """10⁷ full-batch releases of σ = 1 are one of σ = 0.0003, below what counts as noise: ε = ∞, not an error."""
    assert acc.epsilon(steps(1.0, 1.0, 10_000_000), 1e-5) == math.inf
    assert acc.delta(steps(1.0, 1.0, 10_000_000), 1.0) == 1.0
    sigma = acc.noise_multiplier(3.0, 1e-5, 1.0, 10_000_000)
    assert acc.epsilon(steps(1.0, sigma, 10_000_000), 1e-5) <= 3.0


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(50.0, 100_000, 1e-9), (0.833, 100, 1e-11), (8.33, 10_000, 1e-10)])
def test_rounding_of_fourier_transforms_is_no_gift(sigma, steps, delta):
    """Sampling almost surely is no sampling, whose ε is known in closed form. 10⁵ steps lost 10⁻¹² of δ to rounding: at δ = 10⁻¹²
    ε was 63.34 where it is 63.82."""
    exact = acc.epsilon(acc.gaussian(sigma / math.sqrt(steps)), delta)
    found = acc.epsilon([(acc.poisson(1 - 1e-9, acc.gaussian(sigma)), steps)], delta)
    assert exact <= found <= 1.001 * exact


def test_a_delta_below_the_rounding_of_many_steps_is_refused():
    many = [(acc.poisson(1 - 1e-9, acc.gaussian(50.0)), 100_000)]
    with pytest.raises(acc.AccountingError, match="larger delta"):
        acc.epsilon(many, 1e-12)
    assert acc.epsilon(many, 1e-12, "rdp") >= acc.epsilon(acc.gaussian(50.0 / math.sqrt(100_000)), 1e-12)


def test_an_epsilon_of_zero_by_rdp_is_not_believed_where_the_central_limit_has_more():
    """It said 0 where ε is 3·10⁻⁷: μ/√2π, which is δ at ε = 0, lay between δ and 2δ."""
    many = [(acc.poisson(1.212e-05, acc.gaussian(86445.0)), 849_080_659)]
    with pytest.raises(acc.AccountingError, match="rounds epsilon to 0"):
        acc.epsilon(many, 1.48e-6, "rdp")
