"""Whose image is it? Ids of patients (or any unit of privacy) from file names or from a table."""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from erlangen.data.images import named
from erlangen.data.options import DataOptions
from erlangen.data.preprocessing import DataError

_FILE_COLUMNS = ("file", "filename", "file_name", "path", "image", "image_path", "name")


def owners(files: list[Path], root: Path, unit: str, options: DataOptions, strict: bool = True) -> list[str | None]:
    """The id of every file; a file without one is an error, or None where ``strict`` is off (public test images)."""
    if options.unit_pattern is not None:
        found = _by_pattern(files, root, unit, options.unit_pattern)
    elif options.unit_csv is not None:
        found = _by_table(files, root, unit, Path(options.unit_csv))
    else:
        raise DataError(
            f"unit is {unit!r}, but nothing says which {unit} an image of {root} belongs to: give --unit-pattern with the "
            f"id in brackets (e.g. '^(p[0-9]+)_' for names like p12_03.png), or --unit-csv with columns file and {unit}"
        )
    without = [path for path, owner in zip(files, found, strict=True) if not owner]
    if without and strict:
        source = f"pattern {options.unit_pattern!r}" if options.unit_pattern else options.unit_csv
        raise DataError(f"{len(without)} image(s) have no {unit} by {source}: {named(without, root)}{_hint(unit, options)}")
    return found


def folded(owner: object) -> str:
    """An id without what people, and their machines, write differently: capitals, spaces around it, leading zeros, a
    spreadsheet's ".0", accents beside their letters (as some file systems have them), wide letters, dashes of other lengths."""
    plain = re.sub("[\u2010-\u2015\u2212]", "-", unicodedata.normalize("NFKC", str(owner)))
    text = re.sub(r"\.0+$", "", unicodedata.normalize("NFKC", plain.strip().casefold()))
    return re.sub(r"(?<![0-9])0+(?=[0-9])", "", text)


def remark_on_ids(ids: Sequence[object], names: Sequence[str], unit: str, notes: list[str]) -> None:
    """Ids that look as if they were not whose they should be: a unit of its own for every image, one unit in two spellings."""
    spellings: dict[str, set[str]] = {}
    for owner in ids:
        spellings.setdefault(folded(owner), set()).add(str(owner))
    twice = sorted(sorted(found)[:2] for found in spellings.values() if len(found) > 1)
    if twice:
        a, b = twice[0]
        notes.append(
            f"{len(twice)} {unit}(s) are written in several ways ({_shown(a, b)}, say) and are protected as different ones: if "
            "they are the same, write them alike"
        )
    if len(ids) > len(set(ids)) == 1:
        notes.append(
            f"all {len(ids)} images are of one {unit} ({str(ids[0])!r}), and noise that hides one hides all there is to learn: if "
            "there are several, what says whose they are is wrong"
        )
    if 1 < len(ids) == len(set(ids)):
        notes.append(
            f"every image has a {unit} of its own ({names[0]}: {str(ids[0])!r}), so that each is protected by itself: if a {unit} "
            "can have several, what says whose they are is wrong"
        )


def remark_on_classes(
    labels: Sequence[int], ids: Sequence[object] | None, names: Sequence[str], unit: str | None, source: str, notes: list[str]
) -> None:
    """Classes are public, by their number and their names: one that a single unit (``ids``; a record by default) makes up says
    that this unit is in the data. Where all are such, classes were taken for what they are not, or nothing could be protected."""
    owner: Sequence[object] = range(len(labels)) if ids is None else ids
    held: dict[int, set[object]] = {}
    for label, whose in zip(labels, owner, strict=True):
        held.setdefault(label, set()).add(whose)
    alone = [names[k] if k < len(names) else str(k) for k in sorted(held) if len(held[k]) == 1]
    if not alone or len(set().union(*held.values())) == 1:  # of one for all `remark_on_ids` speaks
        return
    whom, listed = unit or "record", ", ".join(alone[:3]) + (f" and {len(alone) - 3} more" if len(alone) > 3 else "")
    if unit is not None and len(alone) == len(held) > 2:  # two may be a small trial
        raise DataError(
            f"every class of {source} ({listed}) holds one {unit} only: classes are public, and so would be who is in the data, "
            f"whatever ε is. If they are folders of {unit}s, make one folder for each class, with those of its {unit}s inside"
        )
    notes.append(
        f"{len(alone)} class(es) hold one {whom} only ({listed}): classes are public, and so is then that there is one; put "
        "classes together, or leave them out"
    )


def _shown(one: str, other: str) -> str:
    """Both spellings, so that they can be told apart where they look the same."""
    looks_alike = unicodedata.normalize("NFKC", one) == unicodedata.normalize("NFKC", other)
    return f"{one!a} and {other!a}" if looks_alike else f"{one!r} and {other!r}"


def in_both(private: Iterable[object], public: Iterable[object | None]) -> list[str]:
    """Ids of the public part that stand in the private one, in whatever spelling."""
    known = {folded(owner) for owner in private}
    return sorted({str(owner) for owner in public if owner is not None and folded(owner) in known})


def refuse_in_both(
    train: Iterable[object], test: Iterable[object | None], unit: str, private: str, public: str, where: str = ""
) -> None:
    """The test set (the part called ``public``) is public: whoever has images there has no privacy to protect in training."""
    shared = in_both(train, test)
    if shared:
        raise DataError(
            f"{where}{len(shared)} {unit}(s) have images in {private} and in {public} ({', '.join(shared[:3])}): the test set is "
            f"public and its accuracy is printed, so their images there are not protected. Keep each {unit} in one part."
        )


def _hint(unit: str, options: DataOptions) -> str:
    """What the table calls its files, so that both ways of writing can be seen together."""
    if options.unit_csv is None:
        where = "path below the folder" if "/" in str(options.unit_pattern) else "file's name (its path, if the pattern has a '/')"
        return f". The pattern is searched in the {where}; mend it, or give --unit-csv with columns file and {unit}"
    rows = _read_table(Path(options.unit_csv), unit)
    if not rows:
        return ". The table has no rows: give each image one, with its file and its " + unit
    return f". The table has {len(rows)} rows, the first for {next(iter(rows))!r}: add what is missing, or take the images out"


def _by_pattern(files: list[Path], root: Path, unit: str, pattern: str) -> list[str | None]:
    """The named group of the unit, or the first; matched on the file's name, or on its path if the pattern has a '/'."""
    compiled = re.compile(pattern)
    group: str | int = unit if unit in compiled.groupindex else 1
    texts = [path.relative_to(root).as_posix() if "/" in pattern else path.name for path in files]
    matches = [compiled.search(text) for text in texts]
    return [None if match is None else match.group(group) for match in matches]


def _by_table(files: list[Path], root: Path, unit: str, table: Path) -> list[str | None]:
    """A row for each image: its path (below the folder, with the folders above, or all of it), or a name no two share."""
    known = _read_table(table, unit)
    count: dict[str, int] = {}
    for path in files:
        count[path.name] = count.get(path.name, 0) + 1
    found: list[str | None] = []
    for path in files:
        keys = [*_written(path, root), *([path.name] if count[path.name] == 1 else [])]
        rows = [key for key in keys if key in known]
        if (other := next((key for key in rows if known[key] != known[rows[0]]), None)) is not None:
            raise DataError(
                f"{table} says of {path.relative_to(root)} that it belongs to {known[rows[0]]!r} ({rows[0]}) and to "
                f"{known[other]!r} ({other}); keep one row, with the path of the image that it is for"
            )
        found.append(known[rows[0]] if rows else None)
    return found


def _written(path: Path, root: Path) -> list[str]:
    """cat/1.png, train/cat/1.png, scans/train/cat/1.png, and the whole path."""
    relative, above = path.relative_to(root).as_posix(), root.resolve()
    return [relative, f"{above.name}/{relative}", f"{above.parent.name}/{above.name}/{relative}", path.resolve().as_posix()]


def _read_table(table: Path, unit: str) -> dict[str, str]:
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=head.count)  # spreadsheets write semicolons where the comma is a decimal sign
            rows = list(csv.DictReader(file, delimiter=delimiter))
            columns = list(rows[0]) if rows else []
    except UnicodeDecodeError as error:
        raise DataError(f"{table} is not written in UTF-8; save it again as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as a CSV table: {error}") from error
    lower = {str(c).strip().lower(): c for c in columns}
    name = next((lower[c] for c in _FILE_COLUMNS if c in lower), None)
    if name is None or unit.lower() not in lower:
        raise DataError(f"{table} has the columns {columns}; it needs one called file and one called {unit}")
    known: dict[str, str] = {}
    for number, row in enumerate(rows, start=2):
        key, owner = (row[name] or "").strip().replace("\\", "/").removeprefix("./"), (row[lower[unit.lower()]] or "").strip()
        if known.setdefault(key, owner) != owner:
            raise DataError(f"{table}, line {number}: {key} belongs to {known[key]!r} and to {owner!r}; keep one row")
    return known
