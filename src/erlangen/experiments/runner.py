"""Runs a preset: every cell, every seed, results beside the paper's numbers."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from erlangen.experiments.presets import Preset
from erlangen.training.run import train


def run_preset(
    preset: Preset, out: Path, first_seed: int = 0, watch: Callable[[str, int, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Finished runs in ``out`` are kept, so that an interrupted table goes on where it stopped."""
    rows = []
    for cell in preset.cells:
        summaries = []
        for seed in range(first_seed, first_seed + preset.seeds):
            folder = out / f"{cell.name.lower().replace(' ', '-')}-seed{seed}"
            done = folder / "summary.json"
            if done.exists():
                summary = json.loads(done.read_text())
            else:
                summary = train(dataclasses.replace(cell.config, seed=seed), folder, overwrite=folder.exists()).summary
            summaries.append(summary)
            if watch is not None:
                watch(cell.name, seed, summary)
        rows.append(_row(cell.name, cell.paper, summaries))
    result = {"preset": preset.name, "paper": preset.paper, "title": preset.title, "note": preset.note, "rows": rows}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _row(name: str, paper: float | None, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    accuracy = [100 * s["test"]["test_accuracy"] for s in summaries]
    return {
        "cell": name,
        "paper": paper,
        "mean": statistics.fmean(accuracy),
        "std": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
        "seeds": len(accuracy),
        "values": accuracy,
        "epsilon": summaries[0]["guarantee"]["epsilon"],
        "delta": summaries[0]["guarantee"]["delta"],
    }
