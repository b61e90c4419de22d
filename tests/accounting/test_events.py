"""Events: construction, and a JSON form that hostile documents cannot abuse."""

from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import erlangen.accounting as acc
from erlangen.accounting.events import MAX_COUNT, MAX_DEPTH

leaves = st.one_of(
    st.floats(0.0, 1e6).map(acc.gaussian),
    st.floats(0.0, 1e6).map(acc.laplace),
    st.just(acc.no_op()),
    st.just(acc.non_private("because")),
)
events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(acc.poisson, st.floats(0.0, 1.0), inner),
        st.builds(acc.composed, inner, st.integers(1, 10**8)),
        st.lists(inner, max_size=3).map(acc.sequence),
        st.builds(acc.repeat_and_select, inner, st.floats(1.0, 100.0), st.sampled_from([0.0, 1.0, 2.5, math.inf])),
    ),
    max_leaves=6,
)


@given(event=events)
def test_json_round_trip(event):
    assert acc.from_json(json.loads(json.dumps(acc.to_json(event), allow_nan=False))) == event


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf, "1", None, True, [1.0]])
def test_noise_multiplier_must_be_a_number(bad):
    for build in (acc.gaussian, acc.laplace):
        with pytest.raises(ValueError, match="noise_multiplier"):
            build(bad)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, "x"])
def test_sample_rate_must_be_a_probability(bad):
    with pytest.raises(ValueError, match="sample_rate"):
        acc.poisson(bad, acc.gaussian(1.0))


def test_constructors_simplify():
    from dp_accounting import NonPrivateDpEvent

    assert acc.gaussian(0) == NonPrivateDpEvent()
    assert acc.poisson(1.0, acc.gaussian(2.0)) == acc.gaussian(2.0)
    assert acc.composed(acc.gaussian(2.0), 1) == acc.gaussian(2.0)
    assert acc.gaussian(np.float32(2.0)) == acc.gaussian(2.0)
    with pytest.raises(ValueError, match="reason"):
        acc.non_private("  ")
    for count in (-1, 1.5, "3", True, MAX_COUNT + 1):
        with pytest.raises(ValueError, match="count"):
            acc.composed(acc.gaussian(1.0), count)


def deep(levels: int) -> dict:
    event: dict = {"type": "NoOpDpEvent"}
    for _ in range(levels):
        event = {"type": "PoissonSampledDpEvent", "sampling_probability": 0.5, "event": event}
    return event


@pytest.mark.parametrize(
    "document",
    [
        None,
        3,
        "GaussianDpEvent",
        [],
        {},
        {"type": 3},
        {"type": ["GaussianDpEvent"]},
        {"type": "os.system", "command": "true"},
        {"type": "UnsupportedDpEvent"},
        {"type": "GaussianDpEvent"},
        {"type": "GaussianDpEvent", "noise_multiplier": "1"},
        {"type": "GaussianDpEvent", "noise_multiplier": -1},
        {"type": "GaussianDpEvent", "noise_multiplier": 10**400},
        {"type": "GaussianDpEvent", "noise_multiplier": math.inf},
        {"type": "GaussianDpEvent", "noise_multiplier": 1, "extra": 2},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 2, "event": {"type": "NoOpDpEvent"}},
        {"type": "SelfComposedDpEvent", "event": {"type": "NoOpDpEvent"}, "count": 0},
        {"type": "SelfComposedDpEvent", "event": {"type": "NoOpDpEvent"}, "count": 1.5},
        {"type": "SelfComposedDpEvent", "event": {"type": "NoOpDpEvent"}, "count": -4},
        {"type": "ComposedDpEvent", "events": {"type": "NoOpDpEvent"}},
        {"type": "RepeatAndSelectDpEvent", "event": {"type": "NoOpDpEvent"}, "mean": 0, "shape": 1},
        deep(MAX_DEPTH + 1),
        deep(900),
    ],
)
def test_invalid_documents_are_refused(document):
    with pytest.raises(acc.EventError):
        acc.from_json(document)


def test_a_saved_history_does_not_take_releases_back():
    """A run that is set back to a checkpoint has spent what it spent since: the releases of both branches count."""
    step, other = acc.poisson(0.01, acc.gaussian(1.0)), acc.gaussian(20.0)
    accountant = acc.Accountant()
    accountant.record(step, 10)
    early = accountant.state_dict()
    accountant.record(step, 5)
    accountant.record(other)
    late = accountant.state_dict()
    cut = {**late, "history": late["history"][:1], "recorded": dict.fromkeys(late["recorded"], 15)}
    for state in (early, cut, {**late, "history": late["history"][::-1]}):
        with pytest.raises(ValueError, match="stays spent"):
            accountant.load_state_dict(state)
    assert accountant.history == ((step, 15), (other, 1))
    accountant.load_state_dict(late)
    resumed = acc.Accountant()
    resumed.load_state_dict(late)
    assert resumed.history == accountant.history


def test_equal_releases_of_another_run_do_not_stand_for_ones_own():
    """Seven steps of one run and ten of another are seventeen, though the ten look as if they began with the seven."""
    step = acc.gaussian(20.0)
    theirs = acc.Accountant()
    theirs.record(step, 10)
    for own in (acc.Accountant(), copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        own.record(step, 7)
        theirs.record(step, 20)
        with pytest.raises(ValueError, match="stays spent"):
            own.load_state_dict(theirs.state_dict())
    later = acc.Accountant()
    later.load_state_dict(theirs.state_dict())
    later.record(step, 5)
    theirs.load_state_dict(later.state_dict())  # nothing happened here since
    assert theirs.steps == 75
    theirs.record(step)
    later.record(step)
    with pytest.raises(ValueError, match="stays spent"):
        theirs.load_state_dict(later.state_dict())


def test_workers_of_one_training_record_the_same_releases():
    first, second = acc.Accountant(), acc.Accountant()
    for accountant in (first, second):
        accountant.share("one training")
        accountant.record(acc.gaussian(20.0), 3)
    second.load_state_dict(first.state_dict())
    assert second.steps == 3


@pytest.mark.parametrize("recorded", [None, {}, {"a": 2}, {"a": 4, "b": -1}, {"a": 3.0}])
def test_a_state_says_who_recorded_what(recorded):
    accountant = acc.Accountant()
    accountant.record(acc.gaussian(20.0), 3)
    with pytest.raises(acc.EventError):
        acc.Accountant().load_state_dict({**accountant.state_dict(), "recorded": recorded})


def test_accountant_merges_and_round_trips():
    accountant = acc.Accountant()
    step = acc.poisson(0.01, acc.gaussian(1.0))
    for _ in range(500):
        accountant.record(step)
    accountant.record(step, 500)
    accountant.record(acc.gaussian(20.0))
    accountant.record(step, 0)
    assert accountant.history == ((step, 1000), (acc.gaussian(20.0), 1))
    assert accountant.steps == 1001
    loaded = acc.Accountant()
    loaded.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert loaded.history == accountant.history
    assert loaded.epsilon(1e-5) == accountant.epsilon(1e-5) > 1.8282
    with pytest.raises(ValueError, match="version"):
        loaded.load_state_dict({"version": 99})
    with pytest.raises(ValueError, match="DpEvents"):
        loaded.record("gaussian")  # type: ignore[arg-type]
    assert loaded.history == accountant.history


def test_opacus_history():
    opacus = pytest.importorskip("opacus.accountants")
    history = [(1.0, 0.01, 600), (1.0, 0.01, 400), (1.5, 0.02, 50)]
    theirs = opacus.RDPAccountant()
    theirs.history = list(history)
    ours = acc.from_opacus(history)
    assert ours.steps == 1050
    assert ours.history[0][1] == 1000
    assert ours.epsilon(1e-5, "rdp") == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)
    with pytest.raises(ValueError, match="Opacus"):
        acc.from_opacus([(1.0, 0.1)])  # type: ignore[list-item]


@settings(max_examples=200)
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
        | st.sampled_from(["GaussianDpEvent", "ComposedDpEvent", "SelfComposedDpEvent"]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "event", "events", "count", "noise_multiplier"]), inner),
        max_leaves=10,
    )
)
def test_random_documents_never_surprise(document):
    try:
        event = acc.from_json(document)
    except acc.EventError:
        return
    assert acc.from_json(acc.to_json(event)) == event
