"""What a mechanism adds against what it states: every direction of small releases, the energy of large ones."""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2

from erlangen.audit.montecarlo import Releaser, Subject
from erlangen.audit.search import stated_covariance
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import CONFIDENCE, Finding, failed, passed, unable
from erlangen.mechanisms import Mechanism

#: coordinates from which on the energy of one release says enough
LARGE = 8192


@single_threaded
def audit_covariance(subject: Subject, trials: int = 4000) -> Finding:
    """The released noise against the covariance that the mechanism states: its least eigenvalue, relative to the statement.

    In coordinates where the stated covariance is the identity, the least eigenvalue of a sample covariance of n Gaussian draws
    in d dimensions is at least (1 − √(d/n) − t/√n)² except with probability e^(−t²/2) (Davidson and Szarek). Directions that
    are stated to carry no noise must carry nothing at all.
    """
    releaser = Releaser(subject)
    mechanism = releaser.mechanism
    assert isinstance(mechanism, Mechanism)
    nobody = {n: torch.zeros(0, *s) for n, s in subject.shapes.items()}
    scale = mechanism.expected_batch
    stated = stated_covariance(mechanism)
    if stated is None:
        return unable(subject.name, "covariance", "the mechanism states no finite covariance, or too large a one")
    drawn = releaser.draw(nobody, trials).double() * scale
    stds = ((torch.as_tensor(mechanism.noise_std(n)), s) for n, s in subject.shapes.items())
    spread = torch.cat([std.double().cpu().expand(shape).flatten() for std, shape in stds])
    off = float((spread.square() - stated.diagonal()).abs().max() / stated.diagonal().max().clamp_min(1e-30))
    if off > 1e-3:  # attacks and denoisers go by it
        return failed(
            subject.name, "covariance", f"noise_std and the diagonal of covariance disagree by {off:.2g} of the largest variance"
        )
    values, vectors = torch.linalg.eigh(stated)
    live = values > 1e-9 * values.max()
    silent = float((drawn @ vectors[:, ~live]).abs().max()) if bool((~live).any()) else 0.0
    if silent > 1e-4 * math.sqrt(float(values.max())):
        return failed(
            subject.name, "covariance", f"a direction stated to be zero is released with size {silent:.3g}", trials
        )
    white = drawn @ (vectors[:, live] / values[live].sqrt())
    least = max(0.0, float(torch.linalg.eigvalsh(white.T @ white / trials)[0]))  # rounding may pass zero
    d, t = int(live.sum()), math.sqrt(-2 * math.log(1 - CONFIDENCE))
    limit = max(0.0, 1 - math.sqrt(d / trials) - t / math.sqrt(trials)) ** 2
    slack = 1 - math.sqrt(d / trials) - math.sqrt(least)
    p = min(1.0, math.exp(-(max(slack, 0.0) ** 2) * trials / 2))
    facts = {"least_eigenvalue": least, "limit": limit, "dimension": d}
    if least < limit:
        reason = f"some direction has {least:.4g} of the stated noise variance (limit {limit:.4g})"
        return failed(subject.name, "covariance", reason, trials, facts, p)
    return passed(subject.name, "covariance", trials, facts, p)


@single_threaded
def audit_energy(subject: Subject, least: int = LARGE) -> Finding:
    """The noise of one release of a large network: none of its large parameters has less energy than the mechanism states.

    Full covariances are for small networks, and a mechanism may treat large ones otherwise. Σx²/Σs² over the coordinates of a
    parameter is a mean of squared normals with weights s²: as wide as (Σs²)²/Σs⁴ equal ones, were they independent. A filter
    leaves a share of the directions silent, so a quarter of that decides.
    """
    mechanism = subject.build()
    assert isinstance(mechanism, Mechanism)
    nobody = {n: torch.zeros(0, *s) for n, s in subject.shapes.items()}
    released, worst = mechanism.release(nobody), (1.0, math.inf, "")
    for name, shape in subject.shapes.items():
        if shape.numel() >= least:
            stated = torch.as_tensor(mechanism.noise_std(name)).double().cpu().square().expand(shape)
            drawn = (released[name].double().cpu() * mechanism.expected_batch).square()
            ratio, freedom = float(drawn.sum() / stated.sum()), float(stated.sum() ** 2 / stated.square().sum()) / 4
            worst = min(worst, (float(chi2.cdf(freedom * ratio, freedom)), ratio, name))
    p, ratio, name = worst
    facts = {"least_energy": ratio, "parameter": name}
    if p < 1 - CONFIDENCE:
        reason = f"{name!r} of {subject.shapes[name].numel()} coordinates has {ratio:.4g} of the stated noise variance"
        return failed(subject.name, "energy", reason, 1, facts, p)
    return passed(subject.name, "energy", 1, facts, p)


def states_its_covariance(mechanism: Mechanism) -> bool:
    """Whether what is released is the noised sum itself; others post-process it, or have no guarantee to state."""
    from erlangen.mechanisms import Clipless, GaussianMechanism, PublishedGeoDP

    return isinstance(mechanism, (GaussianMechanism, Clipless)) and not isinstance(mechanism, PublishedGeoDP)
