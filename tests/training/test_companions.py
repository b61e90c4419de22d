"""Importance sampling and selective updates in a run: what they cost, that it is charged, and that runs resume."""

from __future__ import annotations

import math

import pytest
import torch

from erlangen.accounting import epsilon, gaussian, poisson, sequence
from erlangen.mechanisms import mechanisms
from erlangen.training.companions import Judge
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.run import train
from erlangen.training.session import Session
from erlangen.training.summary import in_plain_words

SMALL = {
    "data": "digits", "model": "mlp", "model_options": {"width": 16}, "batch": 100, "steps": 4, "lr": 0.5, "seed": 0,
    "device": "cpu", "ema": 0.0, "evaluations": 1,
}  # fmt: skip


def session(**options) -> Session:
    given = {"epsilon": None, "noise_multiplier": 1.0} if "epsilon" not in options else {}
    return Session(TrainConfig(**{**SMALL, **given, **options}))


def run(one: Session, steps: int) -> Session:
    for _ in range(steps):
        one.step()
    return one


# -- selective updates ----------------------------------------------------------------------------------------------


def test_every_step_pays_for_its_decision_kept_or_not():
    q = 100 / 1438
    for threshold in (-math.inf, math.inf):
        one = run(session(selective=True, selective_options={"noise_ratio": 2.0, "threshold": threshold}), 4)
        step = sequence([poisson(q, gaussian(1.0)), poisson(q, gaussian(2.0))])
        assert one.accountant.history == ((step, 4),)
        assert one.epsilon() == pytest.approx(
            epsilon([(poisson(q, gaussian(1.0)), 4), (poisson(q, gaussian(2.0)), 4)], one.config.delta), rel=1e-6
        )
        assert one.judge.kept == (4 if threshold > 0 else 0)


def test_rejection_gives_weights_and_momentum_back():
    one = session(selective=True, selective_options={"threshold": -math.inf})
    before = {n: t.clone() for n, t in one.model.state_dict().items()}
    run(one, 3)
    assert all(torch.equal(t, before[n]) for n, t in one.model.state_dict().items())
    two = run(session(selective=True, selective_options={"threshold": math.inf}), 3)
    plain = run(session(), 3)
    for name, t in two.model.state_dict().items():
        assert torch.equal(t, plain.model.state_dict()[name])  # a judge who keeps everything changes nothing


def test_calibration_leaves_room_for_the_decisions():
    plain, judged = session(epsilon=2.0), session(epsilon=2.0, selective=True, selective_options={"noise_ratio": 1.0})
    assert judged.training.mechanism.noise_multiplier > 1.05 * plain.training.mechanism.noise_multiplier
    run(judged, 4)
    assert 1.98 < judged.epsilon() <= 2.0


def test_a_decision_that_nobody_pays_for_is_refused():
    """The broken twin: a judge whose event was left out of the step's."""
    one = session(selective=True)
    one.training.extras.clear()
    with pytest.raises(RuntimeError, match="does not pay for"):
        one.step()


def test_a_judge_with_other_noise_than_was_charged_is_refused():
    one = session(selective=True, selective_options={"noise_ratio": 3.0})
    one.judge.ratio = 2.0  # before the step is charged: it is charged like this
    one.step()
    assert one.training.charged.events[1].event == gaussian(2.0 * one.training.mechanism.noise_multiplier)

    def less(_):
        one.judge.ratio = one.judge.selective.noise_multiplier = 1.0

    one.training.before_release.append(less)  # after
    with pytest.raises(RuntimeError, match="does not pay for"):
        one.step()


def test_one_patient_moves_the_judges_sum_by_the_bound_at_most(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (40, 1, 4, 4)).astype(np.float32), np.arange(40) % 2
    patient = np.repeat(np.arange(10), 4)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, patient=patient)
    one = session(data=str(tmp_path / "d.npz"), unit="patient", batch=5, selective=True)
    assert isinstance(one.judge, Judge)
    losses = one.judge.losses(torch.tensor([3, 7])).detach()
    assert losses.shape == (2,)
    index = torch.from_numpy(np.flatnonzero(patient == 7))
    each = torch.nn.functional.cross_entropy(one.model(one.x[index]), one.y[index], reduction="none")
    assert float(losses[1]) == pytest.approx(float(each.detach().mean()), rel=1e-5)
    run(one, 2)


# -- importance sampling --------------------------------------------------------------------------------------------


def test_importance_costs_its_largest_probability_and_draws_fewer():
    one = session(sampling="importance", max_grad_norm=5.0)
    run(one, 4)
    assert one.accountant.history == ((poisson(100 / 1438, gaussian(1.0)), 4),)
    p = one.sampler.rule.probabilities(one.importance.norms())
    assert float(p.max()) <= 100 / 1438 + 1e-12
    assert float(p.sum()) < 100


def test_norms_are_those_of_each_record_alone():
    one = session(sampling="importance")
    norms = one.importance.norms()
    parameters = {n: p.detach().clone() for n, p in one.model.named_parameters()}
    for record in (0, 700, 1437):
        x, y = one.x[record : record + 1], one.y[record : record + 1]
        g = torch.func.grad(lambda w: torch.nn.functional.cross_entropy(functional(w, x), y))(parameters)  # noqa: B023
        want = math.sqrt(sum(float(t.double().square().sum()) for t in g.values()))
        assert float(norms[record]) == pytest.approx(want, rel=1e-4)


def functional(weights, x):
    h = torch.tanh(x.flatten(1) @ weights["1.weight"].T + weights["1.bias"])
    return h @ weights["3.weight"].T + weights["3.bias"]


def test_importance_as_published_costs_everything_and_cannot_be_calibrated():
    one = run(session(sampling="importance", sampling_options={"as_published": True}), 1)
    assert one.epsilon() == math.inf
    with pytest.raises(ValueError, match="no noise makes 'importance' private"):
        session(epsilon=2.0, sampling="importance", sampling_options={"as_published": True})


def test_a_mechanism_that_does_not_clip_cannot_weight_its_losses():
    with pytest.raises(ConfigError, match="does not clip"):
        session(
            model="lipschitz-lenet", model_options={}, mechanism="clipless", mechanism_options={"loss": "cross-entropy"},
            sampling="importance", max_grad_norm=1.0,
        )  # fmt: skip


# -- both, with everything ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", sorted(set(mechanisms()) - {"clipless", "rep", "shuffle"}))
def test_both_work_with_any_mechanism(mechanism):
    one = run(
        session(mechanism=mechanism, sampling="importance", selective=True, model="cnn", model_options={"width": 8}), 2
    )
    assert 0 < one.epsilon() < math.inf


def test_a_resumed_run_continues_exactly():
    options = {"sampling": "importance", "sampling_options": {"refresh": 3}, "selective": True, "steps": 8}
    straight = run(session(**options), 8)
    first = run(session(**options), 4)
    second = session(**options)
    second.load_state_dict(first.state_dict())
    run(second, 4)
    for name, t in straight.model.state_dict().items():
        assert torch.equal(t, second.model.state_dict()[name])


def test_checkpoints_hold_no_norms():
    one = run(session(sampling="importance"), 1)
    sizes = {t.numel() for t in one.state_dict()["importance"]["seen"].values()}
    assert len(one.dataset) not in sizes
    assert set(one.state_dict()["sampler"]) == {"step"}


def test_the_certificate_of_a_run_with_both_verifies(tmp_path):
    from erlangen.accounting import verify

    config = TrainConfig(**{**SMALL, "epsilon": 3.0, "selective": True, "sampling": "importance"})
    summary = train(config, tmp_path / "run").summary
    assert not verify(tmp_path / "run" / "certificate.json")
    assert summary["guarantee"]["epsilon"]["pld"] <= 3.0
    assert summary["guarantee"]["mechanism"]["selective"]["bound"] == 0.1
    assert summary["guarantee"]["sampler"]["name"] == "importance"


def test_options_are_checked():
    for options, words in (
        ({"sampling": "magic"}, "sampling is"),
        ({"sampling_options": {"floor": 0.5}}, "takes none"),
        ({"sampling": "importance", "sampling_options": {"flor": 0.5}}, "it takes floor"),
        ({"sampling": "importance", "sampling_options": {"refresh": 0}}, "refresh is"),
        ({"sampling": "importance", "sampling_options": {"floor": "low"}}, "sampling_options is .*low.*; give numbers"),
        ({"selective": True, "selective_options": {"nois": 1}}, "it takes noise_ratio"),
        ({"selective": True, "selective_options": {"noise_ratio": 0.0}}, "noise_ratio is"),
    ):
        with pytest.raises(ValueError, match=words):
            session(**options)


@pytest.mark.parametrize(
    ("options", "least"),
    [({"as_published": "complex"}, 0.0), ({"as_published": "real"}, math.inf), ({"as_published": "per-sample"}, 0.0)],
)
def test_certificates_of_published_mechanisms_verify_at_their_true_noise(tmp_path, options, least):
    from erlangen.accounting import verify

    config = TrainConfig(
        **{
            **SMALL,
            "epsilon": None,
            "noise_multiplier": 2.0,
            "mechanism": "gredp",
            "mechanism_options": options,
            "steps": 2,
        }
    )
    result = train(config, tmp_path / "run")
    assert not verify(tmp_path / "run" / "certificate.json")
    assert result.session.epsilon() >= least


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sampling_options": {"as_published": True}}, "importance sampling with probabilities normalised"),
        ({"noise_multiplier": 0.0}, "no noise was added"),
        ({"noise_multiplier": 0.0, "mechanism": "iso", "mechanism_options": {}}, "no noise was added"),
        ({"mechanism_options": {"as_published": "real"}}, "GReDP with real noise"),
    ],
)
def test_what_is_sound_is_no_reason_for_having_no_guarantee(options, why):
    """Of a mechanism at its true noise and a sampler at its largest probability, whichever of them takes the guarantee away."""
    given = {"noise_multiplier": 2.0, "mechanism": "gredp", "mechanism_options": {"as_published": "complex"}, **options}
    result = train(TrainConfig(**{**SMALL, "epsilon": None, "sampling": "importance", "steps": 1, **given}))
    assert in_plain_words(result.summary).startswith(f"No privacy guarantee: ε = ∞, because {why}")
