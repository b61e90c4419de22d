"""One private training run in memory: data, model, mechanism, sampler and optimizer, made from a configuration.

session = Session(TrainConfig(epsilon=3.0))
while session.step_count < session.config.steps:
    session.step()
session.epsilon()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.accounting import Accountant
from erlangen.accounting.ledger import Release
from erlangen.accounting.protected import NAMELESS
from erlangen.data import Dataset
from erlangen.data.augment import draw, views
from erlangen.deploy.averaged import answering
from erlangen.gradients.rows import RowMap, sent
from erlangen.gradients.tape import Tape
from erlangen.mechanisms import GaussianMechanism, Mechanism
from erlangen.mechanisms.denoise import JamesStein
from erlangen.private import PrivateTraining
from erlangen.sampling import Units
from erlangen.sampling.physical import fitting_rows, static_rows
from erlangen.sharded import record_gathered
from erlangen.streams import Once, Stream, seed_layers
from erlangen.training.built import load_data, mechanism_for, network, optimizer_of, share_of_rate
from erlangen.training.companions import Importance, ImportanceSampler, Judge, make_sampler
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.device import pick_device
from erlangen.training.diagnostics import StepDiagnostics
from erlangen.training.ema import EMA
from erlangen.training.frozen import FrozenTrunk
from erlangen.training.graphs import PartGraph
from erlangen.training.metrics import evaluate, near_zero
from erlangen.training.normalise import release_normalisation, wants_private
from erlangen.training.public import PublicPredictions, predictions
from erlangen.training.shards import Shards, with_everybody
from erlangen.workers import Workers


class Session:
    """A run that can be stepped, evaluated, saved and continued. ``run_id`` separates its random streams from others'.

    Several ``workers`` hold the same session and step it together; the results do not depend on how many they are. With
    ``shard`` each holds its part of the model: evaluating, gathering weights and states then needs all of them.
    """

    def __init__(
        self, config: TrainConfig, dataset: Dataset | None = None, run_id: str = "", workers: Workers | None = None
    ) -> None:
        dataset = load_data(config) if dataset is None else dataset
        self.dataset, self.run_id, self.workers = dataset, run_id, workers or Workers()
        if not self.workers.alone:
            if self.workers.first:  # `distributed.follow` makes the others' sessions of this
                self.workers.decide(lambda: {"config": json.loads(config.to_json()), "run": run_id})
            self.workers.require_same({"data": dataset.fingerprint()})
        config = _protecting_units_of(dataset, config)
        self.units = Units(len(dataset), dataset.unit, config.unit or "record")
        self.config = config = config.settled(self.units.count)
        #: made before the first step (the normalisation, if it was asked for); the ledger must have them first
        self.prior: list[Release] = []
        if wants_private(config):
            if not self.workers.alone:
                raise ConfigError("normalise=private draws its noise once: release the constants with one process")
            dataset, config, release = release_normalisation(dataset, self.units, config, run_id)
            self.dataset, self.config = dataset, config
            self.prior.append(release)
        self.device = torch.device(pick_device(config.device, self.workers))
        if self.device.type == "cuda" and config.pad:  # static shapes: kernels are tried once, and the best is kept
            torch.backends.cudnn.benchmark = True
        self.x, self.y = (torch.from_numpy(a).to(self.device) for a in (dataset.x_train, dataset.y_train))
        #: where each worker holds a part of the model
        self.shards = Shards(self) if config.shard and not self.workers.alone else None
        self.model = self._model()
        self.workers.align(self.model)
        #: rows before views that are held in memory at once
        self.most_rows: int = config.max_physical_batch or self._fitting()
        if self.shards is not None:
            self.shards.split(self._mechanism())
        self.ema = EMA(self.model, config.ema) if config.ema else None
        self.optimizer = optimizer_of(config, self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(share_of_rate, config))
        self.sampler = make_sampler(config, self.units.count, run_id)
        self.sampler.join(self.workers)
        self.accountant = Accountant()
        for release in self.prior:
            self.accountant.record(release.event)
        self.denoiser = JamesStein() if config.denoise == "james-stein" else None
        self.judge: Judge | None = None
        self.training = self._private()
        declared = self.training.mechanism.loss
        self.criterion: Callable[[Tensor, Tensor], Tensor] = (
            declared if isinstance(declared, nn.Module) else F.cross_entropy
        )
        frozen = self._frozen()
        #: what a step starts from: images and the model, or features of its frozen trunk and the rest of it
        self.inputs, self.forward = (self.x, self.model) if frozen is None else (frozen.features, frozen.tail)
        self.importance = Importance(self, self.sampler) if isinstance(self.sampler, ImportanceSampler) else None
        self._augmentation = Once(Stream("augmentation", config.seed, run_id))
        self._layers = Once(Stream("layers", config.seed, run_id, self.workers.rank))
        self.step_count = 0
        self.graph = PartGraph(self) if config.graph or config.compile else None
        #: statistics of private records outside any mechanism: empty unless asked for, and listed in the result
        self.non_private: dict[str, float] = {}
        self.diagnostics = self._diagnostics()

    # -- building -------------------------------------------------------------------------------------------------

    def _model(self) -> nn.Module:
        model = network(self.config, self.dataset, self.run_id)
        if self.shards is not None:  # its parts go to the device one by one
            return model
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.device.type == "cuda" else model  # type: ignore[call-overload]

    def _fitting(self) -> int:
        def rows() -> int:
            return max(1, fitting_rows(self.model, self.dataset.input_shape, self.device) // self.config.views)

        # shards meet in every part, so that all need equally many, whatever machines they are on
        return rows() if self.shards is None else self.workers.decide(rows)

    def _mechanism(self) -> Mechanism:
        in_parts = self.most_rows < self.units.rows
        return mechanism_for(self.config, self.model, self.dataset.input_shape, self.run_id, in_parts)

    def _private(self) -> PrivateTraining:
        config = self.config
        mechanism = self._mechanism() if self.shards is None else self.shards.mechanism
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        mechanism.bind(parameters, config.batch)
        tape = Tape(parameters, "sum", config.strategy)
        tape.metric = mechanism.metric
        if self.shards is not None:
            record_gathered(self.model, tape)
        training = PrivateTraining(
            self.model, self.optimizer, tape, mechanism, self.sampler, self.accountant, self.denoiser, self.workers
        )
        training.own_draws = True  # `_parts` draws each batch by the sampler
        if config.selective:
            self.judge = Judge(self)
            training.extras.append(self.judge.event)
        if not self.workers.alone and (config.selective or config.sampling != "poisson"):
            raise ConfigError("selective updates and importance sampling are for one process; train with one worker")
        if config.epsilon is not None:
            assert config.delta is not None
            before = [(release.event, 1) for release in self.prior]
            training.calibrate(config.epsilon, config.delta, config.steps, "pld", before)
        if config.non_private:
            training.before_release.append(lambda _: self._note_gradients(mechanism))
        training.install()
        return training

    def _diagnostics(self) -> StepDiagnostics | None:
        """Errors of the private gradient, where they were asked for and there are per-sample gradients in one process."""
        if not self.config.non_private or not self.workers.alone or not self.training.mechanism.clips_samples:
            return None
        found = StepDiagnostics(self)
        self.training.watch.append(found.see)
        return found

    def _frozen(self) -> FrozenTrunk | None:
        """Features of layers that do not train, where they are the same at every step and used more than once."""
        config = self.config
        fixed = config.views == 1 and config.augment == "none" and config.mechanism != "clipless" and self.shards is None
        if not fixed or config.steps * config.batch <= len(self.x):
            return None
        autocast = partial(torch.autocast, self.device.type, torch.bfloat16, self.halved)
        return FrozenTrunk.of(self.model, self.x, autocast, self._laid_out)

    def _note_gradients(self, mechanism: Mechanism) -> None:
        """ℓ0^ε of the clipped mean gradient before noise: not private, and only where it was asked for."""
        if isinstance(mechanism, GaussianMechanism):
            mean = (total / self.config.batch for total in mechanism.clipped_sum().values())
            self.non_private["small_gradients"] = near_zero(mean, 1e-4)

    # -- running --------------------------------------------------------------------------------------------------

    @with_everybody
    def step(self) -> None:
        """One logical batch: one draw, one release, one update."""
        config = self.config
        recorded = self.graph is not None and self.graph.ready()
        seed_layers(self._layers.at(self.step_count).initial_seed())  # without a seed known to nobody: see `renew_generators`
        parts = self._parts()
        if self.diagnostics is not None:
            self.diagnostics.before()
        for k, (rows, owner, here) in enumerate(parts):
            self._announce(rows, owner, k == 0, k == len(parts) - 1)
            if recorded:
                assert self.graph is not None
                self.graph.add(rows, owner, here, first=k == 0)
            else:
                index = sent(rows, self.device)
                loss = self.backward(self.inputs[index], self.y[index], here, owner)
            if self.judge is not None and k == len(parts) - 1:
                self.judge.step()
            else:
                self.optimizer.step()
            if config.non_private:
                self.non_private["train_loss"] = float(loss.detach())
        if self.diagnostics is not None:
            self.non_private |= self.diagnostics.after()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.ema is not None:
            self.ema.update()
        self.step_count += 1

    def backward(self, records: Tensor, labels: Tensor, moves: Tensor, owner: Tensor) -> Tensor:
        """Forward and backward pass over the views of one physical part; the loss."""
        config = self.config
        x = views(records, config.views, config.augment, moves)
        labels = labels.repeat_interleave(config.views)
        weighted = self.importance.loss if self.importance else lambda out, y, _: self.criterion(out, y)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.halved):
            loss = weighted(self.forward(self._laid_out(x)), labels, owner)
        # the sum over rows: what a mean divides by changes with one record, and with it every other record's rounding
        (loss * len(x)).backward()
        return loss

    @property
    def halved(self) -> bool:
        """16-bit products on a GPU (norms, clipping and sums are float32 all the same), unless asked otherwise."""
        wanted = self.config.precision
        # Clipless certifies its bounds for the precision of the products: lower only when asked for
        automatic = self.device.type == "cuda" and self.config.mechanism != "clipless"
        return wanted == "bf16" or (wanted == "auto" and automatic)

    def _laid_out(self, x: Tensor) -> Tensor:
        """Images as the device's kernels want them."""
        on_gpu = self.device.type == "cuda" and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last if on_gpu else torch.contiguous_format)

    def _parts(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """This worker's part of the next logical batch: rows, their owners and how their views are moved.

        What happens to a record is drawn for the whole batch at once, so that it depends neither on physical batches nor
        on the number of workers. With ``pad`` all parts have the same number of rows.
        """
        config, count = self.config, self.config.views
        share = self.units.share(self.sampler.draw(), self.physical_rows, self.workers, config.pad)
        generator = self._augmentation.at(self.step_count, self.device)
        moves = draw(share.total, count, config.augment, generator)[share.start * count :]
        parts = []
        for rows, owner in share.parts:
            real = int((owner >= 0).sum()) * count
            here, moves = moves[:real], moves[real:]
            parts.append((rows, owner, F.pad(here, (0, 0, 0, len(rows) * count - real))))
        return parts

    @property
    def physical_rows(self) -> int:
        """Records (rows before views) of a physical batch at most; exactly, with ``pad``."""
        if self.config.max_physical_batch is not None or not self.config.pad:
            return self.most_rows
        whole = static_rows(self.config.batch / self.workers.count * self.units.rows / self.units.count)
        return min(whole, self.most_rows)

    def _announce(self, rows: Tensor, owner: Tensor, first: bool, last: bool) -> None:
        count = self.config.views
        valid = owner >= 0 if self.config.pad else None
        named = self.units.grouped or (valid is None and int(owner[0]) < 0)
        owners = RowMap.of(owner.repeat_interleave(count)) if named else RowMap.regular(len(rows), count, valid)
        self.training.announce(owners, first, last)

    @with_everybody
    def evaluate(self) -> dict[str, float]:
        """Public test metrics of the averaged weights; empty without a test set."""
        test = self._test_set()
        if test is None:
            return {}
        with self._evaluating():
            found = evaluate(self.answering, *test, self.dataset.classes)
            if self.config.average_views:
                found["single_view_accuracy"] = evaluate(self.model, *test, self.dataset.classes)["test_accuracy"]
            return found

    @with_everybody
    def public_predictions(self) -> PublicPredictions | None:
        """Of the averaged weights on the public test set; None without one."""
        test = self._test_set()
        if test is None:
            return None
        with self._evaluating():
            return predictions(self.answering, *test)

    def _test_set(self) -> tuple[Tensor, Tensor] | None:
        x, y = self.dataset.x_test, self.dataset.y_test
        return None if x is None or y is None else (torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """With the averaged weights. It happens rarely and in shapes of its own: trying kernels for them would take longer than it
        saves."""
        cudnn = torch.backends.cudnn
        known = cudnn.flags(
            enabled=cudnn.enabled, benchmark=False, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32
        )
        with known, nullcontext() if self.ema is None else self.ema.applied():
            yield

    @property
    def answering(self) -> nn.Module:
        """The model as its answers are asked for: by itself, or averaged over views."""
        return answering(self.model, self.config.average_views, self.config.augment)

    def epsilon(self, method: str = "pld") -> float:
        """ε spent so far at the run's δ."""
        assert self.config.delta is not None
        return self.accountant.epsilon(self.config.delta, method) if self.accountant.steps else 0.0  # type: ignore[arg-type]

    @with_everybody
    def weights(self) -> dict[str, Tensor]:
        """What is released: the averaged weights, or the last ones."""
        weights = dict(self.ema.average) if self.ema is not None else dict(self.model.state_dict())
        return weights if self.shards is None else self.shards.gathered(weights)

    # -- continuing -----------------------------------------------------------------------------------------------

    @with_everybody
    def state_dict(self) -> dict[str, Any]:
        state = {
            "step": self.step_count,
            "model": dict(self.model.state_dict()),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"},
            "mechanism": self.training.mechanism.state_dict(),
            "noise_multiplier": self.training.mechanism.noise_multiplier,
            "sampler": self.sampler.state_dict(),
            **{name: part.state_dict() for name, part in self._companions().items()},
        }
        return state if self.shards is None else self.shards.gathered(state)

    def mechanism_facts(self) -> dict[str, Any]:
        """The mechanism's plain facts, and those of what releases beside it."""
        judged = {} if self.judge is None else {"selective": self.judge.describe()}
        return {**self.training.mechanism.describe(), **judged}

    def _companions(self) -> dict[str, Importance | Judge]:
        both = {"importance": self.importance, "judge": self.judge}
        return {name: part for name, part in both.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.shards is not None:
            state = self.shards.received(state)
        self.step_count = int(state["step"])
        self.model.load_state_dict(state["model"])
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict({**state["scheduler"], "lr_lambdas": [None]})
        self.training.set_noise_multiplier(float(state["noise_multiplier"]))
        self.training.mechanism.load_state_dict(state["mechanism"])
        self.sampler.load_state_dict(state["sampler"])
        for name, part in self._companions().items():
            part.load_state_dict(state[name])


def _protecting_units_of(dataset: Dataset, config: TrainConfig) -> TrainConfig:
    """The configuration with a name for the units that the data have; one that names units that they have not is refused."""
    if config.unit is not None and dataset.unit is None:
        raise ConfigError(
            f"unit is {config.unit!r}, but the data set {dataset.name!r} does not say whose each record is: each would be "
            f"protected by itself, and the certificate would promise it to every {config.unit}. Hand over a data set with "
            "units (from_torch(…, unit=…)), or leave unit out"
        )
    if dataset.unit is not None and config.unit is None:  # records that are averaged before they are clipped: one of them
        return replace(config, unit=NAMELESS)  # can move its group's gradient by two bounds, and only the group's is C
    return config
