"""Where private values go: a mechanism's releases may depend on records through its noise source alone.

The noise source is replaced by a `Probe` that writes down every value handed to it and answers with numbers that do *not* depend
on that value. Then, for neighbouring batches D and D':

- the scale and number of noise draws must be the same (noise scaled by the realised batch is not);
- what is released, and what is kept for the next step, must be *bit for bit* the same: a difference travelled around the noise
  (a layer without noise, a bin without noise, the realised batch size as denominator, a count released as it is);
- Σ ‖(value − value')/std‖² ≤ 1/σ² for the σ of the claimed event: the sensitivity in units of the noise, over all draws of the
  release together (so per-layer clipping counted once, or a side query not paid for, shows).

The real noise source must not repeat either, from release to release or after a restart (`reused`).

Together with an honest noise source these are what makes a Gaussian mechanism; the search over D and D' is finite, so
passing is not proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from erlangen.audit.neighbours import Gradients, Pair, directions, flatten, unflatten
from erlangen.audit.search import stated_covariance
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Claim, Finding, failed, passed, unable
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.noise import NoiseSource

#: what rounding may add to a sensitivity of 1
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Draw:
    release: int
    value: Tensor
    std: Tensor


class Probe(NoiseSource):
    """Writes down what it is asked to hide; answers with noise that forgets the value."""

    secure = False
    description = "audit"

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self.release = -1

    def next_release(self) -> None:
        self.release += 1

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        g = torch.Generator().manual_seed(1_000_003 * (self.release + 1) + len(self.draws))
        self.draws.append(Draw(self.release, value.detach().clone(), torch.as_tensor(std, dtype=torch.float64).clone()))
        return torch.randn(value.shape, generator=g, dtype=torch.float64).to(value) * 3.0


@dataclass(frozen=True)
class Trace:
    """What one batch, released twice in a row, did to the probe, to the outside and to the mechanism's memory."""

    draws: list[Draw]
    outputs: list[Tensor]
    state: Any
    reused: bool


def trace(build: Callable[[], Mechanism], batch: Gradients) -> Trace:
    mechanism, probe = build(), Probe()
    mechanism.noise = probe
    outputs, reused = [], False
    for _ in range(2):
        before = probe.release
        outputs.append(flatten(mechanism.release(batch)))
        reused |= probe.release == before
    return Trace(probe.draws, outputs, mechanism.state_dict(), reused)


def compare(a: Trace, b: Trace) -> tuple[str | None, float]:
    """(what leaks around the noise, or None; the sensitivity in units of the noise of the worse release)."""
    if a.reused or b.reused:
        return "noise is reused: a release did not open a new stream (next_release)", math.inf
    if [d.value.shape for d in a.draws] != [d.value.shape for d in b.draws]:
        return "the number or shape of noise draws depends on the record", math.inf
    if any(not torch.equal(x.std, y.std) for x, y in zip(a.draws, b.draws)):
        return "the scale of the noise depends on the record", math.inf
    for x, y in zip(a.outputs, b.outputs):
        if not torch.equal(torch.nan_to_num(x, 12345.0), torch.nan_to_num(y, 12345.0)):
            return "the release depends on the record around the noise", math.inf
    if a.state != b.state:
        return "what is kept for the next release depends on the record around the noise", math.inf
    return None, max(_distance(a, b, k) for k in {d.release for d in a.draws}) if a.draws else 0.0


def _distance(a: Trace, b: Trace, release: int) -> float:
    total = 0.0
    for x, y in zip(a.draws, b.draws):
        if x.release != release:
            continue
        difference = x.value.double() - y.value.double()
        if not bool(torch.isfinite(difference).all()):
            return math.inf
        scaled = torch.where(difference == 0, 0.0, difference / x.std)
        total += float(scaled.square().sum())
    return math.sqrt(total)


def adversarial(
    shapes: Mapping[str, torch.Size], bound: float, unseen: Sequence[tuple[str, Tensor]] = ()
) -> Iterator[Pair]:
    """Canaries of every size that floating point knows, alone and in company, in single, double and brain precision.

    ``unseen`` are huge ones, with their names, that a mechanism sees too little of: they must not absorb the others where they
    are summed.
    """
    d = sum(s.numel() for s in shapes.values())
    some = list(directions(shapes))
    just_above = float(torch.nextafter(torch.tensor(bound), torch.tensor(math.inf)))
    near = (1e-3 * bound, 0.999999 * bound, bound, just_above, 1.5 * bound, 1e4 * bound)
    sizes = (1e-42, 1e-30, 1e-12, *near, 1e18, 1e30)
    crowd = 0.3 * bound * torch.randn(5, d, generator=torch.Generator().manual_seed(1)) / math.sqrt(d)
    nobody = crowd[:0]

    def pair(name: str, canary: Tensor, others: Tensor, dtype: torch.dtype = torch.float32) -> Pair:
        return Pair(name, unflatten(others.to(dtype), shapes), unflatten(canary.to(dtype), shapes))

    for name, v in some:
        yield pair(f"{name}, huge", 1e4 * bound * v[None], nobody)
        yield pair(f"{name}, exactly C", bound * v[None], crowd)
        yield pair(f"{name}, bfloat16", 7.0 * bound * v[None], nobody, torch.bfloat16)
    for size in sizes:
        for others in (nobody, crowd):
            yield pair(f"size {size:.6g}", size * some[0][1][None], others)
            yield pair(f"size {size:.6g}, every parameter", size * some[1][1][None], others)
        yield pair(f"size {size:.6g}, float64", size * some[0][1][None].double(), nobody, torch.float64)
    for name, canary in unseen:
        yield pair(name, canary[None], crowd)
    ladder = bound * torch.linspace(1.1, 2.0, 6)[:, None] * some[0][1]  # whom others leave out, or let in, counts for a whole bound
    for size in (1e-3, 1.5, 1e4):
        yield pair(f"size {size:.6g}, against six of as many lengths", -size * bound * some[0][1][None], ladder)
    many = bound * some[0][1].expand(40, d)
    yield pair("huge among forty of its kind", 1e4 * bound * some[0][1][None], many)
    yield pair("huge against forty of its kind", -1e4 * bound * some[0][1][None], many)
    for bad in (math.nan, math.inf, -math.inf):
        one = torch.zeros(1, d)
        one[0, -1] = bad
        yield pair(f"one entry {bad}", one, crowd)
        yield pair(f"every entry {bad}", torch.full((1, d), bad), crowd)
        yield pair(f"one entry {bad}, bfloat16", one, nobody, torch.bfloat16)


def unseen(mechanism: Mechanism, sigma: float) -> Iterator[tuple[str, Tensor]]:
    """Over all parameters: what passes the clip at any size, because nothing is released along it; and what passes it at a
    large one, where noise is widest: there a gradient is as long as √λ/σ before it counts for a whole bound."""
    stated = stated_covariance(mechanism)
    if stated is None:
        return
    values, vectors = torch.linalg.eigh(stated)
    silent = vectors[:, values <= 1e-9 * values.max()]
    if silent.shape[1]:
        some = silent @ torch.randn(silent.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for size in (1e8, 1e20):
            yield f"size {size:.6g}, along what is not released", (size * some / some.norm()).float()
    size = 0.999 * math.sqrt(float(values.max())) / sigma
    yield f"size {size:.6g}, along what is noised most", (size * vectors[:, -1]).float()


def reused(build: Callable[[], Mechanism], shapes: Mapping[str, torch.Size]) -> str | None:
    """Whether releases of an empty batch, which are noise alone, repeat: from step to step, or after a restart."""
    nobody = {n: torch.zeros(0, *s) for n, s in shapes.items()}
    mechanism = build()
    seen = {f"release {k + 1}": flatten(mechanism.release(nobody)).double() for k in range(3)}
    resumed = build()
    resumed.load_state_dict(mechanism.state_dict())
    seen["the first release after a restart"] = flatten(resumed.release(nobody)).double()
    items = [(label, v) for label, v in seen.items() if float(v.norm()) > 0]  # a magnitude may be cut to zero
    for k, (later, v) in enumerate(items):
        for earlier, u in items[:k]:
            if torch.equal(u, v):
                return f"noise is reused: {later} is {earlier} again"
    return None


@single_threaded
def audit_flow(
    name: str, build: Callable[[], Mechanism], shapes: Mapping[str, torch.Size], bound: float, delta: float = 1e-5
) -> Finding:
    """The three conditions at the top of this file over `adversarial` pairs, against the mechanism's own event."""
    claim = Claim.of(build().event(), delta)
    if claim.empty:
        return passed(name, "flow", facts={"note": "nothing is claimed (ε = ∞)"})
    if claim.sigma is None:
        return unable(name, "flow", f"one release claims {claim.event!r}; this audit knows Gaussian releases")
    again = reused(build, shapes)
    if again is not None:
        return failed(name, "flow", again)
    first = next(iter(shapes))
    kinds = lambda pair: (len(pair.others[first]), next(iter(pair.others.values())).dtype)  # noqa: E731
    pairs = adversarial(shapes, bound, list(unseen(build(), claim.sigma)))
    return over_pairs(name, "flow", "the release", build, pairs, kinds, claim.sigma)


def over_pairs(
    name: str, kind: str, what: str, build: Callable[[], Any], pairs: Iterable[Pair], alike: Callable[[Pair], Hashable],
    sigma: float,
) -> Finding:  # fmt: skip
    """Whether anything flows past the noise, or one record moves ``what`` by more than its claim, over pairs of neighbours.

    Pairs that are ``alike`` have the same others.
    """
    worst, where, tried = 0.0, "", 0
    without: dict[Hashable, Trace] = {}
    for tried, pair in enumerate(pairs, 1):
        if alike(pair) not in without:
            without[alike(pair)] = trace(build, pair.others)
        leak, distance = compare(trace(build, pair.joined), without[alike(pair)])
        if leak is not None:
            return failed(name, kind, f"{leak} ({pair.name})", tried, {"neighbours": pair.name})
        if distance > worst:
            worst, where = distance, pair.name
    facts = {"sensitivity": worst * sigma, "neighbours": where}
    if worst * sigma > 1 + TOLERANCE:
        reason = f"one record moves {what} by {worst * sigma:.5g} times the claimed sensitivity ({where})"
        return failed(name, kind, reason, tried, facts)
    return passed(name, kind, tried, facts)
