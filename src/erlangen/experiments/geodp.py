"""GeoDP (Duan et al. 2025): Figures 1 and 3 to 6, Tables II and III, and the two items of its Theorem 1.

Every table and figure stands twice: as published, which has no guarantee (ε = ∞), and in the sound forms at equal
noise multiplier, beside ISO with a tuned bound, AUTO-S and momentum. What the paper leaves open is ours: its learning
rates (tuned on a split of the training set, the same grid for every method), the noise and bounding factors of
Figure 5's panels, and an outlier in its batch sizes (163984, read as 16384).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from erlangen.experiments.measurements import Measurement, Point
from erlangen.experiments.presets import register_preset

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
        seeds=5, note="One CPU thread; gradients in memory; seeds are repeats.",
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
        note="w* is 500 steps of full gradient descent; the clean step is the clipped average of the same batch.",
    )
)  # fmt: skip
