"""Audits of run folders and of users' own training functions; results stay with the run.

A finished run cannot be audited by looking at it: canaries must have been in it. Its configuration is replayed, under another
run id (so no random stream is shared), with canaries among its records. The released weights are not touched. What a replay
finds is a statistic of a second training on the same records, which no ledger counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import erlangen
from erlangen.accounting import certificate
from erlangen.audit import canaries, membership
from erlangen.audit.foreign import imported
from erlangen.audit.verdict import CONFIDENCE, CONSISTENT, INCONCLUSIVE, VIOLATED, Finding, corrected, unable

FILE = "audit.json"
SHOWN = ("audit", "verdict", "claim", "delta", "confidence", "lower_bound", "gdp_lower_bound", "ceiling", "trials")


def audit_folder(
    folder: Path, run: int = 1000, records: int = 200, seed: int = 0, confidence: float = CONFIDENCE,
    tick: Callable[[int, int], None] | None = None,
) -> list[Finding]:  # fmt: skip
    """White-box canaries, one-run guesses and black-box membership inference for the configuration of a run."""
    from erlangen.training.config import ConfigError, TrainConfig
    from erlangen.training.session import Session

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no run (no config.json); give the folder that training wrote")
    config = TrainConfig.from_file(folder / "config.json")
    session = Session(config, run_id=f"{folder.name}-audit-{seed}")
    findings = canaries.audit_run(session, folder.name, run=run, seed=seed, confidence=confidence, progress=tick)
    if records:
        try:
            findings.append(
                membership.audit_session(
                    config, folder.name, canaries=records, seed=seed, progress=tick, confidence=confidence
                )
            )
        except ValueError as error:
            findings.append(unable(folder.name, "membership", str(error)))
    return corrected(findings, confidence)


def audit_function(
    path: str, data: str, epsilon: float, delta: float, records: int, seed: int, confidence: float = CONFIDENCE
) -> Finding:
    """``package.module:train``, a function of (x, y) that returns a model, against the ε it claims."""
    from erlangen.data import load

    source = load(data)
    x, y = torch.from_numpy(source.x_train), torch.from_numpy(source.y_train)
    return membership.audit_training_function(
        imported(path), x, y, classes=source.classes, epsilon=epsilon, delta=delta, canaries=min(records, len(x) // 4), name=path,
        seed=seed, confidence=confidence,
    )  # fmt: skip


def verdict(findings: Sequence[Finding]) -> str:
    """One violation is enough; otherwise one audit that could have refuted the claim of ε, and did not, makes it consistent."""
    if any(f.verdict == VIOLATED for f in findings):
        return VIOLATED
    return CONSISTENT if any(f.verdict == CONSISTENT and f.claim is not None for f in findings) else INCONCLUSIVE


def store(folder: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    """Write ``audit.json`` into the run's folder, whole or not at all; returns what a certificate shows."""
    result = {
        "verdict": verdict(findings),
        "findings": [f.to_json() for f in findings],
        "erlangen": erlangen.__version__,
    }
    part = folder / (FILE + ".part")
    part.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    part.replace(folder / FILE)
    show_in_certificate(folder, result)
    return summary(result)


def show_in_certificate(folder: Path, result: dict[str, Any]) -> bool:
    """Put the audit into the run's certificate. A signed one is left alone: it says what was signed."""
    path = folder / "certificate.json"
    if not path.is_file():
        return False
    document = certificate.load(path)
    if document.get("signature") is not None:
        return False
    certificate.save({**document, "audit": in_words(result)}, folder)
    return True


def in_words(result: dict[str, Any]) -> str:
    """One line for people: the verdict, and per audit the bound beside its claim."""
    parts = []
    for f in result["findings"]:
        bound = max([b for b in (f["lower_bound"], f["gdp_lower_bound"]) if isinstance(b, (int, float))], default=None)
        if bound is not None and isinstance(f["claim"], (int, float)):
            parts.append(f"{f['audit']} ε ≥ {bound:.3g} of {f['claim']:.3g} claimed")
        else:
            parts.append(f"{f['audit']} {f['verdict']}")
    confidence = max((f["confidence"] for f in result["findings"]), default=CONFIDENCE)
    replay = "a replay with canaries, which ε does not count"
    return f"{result['verdict']} at {100 * confidence:g} % ({replay}): " + "; ".join(parts)


def stored(folder: Path) -> dict[str, Any] | None:
    """The summary of a run's stored audit for its certificate; None if it was never audited."""
    path = Path(folder) / FILE
    return summary(json.loads(path.read_text())) if path.is_file() else None


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Verdict, and per audit its claim, lower bounds and ceiling at the confidence that decided."""
    return {"verdict": result["verdict"], "audits": [{k: f[k] for k in SHOWN} for f in result["findings"]]}
