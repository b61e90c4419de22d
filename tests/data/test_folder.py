"""Folders of images: what is read is what was drawn, and whatever is in the way is named."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from erlangen import terminal
from erlangen.data import DataError, folder, load
from erlangen.data.images import BadImage, facts, read
from erlangen.data.preprocessing import Preprocessing


def draw(path, value=100, size=(6, 5), mode="L", **options):
    """An image of one value; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path, **options)
    return path


def tree(root, classes=("cat", "dog"), count=2, **options):
    for k, name in enumerate(classes):
        for i in range(count):
            draw(root / name / f"p{i}_{k}.png", 100 * k + 10 * i, **options)
    return root


def test_class_folders(tmp_path):
    data = load(tree(tmp_path / "d"))
    assert data.class_names == ("cat", "dog")
    assert data.x_train.shape == (4, 1, 5, 6)
    assert data.y_train.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(data.x_train[:, 0, 0, 0], np.array([0, 10, 100, 110]) / 127.5 - 1, atol=1e-6)
    assert data.x_test is None
    assert "no test folder" in data.notes[0]


def test_train_and_test_folders(tmp_path):
    tree(tmp_path / "d" / "train")
    tree(tmp_path / "d" / "test", classes=("dog",), count=1)
    tree(tmp_path / "d" / "spare")
    data = load(tmp_path / "d")
    assert data.y_test.tolist() == [1]
    assert any("not used: spare" in note for note in data.notes)
    assert any("no test images for cat" in note for note in data.notes)
    draw(tmp_path / "d" / "test" / "horse" / "a.png")
    with pytest.raises(DataError, match=r"train has not: horse"):
        load(tmp_path / "d")


@pytest.mark.parametrize(
    ("mode", "value", "suffix", "expected"),
    [
        ("L", 51, ".png", [0.2]),
        ("1", 1, ".png", [1.0]),
        ("RGB", (255, 0, 51), ".png", [1.0, 0.0, 0.2]),
        ("RGB", (255, 0, 51), ".webp", [1.0, 0.0, 0.2]),
        ("RGB", (255, 0, 51), ".bmp", [1.0, 0.0, 0.2]),
        ("L", 51, ".jpg", [0.2]),
        ("LA", (255, 128), ".png", [128 / 255]),
        ("RGBA", (255, 255, 0, 51), ".png", [0.2, 0.2, 0.0]),
        ("I;16", 13107, ".png", [0.2]),
        ("I;16", 13107, ".tif", [0.2]),
        ("P", 0, ".png", [0.0, 0.0, 0.0]),
    ],
)
def test_every_kind_of_pixel_lands_in_its_place(tmp_path, mode, value, suffix, expected):
    options = {"lossless": True} if suffix == ".webp" else {}
    path = draw(tmp_path / f"a{suffix}", value, mode=mode, **options)
    channels = len(expected)
    pixels, digest = read(path, Preprocessing(channels, 5, 6))
    tolerance = 0.02 if suffix == ".jpg" else 1 / 254
    np.testing.assert_allclose(pixels[:, 2, 3], expected, atol=tolerance)
    assert pixels.dtype == np.float32
    assert len(digest) == 64
    assert facts(path).grey == (channels == 1)


def test_16_bits_by_a_given_white(tmp_path):
    path = draw(tmp_path / "a.png", 1024, mode="I;16")
    assert read(path, Preprocessing(1, 5, 6, white=4096.0))[0][0, 0, 0] == pytest.approx(0.25)
    assert facts(path).bits == 16


def test_orientation_of_the_camera_is_applied(tmp_path):
    image = Image.new("L", (6, 4))
    image.putpixel((5, 0), 255)  # top right
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90°: the top right comes to the bottom right
    image.save(tmp_path / "a.png", exif=exif)
    found = facts(tmp_path / "a.png")
    assert (found.height, found.width, found.turned) == (6, 4, True)
    pixels, _ = read(tmp_path / "a.png", Preprocessing(1, 6, 4))
    assert pixels[0, 5, 3] == 1.0
    assert pixels.sum() == 1.0


def test_resizing_covers_and_takes_the_middle(tmp_path):
    image = Image.new("L", (40, 20))
    image.paste(255, (10, 0, 30, 20))  # the middle square is white
    image.save(tmp_path / "a.png")
    pixels, _ = read(tmp_path / "a.png", Preprocessing(1, 10, 10, resize=True))
    assert pixels[0, :, 1:9].min() == 1.0
    with pytest.raises(BadImage, match="is 40×20 pixels, not 10×10"):
        read(tmp_path / "a.png", Preprocessing(1, 10, 10))


def test_mixed_sizes_are_named_and_cured(tmp_path):
    root = tree(tmp_path / "d")
    draw(root / "dog" / "odd.png", size=(9, 9))
    with pytest.raises(DataError, match=r"2 sizes \(width×height\): 6×5 \(4\), 9×9 \(1\)\. Give.*Not 6×5: dog/odd\.png"):
        load(root)
    data = load(root, image_size=4)
    assert data.x_train.shape == (5, 1, 4, 4)
    assert any("5 of 5 images are scaled to cover 4×4" in note for note in data.notes)
    assert load(root, image_size=[4, 8]).x_train.shape == (5, 1, 4, 8)


def test_mixed_colours_are_said(tmp_path):
    root = tree(tmp_path / "d")
    draw(root / "dog" / "odd.png", (10, 20, 30, 0), mode="RGBA")
    data = load(root)
    assert data.x_train.shape == (5, 3, 5, 6)
    text = "\n".join(data.notes)
    assert "4 of 5 images are greyscale, repeated to RGB" in text
    assert "1 of 5 images are with transparency, put on black" in text
    assert load(root, channels="grey").x_train.shape == (5, 1, 5, 6)


def test_bad_files_stop_the_run_or_are_left_out_and_named(tmp_path):
    root = tree(tmp_path / "d", count=3)
    (root / "cat" / "empty.png").write_bytes(b"")
    (root / "cat" / "words.jpg").write_text("no image")
    noise = np.random.default_rng(0).integers(0, 255, (5, 6), dtype=np.uint8)
    Image.fromarray(noise).save(root / "dog" / "torn.png")
    whole = (root / "dog" / "torn.png").read_bytes()
    (root / "dog" / "torn.png").write_bytes(whole[:50])
    with pytest.raises(DataError, match=r"(?s)2 image\(s\) in .*--skip-bad.*2 × is not an image: cat/empty\.png, cat/words\.jpg"):
        load(root)
    draw(root / "dog" / "large.png", size=(60, 50))
    with pytest.raises(DataError, match=r"(?s)2 × is not an image.*And the images of .* have 2 sizes"):
        load(root)
    (root / "dog" / "large.png").unlink()
    for name in ("empty.png", "words.jpg"):
        (root / "cat" / name).unlink()
    with pytest.raises(DataError, match=r"(?s)1 image\(s\).*torn\.png"):
        load(root)
    (root / "cat" / "words.jpg").write_text("no image")
    data = load(root, skip_bad=True)
    assert len(data) == 6
    left_out = [note for note in data.notes if "left out" in note]
    assert len(left_out) == 2
    assert "cat/words.jpg" in left_out[0]
    assert "dog/torn.png" in left_out[1]


def test_what_is_no_data_set_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no folders"):
        load(tmp_path / "empty")
    tree(tmp_path / "one", classes=("cat",))
    with pytest.raises(DataError, match=r"one class only \(cat\)"):
        load(tmp_path / "one")
    (tree(tmp_path / "hole") / "zebra").mkdir()
    with pytest.raises(DataError, match="hold no usable image: zebra"):
        load(tmp_path / "hole")
    (tmp_path / "hole" / "zebra" / "1.dcm").write_bytes(b"x")
    with pytest.raises(DataError, match=r"there are 1 other files, \.dcm: convert them"):
        load(tmp_path / "hole")
    draw(tree(tmp_path / "stray") / "lonely.png")
    with pytest.raises(DataError, match=r"lie in no class folder: lonely\.png"):
        load(tmp_path / "stray")
    tree(tmp_path / "half" / "test")
    with pytest.raises(DataError, match="none called train"):
        load(tmp_path / "half")
    with pytest.raises(DataError, match="folder of class folders"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("names", [("Training", "Testing"), ("Train", "Test"), ("TRAIN", "val", "Test")])
def test_parts_under_other_names_are_not_taken_for_classes(names, tmp_path):
    """A network learnt to tell training from test images, and the public ones were trained on as private."""
    for name in names:
        tree(tmp_path / "scans" / name)
    with pytest.raises(DataError, match=r"would be its classes.*rename that of the private images to train"):
        load(tmp_path / "scans")
    for name in ("other", names[0]):
        tree(tmp_path / "mixed" / name)
    assert len(load(tmp_path / "mixed").class_names) == 2


def test_other_files_are_left_aside_and_said(tmp_path):
    root = tree(tmp_path / "d")
    (root / "cat" / "readme.txt").write_text("hello")
    (root / "cat" / ".DS_Store").write_text("hidden")
    (root / "list.csv").write_text("a,b")
    data = load(root)
    assert any("2 file(s) that are no images (.csv, .txt)" in note for note in data.notes)
    (tmp_path / "two").mkdir()
    root.rename(tmp_path / "two" / "train")
    assert any(note.endswith("left aside: train/list.csv, train/cat/readme.txt") for note in load(tmp_path / "two").notes)


def test_copies_of_an_image_are_said_unless_they_are_one_units(tmp_path):
    """A file that is there twice is two records: ε protects each of them, and whoever is on both for 2ε."""
    root = tmp_path / "d"
    for k, name in enumerate(("cat", "dog")):
        for i in range(4):
            draw(root / name / f"pat{i}" / f"p{i}_{k}.png", 10 * i + k)
    assert not any("copies" in note for note in load(root).notes)
    (root / "dog" / "pat3" / "copy.png").write_bytes((root / "cat" / "pat0" / "p0_0.png").read_bytes())
    (note,) = [note for note in load(root).notes if "copies" in note]
    assert note.startswith("1 training image(s) are copies of one of another record (dog/pat3/copy.png)")
    (note,) = [note for note in load(root, "patient", unit_pattern=r"/(pat\d)/").notes if "copies" in note]
    assert "copies of one of another patient" in note
    (root / "dog" / "pat3" / "copy.png").rename(root / "cat" / "pat0" / "copy.png")
    assert not any("copies" in note for note in load(root, "patient", unit_pattern=r"/(pat\d)/").notes)


def test_files_in_deeper_folders_count(tmp_path):
    root = tree(tmp_path / "d")
    draw(root / "cat" / "2024" / "x.png")
    assert len(load(root)) == 5


def test_the_fingerprint_is_that_of_the_files(tmp_path):
    root = tree(tmp_path / "d")
    same = {load(root).fingerprint(), load(root, image_size=4, normalise="0.1/0.2").fingerprint()}
    assert len(same) == 1
    draw(root / "cat" / "p0_0.png", 7)
    assert load(root).fingerprint() not in same


def patients(root):
    for k, name in enumerate(("cat", "dog")):
        for i in range(4):
            draw(root / name / f"pat{i}" / f"p{i}_{k}.png", 10 * i)
    return root


@pytest.mark.parametrize("pattern", [r"^(p\d+)_", r"(?P<other>x)?(?P<patient>p\d+)_", r"/(pat\d)/"])
def test_patients_from_names(tmp_path, pattern):
    data = load(patients(tmp_path / "d"), "patient", unit_pattern=pattern)
    assert len(np.unique(data.unit)) == 4
    assert data.unit[0] == data.unit[4]


def test_patients_from_a_table(tmp_path):
    root = patients(tmp_path / "d")
    files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.png"))
    table = tmp_path / "who.csv"
    table.write_text("File,Patient,age\n" + "".join(f"{f},{f[-5]},7\n" for f in files))
    assert load(root, "patient", unit_csv=str(table)).unit.tolist() == ["0"] * 4 + ["1"] * 4
    table.write_text("file,patient\n" + "".join(f"{f.rpartition('/')[2]},a\n" for f in files[:-1]))
    with pytest.raises(DataError, match=r"1 image\(s\) have no patient by .*dog/pat3/p3_1\.png"):
        load(root, "patient", unit_csv=str(table))
    table.write_text(f"file,patient\n{files[0]},a\n{files[0]},b\n")
    with pytest.raises(DataError, match=r"line 3.*belongs to 'a' and to 'b'"):
        load(root, "patient", unit_csv=str(table))
    table.write_text("picture,patient\nx,y\n")
    with pytest.raises(DataError, match="one called file"):
        load(root, "patient", unit_csv=str(table))


@pytest.mark.parametrize("written", ["{}", "./{}", "train/{}", "scans/train/{}", "{root}/{}"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_may_write_paths_as_its_maker_does(tmp_path, written, separator):
    root = patients(tmp_path / "scans" / "train")
    files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.png"))
    table = tmp_path / "who.csv"
    rows = [f"{written.format(f, root=root)}{separator}{f[-7]}" for f in files]
    table.write_text("\n".join([f"file{separator}patient", *rows]))
    assert load(root.parent, "patient", unit_csv=str(table)).unit.tolist() == [f[-7] for f in files]


def test_a_table_of_other_paths_is_shown_beside_ours(tmp_path):
    root = patients(tmp_path / "scans")
    table = tmp_path / "who.csv"
    table.write_text("file,patient\nelsewhere/cat/p0_0.png,p0\n")
    with pytest.raises(DataError, match=r"1 rows, the first for 'elsewhere/cat/p0_0.png'"):
        load(root, "patient", unit_csv=str(table))


def test_the_folder_above_the_data_is_recognised(tmp_path):
    patients(tmp_path / "above" / "scans")
    with pytest.raises(DataError, match=r"one class only \(scans\).*above/scans has folders .*: is that the data"):
        load(tmp_path / "above")
    with pytest.raises(DataError, match=r"'.*/below', which is nowhere"):
        load(tmp_path / "below")


def test_an_owner_must_be_known_and_on_one_side(tmp_path):
    root = patients(tmp_path / "d" / "train")
    with pytest.raises(DataError, match="--unit-pattern"):
        load(root, "patient")
    with pytest.raises(DataError, match=r"8 image\(s\) have no patient .* is searched in the file's name .*give --unit-csv"):
        load(root, "patient", unit_pattern="^(q)_")
    draw(tmp_path / "d" / "test" / "cat" / "p2_9.png")
    with pytest.raises(DataError, match=r"1 patient\(s\) have images in train and in test \(p2\)"):
        load(tmp_path / "d", "patient", unit_pattern=r"^(p\d+)_")
    (tmp_path / "d" / "test" / "cat" / "p2_9.png").rename(tmp_path / "d" / "test" / "cat" / "p9_9.png")
    assert load(tmp_path / "d", "patient", unit_pattern=r"^(p\d+)_").unit.shape == (8,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_size": 0}, "between 1 and 4096"),
        ({"image_size": "big"}, "one whole number"),
        ({"channels": "blue"}, "auto, grey or rgb"),
        ({"white": -1.0}, "counts as white"),
        ({"normalise": "loud"}, "MEAN/STD"),
        ({"normalise": "0.5/0"}, "above 0"),
        ({"normalise": "0.1,0.2/0.5"}, "one for each of 1 channel"),
        ({"unit_pattern": "("}, "no regular expression"),
        ({"unit_pattern": "p"}, "has no group"),
        ({"unit_pattern": "(p)", "unit_csv": "x"}, "exclude each other"),
        ({"unit_csv": "nowhere.csv"}, "no file at"),
        ({"colour": 1}, "unknown data option"),
    ],
)
def test_options_are_checked(tmp_path, options, words):
    with pytest.raises(DataError, match=words):
        load(tree(tmp_path / "d"), **options)
    if "normalise" not in options and "colour" not in options:
        with pytest.raises(DataError):
            load("digits", **options)


def test_floating_point_images_are_refused(tmp_path):
    draw(tmp_path / "a.tif", 0.5, mode="F")
    with pytest.raises(BadImage, match="no known range"):
        facts(tmp_path / "a.tif")


def test_formats_that_were_not_asked_for_are_not_decoded(tmp_path):
    """A PostScript or PSD file with the name of a PNG never reaches its decoder."""
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with pytest.raises(BadImage, match="is not an image"):
        facts(tmp_path / "a.png")


def test_whose_an_image_is_without_saying_that_it_counts_is_refused(tmp_path):
    """Ids that nobody asked to protect would leave every image protected by itself, and its owner not."""
    root = patients(tmp_path / "d")
    with pytest.raises(DataError, match="unit is not given"):
        load(root, unit_pattern=r"^(p\d+)_")
    table = tmp_path / "owners.csv"
    table.write_text("file,patient\n")
    with pytest.raises(DataError, match="unit_csv says whose"):
        load(root, unit_csv=str(table))


def test_a_test_folder_of_training_images_is_refused(tmp_path):
    """The test set is public, and some of its images are stored with the run: private ones must not be among them."""
    root, rng = tmp_path / "d", np.random.default_rng(0)
    for k in range(24):
        place = root / "train" / ("cat", "dog")[k % 2] / f"{k}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5), dtype=np.uint8)).save(place)
    for k in range(12):  # the same pixels under another name, in another format
        label = ("cat", "dog")[k % 2]
        copied = root / "test" / label / f"of-{k}.bmp"
        copied.parent.mkdir(parents=True, exist_ok=True)
        Image.open(root / "train" / label / f"{k}.png").save(copied)
    with pytest.raises(DataError, match="12 of the 12 images of test are in train"):
        load(root)
    for k in range(1, 12):
        (root / "test" / ("cat", "dog")[k % 2] / f"of-{k}.bmp").unlink()
    draw(root / "test" / "dog" / "new.png", 7, size=(5, 6))
    assert any("1 of the 2 images of test are in train" in note for note in load(root).notes)


def test_a_bar_has_the_terminal_to_itself(tmp_path, monkeypatch):
    """Two displays that move would write over each other."""
    heard = []

    class Spinner:
        def start(self):
            heard.append("start")

        def stop(self):
            heard.append("stop")

    monkeypatch.setattr(terminal, "waiting", [Spinner()])
    load(tree(tmp_path / "d"))
    assert heard == []
    monkeypatch.setattr(folder, "MANY", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(tmp_path / "d")
    assert heard == ["stop", "start"] * 2, "once for the headers, once for the pixels"
