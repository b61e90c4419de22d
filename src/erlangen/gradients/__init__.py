"""Per-sample gradients: rows and their owners, pieces, the tape, one rule per layer family."""

from erlangen.gradients.attach import attach, detach, is_attached, plan
from erlangen.gradients.pieces import Dense, Lookup, Outer
from erlangen.gradients.registry import registered, rule
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import PerSampleGradients, Tape

__all__ = [
    "Dense",
    "Lookup",
    "Outer",
    "PerSampleGradients",
    "RowMap",
    "Tape",
    "attach",
    "detach",
    "is_attached",
    "plan",
    "registered",
    "rule",
]
