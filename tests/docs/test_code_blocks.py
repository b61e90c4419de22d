"""Every Python block of README and docs runs, in order, in one scope per page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from erlangen.mechanisms import base

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "_MECHANISMS", dict(base._MECHANISMS))  # what a page registers ends with it
    torch.manual_seed(0)
    scope: dict = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, str(page), "exec"), scope)


def test_links_lead_somewhere():
    """Relative links between pages exist."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken
