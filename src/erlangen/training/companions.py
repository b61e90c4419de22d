"""Importance sampling and selective update in a session, with what they cost.

Both work with any mechanism that clips. Importance sampling replaces the sampler and costs what its largest inclusion
probability costs. A judge adds one release to every step; both are one event, charged before the gradient is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.rows import RowMap
from erlangen.mechanisms.companions import ImportanceSampler, SelectiveUpdate
from erlangen.sampling import PoissonSampler
from erlangen.spelling import refuse_unknown
from erlangen.training.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from erlangen.training.session import Session

#: rows whose gradients are looked at together where the configuration sets no limit
ROWS = 1024


def make_sampler(config: TrainConfig, units: int, run_id: str) -> PoissonSampler:
    """Poisson batches, or importance sampling with q_max = batch/N."""
    if config.sampling == "poisson":
        if config.sampling_options:
            raise ConfigError(f"sampling_options is {config.sampling_options}; sampling 'poisson' takes none")
        return PoissonSampler(units, config.batch, config.seed, run_id, config.secure)
    refuse_unknown("sampling 'importance'", config.sampling_options, ("floor", "refresh", "as_published"), ConfigError)
    try:
        return ImportanceSampler(
            units, config.batch, config.max_grad_norm, seed=config.seed, run_id=run_id, secure=config.secure,
            **config.sampling_options,
        )  # fmt: skip
    except TypeError as error:
        raise ConfigError(f"sampling_options is {config.sampling_options}; give numbers, as_published true or false") from error


class Importance:
    """Feeds the norms of a session's units to its sampler, and the weights that undo the sampling to its loss."""

    def __init__(self, session: Session, sampler: ImportanceSampler) -> None:
        if not session.training.mechanism.clips_samples or session.criterion is not F.cross_entropy:
            raise ConfigError(
                f"sampling is 'importance', which weights losses before they are clipped; mechanism "
                f"{session.config.mechanism!r} does not clip. Use sampling 'poisson'"
            )
        self.session, self.sampler = session, sampler
        #: the (private) weights at which norms were taken: they, not the norms, go into a checkpoint
        self.seen: dict[str, Tensor] = {}
        sampler.norms = self.norms

    def norms(self) -> Tensor:
        """‖g_u‖ of every unit at the present weights, in the mechanism's geometry."""
        session = self.session
        self.seen = {n: t.detach().clone() for n, t in session.model.state_dict().items()}
        parts = [
            self._norms(rows, owner)
            for rows, owner in session.units.physical(
                torch.arange(session.units.count), session.config.max_physical_batch or min(ROWS, session.most_rows or ROWS)
            )
        ]
        return torch.cat(parts)

    def _norms(self, rows: Tensor, owner: Tensor) -> Tensor:
        session, tape = self.session, self.session.training.tape
        tape.clear()
        tape.rows = RowMap.of(owner) if session.units.grouped else RowMap.regular(len(rows))
        index = rows.to(session.device)
        F.cross_entropy(session.model(session.x[index]), session.y[index], reduction="sum").backward()
        with torch.no_grad():
            squared = tape.gradients().norms_squared(session.training.mechanism.metric)
        tape.clear()
        return torch.stack([s.double() for s in squared.values()]).sum(0).sqrt().cpu()

    def loss(self, logits: Tensor, labels: Tensor, owner: Tensor) -> Tensor:
        """The mean loss of a physical batch, each row weighted by q_max/p of its unit."""
        weights = self.sampler.weights[owner.clamp(min=0)].to(logits)
        views = len(logits) // max(1, len(owner))
        each = F.cross_entropy(logits, labels, reduction="none")
        return (each * weights.repeat_interleave(views)).mean() if len(owner) else each.sum()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Norms are taken again at the weights at which they had been taken."""
        if not state["seen"]:
            return
        now = {n: t.detach().clone() for n, t in self.session.model.state_dict().items()}
        self.session.model.load_state_dict(state["seen"])
        self.sampler.ask()
        self.session.model.load_state_dict(now)


def noise_ratio(config: TrainConfig) -> float:
    """σ of a selective update's decisions over σ of the gradient."""
    ratio = float(config.selective_options.get("noise_ratio", 5.0))
    if not ratio > 0:
        raise ConfigError(f"noise_ratio is {ratio}; the judge's noise over the mechanism's must be positive")
    return ratio


class Judge:
    """Selective update of a session. ``noise_ratio`` is the judge's noise multiplier over the mechanism's.

    The event of a decision belongs to the event of the step (`PrivateTraining.extras`), which is charged before the
    gradient is released, whether the update is kept or not.
    """

    def __init__(self, session: Session) -> None:
        config = session.config
        options = dict(config.selective_options)
        refuse_unknown("a selective update", options, ("noise_ratio", "batch", "bound", "threshold"), ConfigError)
        self.session, self.ratio = session, noise_ratio(config)
        options.pop("noise_ratio", None)
        batch = options.pop("batch", config.batch)
        options.setdefault("bound", 0.1)
        self.selective = SelectiveUpdate(
            session.units.count, batch, self.ratio, self._charged, seed=config.seed, run_id=session.run_id,
            secure=config.secure, **options,
        )  # fmt: skip
        self.kept = 0

    def event(self, sigma: float) -> DpEvent:
        """One decision where the mechanism's noise multiplier is σ."""
        return self.selective.event(self.ratio * sigma)

    def _charged(self, event: DpEvent) -> None:
        """A decision that the event charged for this step does not contain is refused: it would be free."""
        if event not in getattr(self.session.training.charged, "events", [])[1:]:  # the first is the gradient's
            raise RuntimeError("a selective update was to be decided that the step's event does not pay for")

    def step(self) -> None:
        """The optimizer's step, undone if the second sample says that it made things worse."""
        session = self.session
        self.selective.noise_multiplier = self.ratio * session.training.mechanism.noise_multiplier
        self.kept += self.selective.step(session.model, session.optimizer, self.losses)

    def losses(self, units: Tensor) -> Tensor:
        """The loss of every unit: the mean over its rows."""
        session, model = self.session, self.session.model
        training, out = model.training, [session.x.new_zeros(0)]
        model.eval()
        # nobody may be drawn, and modules need not know what a batch of no rows is
        for rows, owner in session.units.physical(units, session.most_rows) if len(units) else ():
            index = rows.to(session.device)
            each = F.cross_entropy(model(session.x[index]), session.y[index], reduction="none")
            if session.units.grouped:
                one = RowMap.of(owner)
                each = one.sum_rows(one.scaled(each))
            out.append(each)
        model.train(training)
        return torch.cat(out)

    def describe(self) -> dict[str, Any]:
        """Plain facts for summaries and certificates."""
        s = self.selective
        sigma = self.ratio * self.session.training.mechanism.noise_multiplier
        return {
            "noise_multiplier": sigma, "bound": s.bound, "threshold": s.threshold,
            "expected_batch": s.sampler.expected_batch, "sample_rate": s.sampler.sample_rate,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"selective": self.selective.state_dict(), "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.selective.load_state_dict(state["selective"])
        self.kept = int(state["kept"])


__all__ = ["Importance", "Judge", "make_sampler", "noise_ratio"]
