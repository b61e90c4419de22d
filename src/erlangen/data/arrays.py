"""Arrays in memory or in .npz and .npy files: checked, and turned into a `Dataset`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from erlangen.data.base import Dataset, digest_of
from erlangen.data.options import DataOptions
from erlangen.data.owners import refuse_in_both, remark_on_classes, remark_on_ids
from erlangen.data.preprocessing import DataError, Preprocessing
from erlangen.data.shared import refuse_shared_images, remark_on_copies

#: integer formats whose range is known
_LARGEST = {"uint8": 255.0, "uint16": 65535.0, "bool": 1.0}


def read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:
        why = "it holds objects, not arrays of numbers" if "pickle" in str(error) else str(error)
        raise DataError(f"{path} cannot be read as .npz: {why}; save it with np.savez") from error


def read_npy_folder(folder: Path) -> dict[str, np.ndarray]:
    """x_train.npy, y_train.npy, … and any further array (patient.npy) beside each other."""
    arrays = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            arrays[path.stem] = np.load(path, allow_pickle=False)
        except Exception as error:
            why = "it holds objects, not an array of numbers" if "pickle" in str(error) else str(error)
            raise DataError(f"{path} cannot be read as .npy: {why}; save it with np.save") from error
    return arrays


def from_arrays(
    name: str, arrays: dict[str, np.ndarray], unit: str | None = None, options: DataOptions | None = None
) -> Dataset:
    """A data set of x_train, y_train and, if there, x_test, y_test, class_names and the array that ``unit`` names.

    An array ``<unit>_test`` says whose the test images are: nobody may be in both parts.
    Integer pixels are scaled by the range of their type; floats are used as they are, unless ``options.normalise`` says
    otherwise. The fingerprint is that of the arrays as they were given, whatever the options do to them.
    """
    options = options or DataOptions()
    for key in ("x_train", "y_train"):
        if key not in arrays:
            raise DataError(f"{name} has no array {key!r} (it has {sorted(arrays)}); save it with np.savez(…, {key}=…)")
    x_test, y_test = arrays.get("x_test"), arrays.get("y_test")
    if (x_test is None) != (y_test is None):
        raise DataError(f"{name} has only one of x_test and y_test; give both or neither")
    if given := next((key for key in ("unit_pattern", "unit_csv") if getattr(options, key) is not None), None):
        raise DataError(f"{given} is {getattr(options, given)!r}, but {name} holds arrays, whose rows have no file names; leave it "
                        f"out: the array {unit!r} says whose each row is")  # fmt: skip
    names = _class_names(name, arrays)
    notes: list[str] = []
    owner = _unit(name, arrays, unit)
    x_train, y_train, owner, prep = _part(name, "train", arrays, owner, len(names), options, None, notes)
    classes, public = int(y_train.max()) + 1, len(names)
    if x_test is not None:
        x_test, y_test, _, _ = _part(name, "test", arrays, None, len(names), options, prep, notes)
        refuse_shared_images(name, arrays["x_train"], arrays["x_test"], "x_train", "x_test", notes)
        if unit is not None and f"{unit}_test" in arrays:
            theirs = arrays[f"{unit}_test"].tolist()
            refuse_in_both(arrays[unit].tolist(), theirs, unit, "x_train", "x_test", f"{name}: ")
        public = max(public, int(y_test.max(initial=0)) + 1)
        classes = max(classes, public)
    if unit is not None and owner is not None:
        remark_on_ids(owner.tolist(), [f"row {k}" for k in range(len(x_train))], unit, notes)
    ids = None if owner is None else owner.tolist()
    remark_on_classes(y_train.tolist(), ids, names, unit, name, notes)
    rows = (hash(row.tobytes()) for row in x_train)
    remark_on_copies(rows, ids, unit, [f"row {k}" for k in range(len(x_train))], notes)
    if classes > public:
        notes.append(
            f"that there are {classes} classes is read off the private labels, where one record can change it; save class_names "
            "with the arrays"
        )
    if len(np.unique(y_train)) < 2:
        raise DataError(f"{name} has one class only; a classifier needs at least two")
    absent = sorted(set(range(max(classes, len(names)))) - set(y_train.tolist()))
    if absent:
        notes.append(f"no training image has label {', '.join(map(str, absent[:5]))}{' …' if len(absent) > 5 else ''}")
    return Dataset(
        name, x_train, y_train, x_test, y_test, max(classes, len(names)), owner, names, prep, tuple(notes),
        digest_of(arrays["x_train"], arrays["y_train"]), classes > public,
    )  # fmt: skip


def _part(
    name: str, part: str, arrays: dict[str, np.ndarray], owner: np.ndarray | None, classes: int, options: DataOptions,
    like: Preprocessing | None, notes: list[str],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, Preprocessing]:  # fmt: skip
    """One part, checked and normalised; the test part must look like the training part."""
    key_x, key_y = f"x_{part}", f"y_{part}"
    y = _labels(name, key_y, arrays[key_y], len(arrays[key_x]))
    x = _channels_first(name, key_x, arrays[key_x])
    good, why = _good_rows(x, y, classes)
    if not good.all():
        rows = np.flatnonzero(~good)
        listed = f"{', '.join(map(str, rows[:3]))}{f' and {len(rows) - 3} more' if len(rows) > 3 else ''}"
        if not options.skip_bad:
            raise DataError(
                f"{name}: {key_x}, {key_y} cannot be used in record(s) {listed}: {why}; mend them, or pass --skip-bad to "
                "train without them"
            )
        notes.append(f"{len(rows)} record(s) of {part} were left out (--skip-bad): {listed} ({why})")
        x, y = x[good], y[good]
        owner = None if owner is None else np.asarray(owner)[good]
    if not len(x):
        raise DataError(f"{name}: no record of {key_x} is left; there is nothing to train on")
    pixels, kind = scaled(name, key_x, x, options.white)
    if options.size is not None and pixels.shape[2:] != options.size:
        pixels = resized(pixels, options.size)
        notes.append(f"{key_x} was scaled and cropped to {options.size[1]}×{options.size[0]}")
    pixels = _with_channels(name, key_x, pixels, options.channels)
    prep = like or _preprocessing(pixels.shape[1:], kind, options)
    if pixels.shape[1:] != prep.shape or kind != prep.kind:
        raise DataError(
            f"{name}: {key_x} has shape {pixels.shape[1:]} per image ({kind}), x_train {prep.shape} ({prep.kind})"
        )
    return prep.normalise(pixels), y, owner, prep


def _preprocessing(shape: tuple[int, ...], kind: str, options: DataOptions) -> Preprocessing:
    mean, std = options.constants() or (((0.5,), (0.5,)) if kind == "image" else ((0.0,), (1.0,)))
    channels, height, width = shape
    return Preprocessing(channels, height, width, mean, std, kind, options.size is not None, options.white)


def scaled(name: str, key: str, x: np.ndarray, white: float | None) -> tuple[np.ndarray, str]:
    """Pixels in [0, 1] and "image", or the floats as they are and "array"."""
    if np.issubdtype(x.dtype, np.floating):
        return np.array(x, dtype=np.float32), "array"
    if np.issubdtype(x.dtype, np.complexfloating):
        raise DataError(f"{name}: {key} holds {x.dtype}; save real and imaginary parts (or magnitude and phase) as channels")
    largest = white or _LARGEST.get(str(x.dtype))
    if largest is None:
        raise DataError(
            f"{name}: {key} holds {x.dtype}, which has no range of its own: save uint8 or uint16, or give the value of "
            "white (--white 255)"
        )
    pixels = x.astype(np.float32)
    pixels /= np.float32(largest)
    return np.clip(pixels, 0.0, 1.0, out=pixels), "image"


def resized(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[N, C, H, W] scaled to cover ``size``, the middle taken."""
    import torch
    import torch.nn.functional as F

    height, width = x.shape[2:]
    scale = max(size[0] / height, size[1] / width)
    cover = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    pieces = torch.from_numpy(x).split(1024)
    whole = torch.cat([F.interpolate(p, cover, mode="bilinear", antialias=True, align_corners=False) for p in pieces])
    top, left = (cover[0] - size[0]) // 2, (cover[1] - size[1]) // 2
    return whole[:, :, top : top + size[0], left : left + size[1]].contiguous().numpy()


def _with_channels(name: str, key: str, x: np.ndarray, wanted: str) -> np.ndarray:
    count = {"grey": 1, "rgb": 3}.get(wanted, x.shape[1])
    if count == x.shape[1]:
        return x
    if x.shape[1] == 1:
        return np.repeat(x, 3, 1)
    if x.shape[1] != 3:
        raise DataError(f"{name}: {key} has {x.shape[1]} channels, which cannot be turned to {wanted}")
    return np.tensordot(x, np.array([0.299, 0.587, 0.114], np.float32), (1, 0))[:, None].astype(np.float32)


def _channels_first(name: str, key: str, x: np.ndarray) -> np.ndarray:
    if not len(x):
        raise DataError(f"{name}: {key} is empty; there is nothing to train on")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4:
        raise DataError(f"{name}: {key} has shape {x.shape}; expected N×H×W, N×H×W×C or N×C×H×W")
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
        raise DataError(f"{name}: {key} holds {x.dtype}; pixels are numbers")
    return x


def _labels(name: str, key: str, y: np.ndarray, rows: int) -> np.ndarray:
    if not rows:
        raise DataError(f"{name}: there are no images for {key}; there is nothing to train on")
    if y.shape != (rows,):
        raise DataError(f"{name}: {key} has shape {y.shape} for {rows} images; give one integer label per image")
    if y.dtype.kind in "US":
        raise DataError(
            f"{name}: {key} holds words, but labels must be integers ≥ 0; save class_names, labels = np.unique(words, "
            "return_inverse=True), and both of them"
        )
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{name}: {key} holds {y.dtype}, but labels must be integers ≥ 0; save it with .astype(int)")
    return y.astype(np.int64)


def _good_rows(x: np.ndarray, y: np.ndarray, classes: int) -> tuple[np.ndarray, str]:
    """Which records can be used, and what is wrong with the others."""
    limit = classes or 1_000_000
    in_range = (y >= 0) & (y < limit)
    finite = np.ones(len(x), dtype=bool)
    if np.issubdtype(x.dtype, np.floating):
        finite = np.isfinite(x).reshape(len(x), -1).all(1)
    why = []
    if not in_range.all():
        bound = f"below {classes}, the number of class_names" if classes else "below a million"
        why.append(f"labels must be integers ≥ 0 and {bound}, got {y.min()} to {y.max()}")
    if not finite.all():
        why.append("pixels are not finite (NaN or infinity)")
    return in_range & finite, "; ".join(why)


def _class_names(name: str, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    if "class_names" not in arrays:
        return ()
    names = arrays["class_names"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{name}: class_names holds {names.dtype} {names.shape}; save one string for each class")
    return tuple(str(n) for n in names)


def _unit(name: str, arrays: dict[str, np.ndarray], unit: str | None) -> np.ndarray | None:
    if unit is None:
        return None
    if unit not in arrays:
        raise DataError(f"{name} has no array {unit!r} for the unit of privacy (it has {sorted(arrays)})")
    owner = arrays[unit]
    if owner.shape != arrays["x_train"].shape[:1]:
        rows = len(arrays["x_train"])
        raise DataError(f"{name}: {unit} has shape {owner.shape} for {rows} training images; give one id per image")
    return owner
