"""GeoDP (Duan et al. 2025): Figures 1 and 3 to 6, Tables II and III, and the two items of its Theorem 1.

Every table and figure stands twice: as published, which has no guarantee (ε = ∞), and in the sound forms at equal
noise multiplier, beside ISO with a tuned bound, AUTO-S and momentum. What the paper leaves open is ours: its learning
rates (tuned on a split of the training set), the noise and bounding factors of Figure 5's panels, and an outlier in its
batch sizes (163984, read as 16384).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from erlangen.experiments.measurements import Measurement, Point
from erlangen.experiments.presets import Cell, Preset, register_preset
from erlangen.training.config import TrainConfig

PAPER = "GeoDP"
#: the bound of all of the paper's experiments
BOUND = 0.1
MNIST, CIFAR = 60_000, 50_000
MEASURES = "erlangen.experiments.releases"

Series = tuple[str, str, dict[str, Any]]


def published(beta: float) -> dict[str, Any]:
    return {"as_published": True, "beta": beta}


def series(betas: Iterable[float]) -> list[Series]:
    """(label, mechanism, options) of everything that is compared at one point."""
    return [
        ("DP", "iso", {}),
        ("DP, C tuned", "iso", {"tuned": True}),
        ("AUTO-S", "iso", {"clipping": "auto-s"}),
        *((f"GeoDP as published β={b:g}", "geodp", published(b)) for b in betas),
        ("direction", "geodp", {"form": "direction"}),
        ("angles β=0.1", "geodp", {"form": "angles", "beta": 0.1}),
    ]


def errors(settings: Iterable[tuple[float, int, int]], betas: tuple[float, ...]) -> tuple[Point, ...]:
    """The error of one release for each (σ, d, B) and each of `series`."""
    points = []
    for sigma, d, batch in settings:
        for label, mechanism, options in series(betas):
            own = {k: v for k, v in options.items() if k not in ("tuned", "clipping")}
            points.append(
                Point(
                    f"σ={sigma:g} d={d} B={batch} {label}",
                    {"mechanism": mechanism, "sigma": sigma, "d": d, "batch": batch, "bound": BOUND, **options},
                    (mechanism, own, sigma),
                    quick={"d": min(d, 500), "batch": min(batch, 256), "epochs": 0},
                )
            )
    return tuple(points)


ERRORS = {
    "direction_mse": "squared error of the direction (sum over angles)",
    "gradient_mse": "squared error of the gradient",
    "cosine": "cosine to the averaged clipped gradient",
}
SIGMAS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
DIMENSIONS = (500, 1000, 2000, 5000, 10_000, 20_000)
BATCHES = (512, 1024, 2048, 4096, 8192, 16_384)
SETTINGS = [
    *((s, 5000, 2048) for s in SIGMAS),
    *((8.0, d, 4096) for d in DIMENSIONS),
    *((8.0, 10_000, b) for b in BATCHES if b != 4096),
]


def _errors(name: str, where: str, title: str, points: tuple[Point, ...], note: str = "") -> None:
    said = "Gradients of a CNN on CIFAR-10, seen along 2 epochs of training without privacy; public data."
    measure = f"{MEASURES}:release_error"
    register_preset(
        Measurement(name, f"{PAPER} ({where})", title, measure, points, ERRORS, note=f"{said} {note}".strip())
    )


_errors(
    "geodp-fig1", "Figure 1", "Direction and gradient error against σ", errors(SETTINGS[:6], (1.0,)),
    "The paper states no settings here; those of Figure 3(a).",
)  # fmt: skip
_errors(
    "geodp-fig3", "Figure 3", "Direction and gradient error against σ, d, B for three β",
    errors(SETTINGS, (1.0, 0.1, 0.01)),
)  # fmt: skip
_errors(
    "geodp-fig4", "Figure 4", "Direction and gradient error against β",
    errors([(8.0, d, 4096) for d in (20_000, 10_000, 5000)], (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
)  # fmt: skip


# -- runtime --------------------------------------------------------------------------------------------------------

TIMED: list[Series] = [
    ("DP", "iso", {}),
    ("GeoDP as published", "geodp", published(0.1)),
    ("direction", "geodp", {"form": "direction"}),
    ("shrink", "geodp", {"form": "shrink"}),
    ("angles", "geodp", {"form": "angles"}),
]


def _timed(d: int, batch: int) -> list[Point]:
    return [
        Point(
            f"d={d} B={batch} {label}",
            {"mechanism": mechanism, "sigma": 1.0, "d": d, "batch": batch, **options},
            (mechanism, options, 1.0),
            quick={"d": min(d, 5000), "batch": min(batch, 64)},
        )
        for label, mechanism, options in TIMED
    ]


register_preset(
    Measurement(
        "geodp-fig6", f"{PAPER} (Figure 6)", "Runtime of a release against d and B", f"{MEASURES}:release_runtime",
        tuple(
            point
            for d, b in [(d, 500) for d in (1250, 5000, 20_000, 80_000, 320_000)] + [(20_000, b) for b in (1000, 2000, 4000)]
            for point in _timed(d, b)
        ),
        {"seconds": "seconds for clipping, summing and noising the batch", "ratio": "as a multiple of DP, same run"},
        seeds=5, note="Processor time of one CPU thread; gradients in memory; seeds are repeats.",
    )
)  # fmt: skip


# -- Theorem 1 ------------------------------------------------------------------------------------------------------

register_preset(
    Measurement(
        "geodp-theorem1", f"{PAPER} (Theorem 1)", "Items A and B of the model-efficiency split, logistic regression on MNIST",
        f"{MEASURES}:efficiency_split",
        tuple(
            Point(
                f"σ={sigma:g} step {step} {label}",
                {"mechanism": mechanism, "sigma": sigma, "step": step, "batch": 4096, "bound": BOUND, "rate": 20.0, **options},
                (mechanism, {k: v for k, v in options.items() if k != "clipping"}, sigma),
                quick={"batch": 256, "optimum_steps": 20, "step": min(step, 5)},
            )
            for sigma in (1.0, 10.0)
            for step in (10, 100)
            for label, mechanism, options in [
                ("DP", "iso", {}), ("AUTO-S", "iso", {"clipping": "auto-s"}),
                *((f"GeoDP as published β={b:g}", "geodp", published(b)) for b in (1.0, 0.1)),
                ("direction", "geodp", {"form": "direction"}),
            ]
        ),
        {"item_a": "η²(‖g*‖² − ‖g‖²)", "item_b": "2η⟨g* − g, w* − w⟩", "difference": "A + B; below 0 the noisy step is better"},
        note="w* is 150 steps of full gradient descent with momentum; the clean step is the clipped average of the same batch.",
        beside=True,
    )
)  # fmt: skip


# -- training -------------------------------------------------------------------------------------------------------


def _method(name: str) -> dict[str, Any]:
    """Options of a row of the tables: a base and the companions behind its plus signs."""
    base, *companions = name.split("+")
    bases: dict[str, dict[str, Any]] = {
        "DP": {},
        "GeoDP": {"mechanism": "geodp"},
        "direction": {"mechanism": "geodp", "mechanism_options": {"form": "direction"}},
        "shrink": {"mechanism": "geodp", "mechanism_options": {"form": "shrink"}},
        # every angle of every record is looked at: small parts
        "angles": {"mechanism": "geodp", "mechanism_options": {"form": "angles", "beta": 0.1}, "max_physical_batch": 256},
    }
    extras: dict[str, dict[str, Any]] = {
        "IS": {"sampling": "importance"}, "SUR": {"selective": True}, "AUTO-S": {"clipping": "auto-s"},
        "PSAC": {"clipping": "psac"}, "momentum": {"momentum": 0.9},
    }  # fmt: skip
    options = dict(bases[base])
    for companion in companions:
        options.update(extras[companion])
    return options


#: lr·C/(1 − momentum) by σ and method, the best on held-out training images (``benchmarks/gredp_geodp.py``)
Lengths = Mapping[float, Mapping[str, float]]


@dataclass(frozen=True)
class Task:
    """What a table trains: data, network, epochs and step lengths; 1 where none was tuned."""

    label: str
    data: str
    model: str
    records: int
    steps: dict[int, int]
    lengths: Lengths = field(default_factory=dict)

    def length(self, name: str, sigma: float) -> float:
        """That of the method with this clipping rule; sampling and selection are not tuned again, nor momentum everywhere."""
        parts, tuned = [part for part in name.split("+") if part not in ("IS", "SUR")], self.lengths.get(sigma, {})
        plain = [part for part in parts if part != "momentum"]
        known = (tuned.get("+".join(some)) for some in (parts, plain, parts[:1]))
        return next((length for length in known if length is not None), 1.0)

    def config(self, name: str, batch: int, sigma: float, **changes: Any) -> TrainConfig:
        values: dict[str, Any] = dict(
            data=self.data, model=self.model, max_grad_norm=BOUND, epsilon=None, noise_multiplier=sigma, delta=1e-5,
            batch=batch, steps=self.steps[batch], momentum=0.0, ema=0.0, max_physical_batch=2048,
        )  # fmt: skip
        values = {**values, **_method(name), **changes}
        lr = self.length(name, sigma) / values["max_grad_norm"] * (1 - values["momentum"])
        return TrainConfig(**{"lr": lr, **values})


def _epochs(records: int, epochs: int = 20) -> dict[int, int]:
    return {batch: round(epochs * records / batch) for batch in (8192, 16_384)}


# of the trials at the paper's C and B = 16,384, and β = 0.1; B = 8192 and other β were not tuned
LENGTHS_2: Lengths = {
    10.0: {
        "DP": 3.2, "DP+momentum": 12.8, "DP+AUTO-S": 3.2, "DP+PSAC": 3.2, "direction": 0.2, "shrink": 0.2, "GeoDP": 12.8,
    },
    1.0: {
        "DP": 3.2, "DP+momentum": 12.8, "DP+AUTO-S": 12.8, "DP+PSAC": 3.2, "direction": 0.05, "shrink": 0.05, "GeoDP": 3.2,
    },
}  # fmt: skip
LENGTHS_3: Lengths = {
    0.1: {
        "DP": 1.6, "DP+momentum": 6.4, "DP+AUTO-S": 1.6, "DP+PSAC": 0.8, "direction": 0.1, "shrink": 0.1, "GeoDP": 6.4,
    },
    0.01: {
        "DP": 1.6, "DP+momentum": 6.4, "DP+AUTO-S": 1.6, "DP+PSAC": 6.4, "direction": 0.1, "shrink": 0.1, "GeoDP": 1.6,
    },
}  # fmt: skip

TABLE_2 = Task("MNIST", "mnist", "geodp-cnn", MNIST, _epochs(MNIST), LENGTHS_2)
TABLE_3 = Task("CIFAR-10", "cifar10", "resnet3", CIFAR, _epochs(CIFAR), LENGTHS_3)

Rows = list[tuple[str, int, float | None, tuple[float, float]]]
#: (method, B, β, the paper's accuracy at either σ)
ROWS_2: Rows = [
    ("DP", 8192, None, (87.93, 94.25)), ("DP", 16384, None, (88.12, 95.52)), ("DP+IS", 16384, None, (88.43, 95.63)),
    ("DP+SUR", 16384, None, (88.47, 95.75)), ("DP+AUTO-S", 16384, None, (88.40, 95.71)),
    ("DP+PSAC", 16384, None, (88.48, 95.83)), ("DP+SUR+PSAC", 16384, None, (89.83, 96.91)),
    ("GeoDP", 8192, 0.1, (90.31, 96.47)), ("GeoDP", 16384, 0.1, (93.58, 98.04)), ("GeoDP", 8192, 0.5, (53.80, 60.31)),
    ("GeoDP+IS", 16384, 0.1, (93.60, 98.13)), ("GeoDP+SUR", 16384, 0.1, (93.68, 98.22)),
    ("GeoDP+AUTO-S", 16384, 0.1, (93.64, 98.17)), ("GeoDP+PSAC", 16384, 0.1, (94.13, 98.24)),
    ("GeoDP+SUR+PSAC", 16384, 0.1, (95.27, 98.69)),
]  # fmt: skip
ROWS_3: Rows = [
    ("DP", 8192, None, (59.39, 63.27)), ("DP", 16384, None, (60.12, 63.84)), ("DP+IS", 16384, None, (60.27, 64.07)),
    ("DP+SUR", 16384, None, (61.73, 64.83)), ("DP+AUTO-S", 16384, None, (60.51, 63.91)),
    ("DP+PSAC", 16384, None, (61.30, 64.71)), ("DP+SUR+PSAC", 16384, None, (62.91, 65.60)),
    ("GeoDP", 8192, 1.0, (61.47, 65.93)), ("GeoDP", 16384, 1.0, (63.38, 66.51)), ("GeoDP", 16384, 0.1, (65.47, 67.35)),
    ("GeoDP+IS", 16384, 0.1, (65.51, 67.35)), ("GeoDP+SUR", 16384, 0.1, (65.53, 67.36)),
    ("GeoDP+AUTO-S", 16384, 0.1, (65.58, 67.37)), ("GeoDP+PSAC", 16384, 0.1, (65.58, 67.38)),
    ("GeoDP+SUR+PSAC", 16384, 0.1, (66.03, 67.40)),
]  # fmt: skip
SOUND = (
    "direction",
    "shrink",
    "direction+IS",
    "direction+SUR",
    "direction+AUTO-S",
    "direction+PSAC",
    "direction+SUR+PSAC",
    "angles",
)


def _noise_free(task: Task, paper: float) -> Cell:
    """Ordinary training: no noise, a bound that nothing reaches, small batches. The paper says nothing about its own."""
    batch = 512
    run = TrainConfig(
        data=task.data, model=task.model, max_grad_norm=1e6, epsilon=None, noise_multiplier=0.0, delta=1e-5, batch=batch,
        steps=round(20 * task.records / batch), lr=0.05, momentum=0.9, ema=0.0, max_physical_batch=batch,
    )  # fmt: skip
    return Cell(f"noise-free B={batch}", run, paper)


def _cells(task: Task, rows: Rows, sigmas: tuple[float, float], noise_free: float) -> list[Cell]:
    cells = [_noise_free(task, noise_free)]
    for k, sigma in enumerate(sigmas):
        for name, batch, beta, papers in rows:
            extra = {} if beta is None else {"mechanism_options": published(beta)}
            label = f"σ={sigma:g} {name} B={batch}" + ("" if beta is None else f" β={beta:g} as published")
            cells.append(Cell(label, task.config(name, batch, sigma, **extra), papers[k]))
            if name == "DP+IS":  # probabilities normalised by everybody's norms, as the papers have it
                as_papers = task.config(name, batch, sigma, sampling_options={"as_published": True})
                cells.append(Cell(f"{label} as published", as_papers, papers[k]))
        bounds = {f"σ={sigma:g} DP B=16384 C={c:g}": task.config("DP", 16384, sigma, max_grad_norm=c) for c in (0.01, 1.0)}
        cells += [Cell(label, run) for label, run in bounds.items()]
        cells.append(Cell(f"σ={sigma:g} DP+momentum B=16384", task.config("DP+momentum", 16384, sigma)))
        # an advantage over one bound may be that bound's
        rivals = (*(f"σ={sigma:g} {n} B=16384" for n in ("DP", "DP+AUTO-S", "DP+momentum")), *bounds)
        cells += [Cell(f"σ={sigma:g} {n} B=16384", task.config(n, 16384, sigma), against=rivals) for n in SOUND]
    return cells


register_preset(
    Preset(
        "geodp-table2", f"{PAPER} (Table II)", "DP, GeoDP and companions on MNIST, the CNN of 21,840 parameters", MNIST,
        tuple(_cells(TABLE_2, ROWS_2, (10.0, 1.0), 99.11)),
        note="Companions of GeoDP as published do not give it a guarantee. SUR costs a second release a step.",
    )
)  # fmt: skip
register_preset(
    Preset(
        "geodp-table3", f"{PAPER} (Table III)", "DP, GeoDP and companions on CIFAR-10, a ResNet of three blocks", CIFAR,
        tuple(_cells(TABLE_3, ROWS_3, (0.1, 0.01), 67.43)),
        note="At σ = 0.1 and 0.01 the true ε of every row is beyond any use.",
    )
)  # fmt: skip

LENGTHS_5: Lengths = {
    10.0: {"DP": 0.4, "DP+AUTO-S": 0.4, "direction": 0.025, "shrink": 0.025, "GeoDP": 1.6},
    1.0: {"DP": 1.6, "DP+AUTO-S": 1.6, "direction": 0.025, "shrink": 0.025, "GeoDP": 6.4},
    0.1: {"DP": 0.4, "DP+AUTO-S": 0.4, "direction": 0.025, "shrink": 0.4, "GeoDP": 1.6},
    0.01: {"DP": 0.4, "DP+AUTO-S": 1.6, "direction": 0.025, "shrink": 0.025, "GeoDP": 1.6},
}
# Figure 5: logistic regression, 350 iterations; (σ, B, the bounding factors)
PANELS: dict[str, tuple[tuple[float, int, tuple[float, ...]], ...]] = {
    "a": ((1.0, 4096, (1.0,)), (1.0, 2048, (1.0,))),
    "b": ((10.0, 4096, (1.0, 0.5)),),
    "c": ((0.1, 256, (1.0,)), (0.01, 256, (1.0,))),
}


def _panel(panel: str, sigma: float, batch: int, betas: tuple[float, ...]) -> list[Cell]:
    task = Task("MNIST", "mnist", "logistic", MNIST, {batch: 350}, LENGTHS_5)
    where = f"({panel}) σ={sigma:g} B={batch}"
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("no noise", "DP", {"noise_multiplier": 0.0}),
        *((name, name, {}) for name in ("DP", "DP+momentum", "DP+AUTO-S")),
        ("DP C=10", "DP", {"max_grad_norm": 10.0, "lr": 0.16}),  # the best of three bounds at every σ
        *((f"GeoDP as published β={b:g}", "GeoDP", {"mechanism_options": published(b)}) for b in betas),
        *((name, name, {}) for name in ("direction", "shrink")),
    ]
    rivals = tuple(f"{where} {name}" for name in ("DP", "DP C=10", "DP+momentum", "DP+AUTO-S"))
    return [
        Cell(
            f"{where} {label}", dataclasses.replace(task.config(name, batch, sigma, **changes), evaluations=35),
            unit="test loss", measure="test_loss", against=rivals if label in ("direction", "shrink") else (),
        )
        for label, name, changes in rows
    ]  # fmt: skip


register_preset(
    Preset(
        "geodp-fig5", f"{PAPER} (Figure 5)", "Logistic regression on MNIST, 350 iterations", MNIST, 
        tuple(cell for panel, settings in PANELS.items() for each in settings for cell in _panel(panel, *each)),
        note="The paper plots training losses, which are private; ours are losses on the public test set.",
    )
)  # fmt: skip
