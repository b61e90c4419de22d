"""What `gredp_geodp.py` trains: the papers' tables as grids of methods, settings and steps.

A *step length* is lr·C/(1 − momentum), what a run of clipped gradients moves; learning rates follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from erlangen.training.config import TrainConfig

Options = dict[str, Any]
#: (step length, C, momentum)
Pick = tuple[float, float, float]


@dataclass(frozen=True)
class Method:
    """Options of a method, its ``family`` (what trains together) and the settings it runs in (all of them).

    ``scale`` multiplies the step lengths that are tried: normalised steps do not shrink, and need shorter ones. ``tried``
    replaces the task's grid, ``fixed`` its picks. A method that is ``like`` another is not tuned: it takes what was tuned for
    that one in the task's ``base``. One that trains ``alone`` does what no ensemble can (it chooses its batches, or takes
    updates back).
    """

    family: str
    options: Options
    settings: tuple[str, ...] | None = None
    scale: float = 1.0
    tried: tuple[Pick, ...] = ()
    fixed: tuple[Pick, ...] = ()
    like: str | None = None
    alone: bool = False


@dataclass(frozen=True)
class Task:
    """One table. ``settings`` change the common options (σ at least); ``picks`` are measured as they are, a grid is tuned."""

    name: str
    common: Options
    settings: dict[str, Options]
    methods: dict[str, Method]
    lengths: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()
    momenta: tuple[float, ...] = (0.0, 0.9)
    picks: tuple[Pick, ...] = ()
    #: rows of a member in memory at a time, and members at a time, where the default does not fit
    rows: int | None = None
    members: int | None = None
    #: rows of all members at a time; larger batches take several passes
    most_rows: int | None = None
    precision: str | None = None
    #: settings that are tuned and measured before the next ones; none means all at once
    stages: tuple[tuple[str, ...], ...] = ()
    #: what is tuned for: accuracy, or (``test_loss``) the loss
    score: str = "test_accuracy"
    #: steps of a tuning trial, where a whole run would cost too much
    tuning_steps: int | None = None
    #: the task whose methods these are ``like``; runs of a seed start from its weights
    base: str | None = None
    #: the task with whose runs those of a seed share batches
    beside: str | None = None
    #: looks at the test set on the way, for a curve; nothing is decided by them
    looks: int = 1

    def grid(self, method: str) -> list[Pick]:
        scale, tried = self.methods[method].scale, self.methods[method].tried
        return list(tried) or [
            (length * scale, bound, mu) for length in self.lengths for bound in self.bounds for mu in self.momenta
        ]

    def fixed(self, method: str) -> list[Pick]:
        scale, own = self.methods[method].scale, self.methods[method].fixed
        return list(own) or [(length * scale, bound, mu) for length, bound, mu in self.picks]

    def where(self, method: str, stage: tuple[str, ...]) -> list[str]:
        return [s for s in self.methods[method].settings or self.settings if s in stage]

    def shape(self, method: str, setting: str) -> str:
        """What trains together: one family, and settings that differ in noise only."""
        other = {k: v for k, v in self.settings[setting].items() if k != "noise_multiplier"}
        return f"{self.methods[method].family} {other or ''}".strip()

    def options(self, method: str, setting: str) -> Options:
        """All that a pick, a seed and a device leave open."""
        return {**self.common, **self.methods[method].options, **self.settings[setting]}

    def config(self, method: str, setting: str, pick: Pick, seed: int, device: str) -> TrainConfig:
        length, bound, momentum = pick
        return TrainConfig(
            **self.options(method, setting), epsilon=None, delta=1e-5, max_grad_norm=bound, momentum=momentum, seed=seed,
            device=device, lr=length / bound * (1 - momentum), evaluations=1,
        )  # fmt: skip


def noise(sigma: float, **options: Any) -> Options:
    return {"noise_multiplier": sigma, **options}


# -- GReDP ----------------------------------------------------------------------------------------------------------

#: ε → σ of 1,200 steps at q = 500/60,000, δ = 1e-5: of that ε (PLD), and of a plain Gaussian's claim of it (RDP)
SIGMAS = {0.5: (2.1938, 2.3769), 1.0: (1.3207, 1.4104), 1.5: (1.0451, 1.1167), 2.0: (0.9146, 0.9780)}
#: B → the same at ε = 2 and ten epochs
BATCH_SIGMAS = {256: (0.7863, 0.8552), 512: (0.9197, 0.9835), 1024: (1.1251, 1.1957), 2048: (1.4379, 1.5371)}
#: for CIFAR-10, ε → σ of 3,000 steps at q = 500/50,000, and B → σ at ε = 2 and thirty epochs
CIFAR_SIGMAS = {0.5: (3.9456, 4.2938), 1.0: (2.1888, 2.3592), 1.5: (1.6022, 1.7140), 2.0: (1.3137, 1.3943)}
CIFAR_BATCH_SIGMAS = {256: (1.0418, 1.0970), 512: (1.3252, 1.4069), 1024: (1.7493, 1.8700), 2048: (2.3734, 2.5490)}

SPECTRAL: Options = {"mechanism": "spectral", "mechanism_options": {"ratio": 0.5}}
GREDP: Options = {"mechanism": "gredp"}
PUBLISHED: Options = {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}
#: to the letter: every layer clipped at C by itself
LAYERED: dict[str, Options] = {
    "Spectral-DP as published": {"mechanism": "spectral", "mechanism_options": {"ratio": 0.5, "as_published": True}},
    **{f"GReDP as published, {reading}": {"mechanism": "gredp", "mechanism_options": {"as_published": reading}}
       for reading in ("complex", "real", "per-sample")},
}  # fmt: skip
CIRCULANT: Options = {"model_options": {"circulant": 4}}
LENET: Options = {"data": "mnist", "model": "lenet", "batch": 500, "steps": 1200, "ema": 0.99}


def dense(true: tuple[str, ...], claimed: tuple[str, ...]) -> dict[str, Method]:
    """A filtered norm needs gradients that were formed: Spectral-DP trains by itself, and the others need not form theirs."""
    return {
        "DP-SGD": Method("dense", {}, true),
        "Spectral-DP": Method("spectral", SPECTRAL, true),
        "GReDP": Method("dense", GREDP, true),
        "GReDP as published": Method("dense", PUBLISHED, claimed),
    }


def in_blocks(methods: dict[str, Method]) -> dict[str, Method]:
    """The same with block-circulant layers."""
    return {
        f"{name}, circulant": replace(m, family=f"circulant {m.family}", options={**m.options, **CIRCULANT})
        for name, m in methods.items()
    }


def table1(name: str, common: Options, sigmas: tuple[float, float], **options: Any) -> Task:
    """Every method at equal true ε, and GReDP at its claim; dense and circulant."""
    plain = dense(("true",), ("claimed",))
    methods = {**plain, "AUTO-S": Method("auto-s", {"clipping": "auto-s"}, ("true",)), **in_blocks(plain)}
    return Task(name, common, {"true": noise(sigmas[0]), "claimed": noise(sigmas[1])}, methods, **options)


TABLE_1 = table1("gredp-table1", LENET, SIGMAS[1.0], lengths=(0.5, 1.0, 2.0), bounds=(0.1, 1.0))


def on_cifar(model: str) -> Options:
    return {"data": "cifar10", "model": model, "batch": 500, "steps": 3000, "ema": 0.99}


#: the networks on CIFAR-10, and how many train at a time; products in bfloat16, clipping measures what is summed
CIFAR: dict[str, Options] = {
    model: {"members": members, "most_rows": 8192, "precision": "bfloat16"}
    for model, members in {"model3": 12, "resnet20": 12, "alexnet": 6}.items()
}


def cifar(model: str, target: float) -> Task:
    """One column of Table 1 on CIFAR-10.

    The step length is tuned in a third of the steps; C is not, because nearly every gradient is clipped.
    """
    tuning: Options = {"lengths": (0.3, 1.0, 3.0), "bounds": (1.0,), "momenta": (0.9,), "tuning_steps": 1000}
    return table1(f"gredp-{model}", on_cifar(model), CIFAR_SIGMAS[target], **CIFAR[model], **tuning)


MODEL_3, RESNET_20, ALEXNET = cifar("model3", 2.0), cifar("resnet20", 1.5), cifar("alexnet", 2.0)
COLUMNS = (TABLE_1, MODEL_3, RESNET_20, ALEXNET)


def tuned(column: Task) -> Task:
    """What claims an advantage on CIFAR-10 and what it stands against, with C and momentum tuned too, as on LeNet-5."""
    names = ("DP-SGD", "AUTO-S", "Spectral-DP", "DP-SGD, circulant", "Spectral-DP, circulant")
    methods = {name: column.methods[name] for name in names}
    return replace(column, name=f"{column.name}-tuned", methods=methods, bounds=(0.1, 1.0), momenta=(0.0, 0.9))


#: lr 0.1 at C = 1 with momentum 0.9
BATCH: tuple[Pick, ...] = ((1.0, 1.0, 0.9),)


def layered(column: Task) -> Task:
    """Spectral-DP and GReDP to the letter, with the noise of their claim; not tuned."""
    methods = {name: Method("layers", {**options, "clipping": "per-layer"}) for name, options in LAYERED.items()}
    return replace(
        column, name=f"{column.name}-layers", settings={"claimed": column.settings["claimed"]}, methods=methods, lengths=(),
        bounds=(), momenta=(), picks=BATCH, tuning_steps=None,
    )  # fmt: skip


def noise_free(table: Task, lr: float, **common: Any) -> Task:
    """Ordinary training: no noise, a bound that nothing reaches, momentum 0.9; not tuned."""
    bound = 1e6
    return replace(
        table, name=f"{table.name}-noise-free", common={**table.common, **common}, settings={"σ=0": noise(0.0)},
        methods={"no privacy": Method("plain", {})}, lengths=(), bounds=(), momenta=(), picks=((10 * lr * bound, bound, 0.9),),
        stages=(), tuning_steps=None,
    )  # fmt: skip


def levels(sigmas: dict[float, tuple[float, float]], label: str, **shapes: Any) -> dict[str, Options]:
    found = {}
    for value, (true, claimed) in sigmas.items():
        other = {name: make(value) for name, make in shapes.items()}
        found |= {
            f"{label}={value:g} true": noise(true, **other),
            f"{label}={value:g} claimed": noise(claimed, **other),
        }
    return found


def ablation(name: str, common: Options, settings: dict[str, Options], picks: tuple[Pick, ...], **options: Any) -> Task:
    """No tuning: what is varied is the table."""
    true = tuple(s for s in settings if s.endswith("true"))
    claimed = tuple(s for s in settings if s.endswith("claimed"))
    return Task(name, common, settings, dense(true, claimed), picks=picks, **options)


def bounds(length: float) -> tuple[Pick, ...]:
    """Table 3: both C at one step length."""
    return ((length, 0.1, 0.9), (length, 1.0, 0.9))


RATES = tuple((lr * 10, 1.0, 0.9) for lr in (0.001, 0.01, 0.025, 0.05, 0.1))
TABLE_3 = ablation("gredp-table3", LENET, levels(SIGMAS, "ε"), bounds(1.0))
FIGURE_4 = ablation("gredp-fig4", LENET, levels(BATCH_SIGMAS, "B", batch=int, steps=lambda b: round(600_000 / b)), BATCH)
FIGURE_RATES = ablation("gredp-fig5", LENET, levels({2.0: SIGMAS[2.0]}, "ε"), RATES)
#: on CIFAR-10 the step lengths that Table 1's trials chose for DP-SGD
CIFAR_LENGTHS = {"model3": 1.0, "resnet20": 3.0, "alexnet": 1.0}


def dynamics(model: str, length: float) -> Task:
    """Figure 3, middle and right: accuracy along training at ε = 2. Table 3 takes over what ends there.

    What an advantage stands against is here too: AUTO-S and DP-SGD without momentum (Table 3 has its second bound).
    """
    picks = ((length, 1.0, 0.9),)
    task = ablation(f"gredp-fig3-{model}", on_cifar(model), levels({2.0: CIFAR_SIGMAS[2.0]}, "ε"), picks, looks=15, **CIFAR[model])
    rivals = {
        "AUTO-S": Method("auto-s", {"clipping": "auto-s"}, ("ε=2 true",)),
        "DP-SGD without momentum": Method("dense", {}, ("ε=2 true",), fixed=((length, 1.0, 0.0),)),
    }
    return replace(task, methods={**task.methods, **rivals})


CIFAR_ABLATIONS = tuple(dynamics(model, length) for model, length in CIFAR_LENGTHS.items()) + tuple(
    ablation(f"gredp-{name}-{model}", on_cifar(model), settings, picks, **CIFAR[model])
    for model, length in CIFAR_LENGTHS.items()
    for name, settings, picks in (
        ("table3", levels(CIFAR_SIGMAS, "ε"), bounds(length)),
        ("fig4", levels(CIFAR_BATCH_SIGMAS, "B", batch=int, steps=lambda b: round(1_500_000 / b)), BATCH),
        ("fig5", levels({2.0: CIFAR_SIGMAS[2.0]}, "ε"), RATES),
    )
)
#: networks without norms do not survive the noise of a small ε at Table 3's step length
SHORT_STEPS = tuple(
    ablation(
        f"gredp-table3-short-{model}", on_cifar(model), levels({e: CIFAR_SIGMAS[e] for e in (0.5, 1.0)}, "ε"), bounds(0.3),
        **CIFAR[model],
    )
    for model in ("model3", "alexnet")
)  # fmt: skip


def steps(model: str) -> Task:
    """Whether a filter still pays at half of the rate that Table 1's grid chose: both rates, more seeds than Figure 5 has."""
    task = ablation(
        f"gredp-steps-{model}", on_cifar(model), levels({2.0: CIFAR_SIGMAS[2.0]}, "ε"), tuple((k, 1.0, 0.9) for k in (0.5, 1.0)),
        **CIFAR[model],
    )  # fmt: skip
    return replace(task, methods={name: task.methods[name] for name in ("DP-SGD", "Spectral-DP")})


STEPS = (steps("model3"), steps("alexnet"))


def circulant(task: Task) -> Task:
    """An ablation with block-circulant layers."""
    return replace(task, name=f"{task.name}-circulant", methods=in_blocks(task.methods), beside=task.name)


#: the one that decides whether blocks gain at the better rate comes first
CIRCULANT_ABLATIONS = tuple(map(circulant, (*STEPS, TABLE_3, FIGURE_4, FIGURE_RATES, *CIFAR_ABLATIONS, *SHORT_STEPS)))


# -- GeoDP ----------------------------------------------------------------------------------------------------------


def sound(scale: float, **options: Any) -> Method:
    return Method("direction", {"mechanism": "geodp", "mechanism_options": options}, scale=scale)


def geodp(name: str, common: Options, sigmas: tuple[float, ...], betas: tuple[float, ...], **options: Any) -> Task:
    """DP against GeoDP: as published for each β, and the sound forms."""
    methods = {
        "DP": Method("flat", {}),
        "DP+AUTO-S": Method("auto-s", {"clipping": "auto-s"}),
        "DP+PSAC": Method("psac", {"clipping": "psac"}),
        "direction": sound(1 / 16),
        "direction, scaled": sound(1.0, magnitude="scaled"),
        "shrink": sound(1 / 16, form="shrink"),
    }
    for beta in betas:
        published = {"mechanism": "geodp", "mechanism_options": {"as_published": True, "beta": beta}}
        methods[f"GeoDP as published β={beta:g}"] = Method("published", published)
    settings = {f"σ={sigma:g}": noise(sigma) for sigma in sigmas}
    return Task(name, {"data": "mnist", "ema": 0.0, **common}, settings, methods, **options)


TABLE_II = geodp(
    "geodp-table2", {"model": "geodp-cnn", "batch": 16384, "steps": 73}, (10.0, 1.0), (0.1,),
    lengths=(0.8, 3.2, 12.8), bounds=(0.1, 1.0), rows=1056, stages=(("σ=10",), ("σ=1",)),
)  # fmt: skip
# Table II with batches of a sixteenth and noise of a sixteenth: the noise on the average is the same, so a CPU can show
# who copes with it (ε is another one, and so is the sampling error of a batch)
TABLE_II_SMALL = geodp(
    "geodp-table2-small", {"model": "geodp-cnn", "batch": 1024, "steps": 73}, (0.625,), (0.1,),
    lengths=(0.8, 3.2, 12.8), bounds=(0.1,), momenta=(0.0,),
)  # fmt: skip
FIGURE_5 = geodp(
    "geodp-fig5", {"model": "logistic", "batch": 4096, "steps": 350}, (10.0, 1.0), (1.0, 0.5),
    lengths=(0.4, 1.6, 6.4), bounds=(0.1,), rows=1096, score="test_loss",
)  # fmt: skip
FIGURE_5_HALF = geodp(
    "geodp-fig5-b2048", {"model": "logistic", "batch": 2048, "steps": 350}, (1.0,), (1.0,),
    lengths=(0.4, 1.6, 6.4), bounds=(0.1,), score="test_loss",
)  # fmt: skip
# panel (c): with so little noise long steps are worth a trial
FIGURE_5C = geodp(
    "geodp-fig5c", {"model": "logistic", "batch": 256, "steps": 350}, (0.1, 0.01), (1.0,),
    lengths=(0.4, 1.6, 6.4, 25.6), bounds=(0.1,), score="test_loss",
)  # fmt: skip


def larger_bounds(figure: Task, **options: Any) -> Task:
    """The paper's C is 0.1; larger ones, for the methods to which C is more than a factor of the learning rate."""
    methods = {name: m for name, m in figure.methods.items() if "clipping" not in m.options and name != "shrink"}
    name = f"{figure.name}-bounds"
    return replace(figure, name=name, bounds=(1.0, 10.0), momenta=(0.0,), methods=methods, **options)


FIGURE_5_BOUNDS = larger_bounds(FIGURE_5, stages=(("σ=10",), ("σ=1",)))
FIGURE_5_HALF_BOUNDS, FIGURE_5C_BOUNDS = larger_bounds(FIGURE_5_HALF), larger_bounds(FIGURE_5C)
# GeoDP as published at σ = 1 was best at the longest step of its grid
FIGURE_5_LONG = replace(
    FIGURE_5, name="geodp-fig5-long", settings={"σ=1": noise(1.0)}, lengths=(12.8, 25.6), bounds=(10.0,), momenta=(0.0,),
    methods={name: method for name, method in FIGURE_5.methods.items() if "as published" in name},
)  # fmt: skip


def noiseless(figure: Task) -> Task:
    """The figure's black line."""
    return replace(
        figure, name=f"{figure.name}-noiseless", settings={"σ=0": noise(0.0)}, bounds=(0.1, 1.0, 10.0), momenta=(0.0,),
        methods={"DP": figure.methods["DP"]}, stages=(),
    )  # fmt: skip


FIGURE_5_QUIET, FIGURE_5C_QUIET = noiseless(FIGURE_5), noiseless(FIGURE_5C)


def angles(table: Task) -> Task:
    """The sound form in the paper's own coordinates. It looks at every angle of every record: run by run, on a CPU.

    C is a factor of the learning rate, as far as it clips no magnitude.
    """
    method = replace(sound(1.0, form="angles", beta=0.1), family="angles", alone=True)
    return replace(table, name=f"{table.name}-angles", methods={"angles β=0.1": method}, bounds=(0.1,), beside=table.name)


TABLE_II_ANGLES, FIGURE_5_ANGLES = angles(TABLE_II), angles(FIGURE_5)


def table_3() -> Task:
    """CIFAR-10. Where C is (nearly) a factor of the learning rate, all trials are step lengths; DP's come again with momentum."""
    task = geodp(
        "geodp-table3", {"data": "cifar10", "model": "resnet3", "batch": 16384, "steps": 61}, (0.1, 0.01), (1.0, 0.1),
        lengths=(1.6, 6.4), bounds=(0.1, 1.0), momenta=(0.0,), rows=1056, members=16, precision="bfloat16",
    )  # fmt: skip
    methods = {name: method for name, method in task.methods.items() if name != "direction, scaled"}
    plain = tuple(task.grid("DP"))
    methods["DP"] = replace(methods["DP"], tried=plain + tuple((length, bound, 0.9) for length, bound, _ in plain))
    for name in ("DP+AUTO-S", "DP+PSAC", "direction", "shrink"):
        lengths = (length * methods[name].scale for length in (0.8, 1.6, 3.2, 6.4))
        methods[name] = replace(methods[name], tried=tuple((length, 0.1, 0.0) for length in lengths))
    return replace(task, methods=methods)


TABLE_III = table_3()

#: the papers' noise-free numbers; ours have small batches
QUIET = (
    *(noise_free(column, 0.01) for column in COLUMNS),
    noise_free(TABLE_II, 0.05, batch=512, steps=2344), noise_free(TABLE_III, 0.05, batch=512, steps=1953),
)  # fmt: skip

#: what stands behind the plus signs of Tables II and III
COMPANIONS: dict[str, Options] = {
    "IS": {"sampling": "importance"}, "SUR": {"selective": True}, "AUTO-S": {"clipping": "auto-s"},
    "PSAC": {"clipping": "psac"},
}  # fmt: skip


def companions(base: Task, rows: dict[str, tuple[str, str]], halved: dict[str, tuple[str, Options]]) -> Task:
    """The rows of a table that its ``base`` does not have, at what was tuned there.

    ``rows``: (the base's method, companions); the step length, C and momentum are those of the base's method, or of its
    method with the same clipping rule. ``halved``: methods at half the batch and twice the steps.
    """
    methods = {}
    for name, (method, extras) in rows.items():
        options = dict(base.methods[method].options)
        for extra in extras.split("+"):
            options |= COMPANIONS[extra]
        alone = "sampling" in options or "selective" in options
        ruled = f"{method}+{extras.split('+')[-1]}"
        like = ruled if ruled in base.methods else method
        methods[name] = Method(f"{base.methods[method].family} {extras}", options, like=like, alone=alone)
    shorter = {"batch": base.common["batch"] // 2, "steps": 2 * base.common["steps"]}
    for name, (like, changes) in halved.items():
        options = {**base.methods[like].options, **changes, **shorter}
        methods[name] = Method(f"{base.methods[like].family}, half the batch", options, like=like)
    return replace(
        base, name=f"{base.name}-companions", base=base.name, methods=methods, lengths=(), bounds=(), momenta=(), picks=(),
        stages=tuple((setting,) for setting in base.settings),
    )  # fmt: skip


def rows_of(label: str, method: str, *extras: str) -> dict[str, tuple[str, str]]:
    return {f"{label}+{extra}": (method, extra) for extra in extras}


GEODP = "GeoDP as published β=0.1"
ROWS = {**rows_of("DP", "DP", "IS", "SUR"), **rows_of(GEODP, GEODP, "IS", "SUR")}
MORE = {**rows_of("DP", "DP", "SUR+PSAC"), **rows_of(GEODP, GEODP, "SUR+PSAC", "AUTO-S", "PSAC")}


def as_published(beta: float) -> Options:
    return {"mechanism_options": {"as_published": True, "beta": beta}}


TABLE_II_MORE = companions(
    TABLE_II, {**ROWS, **MORE, **rows_of("direction", "direction", "IS", "SUR", "PSAC")},
    {"DP B=8192": ("DP", {}), f"{GEODP} B=8192": (GEODP, {}), "GeoDP as published β=0.5 B=8192": (GEODP, as_published(0.5))},
)  # fmt: skip
TABLE_III_MORE = companions(
    TABLE_III, {**ROWS, **MORE},
    {"DP B=8192": ("DP", {}), "GeoDP as published β=1 B=8192": ("GeoDP as published β=1", {})},
)  # fmt: skip

#: in the order in which they are worth running
ALL = (
    TABLE_1, TABLE_II, FIGURE_5, TABLE_3, FIGURE_4, FIGURE_RATES, MODEL_3, TABLE_III, RESNET_20, ALEXNET, TABLE_II_SMALL,
    FIGURE_5_BOUNDS, FIGURE_5_HALF, FIGURE_5_HALF_BOUNDS, FIGURE_5C, FIGURE_5C_BOUNDS,
    FIGURE_5_LONG, FIGURE_5_ANGLES, TABLE_II_ANGLES, FIGURE_5_QUIET, FIGURE_5C_QUIET, TABLE_II_MORE, TABLE_III_MORE,
    *map(tuned, COLUMNS[1:]),
    *CIFAR_ABLATIONS, *SHORT_STEPS, *STEPS, *CIRCULANT_ABLATIONS, *map(layered, COLUMNS), *QUIET,
)  # fmt: skip
TASKS = {task.name: task for task in ALL}
DEFAULT = ("gredp-table1", "geodp-table2", "geodp-fig5")


def shortened(config: TrainConfig, steps: int) -> TrainConfig:
    """So few steps of small batches."""
    return replace(config, steps=steps, batch=min(config.batch, 32)) if steps else config


__all__ = ["DEFAULT", "TASKS", "Method", "Options", "Pick", "Task", "shortened"]
