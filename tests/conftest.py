"""Kernels run under Triton's interpreter where there is no GPU; it must be chosen before they are defined."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.browsers import browser  # noqa: F401  (a fixture for every room of the tests)

# how fast examples are drawn says something of the machine and of first imports, nothing of the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
