"""Everything that decides a run, typed, checked and written into its folder."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from erlangen.accounting.protected import require_name
from erlangen.data.augment import KINDS, Kind
from erlangen.spelling import hint

#: how far the noise of a whole run may carry each weight, and the largest rate in units of the clipping bound: measured
#: on held-out images of several data sets, sizes and ε (docs/results/defaults.md)
WALK, LARGEST_RATE = 0.2, 4.0


class ConfigError(ValueError):
    """An option has a value that cannot work; the message names it and the cure."""


@dataclass(frozen=True)
class TrainConfig:
    """One private training run. ``epsilon`` and ``noise_multiplier`` exclude each other."""

    data: str = "digits"
    data_options: dict[str, Any] = field(default_factory=dict)
    unit: str | None = None
    model: str = "auto"
    model_options: dict[str, Any] = field(default_factory=dict)
    #: a file of *public* weights to start from
    weights: str | None = None
    mechanism: str = "iso"
    mechanism_options: dict[str, Any] = field(default_factory=dict)
    clipping: str = "flat"
    clipping_options: dict[str, Any] = field(default_factory=dict)
    sampling: str = "poisson"
    sampling_options: dict[str, Any] = field(default_factory=dict)
    selective: bool = False
    selective_options: dict[str, Any] = field(default_factory=dict)
    max_grad_norm: float = 1.0
    epsilon: float | None = 3.0
    delta: float | None = None
    noise_multiplier: float | None = None
    batch: float = 0
    steps: int = 0
    optimizer: str = "sgd"
    lr: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    warm_up: int = 0
    ema: float = 0.99
    denoise: str = "none"
    views: int = 1
    augment: str = "none"
    #: answers (evaluations, predictions, exports) are means over fixed views; nothing that is trained or released changes
    average_views: bool = False
    max_physical_batch: int | None = None
    pad: bool = False
    graph: bool = False
    compile: bool = False
    shard: bool = False
    strategy: str = "auto"
    precision: str = "auto"
    seed: int | None = None
    secure: bool = False
    device: str = "auto"
    evaluations: int = 10
    checkpoints: int = 0
    non_private: bool = False

    def __post_init__(self) -> None:
        self._require_types()
        self._require_values()
        self._refuse_contradictions()
        if self.shard:
            self._refuse_with_shard()

    def _require_types(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            allowed = (dict,) if get_origin(kind) is dict else get_args(kind) or (kind,)
            if float in allowed:
                allowed += (int,)
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                words = {bool: "true or false", dict: "an object {…}"}
                names = " or ".join(words.get(k, k.__name__) for k in allowed if k is not type(None))
                raise ConfigError(f"{name} is {value!r}; it must be {names}")

    def _require_values(self) -> None:
        for name, ok, cure in (
            ("max_grad_norm", self.max_grad_norm > 0 and math.isfinite(self.max_grad_norm), "give C > 0"),
            ("epsilon", self.epsilon is None or 0 < self.epsilon < math.inf, "give a finite ε > 0, or σ: noise_multiplier"),
            ("delta", self.delta is None or 0 < self.delta < 1, "give 0 < δ < 1, or leave it out for min(1e-5, 0.1/N)"),
            ("noise_multiplier", self.noise_multiplier is None or self.noise_multiplier >= 0, "give σ ≥ 0"),
            ("batch", self.batch >= 0, "give the expected batch size"),
            ("steps", self.steps >= 0, "give the number of steps"),
            ("lr", self.lr >= 0 and math.isfinite(self.lr), "give a learning rate > 0"),
            ("momentum", 0 <= self.momentum < 1, "give 0 ≤ momentum < 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "give a number ≥ 0"),
            ("weight_decay", not self.weight_decay or self.optimizer != "adam-bc", "adam-bc has none: leave it out"),
            ("ema", 0 <= self.ema < 1, "give 0 ≤ ema < 1; 0 turns it off"),
            ("views", self.views >= 1, "give at least one view of each record"),
            ("augment", self.augment in KINDS, f"choose {', '.join(KINDS)}"),
            ("views", self.views > 1 or not KINDS.get(self.augment, Kind()).mix, f"{self.augment} mixes them: give two or more"),
            ("average_views", not self.average_views or KINDS.get(self.augment, Kind()).margin, "give an augment that moves them"),
            ("sampling", self.sampling in ("poisson", "importance"), "choose poisson or importance"),
            ("denoise", self.denoise in ("none", "james-stein"), "choose none or james-stein"),
            ("warm_up", self.warm_up >= 0, "give the number of first steps over which the rate grows linearly"),
            ("schedule", self.schedule in ("constant", "cosine"), "choose constant or cosine"),
            ("precision", self.precision in ("auto", "float32", "bf16"), "choose auto (bf16 on a GPU), float32 or bf16"),
            ("evaluations", self.evaluations >= 1, "evaluate at least once"),
            ("checkpoints", self.checkpoints >= 0, "give how many are written besides those of the evaluations"),
            ("max_physical_batch", self.max_physical_batch is None or self.max_physical_batch >= 1, "give rows ≥ 1"),
        ):
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; {cure}")
        if self.unit is not None:
            try:
                require_name(self.unit)
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def _refuse_contradictions(self) -> None:
        """Options that exclude each other, or do nothing together."""
        if self.secure and self.seed is not None:
            raise ConfigError("secure and seed exclude each other: seeded noise can be drawn again by anyone")
        if self.noise_multiplier is not None and self.epsilon is not None:
            raise ConfigError("epsilon and noise_multiplier exclude each other: give the one you mean")
        if self.noise_multiplier is None and self.epsilon is None:
            raise ConfigError("give epsilon (σ is then calibrated) or noise_multiplier")
        if "weights" in self.model_options:
            raise ConfigError("model_options has weights, an option of every network by itself: give weights (--weights FILE)")
        if self.selective_options and not self.selective:
            raise ConfigError(f"selective_options is {self.selective_options}, but selective is off: turn it on, or leave them out")
        if self.mechanism == "clipless" and (self.clipping != "flat" or self.clipping_options):
            raise ConfigError(
                f"clipping is {self.clipping!r} with {self.clipping_options}, but mechanism 'clipless' clips nothing; leave "
                "clipping and clipping_options out, or choose another mechanism"
            )

    def _refuse_with_shard(self) -> None:
        """What is not proved, or asks for more than its own part of the network, with sharded parameters."""
        for name, ok, cure in (
            ("mechanism", self.mechanism in ("iso", "rep", "shuffle"), "choose iso, rep or shuffle"),
            ("clipping", self.clipping != "adaptive", "choose a bound that stays: flat, per-layer, auto-s or psac"),
            ("sampling", self.sampling == "poisson", "choose poisson"),
            ("selective", not self.selective, "leave it out"),
            ("denoise", self.denoise == "none", "choose none"),
            ("graph", not self.graph, "leave it out"),
            ("compile", not self.compile, "leave it out"),
            ("non_private", not self.non_private, "leave it out"),
        ):
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, which --shard cannot do; {cure}, or leave --shard out")

    def settled(self, records: int) -> TrainConfig:
        """With every open choice made from *public* facts: the number of records and the other options."""
        if self.mechanism == "clipless":
            return self._lipschitz()._settled(records)
        return dataclasses.replace(self, model="cnn" if self.model == "auto" else self.model)._settled(records)

    def _lipschitz(self) -> TrainConfig:
        """Clipless needs a network and a loss with known constants; chosen on held-out digits (docs/results/clipless.md)."""
        loss = {"name": "hinge", "margin": 0.15}
        return dataclasses.replace(
            self,
            model="lipschitz-mlp" if self.model == "auto" else self.model,
            mechanism_options={"loss": loss, **self.mechanism_options},
            lr=self.lr or (0.3 * (1 - self.momentum) if self.optimizer == "sgd" else 0.0),
        )

    def _settled(self, records: int) -> TrainConfig:
        batch = self.batch or max(1, min(records, 2 ** round(math.log2(max(2.0, records / 6)))))
        if batch > records:
            raise ConfigError(f"batch is {batch} but there are only {records} units of privacy; give a smaller batch")
        settled = dataclasses.replace(
            self,
            batch=batch,
            steps=self.steps or max(1, round(30 * records / batch)),
            delta=self.delta if self.delta is not None else min(1e-5, 0.1 / records),
        )
        return settled if self.lr else dataclasses.replace(settled, lr=settled._quiet_rate(records))

    def usual_rate(self) -> float:
        """The learning rate that fits the optimizer and the clipping bound, whatever the noise."""
        return 1e-3 if self.optimizer.startswith("adam") else (1 - self.momentum) / self.max_grad_norm

    def _quiet_rate(self, records: int) -> float:
        """The rate at which the run's noise moves a weight by `WALK`, at most `LARGEST_RATE` usual ones.

        With effective rate η/C the noise of T steps is a random walk of standard deviation η·σ√T/B. For a σ that makes the
        run (ε, δ)-private, σ√T/B ≈ T/(N·μ(ε, δ)): few records and a small ε ask for small steps, many allow large ones.
        """
        usual = self.usual_rate()
        if self.optimizer != "sgd":
            return usual
        if self.epsilon is None:
            walk = (self.noise_multiplier or 0.0) * math.sqrt(self.steps) / self.batch
        else:
            from erlangen.accounting.attacker import mu_of

            assert self.delta is not None
            walk = self.steps / (records * mu_of(float(self.epsilon), self.delta))
        return float(f"{usual * min(LARGEST_RATE, WALK / max(walk, 1e-9)):.3g}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        known = get_type_hints(cls)
        unknown = sorted(set(values) - set(known))
        if unknown:
            meant = "".join(hint(name, known) for name in unknown)
            raise ConfigError(f"unknown option(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}.{meant}")
        if values.get("noise_multiplier") is not None and "epsilon" not in values:
            values = {**values, "epsilon": None}  # the default target gives way to a σ that was chosen
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> TrainConfig:
        return cls.from_dict(read_options(path))


def read_options(path: Path) -> dict[str, Any]:
    """The options of a JSON configuration file; what it leaves out keeps its default."""
    try:
        values = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"no file at {path}; give a JSON file of options, such as the config.json of a run") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a JSON configuration: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a JSON object of options")
    return values
