"""A folder of class folders: DIR/CLASS/*.png, or DIR/train/CLASS/… with DIR/test/CLASS/… as the public test set."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from erlangen.data.base import Dataset
from erlangen.data.images import SUFFIXES, BadImage, ImageFacts, facts, files_under, is_hidden, named, read, reasons
from erlangen.data.options import DataOptions
from erlangen.data.owners import owners, refuse_in_both, remark_on_classes, remark_on_ids
from erlangen.data.preprocessing import DataError, Preprocessing
from erlangen.data.shared import refuse_shared_images, remark_on_copies
from erlangen.terminal import alone

#: from here on reading takes long enough for a bar
MANY = 5000
TEST_NAMES = ("test", "val", "valid", "validation")
#: what else parts of a data set are called, in small letters; nothing is trained to tell them apart
_PARTS = {*TEST_NAMES, "train", "training", "testing"}
_T = TypeVar("_T")


@dataclass
class _Part:
    """The images of the training or the test part, with what is known of them so far."""

    root: Path
    files: list[Path]
    labels: list[int]
    facts: list[ImageFacts]

    def keep(self, chosen: list[bool]) -> None:
        for name in ("files", "labels", "facts"):
            values = getattr(self, name)
            setattr(self, name, [v for v, keep in zip(values, chosen, strict=True) if keep] if values else values)


def read_folder(folder: str | Path, unit: str | None = None, options: DataOptions | None = None) -> Dataset:
    """Every image of the folder, or a `DataError` that names the files in the way; nothing is dropped in silence."""
    root, options = Path(folder), options or DataOptions()
    notes: list[str] = []
    train_root, test_root = _layout(root, notes)
    classes = _classes(train_root)
    train = _listed(train_root, classes, root, notes)
    test = _test_part(test_root, classes, root, notes) if test_root is not None else None
    parts = [part for part in (train, test) if part is not None]
    bad = [found for part in parts for found in _look(part)]
    sizes = _mixed_sizes(parts, root, options)
    _refuse_bad(bad, root, options, notes, also=sizes)
    if sizes:
        raise DataError(sizes)
    _refuse_empty(train, classes)
    prep = _format(parts, options)
    unit_labels = None
    x_test = y_test = None
    x_train, digests = _decoded(train, prep, root, options, notes)
    if test is not None:
        x_test, _ = _decoded(test, prep, root, options, notes)
        y_test = np.array(test.labels, dtype=np.int64)
        refuse_shared_images(str(root), x_train, x_test, train.root.name, test.root.name, notes)
    _refuse_empty(train, classes)
    if unit is not None:
        unit_labels = np.array(owners(train.files, train.root, unit, options))
        _refuse_shared_owners(unit_labels, test, unit, options, notes)
    names = [str(path.relative_to(root)) for path in train.files]
    if unit is not None and unit_labels is not None:
        remark_on_ids(unit_labels.tolist(), names, unit, notes)
    ids = None if unit_labels is None else unit_labels.tolist()
    remark_on_classes(train.labels, ids, classes, unit, str(root), notes)
    remark_on_copies(digests, ids, unit, names, notes)
    _say(parts, prep, notes)
    known = options.channels != "auto" or (test is not None and not all(fact.grey for fact in test.facts))
    if not known:
        notes.append(
            f"the network will see {'grey images' if prep.channels == 1 else 'colours'}, which was read off the private images, "
            f"where a single one can change it; to decide it yourself, give --channels {'grey' if prep.channels == 1 else 'rgb'}"
        )
    digest = hashlib.sha256("".join(f"{k}:{d}\n" for k, d in zip(train.labels, digests, strict=True)).encode())
    labels = np.array(train.labels, dtype=np.int64)
    return Dataset(
        root.resolve().name, x_train, labels, x_test, y_test, len(classes), unit_labels, tuple(classes), prep,
        tuple(notes), digest.hexdigest(), channels_from_images=not known,
    )  # fmt: skip


# -- which files ----------------------------------------------------------------------------------------------------


def _layout(root: Path, notes: list[str]) -> tuple[Path, Path | None]:
    folders = {p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")}
    if "train" not in folders:
        lonely = sorted(folders & set(TEST_NAMES))
        if lonely and len(folders) <= 2:
            raise DataError(f"{root} has a folder {lonely[0]} but none called train; put the training images into train/")
        if len(folders) > 1 and {name.casefold() for name in folders} <= _PARTS:
            raise DataError(
                f"the folders {', '.join(sorted(folders))} of {root} would be its classes, and are called as parts of a data set "
                "are: rename that of the private images to train, and that of the public ones to test"
            )
        return root, None
    tests = [name for name in TEST_NAMES if name in folders]
    unused = sorted(folders - {"train", *tests[:1]})
    if unused:
        notes.append(f"not used: {', '.join(unused)} (beside train{' and ' + tests[0] if tests else ''})")
    return root / "train", root / tests[0] if tests else None


def _classes(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__MACOSX")))
    if not names:
        raise DataError(f"{folder} holds no folders; make one for each class, e.g. {folder}/cat and {folder}/dog")
    if len(names) == 1:
        inside = _folders(folder / names[0])
        hint = f". {folder / names[0]} has folders ({', '.join(inside[:3])}): is that the data?" if len(inside) > 1 else ""
        raise DataError(f"{folder} has one class only ({names[0]}); a classifier needs at least two folders{hint}")
    return names


def _listed(root: Path, classes: list[str], top: Path, notes: list[str]) -> _Part:
    stray = sorted(p for p in root.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
    if stray:
        raise DataError(f"{len(stray)} image(s) in {root} lie in no class folder: {named(stray, root)}")
    files: list[Path] = []
    labels: list[int] = []
    others = [p for p in sorted(root.iterdir()) if p.is_file() and not is_hidden(p, root)]
    for k, name in enumerate(classes):
        images, rest = files_under(root / name)
        files += images
        labels += [k] * len(images)
        others += rest
    if others:
        notes.append(f"{len(others)} file(s) that are no images ({_kinds(others)}) were left aside: {named(others, top)}")
    return _Part(root, files, labels, [])


def _kinds(files: list[Path]) -> str:
    return ", ".join(sorted({p.suffix.lower() or "no suffix" for p in files})[:5])


def _test_part(root: Path, classes: list[str], top: Path, notes: list[str]) -> _Part:
    strange = sorted(set(_folders(root)) - set(classes))
    if strange:
        raise DataError(f"{root} has classes that train has not: {', '.join(strange[:5])}; use the same folder names")
    missing = sorted(set(classes) - set(_folders(root)))
    if missing:
        notes.append(f"no test images for {', '.join(missing[:5])}")
    test = _listed(root, [c for c in classes if c not in missing], top, notes)
    place = {name: k for k, name in enumerate(classes)}
    test.labels = [place[path.relative_to(root).parts[0]] for path in test.files]
    return test


def _folders(root: Path) -> list[str]:
    return [p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "__MACOSX"))]


# -- what is in them ------------------------------------------------------------------------------------------------


def _look(part: _Part) -> list[tuple[Path, str]]:
    """Headers of all files; those that cannot be read leave the part and are returned with the reason."""
    found = _each(_fact_or_reason, part.files, "looking at")
    bad = [(path, fact) for path, fact in zip(part.files, found, strict=True) if isinstance(fact, str)]
    part.facts = [fact if isinstance(fact, ImageFacts) else ImageFacts(0, 0, True, 8) for fact in found]
    part.keep([isinstance(fact, ImageFacts) for fact in found])
    return bad


def _fact_or_reason(path: Path) -> ImageFacts | str:
    try:
        return facts(path)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be opened: {error.strerror or error}"


def _decoded(
    part: _Part, prep: Preprocessing, root: Path, options: DataOptions, notes: list[str]
) -> tuple[np.ndarray, list[str]]:
    """Network inputs of every image, and the digest of each file."""
    x = np.empty((len(part.files), *prep.shape), dtype=np.float32)

    def one(index: int) -> tuple[bool, str]:
        try:
            x[index], digest = read(part.files[index], prep)
        except (BadImage, OSError) as error:
            return False, str(error)
        return True, digest

    results = _each(one, range(len(part.files)), "reading")
    bad = [(part.files[i], why) for i, (good, why) in enumerate(results) if not good]
    _refuse_bad(bad, root, options, notes)
    kept = [good for good, _ in results]
    if bad:
        part.keep(kept)
        x = x[np.array(kept)]
    return prep.normalise(x), [digest for good, digest in results if good]


def _each(function: Callable[..., _T], items: Iterable, doing: str) -> list[_T]:
    """In threads (Pillow decodes outside the interpreter lock), with a bar for large folders on a terminal."""
    values = list(items)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        results = pool.map(function, values)
        if len(values) < MANY or not sys.stderr.isatty():
            return list(results)
        from rich.console import Console
        from rich.progress import track

        console = Console(file=sys.stderr)
        with alone():
            return list(track(results, f"{doing} images", total=len(values), console=console, transient=True))


def _refuse_bad(
    bad: list[tuple[Path, str]], root: Path, options: DataOptions, notes: list[str], also: str = ""
) -> None:
    if not bad:
        return
    if not options.skip_bad:
        cure = "mend or remove them, or pass --skip-bad to go on without them"
        more = f"\nAnd {also}" if also else ""
        raise DataError(f"{len(bad)} image(s) in {root} cannot be used; {cure}:\n{reasons(bad, root)}{more}")
    notes.append(f"{len(bad)} image(s) were left out (--skip-bad):\n{reasons(bad, root)}")


def _refuse_empty(train: _Part, classes: list[str]) -> None:
    empty = [name for k, name in enumerate(classes) if k not in set(train.labels)]
    if empty:
        others = [path for name in empty for path in files_under(train.root / name)[1]]
        there = f" (there are {len(others)} other files, {_kinds(others)}: convert them)" if others else ""
        raise DataError(
            f"{len(empty)} class folder(s) of {train.root} hold no usable image: {', '.join(empty[:5])}; add images "
            f"({', '.join(SUFFIXES)}){there} or remove the folder"
        )


def _mixed_sizes(parts: list[_Part], root: Path, options: DataOptions) -> str:
    """What to say about images of several sizes; empty if there is nothing to say."""
    pairs = [(f, p) for part in parts for p, f in zip(part.files, part.facts, strict=True)]
    sizes = Counter((fact.height, fact.width) for fact, _ in pairs)
    if options.size is not None or len(sizes) <= 1:
        return ""
    listed = ", ".join(f"{w}×{h} ({count})" for (h, w), count in sizes.most_common(4)) + (", …" if len(sizes) > 4 else "")
    common = sizes.most_common(1)[0][0]
    odd = [path for fact, path in pairs if (fact.height, fact.width) != common]
    return (
        f"the images of {root} have {len(sizes)} sizes (width×height): {listed}. Give --image-size N "
        f"to scale and crop them all to N×N. Not {common[1]}×{common[0]}: {named(odd, root)}"
    )


def _format(parts: list[_Part], options: DataOptions) -> Preprocessing:
    """Size and colours. They are the format of the data, and public: give them to make them independent of the files."""
    every = [fact for part in parts for fact in part.facts]
    height, width = options.size or (every[0].height, every[0].width)
    grey = options.channels == "grey" or (options.channels == "auto" and all(fact.grey for fact in every))
    mean, std = options.constants() or ((0.5,), (0.5,))
    resize = options.size is not None
    return Preprocessing(1 if grey else 3, height, width, mean, std, resize=resize, white=options.white)


def _refuse_shared_owners(
    train: np.ndarray, test: _Part | None, unit: str, options: DataOptions, notes: list[str]
) -> None:
    """Nobody may be in both parts; of whom a test image is that names nobody cannot be known."""
    if test is None:
        return
    ids = owners(test.files, test.root, unit, options, strict=False)
    without = [path for path, owner in zip(test.files, ids, strict=True) if not owner]
    if without:
        notes.append(
            f"{len(without)} of {len(ids)} test images have no {unit} by which to see whether they are of somebody in train "
            f"({named(without, test.root)}): whoever is in both is not protected"
        )
    refuse_in_both(train.tolist(), ids, unit, "train", test.root.name)


def _say(parts: list[_Part], prep: Preprocessing, notes: list[str]) -> None:
    every = [fact for part in parts for fact in part.facts]
    total = len(every)
    colours = "greyscale" if prep.channels == 1 else "RGB"
    of_size = [fact for fact in every if (fact.height, fact.width) != (prep.height, prep.width)]
    range_ = f"0 … {prep.white:g}" if prep.white else "0 … 65535"
    for count, text in (
        (sum(f.grey for f in every) if prep.channels == 3 else 0, "greyscale, repeated to RGB"),
        (sum(not f.grey for f in every) if prep.channels == 1 else 0, "in colour, turned to greyscale"),
        (sum(f.bits == 16 and f.grey for f in every), f"16-bit greyscale, read as {range_}"),
        (sum(f.bits == 16 and not f.grey for f in every), "16-bit colour, read with 8 bits"),
        (sum(f.alpha for f in every), "with transparency, put on black"),
        (sum(f.turned for f in every), "turned upright as their camera noted"),
        (sum(f.frames > 1 for f in every), "with several frames, of which the first is used"),
        (len(of_size), f"scaled to cover {prep.width}×{prep.height}, the middle taken"),
    ):
        if count:
            notes.append(f"{count} of {total} images are {text}")
    test = f", {len(parts[1].files)} for the public test" if len(parts) > 1 else ", no test folder"
    notes.insert(0, f"{len(parts[0].files)} training images of {prep.width}×{prep.height}, {colours}{test}")
