"""What the site needs beyond Markdown: notebooks become pages, results enter the navigation by themselves, links to files outside
docs/ become their names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

#: [words](../../benchmarks/results): there on disk, not on the site
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests)[^)#]*|[A-Z]+\.md)\)")


def on_config(config: Any) -> Any:
    """The section "Results" lists every page of docs/results under the first words of its heading."""
    pages = sorted((Path(config.docs_dir) / "results").glob("*.md"))
    entries = [{_heading(path): f"results/{path.name}"} for path in pages]
    config.nav = [{"Results": entries} if isinstance(part, dict) and "Results" in part else part for part in config.nav]
    return config


def _heading(path: Path) -> str:
    first = path.read_text(encoding="utf-8").lstrip().splitlines()[0]
    return first.lstrip("# ").split(":")[0]


def on_files(files: Any, config: Any) -> Any:
    for path in sorted((Path(config.docs_dir) / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    depth = page.file.src_uri.count("/") + 1

    def name(match: re.Match[str]) -> str:
        up = match.group(0).count("../")
        return f"{match.group(1)} (`{match.group(2)}`)" if up >= depth else match.group(0)

    return _OUTSIDE.sub(name, markdown)


def page_of(path: Path) -> str:
    """The cells of a notebook as Markdown; outputs are not stored, the tests run the code."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    parts.append(f"*This page is the notebook [{path.name}]({path.name}).*")
    return "\n\n".join(parts) + "\n"
