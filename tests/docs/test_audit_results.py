"""The first lines of the page of audits say what its tables show, as a new page would."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

from erlangen.audit.everything import Everything
from erlangen.audit.markdown import page as written
from erlangen.audit.verdict import Finding
from tests.docs.test_results import FOLDER

PAGE = (FOLDER / "audit.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The first table of a section, without its head."""
    table = PAGE.split(f"## {section}\n")[1].split("\n\n|")[1].split("\n\n")[0]
    return [[c.strip(" *") for c in line.strip()[1:-1].split("|")] for line in table.splitlines()[2:]]


def as_told() -> Everything:
    """What the tables tell of the results that they were written from."""
    releases: list[Any] = [
        SimpleNamespace(
            entry=SimpleNamespace(paper=r[0], claimed_by=r[2]),
            finding=Finding(r[1], "release", r[9], claim=float(r[3])),
        )
        for r in rows("One release")
    ]
    verdicts = ("consistent", "violated", "inconclusive")
    static = [
        Finding("", r[0], v)
        for r in rows("Static audit")
        for v, n in zip(verdicts, r[2:5], strict=True)
        for _ in range(int(n))
    ]
    zoo = [
        {"name": r[0], "kind": r[1], "bug": r[2], "caught_by": [] if r[3] == "nothing" else [r[3]]}
        for r in rows("Does it have teeth?")
    ]
    ((spared, sound),) = re.findall(r"(\d+) of (\d+) sound ones passed", PAGE.split("## Does it have teeth?")[1])
    zoo += [{"name": "", "kind": "", "bug": "", "caught_by": ["noise"] * (i >= int(spared))} for i in range(int(sound))]
    nothing: dict[str, Any] = {f.name: [] for f in dataclasses.fields(Everything)}
    runs = [Finding(r[0], r[1], r[7]) for r in rows("Training runs")]
    return Everything(**{**nothing, "rows": releases, "runs": runs, "static": static, "zoo": zoo})


def test_the_page_begins_with_what_its_tables_show() -> None:
    new, stands = (text.split("\n## ")[0] for text in (written(as_told()), PAGE))
    assert new == stands
