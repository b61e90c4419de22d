"""The site builds without a warning: no broken link, no page left out of the navigation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
ROOT = Path(__file__).parents[2]


def build(root: Path, out: Path) -> subprocess.CompletedProcess:
    # not --quiet: it hides warnings from --strict, too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for page in ("index", "which-mechanism", "ui", "methods/rep", "notebooks/auditing"):
        text = (tmp_path / "site" / f"{page}.html").read_text()
        assert "fonts.googleapis" not in text


def test_a_broken_link_would_be_caught(tmp_path):
    """The broken twin."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with open(tmp_path / "docs" / "start.md", "a") as file:
        file.write("\n[nowhere](no-such-page.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "no-such-page" in done.stderr
