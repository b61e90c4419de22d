"""A run as its report sees it: what lies in the folder, read with distrust.

Names, classes and options come from users and are only ever text here. The certificate is recomputed, not believed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from erlangen.accounting import certificate, certificate_check
from erlangen.accounting.certificate_beside import Validation
from erlangen.accounting.certificate_check import Verdict
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import options_of, without_places
from erlangen.training.public import PublicPredictions

#: options that do not make two runs different experiments
INCIDENTAL = ("seed", "secure", "device", "max_physical_batch", "strategy", "evaluations", "checkpoints", "non_private")


class ReportError(ValueError):
    """A folder cannot be reported on; the message says which and why."""


@dataclass(frozen=True)
class Run:
    """One finished run. ``problems`` says what in its certificate does not hold; ``certificate`` is None without one."""

    folder: Path
    config: TrainConfig
    summary: dict[str, Any]
    certificate: dict[str, Any] | None
    problems: tuple[str, ...]
    history: tuple[dict[str, Any], ...]
    audit: dict[str, Any] | None
    public: PublicPredictions | None
    #: what the comparison that the run belongs to says about its ε
    note: str = ""
    #: what private validation of the run has released, of which its certificate says nothing
    validation: Validation | None = None
    #: what could not be compared with its certificate
    unchecked: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def guarantee(self) -> dict[str, Any]:
        return self.summary["guarantee"]

    @property
    def delta(self) -> float:
        return float(self.guarantee["delta"])

    @property
    def epsilon(self) -> float:
        """The true ε: of the certificate if it verifies, of the summary without one, ∞ if they cannot be believed."""
        if self.problems:
            return math.inf
        if self.certificate is not None:
            return finite_or_inf(self.certificate["guarantee"]["best_epsilon"])
        return finite_or_inf(self.guarantee["epsilon"]["pld"])

    @property
    def spent(self) -> float:
        """ε of each unit of the training, with what validation on its very records released. Where those are not the units,
        nobody knows how many belong to one: then it is ∞, and `validation` says what holds for whom."""
        beyond = self.validation
        return self.epsilon if beyond is None or not beyond.on_training else max(self.epsilon, beyond.epsilon)

    @property
    def accuracy(self) -> float | None:
        """On the public test set; None without one."""
        value = self.summary.get("test", {}).get("test_accuracy")
        return None if value is None else float(value)

    @property
    def classes(self) -> int:
        if self.public is not None:
            return int(self.public.logits.shape[1])
        return int(self.summary["data"].get("classes") or 0)

    def class_name(self, index: int) -> str:
        names = self.summary["data"].get("class_names")
        return str(names[index]) if isinstance(names, list) and index < len(names) else str(index)

    @property
    def non_private(self) -> list[str]:
        """Statistics of private records that were computed outside any mechanism in this run."""
        return [str(x) for x in self.summary.get("non_private") or []]

    @property
    def options(self) -> dict[str, Any]:
        """Every option as it may be shown."""
        return without_places(self.config)

    @cached_property
    def setting(self) -> str:
        """Everything that decides the run but its seed: runs of one setting differ by chance alone."""
        values = json.loads(self.config.to_json())
        return json.dumps({k: v for k, v in values.items() if k not in INCIDENTAL}, sort_keys=True)

    def model(self) -> nn.Module:
        """The trained network, from the weights of the folder."""
        from erlangen.deploy.card import load_model

        shape = self.summary["data"].get("input_shape")
        if shape is None and self.public is not None:
            shape = self.public.images.shape[1:]
        if shape is None or not self.classes:
            raise ReportError(f"{self.folder} does not say the shape of its images; train it again to see its network")
        return load_model(self.folder, tuple(int(n) for n in shape), self.classes)


def read(folder: Path) -> Run:
    """The run in ``folder``."""
    if not (folder / "config.json").is_file():
        raise ReportError(f"{folder} holds no run: there is no config.json; give a folder of erlangen train")
    if not (folder / "summary.json").is_file():
        raise ReportError(
            f"the run in {folder} has not finished: `erlangen ui {folder.parent}` follows one that is running, "
            f"`erlangen train --resume {quote(str(folder))}` goes on with one that was stopped"
        )
    config = TrainConfig.from_file(folder / "config.json")
    summary = _json(folder / "summary.json")
    if not isinstance(summary, dict) or not isinstance(summary.get("guarantee"), dict):
        raise ReportError(f"{folder / 'summary.json'} is not the summary of a run")
    summary.setdefault("data", {})
    document, found = _certificate(folder)
    problems = found.problems
    if document is not None and not problems:
        problems = (*_contradictions(summary, document), *_other_options(config, document))
    return Run(
        folder, config, summary, document, problems, history(folder), _audit(folder), PublicPredictions.load(folder),
        validation=found.validation, unchecked=_unchecked(found),
    )  # fmt: skip


def collect(folders: Iterable[Path]) -> list[Run]:
    """Runs of the folders in order; a comparison's folder stands for its final runs."""
    runs: list[Run] = []
    for folder in folders:
        index = folder / "comparison.json"
        if index.is_file():
            result = _json(index)
            finished = [c for c in map(str, result.get("runs", [])) if (folder / c / "summary.json").is_file()]
            runs += [dataclasses.replace(read(folder / c), note=str(result.get("covers", ""))) for c in finished]
        else:
            runs.append(read(folder))
    if not runs:
        raise ReportError("there is no finished run to report on")
    return runs


def _certificate(folder: Path) -> tuple[dict[str, Any] | None, Verdict]:
    path = folder / "certificate.json"
    if not path.is_file():
        return None, Verdict(())
    found = certificate_check.examine(path, page=False)  # a report is a page of its own
    try:
        return certificate.load(path), found
    except ValueError:
        return None, found


def _unchecked(found: Verdict) -> tuple[str, ...]:
    """What could not be compared with the certificate, and contradicts nothing."""
    return tuple(words for words in found.remarks if found.validation is None or words != found.validation.words)


def _contradictions(summary: dict[str, Any], document: dict[str, Any]) -> list[str]:
    """What the summary, from which a report takes its words, promises beyond the certificate, from which it takes ε."""
    told, bare = summary["guarantee"], lambda words: str(words).removesuffix(": not for release")
    pairs = {
        "δ": (told.get("delta"), document["delta"]), "the unit": (told.get("unit"), document["unit"]),
        "randomness": (bare(summary.get("randomness")), bare(document["randomness"])),
        "non_private": (summary.get("non_private"), document["non_private"]),
        "the number of releases": (told.get("releases", document["steps"]), document["steps"]),
        "the number of records": (summary["data"].get("records", document["data"]["size"]), document["data"]["size"]),
    }  # fmt: skip
    for part in ("mechanism", "sampler"):
        here, there = (facts if isinstance(facts, dict) else {} for facts in (told.get(part), document[part]))
        pairs |= {f"{name} of the {part}": (here.get(name), value) for name, value in there.items()}
    for method, value in document["guarantee"]["epsilon"].items():
        stated = told.get("epsilon", {}).get(method)
        same = value is None or math.isclose(finite_or_inf(stated), finite_or_inf(value), rel_tol=1e-3)
        pairs[f"ε by {method.upper()}"] = (stated, stated if same else value)
    unlike = ((what, here, there) for what, (here, there) in pairs.items() if here != there)
    return [f"{what} is {here!r} in summary.json, and {there!r} in the certificate" for what, here, there in unlike]


def _other_options(config: TrainConfig, document: dict[str, Any]) -> list[str]:
    """Options that a page would show, and the certificate has otherwise."""
    certified = document["config"] or {}
    return [
        f"{name} is {value!r} in config.json, and {certified[name]!r} in the certificate"
        for name, value in options_of(config).items()
        if name in certified and certified[name] != value
    ]


def history(folder: Path) -> tuple[dict[str, Any], ...]:
    """Evaluations by step. A resumed run may have written a step twice: the last one counts. A torn line is left out."""
    rows = dict(_evaluations(folder))
    return tuple(rows[step] for step in sorted(rows))


def evaluated(folder: Path) -> list[int]:
    """The steps of all evaluations, as they were written one after the other."""
    return [step for step, _ in _evaluations(folder)]


def _evaluations(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    path = folder / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            yield int(row["step"]), row
        except (ValueError, KeyError, TypeError):
            continue


def _audit(folder: Path) -> dict[str, Any] | None:
    path = folder / "audit.json"
    found = _json(path) if path.is_file() else None
    return found if isinstance(found, dict) and isinstance(found.get("findings"), list) else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error


def finite_or_inf(value: Any) -> float:
    """Files write ∞ as "inf"; whatever is no number is not a guarantee."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.inf
    return number if not math.isnan(number) else math.inf


__all__ = ["ConfigError", "ReportError", "Run", "collect", "evaluated", "finite_or_inf", "history", "read"]
