"""Trainings of one engine add up where they protect the same units, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from erlangen import PrivacyEngine
from erlangen.accounting import Accountant, EventError, Protected, accountant, epsilon, gaussian, poisson
from erlangen.accounting.protected import mixed
from erlangen.sampling import Units

X = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
#: four records each, put together in two ways
PATIENTS, OTHERS = [k // 4 for k in range(400)], [k % 100 for k in range(400)]
STEPS = 20


class Scans(TensorDataset):
    patient = PATIENTS


def private(engine, unit, data=None):
    net = nn.Linear(4, 2)
    data = TensorDataset(X, Y) if data is None else data
    batch = 40 if unit is None else 10  # a tenth of the units either way
    return engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=2.0, max_grad_norm=1.0, unit=unit,
    )  # fmt: skip


def steps(model, optimizer, loader, count=STEPS):
    done = 0
    while done < count:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == count:
                break


def spent(count):
    return epsilon([(poisson(0.1, gaussian(2.0)), count)], 1e-5)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, PATIENTS, "a record, then a group"),
        (PATIENTS, None, "a group, then a record"),
        (PATIENTS, OTHERS, "put together into other units"),
    ],
    ids=["records, patients", "patients, records", "patients, others"],
)
def test_a_training_that_protects_other_units_is_refused(first, second, words):
    engine = PrivacyEngine()
    steps(*private(engine, first))
    engine.remove()
    with pytest.raises(EventError, match=f"20 releases were recorded before.*{words}.*an engine .* of its own"):
        private(engine, second)
    assert engine.get_epsilon(1e-5) == pytest.approx(spent(STEPS))
    steps(*private(engine, first))  # and one that protects the same adds up
    assert engine.get_epsilon(1e-5) == pytest.approx(spent(2 * STEPS))


def test_adding_them_up_would_say_too_little(monkeypatch):
    """The broken twin: a record turns its patient's clipped mean around, which is two bounds, and the sum knows of one."""
    monkeypatch.setattr(accountant, "mixed", lambda everybody: None)
    engine = PrivacyEngine()
    steps(*private(engine, None))
    engine.remove()
    steps(*private(engine, PATIENTS))
    patients_alone = epsilon([(poisson(0.1, gaussian(1.0)), STEPS)], 1e-5)
    assert engine.get_epsilon(1e-5) == pytest.approx(1.484, abs=1e-3)
    assert patients_alone > 3.5


def test_trainings_side_by_side_that_protect_different_units_have_no_epsilon():
    engine = PrivacyEngine()
    records, patients = private(engine, None), private(engine, PATIENTS)  # nothing was released yet
    steps(*records, count=2)
    assert engine.get_epsilon(1e-5) < 1
    steps(*patients, count=2)
    with pytest.warns(UserWarning, match="ε = ∞: releases protect a record, then a group"):
        assert engine.get_epsilon(1e-5) == math.inf
    assert engine.accountant.epsilon(1e-5) == math.inf


def test_units_are_who_belongs_together_whatever_they_are_called():
    engine = PrivacyEngine()
    steps(*private(engine, PATIENTS), count=1)
    engine.remove()
    steps(*private(engine, [f"id-{(7 * p) % 100}" for p in PATIENTS]), count=1)  # the same patients under other ids
    engine.remove()
    steps(*private(engine, "patient", Scans(X, Y)), count=1)
    assert engine.get_epsilon(1e-5) < 1
    every = Units(6, list("fedcba"))
    assert every.grouping() == Units(6).grouping() != Units(6, list("aabbcc")).grouping()


def test_other_records_of_units_of_the_same_name_add_up():
    """Folds of one data set: each training has other records, and patients are patients."""
    engine, labels = PrivacyEngine(), torch.tensor(PATIENTS)
    for fold in range(2):
        rows = [k for k in range(400) if k % 2 == fold]
        steps(*private(engine, {"patient": labels[rows].tolist()}, Subset(TensorDataset(X, Y), rows)), count=1)
        engine.remove()
    assert engine.get_epsilon(1e-5) < 1
    with pytest.raises(EventError, match="a patient, then a record"):
        private(engine, None)


def test_a_checkpoint_keeps_whom_its_releases_protect(tmp_path):
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, None)
    steps(model, optimizer, loader, count=2)
    engine.save_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    same, other = PrivacyEngine(), PrivacyEngine()
    _, optimizer, _ = private(same, None)
    same.load_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    assert same.accountant.steps == 2
    same.remove()
    with pytest.raises(EventError, match="a record, then a group"):
        private(same, PATIENTS)
    net, optimizer, _ = private(other, PATIENTS)
    before = net.weight.detach().clone()
    with pytest.raises(EventError, match="a record, then a group"):
        other.load_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    assert torch.equal(net.weight, before)
    assert other.accountant.steps == 0


def test_states_say_whom_releases_protect_or_nothing():
    counting, event = Accountant(), gaussian(1.0)
    counting.record(event, protected=Protected("record", "a", "data"))
    state = counting.state_dict()
    loaded = Accountant()
    loaded.load_state_dict(state)
    loaded.record(event, protected=Protected("patient", "b", "data"))
    assert loaded.epsilon(1e-5) == math.inf
    assert counting.mixed is None
    older = Accountant()
    older.load_state_dict({key: value for key, value in state.items() if key != "protected"})
    older.record(event, protected=Protected("patient", "b", "data"))
    assert older.epsilon(1e-5) < 10
    with pytest.raises(EventError, match="whom a release protects"):
        Accountant().load_state_dict({**state, "protected": [{"unit": "record"}]})


@pytest.mark.parametrize(
    "labels", [[2**53, 2**53 + 1, 0.5], [2**63, 2**63 + 1, -1], [2**63, 2**63 + 1, 5], [1, "1", "2"], [b"1", 2, 3]]
)
def test_labels_that_would_become_one_are_refused(labels):
    """Two patients were one unit: each could turn its clipped gradient around, by two bounds."""
    with pytest.raises(ValueError, match=r"several kinds.*str\(label\)"):
        Units(3, labels)
    assert Units(3, [repr(label) for label in labels]).count == 3


@pytest.mark.parametrize(
    "labels",
    [[1, 2, 0.5], [2**63, 2**62, 5], ["a", "b", "c"], [1.5, 1.25, 1.0], list(torch.arange(3)), (7, 8, 9), [2**60, 2**60 + 1, 3]],
)
def test_labels_that_stay_apart_are_accepted(labels):
    assert Units(3, labels).count == 3


def test_groups_without_a_name_on_other_records_are_anybodys():
    """Patients of a data set, then families of a part of it that holds all records: ε for a patient was added to ε for a family."""
    by_patient, by_family, part = (Protected(unit, grouping, data) for unit, grouping, data in (
        ("group", "patients", "all"), ("group", "families", "part"), ("patient", "patients", "part"),
    ))  # fmt: skip
    assert "groups without a name" in mixed([by_patient, by_family])
    assert "a group, then a patient" in mixed([by_patient, part])
    assert mixed([Protected("patient", "one", "all"), part]) is None
    assert mixed([by_patient, by_patient]) is None
    engine, half = PrivacyEngine(), list(range(200))
    steps(*private(engine, PATIENTS), count=1)
    engine.remove()
    with pytest.raises(EventError, match="groups without a name"):
        private(engine, PATIENTS[:200], Subset(TensorDataset(X, Y), half))


@pytest.mark.parametrize("unit", [{}, {"a": PATIENTS, "b": PATIENTS}, {"": PATIENTS}])
def test_a_name_and_its_labels_are_one_entry(unit):
    with pytest.raises(ValueError, match="give one, a name and its labels"):
        private(PrivacyEngine(), unit)


@pytest.mark.parametrize("name", ["record", "Records "])
def test_groups_are_not_called_records(name):
    """What holds for two records together was promised to each of them, and added up with what is."""
    with pytest.raises(ValueError, match="Call them what they are"):
        private(PrivacyEngine(), {name: PATIENTS})


class Shuffled(TensorDataset):
    """Shuffles itself between epochs, and takes the labels along."""

    def __init__(self):
        super().__init__(X, Y)
        self.patient = list(PATIENTS)

    def shuffle(self):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(1))
        self.tensors = tuple(t[order] for t in self.tensors)
        self.patient = [self.patient[k] for k in order]


def test_records_that_are_shuffled_with_their_labels_are_not_given_to_other_patients():
    """Four records of one patient were clipped as those of four others: four bounds."""
    data = Shuffled()
    model, optimizer, loader = private(PrivacyEngine(), "patient", data)
    steps(model, optimizer, loader, 1)
    data.patient = [f"number {k}" for k in PATIENTS]  # the same patients by other names
    steps(model, optimizer, loader, 1)
    data.shuffle()
    with pytest.raises(RuntimeError, match=r"'patient' of the data set.*shuffled"):
        steps(model, optimizer, loader, 1)
