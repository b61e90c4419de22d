"""What averaging answers over views is worth: a finished run's accuracy on public test images, with single views and with all.

    python benchmarks/views.py runs/first runs/second --out views.json

Both look at the same images, so the difference has a paired interval over images (95 %, normal). No privacy is spent: the weights
were released before. Nothing is chosen here; the views are those of `erlangen.deploy.averaged`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from erlangen.deploy.averaged import Averaged, rows_at_once
from erlangen.deploy.card import load_run
from erlangen.training.built import load_data
from erlangen.training.config import TrainConfig
from erlangen.training.metrics import scores


@torch.no_grad()
def compare(folder: Path, rows: int = 512) -> dict[str, Any]:
    """Scores with single and averaged views, and the gain in accuracy with its half width."""
    config, (averaged, _) = TrainConfig.from_file(folder / "config.json"), load_run(folder, average_views=True)
    assert isinstance(averaged, Averaged)
    data = load_data(config)
    if data.x_test is None or data.y_test is None:
        raise SystemExit(f"{folder} has no public test images to compare on")
    x, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    answers = {
        name: torch.cat([model(part) for part in x.split(rows_at_once(model, rows))])
        for name, model in (("single", averaged.model), ("averaged", averaged))
    }
    right = {name: (logits.argmax(1) == y).double() for name, logits in answers.items()}
    gain = right["averaged"] - right["single"]
    half = 1.96 * float(gain.std()) / len(gain) ** 0.5
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "run": folder.name, "data": config.data, "model": config.model, "augment": config.augment, "views": averaged.count,
        "images": len(y), "epsilon": summary["guarantee"]["epsilon"], "delta": summary["guarantee"]["delta"], "seed": config.seed,
        **{name: scores(logits, y, data.classes) for name, logits in answers.items()},
        "gain": float(gain.mean()), "half_width_95": half,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for folder in args.runs:
        row = compare(folder)
        found.append(row)
        one, many = (100 * row[name]["test_accuracy"] for name in ("single", "averaged"))
        print(f"{row['run']}: {one:.2f} % → {many:.2f} % ({100 * row['gain']:+.2f} ± {100 * row['half_width_95']:.2f})", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"benchmark": "views", **provenance(), "runs": found}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
