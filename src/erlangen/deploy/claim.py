"""What an exported file says of privacy: what the run's certificate says, if that holds and speaks of these weights."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from erlangen.accounting import certificate, examine
from erlangen.accounting.words import in_json
from erlangen.deploy.fold import ExportError

NOTHING = "there was no certificate beside the run, so nothing is claimed"
OTHERS = "the certificate beside the run does not say of which weights it speaks, so nothing is claimed of these"


def claim(run: Path) -> dict[str, Any]:
    """The verified guarantee, with what validation on the training's records cost beyond it, and whether it was compared with a
    ledger. A certificate that does not hold stops the export: whoever gets the file has nothing to compare its ε with."""
    path = run / "certificate.json"
    if not path.is_file():
        return {"epsilon": None, "note": NOTHING}
    found = examine(path, page=False)
    if found.problems:
        raise ExportError(
            f"the certificate of {run} does not hold, and an exported file would repeat its ε: {found.problems[0]}. See erlangen "
            f"verify {quote(str(run))}; without certificate.json the file claims nothing"
        )
    if found.certified is None or not found.certified["weights_compared"]:
        return {"epsilon": None, "note": OTHERS}
    document = certificate.load(path)
    # seeded noise can be drawn again, and statistics without a guarantee may be about, or somebody is in the
    # public test set: ε alone would say too much
    said = {
        "epsilon": document["guarantee"]["epsilon"], "delta": document["delta"], "unit": document["unit"],
        "neighbouring": document["neighbouring"], "randomness": document["randomness"].removesuffix(": not for release"),
        "non_private": document["non_private"], "not_covered": document["not_covered"],
        "ledger_compared": found.certified["ledger_compared"],
    }  # fmt: skip
    beyond = found.validation
    if beyond is None:
        return said
    return {**said, "epsilon_with_validation": in_json(beyond.epsilon), "validation": beyond.words}
