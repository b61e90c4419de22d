"""Data sets by name, or from a user's folder, file or torch data set: private training data and a public test set."""

import erlangen.data.archives
import erlangen.data.rotated  # noqa: F401  (registers)
from erlangen.data.arrays import from_arrays
from erlangen.data.base import DataError, Dataset, datasets, load, register_dataset
from erlangen.data.folder import read_folder
from erlangen.data.options import DataOptions
from erlangen.data.preprocessing import Preprocessing
from erlangen.data.torch_dataset import from_torch

__all__ = [
    "DataError",
    "DataOptions",
    "Dataset",
    "Preprocessing",
    "datasets",
    "from_arrays",
    "from_torch",
    "load",
    "read_folder",
    "register_dataset",
]
