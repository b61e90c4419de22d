"""Broken training sessions: mistakes of loops and trainers, each a few lines away from `Session`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.rows import RowMap
from erlangen.training.session import Session


class MeanInHalfPrecision(Session):
    """Divides by the realised number of rows before gradients are rounded to 16 bits."""

    def _private(self) -> Any:
        training = super()._private()
        training.tape.loss_reduction = "mean"
        return training

    def step(self) -> None:
        self.criterion = lambda out, y: F.cross_entropy(out, y) / max(1, len(out))
        super().step()


class ViewsClippedApart(Session):
    """Each view of a record is clipped by itself, and their sum is accounted as one contribution."""

    def _announce(self, rows: Tensor, owner: Tensor, first: bool, last: bool) -> None:
        owners = owner.repeat_interleave(self.config.views)
        labels = torch.where(owners < 0, owners, torch.arange(len(owners)))
        self.training.announce(RowMap.of(labels), first, last)


class UnitIgnored(Session):
    """A patient's images are clipped one by one."""

    def _announce(self, rows: Tensor, owner: Tensor, first: bool, last: bool) -> None:
        valid = owner >= 0 if self.config.pad else None
        self.training.announce(RowMap.regular(len(rows), self.config.views, valid), first, last)


class PaddingCounts(Session):
    """The row that stands in for nobody contributes as if it were somebody."""

    def _announce(self, rows: Tensor, owner: Tensor, first: bool, last: bool) -> None:
        super()._announce(rows, owner.clamp(min=0), first, last)


class MicroBatchClippedAsOne(Session):
    """Gradients are accumulated first and clipped afterwards, as one record."""

    def _announce(self, rows: Tensor, owner: Tensor, first: bool, last: bool) -> None:
        self.training.announce(RowMap.of(torch.zeros(len(rows) * self.config.views)), first, last)


class BatchStatistics(Session):
    """Inputs are centred by the mean of the batch."""

    def _laid_out(self, x: Tensor) -> Tensor:
        return x - x.nan_to_num(0.0, 0.0, 0.0).mean(0, keepdim=True) if len(x) else x


class WeightsByClassCounts(Session):
    """Rare classes of the batch weigh more."""

    def step(self) -> None:
        self.criterion = lambda out, y: F.cross_entropy(
            out, y, 1.0 / torch.bincount(y, minlength=out.shape[1]).clamp(min=1)
        )
        super().step()


class RateByRealisedBatch(Session):
    """The learning rate grows with the number of records that were drawn."""

    def _parts(self) -> Any:
        parts = super()._parts()
        self.optimizer.param_groups[0]["lr"] *= (
            sum(int((owner >= 0).sum()) for _, owner, _ in parts) / self.config.batch
        )
        return parts


class LossInTheCheckpoint(Session):
    """Keeps a training loss beside the weights."""

    def state_dict(self) -> dict[str, Any]:
        with torch.no_grad():
            loss = self.criterion(self.model.eval()(self.x), self.y)
        return {**super().state_dict(), "loss": float(loss)}


class AverageOfInputs(Session):
    """A moving average of what the network saw is kept with the weights."""

    def step(self) -> None:
        super().step()
        seen = self.x.nan_to_num(0.0, 0.0, 0.0).mean(0)
        self.optimizer.param_groups[0]["seen"] = 0.9 * self.optimizer.param_groups[0].get("seen", 0.0) + 0.1 * seen


# --- restarts --------------------------------------------------------------------------------------------------------


class SamplerStartsAgain(Session):
    """The place in the stream of batches is not in the checkpoint; that of the noise is."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "sampler": {"step": 0}})


class EntropyInTheCheckpoint(Session):
    """A session without a seed writes down where its noise comes from, but draws new batches."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "entropy": self._entropy}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._entropy = state["entropy"]

    @property
    def _entropy(self) -> str:
        return self._source._stream._entropy

    @_entropy.setter
    def _entropy(self, value: str) -> None:
        self._source._stream = replace(self._source._stream, _entropy=value)

    @property
    def _source(self) -> Any:
        return getattr(self.training.mechanism.noise, "inner", self.training.mechanism.noise)


class OneStreamForAll(Session):
    """Noise by the seed alone, whatever the run is."""

    def _private(self) -> Any:
        name, self.run_id = self.run_id, "run"
        training, self.run_id = super()._private(), name
        return training
