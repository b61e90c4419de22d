"""Images that are there twice: in training and in the public test set, or under two units of privacy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from erlangen.data.preprocessing import DataError

#: fewer images than this in both parts may be chance (blank ones, say)
FEW = 10


def refuse_shared_images(
    name: str, train: np.ndarray, test: np.ndarray, private: str, public: str, notes: list[str]
) -> None:
    """A test set (the part called ``public``) that is mostly made of training images is refused; single ones are said."""
    known = {hash(row.tobytes()) for row in train}
    shared = sum(hash(row.tobytes()) in known for row in test)
    what = f"{shared} of the {len(test)} images of {public} are in {private}, too"
    if shared >= FEW and 2 * shared > len(test):
        raise DataError(
            f"{name}: {what}. The test set is public: predictions on it, and some of its images, are stored without noise. Take "
            f"them out of one of both, or leave {public} out (erlangen validate releases an accuracy on private records)"
        )
    if shared:
        notes.append(f"{what}: the test set is public, and so are they")


def remark_on_copies(
    contents: Iterable[Hashable], owners: Sequence[Hashable] | None, unit: str | None, names: Sequence[str], notes: list[str]
) -> None:
    """Say which training images are copies of one of another unit (``owners``; records by default): each copy is protected as if
    it were somebody else's."""
    owner: Sequence[Hashable] = range(len(names)) if owners is None else owners
    first: dict[Hashable, Hashable] = {}
    copies = [k for k, content in enumerate(contents) if first.setdefault(content, owner[k]) != owner[k]]
    if not copies:
        return
    listed = ", ".join(names[k] for k in copies[:3]) + (f" and {len(copies) - 3} more" if len(copies) > 3 else "")
    cure = "remove them, or give copies one --unit" if unit is None else f"give them one {unit}"
    notes.append(
        f"{len(copies)} training image(s) are copies of one of another {unit or 'record'} ({listed}): each is protected by itself, "
        f"and whoever is on k of them has spent about kε, not ε; {cure}"
    )
