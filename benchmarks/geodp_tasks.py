"""GeoDP's tables and figures, with the companions in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from task import Method, Options, Task, noise


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

ALL = (
    TABLE_II, FIGURE_5, TABLE_III, TABLE_II_SMALL, FIGURE_5_BOUNDS, FIGURE_5_HALF, FIGURE_5_HALF_BOUNDS, FIGURE_5C,
    FIGURE_5C_BOUNDS, FIGURE_5_LONG, FIGURE_5_ANGLES, TABLE_II_ANGLES, FIGURE_5_QUIET, FIGURE_5C_QUIET, TABLE_II_MORE,
    TABLE_III_MORE,
)  # fmt: skip
