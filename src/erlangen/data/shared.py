"""The test set is public: its accuracy, its answers and some of its images are stored as they are."""

from __future__ import annotations

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
