"""The static audit of one registered thing, for whoever is just writing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from erlangen.audit.examples import layer_examples
from erlangen.audit.recipes import Recipe, recipes
from erlangen.audit.registry import load_all
from erlangen.audit.static import audit_example, audit_releases_of, audit_rule, audit_sessions_of
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Finding, corrected, unable
from erlangen.mechanisms import mechanisms
from erlangen.mechanisms.clipping import clipping_rules
from erlangen.spelling import hint


@single_threaded
def audit_registered(name: str, progress: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """The mechanism, clipping rule or layer of this name; verdicts corrected for their number (Holm)."""
    load_all()
    layers = {getattr(kind, "__name__", str(kind)): example for kind, example in layer_examples().items()}
    if name in mechanisms():
        return corrected(list(_mechanism(name, progress)))
    progress(name)
    if name in clipping_rules():
        return corrected(list(audit_rule(name)))
    if name in layers:
        return corrected(list(audit_example(name, layers[name])))
    known = [*mechanisms(), *clipping_rules(), *layers]
    raise ValueError(
        f"nothing is registered as {name!r}; give a mechanism ({', '.join(sorted(mechanisms()))}), a clipping rule "
        f"({', '.join(sorted(clipping_rules()))}) or a layer's class, or name the file that registers it: --plugin FILE."
        f"{hint(name, known)}"
    )


def _mechanism(name: str, progress: Callable[[str], None]) -> Iterator[Finding]:
    for recipe in recipes(only=name):
        if not isinstance(recipe, Recipe):
            yield unable(recipe[0], "flow", f"could not be built: {recipe[1]}")
            continue
        progress(recipe.name)
        yield from audit_releases_of(recipe)
        progress(f"sessions with {recipe.name}")
        yield audit_sessions_of(recipe)
