"""Companions of a mechanism: what they ask beside the gradient, and how they draw.

A companion is audited by what it does, not by its name: one that *decides* (`decide(before, after)`) is a release of its own, and
one that *draws* by gradient norms (`probabilities`, `draw`) is a sampler whose rates depend on private records. Anything else is
`inconclusive` until somebody writes its audit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from erlangen.accounting import gaussian, poisson
from erlangen.audit.flow import TOLERANCE, Probe
from erlangen.audit.neighbours import Gradients
from erlangen.audit.randomness import audit_noise, audit_sampler, dependence, judged, poisson_tests
from erlangen.audit.verdict import Finding, failed, passed, unable
from erlangen.mechanisms import GaussianMechanism, StreamNoise
from erlangen.sampling import PoissonSampler, Sampler

Record = Callable[[Any], None]
UNITS, BATCH, SIGMA, BOUND = 50, 3.0, 1.0, 0.5
RATE, FLOOR = 0.3, 0.2


def audit_companion(name: str, kind: type) -> list[Finding]:
    """Every audit that applies to this companion; one that cannot be built or is of an unknown sort is inconclusive."""
    deciding, drawing = hasattr(kind, "decide"), hasattr(kind, "probabilities") and hasattr(kind, "draw")
    if not deciding and not drawing:
        sorts = "decide(before, after), or probabilities(norms) and draw(norms)"
        return [unable(name, "companion", f"no audit knows this companion: it has neither {sorts}")]
    audits = _of_decisions(kind) if deciding else {"companion": lambda n: audit_draws(n, kind)}
    return [_guarded(name, audit, run) for audit, run in audits.items()]


def _guarded(name: str, audit: str, run: Callable[[str], Finding]) -> Finding:
    try:
        return run(name)
    except Exception as error:
        return unable(name, audit, f"{type(error).__name__}: {error}")


def built(kind: Callable[..., Any], **wanted: Any) -> Any:
    """An object with those of the wanted options that its constructor knows."""
    known = _options(kind)
    return kind(**{k: v for k, v in wanted.items() if k in known})


def _options(kind: Callable[..., Any]) -> set[str]:
    """Names of a constructor's options; through ``**kwargs`` those of the class above it."""
    names: set[str] = set()
    for owner in inspect.getmro(kind) if isinstance(kind, type) else (kind,):
        known = inspect.signature(owner.__init__ if isinstance(kind, type) else owner).parameters
        names |= set(known)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
            break
    return names


# --- decisions -------------------------------------------------------------------------------------------------------


def decider(
    kind: type, record: Record, seed: int | None = 0, run: str = "run", units: int = UNITS, batch: float = BATCH
) -> Any:
    return built(
        kind, units=units, expected_batch=batch, noise_multiplier=SIGMA, record=record, bound=BOUND, threshold=-0.05, seed=seed,
        run_id=run,
    )  # fmt: skip


def _of_decisions(kind: type) -> Mapping[str, Callable[[str], Finding]]:
    ignore: Record = lambda event: None  # noqa: E731
    sampler: Callable[..., Sampler] = lambda n, b, seed, run: decider(kind, ignore, seed, run, n, b).sampler  # noqa: E731
    return {
        "companion": lambda name: audit_decisions(name, kind),
        "noise": lambda name: audit_noise(
            name, lambda seed, run, rank: decider(kind, ignore, seed, run).noise, ranks=1,
            beside={"the gradient": StreamNoise(7, "run")},
        ),
        "sampler": lambda name: audit_sampler(name, sampler, beside={"the judges are the batch that trained": PoissonSampler}),
    }  # fmt: skip


def changes() -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, losses' changes of the others, one more): every size that floating point knows, in four precisions."""
    crowd = torch.linspace(-1.0, 1.0, 7)
    just_above = float(np.nextafter(np.float32(BOUND), np.float32(9)))
    sizes = [0.0, 1e-42, 1e-12, 0.999999 * BOUND, BOUND, just_above, 2 * BOUND, 1e18, 3e38]
    for value in [s * sign for s in sizes for sign in (1, -1)] + [math.nan, math.inf, -math.inf]:
        for others in (crowd[:0], crowd):
            yield f"a change of {value:g} among {len(others)}", others, torch.tensor([value])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield f"a change of 7 in {dtype}", crowd.to(dtype), torch.tensor([7.0], dtype=dtype)


class _Witness(Probe):
    """Also asks, at every draw, whether the decision's price was written down before."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events, self.unpaid = events, False

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        self.unpaid |= len(self.events) <= self.release
        return super().perturb(value, std) * 0.1


def audit_decisions(name: str, kind: type) -> Finding:
    """One record moves a decision through its noise alone, by no more than is paid, and every decision is paid for first."""
    worst, tried = 0.0, 0
    for label, others, one in changes():
        seen = [_decided(kind, losses) for losses in (torch.cat([others, one]), others)]
        tried += 1
        problem = _difference(*seen)
        if problem:
            return failed(name, "companion", f"{problem} ({label})", tried)
        (a, paid), (b, _) = ((s["draws"], s["sigma"]) for s in seen)
        gap = math.sqrt(
            sum(float((x.value.double() - y.value.double()).square().sum()) / float(x.std) ** 2 for x, y in zip(a, b))
        )
        moved = gap / math.sqrt(2) * paid  # two decisions in a row
        worst = max(worst, moved)
        if not moved <= 1 + TOLERANCE:
            return failed(
                name, "companion", f"one record moves a decision by {moved:.5g} times what is paid for ({label})", tried
            )
    return passed(name, "companion", tried, {"sensitivity": worst})


def _decided(kind: type, change: Tensor) -> dict[str, Any]:
    """Two decisions in a row: their answers, noise draws, price and what is kept."""
    events: list[Any] = []
    companion = decider(kind, events.append)
    companion.noise = witness = _Witness(events)
    answers = [companion.decide(torch.zeros_like(change), change) for _ in range(2)]
    release = getattr(events[-1], "event", None) if events else None
    return {
        "answers": answers, "draws": witness.draws, "unpaid": witness.unpaid or len(events) != 2, "releases": witness.release + 1,
        "event": events[-1] if events else None, "sigma": getattr(release, "noise_multiplier", math.inf),
        "state": {k: v for k, v in companion.state_dict().items() if k != "noise"}, "sampler": companion.sampler.event,
    }  # fmt: skip


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    if a["unpaid"] or b["unpaid"]:
        return "a decision is made before its event is recorded, or without one"
    if a["event"] != b["event"] or a["event"] != a["sampler"](gaussian(a["sigma"])):
        return f"the recorded event {a['event']!r} is not that of a decision on this companion's sample"
    if a["releases"] != 2:
        return "noise is reused: a decision did not open a new stream (next_release)"
    if [(d.value.shape, d.std.tolist()) for d in a["draws"]] != [(d.value.shape, d.std.tolist()) for d in b["draws"]]:
        return "the number or the scale of noise draws depends on the record"
    if a["answers"] != b["answers"]:
        return "the decision depends on the record around the noise"
    if a["state"] != b["state"]:
        return "what is kept for the next decision depends on the record"
    return None


# --- draws by gradient norms -----------------------------------------------------------------------------------------


def importance(kind: Callable[..., Any], seed: int | None = 0, run: str = "run") -> Any:
    return built(kind, max_rate=RATE, bound=BOUND, floor=FLOOR, seed=seed, run_id=run)


def norms() -> Tensor:
    """Zero, denormal, around C, huge, infinite and not a number; then ordinary ones."""
    special = [0.0, 1e-42, 1e-30, 0.1 * BOUND, 0.999999 * BOUND, BOUND, 1.5 * BOUND, 1e18, 3e38, math.inf, math.nan]
    return torch.cat([torch.tensor(special), torch.linspace(0.0, 1.2 * BOUND, 30)])


def audit_draws(name: str, kind: Callable[..., Any], steps: int = 3000) -> Finding:
    """Each record's rate depends on itself alone and is at most the rate that is paid for; draws are independent."""
    release = gaussian(1.0)
    event = importance(kind).event(release)
    if type(event).__name__ == "NonPrivateDpEvent":
        return passed(name, "companion", facts={"note": "nothing is claimed (ε = ∞)"})
    if event != poisson(getattr(event, "sampling_probability", 0.5), release):
        return unable(name, "companion", f"the companion claims {event!r}; this audit knows Poisson sampling")
    q, every = event.sampling_probability, norms()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        problem = _rates(kind, every.to(dtype), q)
        if problem:
            return failed(name, "companion", f"{problem} ({dtype})")
    p = _drawn_as_stated(kind, every, steps)
    return judged(name, "companion", p, steps, {"event": repr(event)})


def _rates(kind: Callable[..., Any], every: Tensor, q: float) -> str | None:
    companion = importance(kind)
    p = companion.probabilities(every)
    if not bool(torch.isfinite(p).all()) or bool((p < 0).any()):
        return f"a rate is {float(p[~torch.isfinite(p) | (p < 0)][0])}"
    if float(p.max()) > q * (1 + 1e-12):
        return f"a record of norm {float(every[int(p.argmax())]):g} is drawn at rate {float(p.max()):.6g}, paid for is {q:g}"
    for k in range(len(every)):
        rest = [i for i in range(len(every)) if i != k]
        if not torch.equal(companion.probabilities(every[rest]), p[rest]):
            return f"the rates of the others change when a record of norm {float(every[k]):g} leaves"
    return None


def _drawn_as_stated(kind: Callable[..., Any], every: Tensor, steps: int) -> dict[str, float]:
    companion = importance(kind, 5)
    rates = companion.probabilities(every).numpy()

    def table(source: Any, rows: int) -> np.ndarray:
        out = np.zeros((rows, len(every)))
        for step in range(rows):
            out[step, source.draw(every)[0].numpy()] = 1.0
        return out

    drawn = table(companion, steps)
    resumed = importance(kind, 5)
    resumed.load_state_dict(companion.state_dict())
    p = poisson_tests(drawn, rates, round(1 / RATE))
    scale = np.sqrt(rates * (1 - rates))
    standard = lambda x: (x - rates) / scale  # noqa: E731
    twins = {"another run draws the same": importance(kind, 5, "other"), "draws repeat after a restart": resumed}
    for label, twin in twins.items():
        p[label] = dependence(standard(drawn[:200]), standard(table(twin, 200)))
    return p


def drawn_by(kind: type[Sampler]) -> Callable[..., Any]:
    """A sampler that draws by norms, seen as a companion: what it is handed at each draw are its units' norms."""

    class Drawn:
        def __init__(self, max_rate: float, bound: float, floor: float, seed: int | None, run_id: str) -> None:
            units = len(norms())
            self.sampler = built(
                kind,
                units=units,
                expected_batch=max_rate * units,
                bound=bound,
                floor=floor,
                refresh=1,
                seed=seed,
                run_id=run_id,
            )

        def probabilities(self, every: Tensor) -> Tensor:
            return self.sampler.rule.probabilities(every)

        def draw(self, every: Tensor) -> tuple[Tensor, Tensor]:
            self.sampler.norms = lambda: every
            return self.sampler.draw(), self.sampler.weights

        def event(self, release: Any) -> Any:
            return self.sampler.event(release)

        def state_dict(self) -> dict[str, Any]:
            return self.sampler.state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.sampler.load_state_dict(state)

    return Drawn


# --- as releases, for Monte Carlo ------------------------------------------------------------------------------------


class Decision:
    """A decision as a release: per-record changes of the loss in, one bit out. ``noise`` is the companion's own."""

    shapes: Mapping[str, torch.Size] = {"change": torch.Size([1])}

    def __init__(self, kind: type, sigma: float, seed: int = 0) -> None:
        self.sigma = sigma
        self.companion = built(
            kind, units=UNITS, expected_batch=BATCH, noise_multiplier=sigma, record=lambda event: None, bound=BOUND, seed=seed,
        )  # fmt: skip

    @property
    def noise(self) -> Any:
        return self.companion.noise

    @noise.setter
    def noise(self, source: Any) -> None:
        self.companion.noise = source

    def release(self, gradients: Gradients) -> dict[str, Tensor]:
        change = gradients["change"].flatten()
        return {"accepted": torch.tensor([float(self.companion.decide(torch.zeros_like(change), change))])}

    def event(self) -> Any:
        return gaussian(self.sigma)


class ImportanceStep:
    """Draw by norms, weigh, clip, sum, add noise: a step with importance sampling as a release of Poisson(q_max) price."""

    shapes: Mapping[str, torch.Size] = {"weight": torch.Size([3])}

    def __init__(self, kind: type, sigma: float, rate: float = 0.5, seed: int = 0) -> None:
        self.companion = built(kind, max_rate=rate, bound=BOUND, seed=seed)
        self.mechanism = GaussianMechanism(sigma, BOUND, noise=StreamNoise(seed, "importance step"))
        self.mechanism.bind({n: torch.zeros(s) for n, s in self.shapes.items()}, BATCH)

    def release(self, gradients: Gradients) -> dict[str, Tensor]:
        g = gradients["weight"]
        records, weights = self.companion.draw(g.norm(dim=1))
        return self.mechanism.release({"weight": g[records] * weights[:, None].to(g)})

    def event(self) -> Any:
        return self.companion.event(self.mechanism.event())


__all__ = ["Decision", "ImportanceStep", "audit_companion", "audit_decisions", "audit_draws", "built", "drawn_by"]
