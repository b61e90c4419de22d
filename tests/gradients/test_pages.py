"""Pages of large buffers are kept between steps, unless the user wished otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from erlangen.gradients import pages

SCRIPT = """
import resource, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import erlangen

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(160, 1024), torch.randint(0, 2, (160,)))
model, optimizer, loader = erlangen.PrivacyEngine(seed=0).make_private(
    module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=32), noise_multiplier=1.0,
    max_grad_norm=1.0, strategy="materialise", check=False,
)
faults = []
for _ in range(2):
    for x, y in loader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[3:]))
"""


def faults(**environment: str) -> int:
    """Pages that a step has to ask for again: 32 records with 4 MB of gradients each are 32,000 pages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "ERLANGEN_KEEP"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**clean, **environment})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(pages.platform.libc_ver()[0] != "glibc", reason="another C library: nothing is promised")
def test_a_step_asks_for_no_pages_again():
    assert faults() < 2_000
    assert faults(ERLANGEN_KEEP_PAGES="0") > 20_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ERLANGEN_KEEP_PAGES", "0"),
        ("MALLOC_TRIM_THRESHOLD_", "100000"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
    ],
)
def test_the_users_choice_stands(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert pages.wished_otherwise()
    assert not pages.keep_pages.__wrapped__()


def test_without_a_word_pages_are_kept(monkeypatch):
    for name in (
        "ERLANGEN_KEEP_PAGES",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "GLIBC_TUNABLES",
        "LD_PRELOAD",
    ):
        monkeypatch.delenv(name, raising=False)
    assert not pages.wished_otherwise()
