"""Every Python block of README and docs runs, in order, in one scope per page."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from erlangen.cli.main import app
from erlangen.experiments.presets import tables
from erlangen.gradients.registry import registered
from erlangen.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/*/*.md"))]
REGISTRIES = (
    "erlangen.mechanisms.base._MECHANISMS", "erlangen.mechanisms.clipping.base._RULES", "erlangen.gradients.registry._RULES",
    "erlangen.models._MODELS",
)  # fmt: skip
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registered()  # ours first, or those that are imported while a page runs would end with it too
    for registry in REGISTRIES:  # what a page registers ends with it
        module, _, name = registry.rpartition(".")
        monkeypatch.setattr(registry, dict(getattr(importlib.import_module(module), name)))
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


COMMANDS = [
    (page, line)
    for page in PAGES
    for line in re.findall(r"^ {4,}(erlangen .*)$", re.sub(r"\\\n *", " ", page.read_text()), re.M)
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: getattr(value, "name", value))
def test_commands_are_understood(page, line):
    """Every command line of the docs has commands and options that exist; it is parsed, not run."""
    words = [w for w in shlex.split(line, comments=True) if w != "…"]
    if "--plugin" in words:  # every command takes it, before its own options are read
        del words[(at := words.index("--plugin")) : at + 2]
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup):
        words = words[1:]
        assert words[0] in command.commands, line
        command = command.commands[words[0]]
    if "--help" not in words:
        command.make_context(words[0], words[1:])


def test_the_docs_name_every_table_and_figure():
    page = (ROOT / "docs" / "reproduce.md").read_text()
    listed = page.split("|---|---|")[1].split("Beside them")[0]
    assert set(re.findall(r"`([a-z]+-\w+)`", listed)) == set(tables())


def test_the_docs_name_every_option_of_a_run():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [f.name for f in dataclasses.fields(TrainConfig) if f"`{f.name}`" not in page] == []
