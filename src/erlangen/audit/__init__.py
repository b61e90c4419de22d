"""Audits: attacks on the real code path, and what they prove.

    erlangen.audit.audit_named("gredp", {"as_published": "complex"}, claim_epsilon=1.0)     one release
    erlangen.audit.audit_registered("gredp")                                                one registered thing, statically
    erlangen.audit.static_audit()                                                           everything registered
    erlangen.audit.audit_folder(Path("runs/mine"))                                          a run, replayed with canaries

Each returns `Finding`s: claim, lower bounds, the ceiling that the number of trials allows, and a verdict.
"""

from __future__ import annotations

from erlangen.audit.companions import audit_companion
from erlangen.audit.foreign import imported_subject, opacus_subject
from erlangen.audit.intervals import Counts, epsilon_lower, gdp_lower, holm
from erlangen.audit.layers import Example, audit_layer
from erlangen.audit.membership import audit_training_function
from erlangen.audit.montecarlo import Releases, Subject, audit_releases
from erlangen.audit.named import audit_named
from erlangen.audit.one_run import Guesses, guess
from erlangen.audit.runs import audit_folder, stored
from erlangen.audit.single import audit_registered
from erlangen.audit.static import static_audit
from erlangen.audit.steps import Step, audit_step
from erlangen.audit.verdict import CONSISTENT, INCONCLUSIVE, VIOLATED, Claim, Finding, corrected

__all__ = [
    "CONSISTENT",
    "INCONCLUSIVE",
    "VIOLATED",
    "Claim",
    "Counts",
    "Example",
    "Finding",
    "Guesses",
    "Releases",
    "Step",
    "Subject",
    "audit_companion",
    "audit_folder",
    "audit_layer",
    "audit_named",
    "audit_registered",
    "audit_releases",
    "audit_step",
    "audit_training_function",
    "corrected",
    "epsilon_lower",
    "gdp_lower",
    "guess",
    "holm",
    "imported_subject",
    "opacus_subject",
    "static_audit",
    "stored",
]
