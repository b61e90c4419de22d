"""The static audit: deterministic where it can be, over everything that is registered.

Mechanisms, clipping rules, samplers, noise sources, companions, layer rules and Lipschitz layers are found by their registries, and
what the library defines without registering it is found by its class (`registry`), so that a new one cannot escape: what cannot be
built or has no example is `inconclusive`, which is not a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from erlangen.audit.clipping import audit_clipping, audit_constants
from erlangen.audit.companions import audit_companion, audit_draws, built, drawn_by
from erlangen.audit.covariance import audit_covariance, audit_energy, states_its_covariance
from erlangen.audit.ensembles import Process, audit_ensemble
from erlangen.audit.examples import Example, bounded_examples, combinations_of_layers, layer_examples
from erlangen.audit.flow import audit_flow
from erlangen.audit.layers import audit_layer
from erlangen.audit.prior import audit_normalisation
from erlangen.audit.randomness import audit_noise, audit_sampler
from erlangen.audit.recipes import BATCH, ENLARGED, Recipe, recipes, small_network
from erlangen.audit.registry import defined, load_all, missing
from erlangen.audit.restarts import audit_restarts, restart_cases
from erlangen.audit.sessions import audit_crowds, audit_sessions
from erlangen.audit.steps import audit_step
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Finding, corrected, failed, passed, unable
from erlangen.mechanisms import ClippingRule, Mechanism, NoiseSource, StreamNoise, make_clipping
from erlangen.mechanisms.clipping import clipping_rules
from erlangen.mechanisms.companions import companions
from erlangen.sampling import Sampler, samplers
from erlangen.streams import seed_layers


@single_threaded
def audit_bounds(name: str, build: Callable[[], Any], shape: tuple[int, ...], steps: int = 15) -> Finding:
    """A Lipschitz layer's three bounds under gradient ascent, at its initial weights and at wild ones after projection."""
    from erlangen.lipschitz import check_layer

    seed_layers(0)
    worst = 0.0
    try:
        for attempt in range(3):
            layer = build()
            if attempt:
                for p in layer.parameters():
                    p.data.normal_(0, 10.0**attempt)
                layer.project()
            report = check_layer(layer, shape, steps=steps, restarts=4, move_weights=attempt == 0, seed=attempt)
            worst = max(worst, report.worst)
    except AssertionError as error:
        return failed(name, "bounds", str(error))
    return passed(name, "bounds", facts={"found_over_certified": worst})


def guarded(name: str, audit: str, run: Callable[..., Finding], *args: Any) -> Finding:
    """An audit that cannot run is inconclusive, never a pass and never a crash of the others."""
    try:
        return run(name, *args)
    except Exception as error:
        return unable(name, audit, f"{type(error).__name__}: {error}")


@single_threaded
def static_audit(progress: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Every registered thing; verdicts corrected for their number (Holm)."""
    return corrected([finding for k in range(len(PARTS)) for finding in audit_part(k, progress)])


def audit_part(k: int, progress: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """One of `PARTS`, not corrected for the number of audits."""
    load_all()
    return list(PARTS[k](progress))


def unseen(kind: type, audit: str) -> Finding:
    """Something the library defines that no audit looked at."""
    where = f"{kind.__module__}.{kind.__qualname__}"
    return unable(kind.__qualname__, audit, f"{where} is defined, but nothing registered builds one: register it")


def _mechanisms(progress: Callable[[str], None]) -> Iterator[Finding]:
    seen = set()
    for recipe in recipes():
        if isinstance(recipe, tuple):
            yield unable(recipe[0], "flow", f"could not be built: {recipe[1]}")
            continue
        progress(recipe.name)
        seen.add(type(recipe.build()))
        yield from audit_releases_of(recipe)
    for name, sharded in sharded_builds().items():
        progress(name)
        yield guarded(name, "flow", _alone_in_a_group, sharded, seen)
    for kind in missing(Mechanism, seen):
        yield unseen(kind, "flow")


def audit_releases_of(recipe: Recipe) -> Iterator[Finding]:
    """One variant of a mechanism: its release alone, the noise it states, and a step of training."""
    yield guarded(recipe.name, "flow", _flow, recipe)
    if states_its_covariance(recipe.build()):
        yield guarded(recipe.name, "covariance", _covariance, recipe)
        yield guarded(recipe.name, "energy", _energy, recipe)
    for build in recipe.steps():
        yield guarded(recipe.name, "training step", audit_step, build)


def sharded_builds() -> dict[str, Callable[[Any], Mechanism]]:
    """Mechanisms that only exist on sharded parameters: from a device mesh to one of them."""

    def gaussian(mesh: Any, metric: bool = False) -> Mechanism:
        from torch.distributed.tensor import DTensor, Shard

        from erlangen.mechanisms.geometry import Diagonal
        from erlangen.sharded import ShardedGaussian

        plain = {n: torch.zeros_like(p) for n, p in small_network().named_parameters()}
        stretched = Diagonal({n: torch.linspace(0.5, 2.0, p.numel()).view(p.shape) for n, p in plain.items()})
        geometry, name = (stretched, "rep") if metric else (None, "iso")
        mechanism = ShardedGaussian(1.0, make_clipping("flat", 0.7), geometry, StreamNoise(None, "audit"), name)
        mechanism.bind({n: DTensor.from_local(p, mesh, [Shard(0)], run_check=False) for n, p in plain.items()}, BATCH)
        return mechanism

    return {"iso, sharded": gaussian, "rep, sharded": partial(gaussian, metric=True)}


def _alone_in_a_group(name: str, build: Callable[[Any], Mechanism], seen: set[type]) -> Finding:
    """Information flow in a process group of one. That workers draw from streams of their own is the noise audit's matter."""
    import torch.distributed as dist

    if dist.is_initialized():
        return unable(
            name, "flow", "a process group exists already: audit sharded mechanisms in a process of their own"
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        mechanism = build(mesh)
        seen.add(type(mechanism))
        return audit_flow(name, lambda: build(mesh), mechanism.shapes, 0.7)
    finally:
        dist.destroy_process_group()


def _sessions(progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every mechanism in training sessions, with options that stand together."""
    for k, recipe in enumerate(r for r in recipes() if isinstance(r, Recipe)):
        progress(f"sessions with {recipe.name}")
        yield audit_sessions_of(recipe, k)
    for device in devices():
        if device != "cpu":
            yield guarded(f"iso, crowds on {device}", "session", audit_crowds, {"mechanism": "iso"}, device)


def audit_sessions_of(recipe: Recipe, k: int = 0) -> Finding:
    """One variant of a mechanism in whole sessions: the ``k``-th share of the combinations of options."""
    loss = {"loss": "cross-entropy"} if "loss" in recipe.options else {}
    mechanism = {"mechanism": recipe.mechanism, "mechanism_options": {**recipe.options, **loss}}
    return guarded(recipe.name, "session", audit_sessions, k, mechanism)


def _restarts(progress: Callable[[str], None]) -> Iterator[Finding]:
    """Sessions of every source of randomness, stopped and resumed through their checkpoints."""
    for name, options in restart_cases().items():
        progress(name)
        yield guarded(name, "restart", audit_restarts, options)


def _ensembles(progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every mechanism and clipping rule that ensembles have; their own Poisson process; classes that nothing above built."""
    from erlangen.training.stacked_release import StackedRelease

    seen: set[type] = set()
    built = [r for r in recipes() if isinstance(r, Recipe)]
    for recipe in [*built, *(Recipe("iso", {}, clipping=rule) for rule in clipping_rules() if rule != "flat")]:
        progress(f"ensembles with {recipe.name}")
        options = {
            "mechanism": recipe.mechanism,
            "mechanism_options": dict(recipe.options),
            "clipping": recipe.clipping,
        }
        try:
            found = audit_ensemble(recipe.name, options, seen)
        except Exception as error:
            found = unable(recipe.name, "ensemble", f"{type(error).__name__}: {error}")
        if found is not None:
            yield found
    yield guarded("Poisson process of ensembles", "sampler", audit_sampler, Process)
    for kind in missing(StackedRelease, seen):
        yield unseen(kind, "ensemble")


def _prior(progress: Callable[[str], None]) -> Iterator[Finding]:
    progress("private normalisation")
    yield guarded("private normalisation", "prior release", audit_normalisation)


def _flow(name: str, recipe: Recipe) -> Finding:
    return audit_flow(name, recipe.build, recipe.build().shapes, recipe.bound)


def _covariance(name: str, recipe: Recipe) -> Finding:
    return audit_covariance(recipe.subject())


def _energy(name: str, recipe: Recipe) -> Finding:
    return audit_energy(replace(recipe, network=ENLARGED[recipe.network]).subject())


def _clipping(progress: Callable[[str], None]) -> Iterator[Finding]:
    for name in clipping_rules():
        progress(name)
        yield from audit_rule(name)
    for kind in missing(ClippingRule, clipping_rules().values()):
        yield unseen(kind, "clipping")


def audit_rule(name: str) -> Iterator[Finding]:
    """One registered clipping rule: its weights, its constants, and what it lets through."""
    yield guarded(name, "clipping", audit_clipping, clipping_rules()[name])
    yield guarded(name, "constants", audit_constants, clipping_rules()[name])
    clipped = Recipe("iso", {}, clipping=name)
    yield guarded(clipped.name, "flow", _flow, clipped)


def _noise(progress: Callable[[str], None]) -> Iterator[Finding]:
    for kind in defined(NoiseSource):
        progress(kind.__name__)
        yield guarded(kind.__name__, "noise", audit_noise, partial(_source, kind))


def _source(kind: type[NoiseSource], seed: int | None, run: str, rank: int) -> NoiseSource:
    return built(kind, seed=seed, run_id=run, rank=rank)


def _samplers(progress: Callable[[str], None]) -> Iterator[Finding]:
    kinds = {kind.name: kind for kind in defined(Sampler)} | samplers()  # type: ignore[attr-defined]
    for name, kind in kinds.items():
        progress(name)
        for label, secure in ((f"{name} sampler", False), (f"{name} sampler, secure", True)):
            yield guarded(label, "sampler", audit_sampler, partial(_sampler, kind, secure))
        if hasattr(_sampler(kind, False, 4, 2.0, 0, ""), "norms"):
            yield guarded(f"{name} sampler", "companion", audit_draws, drawn_by(kind))


def _sampler(kind: type[Sampler], secure: bool, units: int, batch: float, seed: int | None, run: str) -> Sampler:
    return built(
        kind, units=units, expected_batch=batch, bound=1.0, seed=None if secure else seed, run_id=run, secure=secure
    )


def _companions(progress: Callable[[str], None]) -> Iterator[Finding]:
    for name, kind in companions().items():
        progress(name)
        yield from audit_companion(name, kind)


def _layers(progress: Callable[[str], None]) -> Iterator[Finding]:
    rules = {getattr(kind, "__name__", str(kind)): example for kind, example in layer_examples().items()}
    for name, example in {**rules, **combinations_of_layers()}.items():
        progress(name)
        yield from audit_example(name, example)
    for kind, entry in bounded_examples().items():
        progress(kind.__name__)
        if entry is None:
            yield unable(kind.__name__, "bounds", "a Lipschitz layer without an example in erlangen.audit.examples")
        else:
            yield guarded(kind.__name__, "bounds", audit_bounds, *entry)


def audit_example(name: str, example: Example | None) -> Iterator[Finding]:
    """The rule of one layer, on every device that has kernels of its own."""
    if example is None:
        yield unable(name, "layer rule", "registered, but without an example: give its class an attribute audit_example")
        return
    for device in devices():
        where = name if device == "cpu" else f"{name} on {device}"
        yield guarded(where, "layer rule", audit_layer, example, 3, device)


def devices() -> tuple[str, ...]:
    """A GPU, where there is one, has kernels of its own."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


PARTS = (_mechanisms, _sessions, _restarts, _ensembles, _prior, _clipping, _noise, _samplers, _companions, _layers)
