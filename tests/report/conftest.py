"""Small finished runs to report on, trained once for all tests of this folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erlangen.training import TrainConfig, run

#: cannot stand in a folder's name (no slash there), but anywhere else
SCRIPT = "</script><script>window.hacked = 1</script>"
FOLDER = '<img src=x onerror="window.hacked=1"> & \'_$x$'

SMALL = TrainConfig(
    model="cnn", model_options={"width": 8}, mechanism="rep", epsilon=None, noise_multiplier=1.0, steps=4, batch=64, lr=0.5,
    seed=0, evaluations=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """REP on digits, with an audit stored beside it."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    run.train(SMALL, folder)
    finding = {
        "audit": "canary", "verdict": "consistent", "claim": 5.0, "lower_bound": 0.4, "gdp_lower_bound": 0.6, "ceiling": 3.0,
        "gdp_ceiling": 4.0, "confidence": 0.999, "reason": "the attack did not refute the claim", "trials": 100,
    }  # fmt: skip
    (folder / "audit.json").write_text(json.dumps({"verdict": "consistent", "findings": [finding]}))
    return folder


@pytest.fixture(scope="session")
def hostile(trained, tmp_path_factory) -> Path:
    """The same run with markup wherever a user can write text; the folder's name included."""
    folder = tmp_path_factory.mktemp("hostile") / FOLDER
    shutil.copytree(trained, folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["data"]["name"] = SCRIPT
    summary["data"]["class_names"] = [f"{k}{SCRIPT}<b>$x_{{" for k in range(10)]
    (folder / "summary.json").write_text(json.dumps(summary))
    config = json.loads((folder / "config.json").read_text())
    config["data"] = SCRIPT
    (folder / "config.json").write_text(json.dumps(config))
    audit = json.loads((folder / "audit.json").read_text())
    audit["findings"][0] |= {"audit": SCRIPT, "reason": SCRIPT}
    audit["verdict"] = SCRIPT
    (folder / "audit.json").write_text(json.dumps(audit))
    return folder
