"""Kernels run under Triton's interpreter where there is no GPU; it must be chosen before they are defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.browsers import browser  # noqa: F401  (a fixture for every room of the tests)
