"""Arrays, .npy folders and torch data sets: scaled by their type, checked row by row."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from erlangen.data import DataError, DataOptions, from_arrays, from_torch, load

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (6, 4, 4), dtype=np.uint8)
LABELS = np.arange(6) % 2


def arrays(x=BYTES, y=LABELS, **more):
    return {"x_train": x, "y_train": y, **more}


@pytest.mark.parametrize(
    ("x", "options", "expected"),
    [
        (BYTES, {}, BYTES / 255 * 2 - 1),
        (BYTES.astype(np.uint16) * 257, {}, BYTES / 255 * 2 - 1),
        (BYTES > 100, {}, (BYTES > 100) * 2.0 - 1),
        (BYTES.astype(np.int64), {"white": 255.0}, BYTES / 255 * 2 - 1),
        (BYTES.astype(np.float64), {}, BYTES),
        (BYTES, {"normalise": "none"}, BYTES / 255),
        (BYTES, {"normalise": "0.2/0.4"}, (BYTES / 255 - 0.2) / 0.4),
        (BYTES.astype(np.float32), {"normalise": "100/50"}, (BYTES - 100.0) / 50),
    ],
)
def test_pixels_are_scaled_by_their_type(x, options, expected):
    data = from_arrays("own", arrays(x), options=DataOptions.of(options))
    np.testing.assert_allclose(data.x_train[:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(data.preprocessing.denormalise(data.x_train)[:, 0].max(), {
        "image": BYTES.max() / 255 if x.dtype != bool else 1.0, "array": 1.0 * BYTES.max(),
    }[data.preprocessing.kind], rtol=1e-5)  # fmt: skip


def test_integers_without_a_range_are_refused():
    with pytest.raises(DataError, match=r"holds int64, which has no range.*--white 255"):
        from_arrays("own", arrays(BYTES.astype(np.int64)))


def test_the_arrays_of_the_caller_stay_as_they_are():
    x = RNG.normal(size=(6, 4, 4)).astype(np.float32)
    before = x.copy()
    from_arrays("own", arrays(x), options=DataOptions(normalise="0.5/0.5"))
    assert np.array_equal(x, before)


def test_bad_rows_are_named_or_left_out():
    x = BYTES.astype(np.float32)
    x[3, 0, 0] = np.nan
    y = np.array([0, 1, 0, 1, -7, 1])
    owner = np.array(list("abcdef"))
    with pytest.raises(DataError, match=r"record\(s\) 3, 4: labels.*got -7 to 1; pixels are not finite"):
        from_arrays("own", arrays(x, y))
    data = from_arrays("own", arrays(x, y, patient=owner), "patient", DataOptions(skip_bad=True))
    assert data.unit.tolist() == ["a", "b", "c", "f"]
    assert data.y_train.tolist() == [0, 1, 0, 1]
    assert "2 record(s) of train were left out" in data.notes[0]


def test_class_names_bound_the_labels():
    names = np.array(["cat", "dog", "owl"])
    data = from_arrays("own", arrays(class_names=names))
    assert (data.classes, data.class_names) == (3, ("cat", "dog", "owl"))
    assert any("no training image has label 2" in note for note in data.notes)
    with pytest.raises(DataError, match="below 3, the number of class_names"):
        from_arrays("own", arrays(y=np.array([0, 1, 2, 3, 0, 1]), class_names=names))


def test_the_fingerprint_is_that_of_the_arrays_as_given():
    plain = from_arrays("own", arrays())
    other = from_arrays("own", arrays(), options=DataOptions(normalise="0.1/0.3", image_size=2, channels="rgb"))
    assert other.x_train.shape == (6, 3, 2, 2)
    assert plain.fingerprint() == other.fingerprint()
    changed = BYTES.copy()
    changed[0, 0, 0] ^= 1
    assert from_arrays("own", arrays(changed)).fingerprint() != plain.fingerprint()


def test_parts_must_look_alike():
    with pytest.raises(DataError, match="x_test has shape"):
        from_arrays("own", arrays(x_test=np.zeros((2, 5, 5), np.uint8), y_test=np.zeros(2, int)))
    with pytest.raises(DataError, match="x_test has shape"):
        from_arrays("own", arrays(x_test=np.zeros((2, 4, 4), np.float32), y_test=np.zeros(2, int)))


def test_npy_files_beside_each_other(tmp_path):
    for name, values in arrays(patient=np.arange(6) // 2).items():
        np.save(tmp_path / f"{name}.npy", values)
    for source in (tmp_path, tmp_path / "x_train.npy"):
        data = load(source, "patient")
        assert data.x_train.shape == (6, 1, 4, 4)
        assert len(np.unique(data.unit)) == 3
    np.save(tmp_path / "x_train.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match="holds objects"):
        load(tmp_path)


class Mapped(TorchDataset):
    """Samples as mappings, with an owner."""

    classes = ("cat", "dog")

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"image": self.make(i), "label": torch.tensor(i % 2), "patient": i // 3}


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.from_numpy(BYTES[i]),
        lambda i: BYTES[i],
        lambda i: Image.fromarray(BYTES[i]),
        lambda i: (torch.from_numpy(BYTES[i]).float() / 127.5 - 1)[None],
    ],
)
def test_torch_data_sets(make):
    data = from_torch(Mapped(make), unit="patient")
    np.testing.assert_allclose(data.x_train[:, 0], BYTES / 127.5 - 1, atol=1e-6)
    assert data.class_names == ("cat", "dog")
    assert data.unit.tolist() == [0, 0, 0, 1, 1, 1]


def test_torch_colour_pictures_lie_channels_first():
    pixels = RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    data = from_torch(Mapped(lambda i: Image.fromarray(pixels)))
    assert data.x_train.shape == (6, 3, 4, 5)
    np.testing.assert_allclose(data.x_train[0], pixels.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)


def test_torch_tensors_and_a_test_set():
    x, y = torch.randn(8, 1, 3, 3), torch.arange(8) % 4
    data = from_torch(TensorDataset(x, y), TensorDataset(x[:2], y[:2]), name="mine", unit=[0, 0, 1, 1, 2, 2, 3, 3])
    assert torch.equal(torch.from_numpy(data.x_train), x)
    assert (data.name, data.classes, len(data.x_test)) == ("mine", 4, 2)
    assert len(np.unique(data.unit)) == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Stream(), "map-style"),
        ([], "is empty"),
        ([(np.zeros((2, 2), np.uint8), 0), (np.zeros((3, 2), np.uint8), 1)], "2 shapes.*record"),
        ([np.zeros(3)], "expected \\(image, label\\)"),
        ([(np.zeros((2, 2), np.uint8), 0.5)], "labels must be integers"),
        ([(np.zeros((2, 2), np.uint8), 0)] * 3, "one class only"),
    ],
)
def test_torch_data_that_cannot_be_used(dataset, words):
    with pytest.raises(DataError, match=words):
        from_torch(dataset)


def test_a_torch_data_set_trains():
    from erlangen.training import TrainConfig
    from erlangen.training.session import Session

    data = from_torch(TensorDataset(torch.randn(40, 1, 4, 4), torch.arange(40) % 2), unit=list(range(20)) * 2)
    session = Session(TrainConfig(data=data.name, unit="patient", model="logistic", steps=2, batch=10, seed=0), data)
    session.step()
    assert session.units.count == 20
    assert session.epsilon() > 0


def test_a_torch_data_set_leaves_a_run_and_can_be_resumed(tmp_path):
    from erlangen.accounting.certificate_check import check
    from erlangen.deploy.card import load_run
    from erlangen.training import TrainConfig, run

    x, y = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8), torch.arange(40) % 2
    data = from_torch(TensorDataset(x, y), name="mine", class_names=("a", "b"))
    config = TrainConfig(model="logistic", steps=3, batch=10, epsilon=None, noise_multiplier=1.0, evaluations=1,
                         data_options={"normalise": "private", "normalise_sigma": 20.0})  # fmt: skip
    mean = run.train(config, tmp_path / "run", dataset=data).session.dataset.preprocessing.mean
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert check(certificate) == []
    assert certificate["config"]["data"] == "mine"
    assert load_run(tmp_path / "run")[1].labels == ("a", "b")
    again = run.resume(tmp_path / "run", say=lambda text: None, dataset=data)
    assert again.summary["steps"] == 3
    assert again.session.dataset.preprocessing.mean == mean != (0.5,)
    with pytest.raises(ValueError, match="fingerprint differs"):
        run.resume(tmp_path / "run", say=lambda text: None, dataset=from_torch(TensorDataset(x + 1, y)))
    with pytest.raises(ValueError, match="mine"):
        run.resume(tmp_path / "run", say=lambda text: None)


def test_labels_in_words_and_complex_pixels_are_refused_with_a_cure_that_works():
    words = np.array(["owl", "cat", "owl", "cat", "cat", "owl"])
    with pytest.raises(DataError, match="return_inverse=True"):
        from_arrays("own", arrays(y=words))
    names, labels = np.unique(words, return_inverse=True)
    data = from_arrays("own", arrays(y=labels, class_names=names))
    assert [data.class_names[k] for k in data.y_train] == list(words)
    with pytest.raises(DataError, match="real and imaginary parts"):
        from_arrays("own", arrays(x=np.zeros((6, 4, 4), dtype=np.complex64)))


class OfPatients(TorchDataset):
    def __init__(self, patients):
        self.patients = patients

    def __len__(self):
        return len(self.patients)

    def __getitem__(self, index):
        return {"image": torch.rand(1, 4, 4), "label": index % 2, "patient": self.patients[index]}


def test_nobody_is_in_training_and_in_the_public_test_set():
    """As for folders: a patient whose images are public is not protected, whatever ε is."""
    train = OfPatients(["a", "a", "b", "b"])
    assert from_torch(train, OfPatients(["c", "d"]), unit="patient").unit.tolist() == ["a", "a", "b", "b"]
    with pytest.raises(DataError, match=r"1 unit\(s\) have images in x_train and in x_test \(b\)"):
        from_torch(train, OfPatients(["b", "c"]), unit="patient")
    arrays = {"x_train": np.zeros((4, 1, 4, 4), np.uint8), "y_train": np.arange(4) % 2, "patient": np.array([1, 1, 2, 2])}
    arrays |= {"x_test": np.ones((2, 1, 4, 4), np.uint8), "y_test": np.arange(2)}
    assert len(from_arrays("mine", {**arrays, "patient_test": np.array([3, 4])}, "patient")) == 4
    with pytest.raises(DataError, match="1 patient"):
        from_arrays("mine", {**arrays, "patient_test": np.array([2, 3])}, "patient")


@pytest.mark.parametrize("given", [{"unit_pattern": "^(p[0-9]+)_"}, {"unit_csv": __file__}])
def test_owners_by_file_name_are_refused_for_arrays(tmp_path, given):
    np.savez(tmp_path / "mine.npz", **arrays(), patient=np.arange(len(arrays()["x_train"])))
    assert load(tmp_path / "mine.npz", "patient").unit is not None
    with pytest.raises(DataError, match=r"(?s)mine holds arrays.*the array 'patient' says whose"):
        load(tmp_path / "mine.npz", "patient", **given)


def test_units_are_records_or_their_owners():
    data = from_arrays("own", arrays())
    assert data.unit_count == len(data)
    owned = dataclasses.replace(data, unit=np.arange(len(data)) // 4)
    assert owned.unit_count == -(-len(data) // 4)
