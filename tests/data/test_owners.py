"""Whose image is it: ids in two spellings, ids of single images, and people on both sides of a split."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from erlangen.data import from_arrays, load
from erlangen.data.owners import folded, in_both, remark_on_ids
from erlangen.data.preprocessing import DataError


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("p001", "P001"), ("1", "1.0"), (1, "01"), (" p7", "p7 "), ("P-007", "p-7"), (12, 12.0), ("p0", "P00"),
        ("M\u00fcller", "Mu\u0308ller"), ("\uff1012", "12"), ("p\u20117", "p-7"), ("p\u20127", "p\u22127"),
    ],
)
def test_spellings_of_one_id_fold_together(one, other):
    assert folded(one) == folded(other)


@pytest.mark.parametrize(("one", "other"), [("p1", "p10"), ("1.5", "1"), ("a1", "b1"), ("p100", "p1"), ("0", "10")])
def test_different_ids_stay_apart(one, other):
    assert folded(one) != folded(other)


def test_what_looks_wrong_about_ids_is_said():
    notes: list[str] = []
    remark_on_ids(["p1", "p1", "p2"], ["a", "b", "c"], "patient", notes)
    assert notes == []
    remark_on_ids(["p1", "P1", "p2"], ["a", "b", "c"], "patient", notes)
    assert len(notes) == 2
    assert "'P1' and 'p1'" in notes[0]
    assert "every image has a patient of its own (a: 'p1')" in notes[1]


def test_one_patient_for_all_is_said():
    """A pattern whose brackets hold too little: all images counted as one patient's, and the training was noise."""
    notes: list[str] = []
    remark_on_ids(["p", "p", "p"], ["a", "b", "c"], "patient", notes)
    assert len(notes) == 1
    assert "all 3 images are of one patient ('p')" in notes[0]


def test_folders_of_patients_are_no_classes(tmp_path):
    """PATIENT/CLASS/*.png: every patient became a class, whose name is stored with the model that was to hide who is in it."""
    for k in range(12):
        picture(tmp_path / "scans" / f"p{k // 2}" / f"c{k % 2}" / f"p{k // 2}_{k}.png", 10 * k)
    with pytest.raises(DataError, match=r"every class of .*\(p0, p1, p2 and 3 more\) holds one patient only.*classes are public"):
        load(tmp_path / "scans", "patient", unit_pattern="^(p[0-9])_")
    picture(tmp_path / "scans" / "p0" / "p9_0.png", 7)
    notes = load(tmp_path / "scans", "patient", unit_pattern="^(p[0-9])_").notes
    said = [note for note in notes if "classes are public" in note]
    assert [note.split(":")[0] for note in said] == ["5 class(es) hold one patient only (p1, p2, p3 and 2 more)"]


def test_a_class_of_one_record_is_said():
    x, y = np.arange(5 * 16, dtype=np.uint8).reshape(5, 4, 4), np.array([0, 0, 1, 1, 2])
    said = [note for note in from_arrays("own", {"x_train": x, "y_train": y}).notes if "classes are public" in note]
    assert [note.split(":")[0] for note in said] == ["1 class(es) hold one record only (2)"]
    patients = np.array([0, 1, 0, 1, 2])
    assert "one patient only (2)" in str(from_arrays("own", {"x_train": x, "y_train": y, "patient": patients}, "patient").notes)
    with pytest.raises(DataError, match="every class of own"):
        from_arrays("own", {"x_train": x, "y_train": y, "patient": y}, "patient")


def test_letters_with_their_accents_beside_them_are_no_other_patient():
    """Some file systems write them so: the images of ten patients were protected as those of twenty, and nothing was said."""
    notes: list[str] = []
    remark_on_ids(["M\u00fcller", "Mu\u0308ller", "x"], ["a", "b", "c"], "patient", notes)
    assert "1 patient(s) are written in several ways ('Mu\\u0308ller' and 'M\\xfcller', say)" in notes[0]
    assert in_both(["M\u00fcller"], ["Mu\u0308ller"]) == ["Mu\u0308ller"]


def test_a_table_that_gives_an_image_to_two_patients_is_refused(tmp_path):
    """Under two ways to write its path: the first that was looked up was taken, in silence."""
    for k in range(4):
        picture(tmp_path / "scans" / f"c{k % 2}" / f"{k}.png", 10 * k)
    rows = [f"c{k % 2}/{k}.png,p{k}" for k in range(4)]
    table = tmp_path / "patients.csv"
    for more, named in (("0.png,p9", "0.png"), ("scans/c0/0.png,p9", "scans/c0/0.png")):
        table.write_text("\n".join(["file,patient", *rows, more]))
        with pytest.raises(DataError, match=rf"c0/0.png that it belongs to 'p0' \(c0/0.png\) and to 'p9' \({named}\)"):
            load(tmp_path / "scans", "patient", unit_csv=str(table))
    table.write_text("\n".join(["file,patient", *rows, "scans/c0/0.png,p0"]))
    assert load(tmp_path / "scans", "patient", unit_csv=str(table)).unit.tolist() == ["p0", "p2", "p1", "p3"]


def test_ids_of_two_columns_are_named():
    x = np.random.default_rng(0).integers(0, 255, (4, 8, 8), dtype=np.uint8)
    arrays = {"x_train": x, "y_train": np.arange(4) % 2, "patient": np.arange(8).reshape(4, 2)}
    with pytest.raises(DataError, match=r"patient has shape \(4, 2\) for 4 training images; give one id per image"):
        from_arrays("a", arrays, "patient")


def test_nobody_is_on_both_sides_in_another_spelling():
    assert in_both(["p001", "p002"], ["P001", None, "p3"]) == ["P001"]
    assert in_both([1, 2], ["1.0"]) == ["1.0"]
    assert in_both(["a"], ["b", None]) == []


def picture(path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)


def test_a_pattern_that_takes_the_whole_name_is_said(tmp_path):
    for k in range(4):
        picture(tmp_path / f"c{k % 2}" / f"p{k // 2}_scan{k}.png", 10 * k)
    whole = load(tmp_path, "patient", unit_pattern="(.*)")
    assert whole.unit_count == 4
    assert any("every image has a patient of its own" in note for note in whole.notes)
    right = load(tmp_path, "patient", unit_pattern="^(p[0-9]+)_")
    assert right.unit_count == 2
    assert not any("of its own" in note for note in right.notes)


def test_folders_and_arrays_refuse_a_patient_in_both_parts_in_another_spelling(tmp_path):
    for part, name in (("train", "p001_a"), ("train", "p002_a"), ("test", "P001_b")):
        for k, kind in enumerate(("c0", "c1")):
            picture(tmp_path / part / kind / f"{name}{k}.png", 40 * k + len(name) + (part == "test"))
    with pytest.raises(DataError, match="P001"):
        load(tmp_path, "patient", unit_pattern="^([pP][0-9]+)_")
    x = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
    arrays = {"x_train": x[:4], "y_train": np.arange(4) % 2, "x_test": x[4:], "y_test": np.arange(2), "patient": np.arange(4)}
    with pytest.raises(DataError, match=r"3\.0"):
        from_arrays("a", {**arrays, "patient_test": np.array([7.0, 3.0])}, "patient")
    assert any("of its own" in note for note in from_arrays("a", arrays, "patient").notes)


def test_test_images_of_nobody_known_are_said(tmp_path):
    """Names of another kind in test/ were not compared with those of train/, and nobody was told."""
    for part, name in (("train", "p1_a"), ("train", "p2_a"), ("test", "scan_p1")):
        for k, kind in enumerate(("c0", "c1")):
            picture(tmp_path / part / kind / f"{name}{k}.png", 40 * k + len(name) + (part == "test"))
    (note,) = [note for note in load(tmp_path, "patient", unit_pattern="^(p[0-9]+)_").notes if "no patient by which" in note]
    assert note.startswith("2 of 2 test images")
    assert "c0/scan_p10.png" in note


def test_a_table_in_another_encoding_gets_a_cure(tmp_path):
    picture(tmp_path / "d" / "c0" / "a.png", 1)
    picture(tmp_path / "d" / "c1" / "b.png", 2)
    (tmp_path / "t.csv").write_bytes("file,patient\na.png,Müller\n".encode("latin-1"))
    with pytest.raises(DataError, match="save it again as CSV UTF-8"):
        load(tmp_path / "d", "patient", unit_csv=str(tmp_path / "t.csv"))
    (tmp_path / "t.csv").write_text("file,patient\na.png,p1\n")
    with pytest.raises(DataError, match=r"b\.png.*add what is missing"):
        load(tmp_path / "d", "patient", unit_csv=str(tmp_path / "t.csv"))
