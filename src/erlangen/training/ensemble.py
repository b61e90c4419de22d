"""Many private runs of one small network at once: seeds, noise levels, mechanisms and learning rates side by side.

    ensemble = Ensemble([dataclasses.replace(config, seed=s) for s in range(20)])
    ensemble.run()
    ensemble.evaluate()            # one dictionary per member
    ensemble.epsilon(0)            # what member 0 spent

Every member is a run of its own: its Poisson batches, its clipping in its geometry, its noise, its average, its cost.
The guarantee is that of `Session` with the same configuration; only the order of the arithmetic differs. Small networks
leave a GPU idle; here one step of all members is a fixed sequence of large products, replayed as a CUDA graph. Batches
are padded to a static size; a member that draws more than fits makes the step take another pass, nothing is dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from erlangen.accounting import Accountant, gaussian, noise_multiplier
from erlangen.data import Dataset, load
from erlangen.gradients.independence import check_independence
from erlangen.mechanisms import Context, Mechanism, StreamNoise, make_clipping, make_mechanism
from erlangen.prepare import refuse_module
from erlangen.sampling import PoissonSampler
from erlangen.streams import Once, Stream, seed_layers
from erlangen.training.built import network, share_of_rate
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.device import pick_device
from erlangen.training.metrics import scores
from erlangen.training.padding import PaddedBatches, PoissonProcess, physical_size
from erlangen.training.stacked import Stack
from erlangen.training.stacked_release import stacked_release

#: options in which members may differ; the rest shapes the computation and must agree
FREE = (
    "seed", "mechanism", "mechanism_options", "max_grad_norm", "noise_multiplier", "epsilon", "lr", "momentum", "delta",
)  # fmt: skip
#: steps whose batches are drawn at a time
CHUNK = 256

#: draws ``steps`` batches of a member: for each step the indices of its records
Draw = Callable[[int], list[np.ndarray]]


class Ensemble:
    """Runs that differ in nothing that changes the shape of a step; see `FREE`.

    ``precision`` (torch.bfloat16, say) is that of activations and products; clipping measures in float32 exactly the
    values that are summed. ``graph`` replays CUDA graphs on a GPU. ``draws`` replaces the members' own samplers, for
    tests. Wide convolutions on at most ``positions`` places (4: a 2×2 map) never form a row's gradient.
    """

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        dataset: Dataset | None = None,
        *,
        run_ids: Sequence[str] | None = None,
        precision: torch.dtype | None = None,
        graph: bool = True,
        draws: Sequence[Draw] | None = None,
        rows: int | None = None,
        positions: int = 0,
    ) -> None:
        if not configs:
            raise ConfigError("an ensemble needs at least one member")
        self.dataset = load(configs[0].data) if dataset is None else dataset
        if self.dataset.unit is not None:
            raise ConfigError(
                f"the data set {self.dataset.name!r} says whose each record is, and an ensemble protects single records only: "
                "whoever has k of them could move a sum by k bounds. Train it with Session"
            )
        self._calibrated = [config.noise_multiplier is None for config in configs]
        self.configs = [_settled(config, len(self.dataset)) for config in configs]
        self.config = _common(self.configs)
        self.run_ids = list(run_ids) if run_ids is not None else [f"member-{k}" for k in range(len(configs))]
        self.device = torch.device(pick_device(self.config.device))
        self.sampler = PoissonSampler(
            len(self.dataset), self.config.batch
        )  # says what a draw costs; see `PoissonProcess`
        self._load_data()
        models = [network(c, self.dataset, r).to(self.device) for c, r in zip(self.configs, self.run_ids, strict=True)]
        self.rows = physical_size(len(self.dataset), self.config.batch, len(configs)) if rows is None else rows
        self.stack = Stack(models, self.rows, precision, positions)
        self._private(models[0])
        self._state()
        batches = draws if draws is not None else [self._sampler(c, r) for c, r in zip(self.configs, self.run_ids)]
        self.batches = PaddedBatches(batches, self.rows)
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.use_graph = graph and self.device.type == "cuda"

    # -- building -------------------------------------------------------------------------------------------------

    def _load_data(self) -> None:
        put = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(self.device)  # noqa: E731
        self.x, self.y = put(self.dataset.x_train), put(self.dataset.y_train)

    def _sampler(self, config: TrainConfig, run_id: str) -> Draw:
        return PoissonProcess(len(self.dataset), config.batch, Stream("sampling", config.seed, run_id)).draw

    def _private(self, model: nn.Module) -> None:
        """The geometry, bound, noise and event of every member, from its mechanism."""
        refuse_module(model)
        with torch.no_grad():
            check_independence(model, (torch.randn(3, *self.dataset.input_shape, device=self.device),))
        self.mechanisms = [self._mechanism(config, model) for config in self.configs]
        self._require_calibrated()
        self._events = [self.sampler.event(mechanism.event()) for mechanism in self.mechanisms]  # what `family` releases
        #: releases by whose noise hides them, counted before they happen
        self._released: dict[str, int] = {}
        self.family = stacked_release(self.mechanisms, self.stack)
        self.rate = self.family.column([c.lr for c in self.configs])
        self.momentum = self.family.column([c.momentum for c in self.configs])

    def _require_calibrated(self) -> None:
        """Where σ was calibrated it is that of a Gaussian release, and so must be what a member releases."""
        for config, mechanism, given in zip(self.configs, self.mechanisms, self._calibrated, strict=True):
            event = mechanism.event()
            if given and event != gaussian(config.noise_multiplier or 0.0):
                raise ConfigError(
                    f"an ensemble calibrates Gaussian releases, and {config.mechanism!r} with σ = {config.noise_multiplier:.4g} "
                    f"costs {event}: give noise_multiplier, or train it with Session"
                )

    @property
    def metric(self) -> Tensor:
        """The diagonal metric of every member, [E, d]; ones where there is none."""
        return self.family.metric

    def _mechanism(self, config: TrainConfig, model: nn.Module) -> Mechanism:
        rule = make_clipping(config.clipping, config.max_grad_norm, **config.clipping_options)
        assert config.noise_multiplier is not None
        context = Context(
            config.noise_multiplier, rule, StreamNoise(config.seed), model, config.batch, config.mechanism_options,
            self.dataset.input_shape,
        )
        mechanism = make_mechanism(config.mechanism, context)
        mechanism.bind({n: p for n, p in model.named_parameters() if p.requires_grad}, config.batch)
        return mechanism

    def _state(self) -> None:
        flat = self.stack.flat
        self.total, self.velocity = torch.zeros_like(flat), torch.zeros_like(flat)
        self.average = flat.clone()
        self.steps_taken = torch.zeros((), dtype=flat.dtype, device=self.device)
        self.cursor = torch.zeros(1, dtype=torch.long, device=self.device)
        self.table = torch.zeros(0, dtype=torch.int32, device=self.device)
        self.step_count = 0
        shares = [share_of_rate(self.config, step) for step in range(self.config.steps + 1)]
        self.factor = torch.tensor(shares, dtype=torch.float64).to(flat)
        # one stream for the noise of all members, named by all that they are: no other ensemble draws from it
        members = "|".join(f"{c.to_json()}{r}" for c, r in zip(self.configs, self.run_ids, strict=True))
        self.seeded = all(c.seed is not None for c in self.configs)
        self._noise = Stream(f"noise|{members}", 0 if self.seeded else None)
        self._layers = Once(Stream(f"layers|{members}", 0 if self.seeded else None))
        self.generator, self._drawn_from = self._noise.at(0, self.device), self._noise.root

    # -- one step -------------------------------------------------------------------------------------------------

    def _accumulate(self) -> None:
        """One pass: per-row gradients of every member, whitened norms, clipped sum."""
        index = self.table.index_select(0, self.cursor)[0].flatten().long()
        self.cursor.add_(1)
        present = (index >= 0).view(self.stack.models, self.rows)
        index = index.clamp(min=0)
        logits = self.stack(self.x.index_select(0, index))
        gradients = self.stack.backward(logits, self.y.index_select(0, index))
        with torch.no_grad():
            self.family.add(gradients, present, self.total)

    @torch.no_grad()
    def _finish(self) -> None:
        """Noise once, divide by the expected batch size, update weights and averages, forget the sum."""
        released = self.family.release(self.total, self.config.batch, self.generator)
        self.velocity.mul_(self.momentum).add_(released)
        rate = self.rate * self.factor.index_select(0, self.steps_taken.long().view(1))
        self.stack.flat.sub_(rate * self.velocity)
        self.steps_taken.add_(1)
        if self.config.ema:
            warm = (1 + self.steps_taken) / (10 + self.steps_taken)
            self.average.lerp_(self.stack.flat, 1 - warm.clamp(max=self.config.ema))
        self.total.zero_()

    def _step(self) -> None:
        self._accumulate()
        self._finish()

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> None:
        """Take ``steps`` more steps (all that are left). Releases are counted before they happen."""
        left = self.config.steps - self.step_count
        wanted = left if steps is None else min(steps, left)
        for start in range(0, wanted, CHUNK):
            self._run_chunk(min(CHUNK, wanted - start))

    def _forget(self) -> None:
        """Whatever a step that was broken off has added up: nothing of it is released."""
        self.total.zero_()
        self.family.forget()

    def _run_chunk(self, steps: int) -> None:
        self._released[self._own] = self._released.get(self._own, 0) + steps  # a chunk that is broken off counts in full
        self._forget()
        self.steps_taken.fill_(self.step_count)
        seed_layers(self._layers.at(self.step_count).initial_seed())  # without a seed known to nobody: see `renew_generators`
        if self._drawn_from != self._noise.root:  # a fork or a copy draws batches of its own, and so it must its noise
            self.generator, self._drawn_from = self._noise.at(0, self.device), self._noise.root
            self._graphs = None
        table, passes = self.batches.draw(steps)
        self._load(table)
        part, whole = self._calls()
        for count in passes.tolist():
            for _ in range(count - 1):
                part()
            whole()
            self.step_count += 1

    def _load(self, table: np.ndarray) -> None:
        """Indices of the chunk into a buffer that keeps its address, so that a captured graph finds them."""
        values = torch.from_numpy(table)
        if len(self.table) < len(values):
            spare = torch.full((len(values) + CHUNK // 8, *values.shape[1:]), -1, dtype=torch.int32)
            self.table, self._graphs = spare.to(self.device), None
        if self.device.type == "cuda":
            self._pinned = values.pin_memory()
            self.table[: len(values)].copy_(self._pinned, non_blocking=True)
        else:
            self.table[: len(values)].copy_(values)
        self.cursor.zero_()

    def _calls(self) -> tuple[Callable[[], None], Callable[[], None]]:
        if not self.use_graph:
            return self._accumulate, self._step
        if self._graphs is None:
            self._graphs = self._capture()
        part, whole = self._graphs
        return part.replay, whole.replay

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        own = (self.stack.flat, self.total, self.velocity, self.average, self.steps_taken, self.cursor)
        state = (*own, *self.family.state.values())
        kept, noise = [t.clone() for t in state], self.generator.get_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
                for tensor, value in zip(state, kept, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # the graphs have a pool of their own
        graphs: list[torch.cuda.CUDAGraph] = []
        for call in (self._accumulate, self._step):
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
                call()
            graphs.append(graph)
        self.generator.set_state(noise)
        return graphs[0], graphs[1]

    # -- results --------------------------------------------------------------------------------------------------

    def weights(self) -> Tensor:
        """What is released, [E, d]: the averaged weights, or the last ones."""
        return self.average if self.config.ema else self.stack.flat

    @torch.no_grad()
    def logits(self, x: Tensor, rows: int = 250) -> Tensor:
        """[E, N, classes] of the released weights on the same inputs for every member."""
        self.stack.use(self.weights())
        self.stack.skeleton.eval()
        spread = lambda part: part.expand(self.stack.models, *part.shape).flatten(0, 1)  # noqa: E731
        parts = [self.stack(spread(part)).unflatten(0, (self.stack.models, -1)).float() for part in x.split(rows)]
        self.stack.skeleton.train()
        self.stack.use(self.stack.flat)
        return torch.cat(parts, 1)

    def evaluate(self) -> list[dict[str, float]]:
        """Public test metrics of every member: accuracy, loss, Brier score, expected calibration error."""
        if self.dataset.x_test is None or self.dataset.y_test is None:
            return [{} for _ in self.configs]
        x = torch.from_numpy(np.ascontiguousarray(self.dataset.x_test)).to(self.device)
        y = torch.from_numpy(np.ascontiguousarray(self.dataset.y_test)).to(self.device)
        return [scores(logits, y, self.dataset.classes) for logits in self.logits(x)]

    @property
    def releases(self) -> int:
        """All that were made here, and on the way to the states that were loaded."""
        return sum(self._released.values())

    @property
    def _own(self) -> str:
        """Who releases: equal seeds make equal releases, copies and forks their own. A digest: of the root noise is drawn."""
        return hashlib.sha256(f"{self._noise.purpose}|{self._noise.root}".encode()).hexdigest()[:16]

    def accountant(self, member: int) -> Accountant:
        """The history of one member: as many Poisson-sampled releases of its mechanism as there were steps."""
        accountant = Accountant()
        accountant.record(self._events[member], self.releases)
        return accountant

    def epsilon(self, member: int, method: str = "pld") -> float:
        """ε that one member has spent, at its δ."""
        delta = self.configs[member].delta
        assert delta is not None
        return self.accountant(member).epsilon(delta, method) if self.releases else 0.0  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed ensemble needs to continue (with the same configurations and sizes); exactly, if it is seeded.

        Without seeds the state of the noise stays here: whoever reads it could draw the noise again, and a resumed ensemble
        would hide other batches behind noise that was used before.
        """
        self._forget()
        return {
            "step": self.step_count,
            "tensors": {n: getattr(self, n).clone() for n in ("velocity", "average", "steps_taken")},
            "flat": self.stack.flat.clone(),
            "family": {n: t.clone() for n, t in self.family.state.items()},
            "noise": self.generator.get_state() if self.seeded else None,
            "releases": dict(self._released),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step_count = int(state["step"])
        for name, value in state["tensors"].items():
            getattr(self, name).copy_(value)
        self.stack.flat.copy_(state["flat"])
        for name, value in state["family"].items():
            self.family.state[name].copy_(value)
        if self.seeded and state["noise"] is not None:
            self.generator.set_state(state["noise"].cpu())  # wherever a checkpoint was loaded to
        for who, count in state["releases"].items():  # what was released here since, or by others before, stays released
            self._released[who] = max(self._released.get(who, 0), int(count))
        self.batches.skip_to(self.step_count)


def _settled(config: TrainConfig, records: int) -> TrainConfig:
    """Open choices made; σ calibrated where ε is given."""
    config = config.settled(records)
    if config.noise_multiplier is None:
        assert config.epsilon is not None
        assert config.delta is not None
        sigma = noise_multiplier(config.epsilon, config.delta, config.batch / records, config.steps)
        config = dataclasses.replace(config, noise_multiplier=sigma, epsilon=None)
    return config


def _common(configs: Sequence[TrainConfig]) -> TrainConfig:
    """The first configuration, after a check that the others differ in `FREE` options only, and that all are possible."""
    for config in configs:
        for field in dataclasses.fields(TrainConfig):
            mine, first = getattr(config, field.name), getattr(configs[0], field.name)
            if field.name not in FREE and mine != first:
                raise ConfigError(f"{field.name} is {mine!r} in one member and {first!r} in another; train them apart")
    config = configs[0]
    for name, only in (
        ("views", 1), ("augment", "none"), ("unit", None), ("secure", False), ("optimizer", "sgd"), ("weight_decay", 0.0),
        ("sampling", "poisson"), ("selective", False), ("denoise", "none"), ("warm_up", 0), ("average_views", False),
    ):  # fmt: skip
        if getattr(config, name) != only:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}; an ensemble has {only!r} only, train it with Session"
            )
    return config
