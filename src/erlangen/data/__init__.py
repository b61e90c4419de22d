"""Data sets by name, or from a file: arrays in memory, split into private training data and a public test set."""

import erlangen.data.archives
import erlangen.data.rotated  # noqa: F401  (registers)
from erlangen.data.base import Dataset, datasets, load, register_dataset

__all__ = ["Dataset", "datasets", "load", "register_dataset"]
