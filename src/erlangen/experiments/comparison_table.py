"""A comparison as one table: text for a terminal, Markdown, CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from erlangen.accounting.words import upper

HEADER = ("ε", "mechanism", "network", "accuracy", "± std", "seeds", "against {first}", "true ε", "setting")


def cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as strings. Differences are mean [95 % interval], in points, paired by seed."""
    header = [name.format(first=result["mechanisms"][0]) for name in HEADER]
    rows = []
    for row in result["rows"]:
        rows.append([
            f"{row['target_epsilon']:g}", row["mechanism"], row["model"], f"{100 * row['mean']:.2f}",
            "–" if row["std"] is None else f"{100 * row['std']:.2f}", str(row["seeds"]), difference(row), true_epsilon(row),
            _setting(row["chosen"]),
        ])  # fmt: skip
    return header, rows


def difference(row: dict[str, Any]) -> str:
    pair = row["against_first"]
    if pair is None:
        return "–"
    mean, half = 100 * pair["mean"], pair["half_width_95"]
    return f"{mean:+.2f}" if half is None else f"{mean:+.2f} [{mean - 100 * half:+.2f}, {mean + 100 * half:+.2f}]"


def true_epsilon(row: dict[str, Any]) -> str:
    for method in ("pld", "rdp"):
        value = row["epsilon"].get(method)
        if value is not None:
            return "∞" if value == "inf" else f"{upper(value, 4)} ({method.upper()})"
    return "–"


def text(result: dict[str, Any]) -> str:
    header, rows = cells(result)
    widths = [max(len(line[k]) for line in [header, *rows]) for k in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in [header, *rows]]
    return "\n".join([_title(result), "", lines[0], "-" * len(lines[0]), *lines[1:], "", *_notes(result)])


def markdown(result: dict[str, Any]) -> str:
    header, rows = cells(result)
    lines = ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in [header, *rows]]
    rule = "|" + "---|" * len(header)
    return "\n".join(
        [f"# {_plain(_title(result))}", "", lines[0], rule, *lines[1:], "", *(f"{_plain(n)}\n" for n in _notes(result))]
    )


def comma_separated(result: dict[str, Any]) -> str:
    """One line per run, for further work: mechanism, ε, seed, accuracy."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "mechanism",
            "model",
            "target_epsilon",
            "epsilon_pld",
            "epsilon_rdp",
            "delta",
            "noise_multiplier",
            "seed",
            "accuracy",
        ]
    )
    for row in result["rows"]:
        for seed, accuracy in enumerate(row["accuracies"]):
            spent = row["epsilon"]
            writer.writerow([
                row["mechanism"], row["model"], row["target_epsilon"], spent.get("pld"), spent.get("rdp"), row["delta"],
                row["noise_multiplier"], seed, accuracy,
            ])  # fmt: skip
    return buffer.getvalue()


def _title(result: dict[str, Any]) -> str:
    data = result["data"]
    return (
        f"{', '.join(result['mechanisms'])} on {data['name']} ({data['records']:,} records), public test accuracy in %"
    )


def _notes(result: dict[str, Any]) -> list[str]:
    first = result["mechanisms"][0]
    notes = [f"Differences from {first} are in points, paired by seed, with 95 % intervals (Student's t)."]
    if len({row["model"] for row in result["rows"]}) > 1:
        notes.append(
            "Not all mechanisms trained the same network: the comparison is of network and mechanism together."
        )
    return [*notes, result["covers"]]


def _setting(chosen: dict[str, Any] | None) -> str:
    if chosen is None:
        return "of each search"
    loss = chosen["mechanism_options"].get("loss")
    if isinstance(loss, dict) and len(loss) > 1:
        numbers = [f"{key} {value:.3g}" for key, value in loss.items() if isinstance(value, float)]
        return f"lr {chosen['lr']:.3g}, {' '.join([loss['name'], *numbers])}"
    return f"lr {chosen['lr']:.3g}, C {chosen['max_grad_norm']:.3g}"


def _plain(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
