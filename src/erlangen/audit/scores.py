"""Scores of a release: a view of it and a linear function of that view. The larger, the more likely was the canary there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from erlangen.audit.neighbours import Pair, flatten


@dataclass(frozen=True)
class Score:
    """A view of the release and a linear function of it; ``name`` says where the function came from."""

    view: str
    weights: np.ndarray
    pair: Pair
    name: str = ""

    def __call__(self, releases: Tensor) -> np.ndarray:
        return VIEWS[self.view](releases, self.pair) @ self.weights


def _size(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bad = ~torch.isfinite(y).all(1)
    y = torch.where(bad[:, None], 0.0, y.double())
    return y, y.norm(dim=1), bad.double()


def _plain(y: Tensor, pair: Pair) -> np.ndarray:
    """The release itself: cheap, and enough where noise is Gaussian and added to a sum."""
    return torch.nan_to_num(y, 0.0, 0.0, 0.0).numpy()


def _raw(y: Tensor, pair: Pair) -> np.ndarray:
    y, norm, bad = _size(y)
    return torch.cat([y, norm[:, None], (norm + 1e-30).log()[:, None], bad[:, None]], 1).numpy()


def _unit(y: Tensor, pair: Pair) -> np.ndarray:
    y, norm, bad = _size(y)
    return torch.cat([y / (norm[:, None] + 1e-30), norm[:, None], bad[:, None]], 1).numpy()


def _projected(y: Tensor, pair: Pair) -> np.ndarray:
    """Components along the canary and along the others, signed and not, and the angle between them."""
    y, norm, bad = _size(y)
    p, q = (y @ torch.from_numpy(v) for v in (along(pair), along(pair, "others")))
    angle = torch.atan2(p.abs(), q.abs())
    return torch.stack([p, q, p.abs(), q.abs(), angle, norm, bad], 1).numpy()


VIEWS: dict[str, Callable[[Tensor, Pair], np.ndarray]] = {
    "plain": _plain,
    "projected": _projected,
    "raw": _raw,
    "unit": _unit,
}


def along(pair: Pair, part: str = "canary") -> np.ndarray:
    """The unit vector of the canary (or of the sum of the others); zero where there is none or it is not finite."""
    v = flatten({n: g.sum(0) for n, g in getattr(pair, part).items()}).double()
    v = torch.nan_to_num(v, 0.0, 0.0, 0.0)
    return (v / v.norm().clamp(min=1e-30)).numpy()


def fisher(with_record: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Σ⁻¹(mean difference), Σ the mean covariance of both worlds with a little ridge."""
    spread = np.atleast_2d((np.cov(with_record.T) + np.cov(without.T)) / 2)
    scale = np.sqrt(np.diag(spread))
    scale = np.where(scale > 0, scale, 1e-12)
    whitened = spread / np.outer(scale, scale) + 1e-6 * np.eye(len(scale))
    return np.linalg.solve(whitened, (with_record.mean(0) - without.mean(0)) / scale) / scale


def separation(with_record: np.ndarray, without: np.ndarray) -> float:
    """How far apart two samples of scores are: the largest TPR − FPR of 49 thresholds, either way round."""
    both = np.concatenate([with_record, without])
    thresholds = np.quantile(both, np.linspace(0.02, 0.98, 49))
    a, b = np.sort(with_record), np.sort(without)
    hits = np.searchsorted(b, thresholds, "right") / len(b) - np.searchsorted(a, thresholds, "right") / len(a)
    return float(np.abs(hits).max()) - 1.0 / len(a)


def noise_of(trials: int) -> float:
    """One standard error of a separation that is not near 1."""
    return float(np.sqrt(0.5 / trials))
