"""GReDP (Wang et al. 2025): Tables 1 to 3 and Figures 3 to 5 (accuracy against ε, batch size, learning rate).

Every table stands twice. *As published* the noise is what a plain Gaussian needs for the claimed ε, and the run's own,
larger ε is beside it; Table 1 has all three readings of the noise, and layers clipped one by one as in Algorithm 2. *At
equal true ε* are DP-SGD, Spectral-DP and GReDP in their sound forms, with dense and with block-circulant layers, beside
AUTO-S and DP-SGD with momentum; C, learning rate and momentum of LeNet-5 are tuned alike for every method
(``benchmarks/gredp_geodp.py``), the other networks are not tuned. Theirs: B = 500, C = 1, δ = 1e-5. Ours where the paper
is silent: 10 epochs on MNIST and 30 on CIFAR-10, EMA, Spectral-DP's share of frequencies ρ = 0.5, circulant blocks of 4.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from erlangen.experiments.presets import Cell, Preset, register_preset
from erlangen.training.config import TrainConfig

PAPER = "GReDP"
BLOCK = 4


@dataclass(frozen=True)
class Network:
    """One column of the paper's tables."""

    label: str
    model: str
    data: str
    records: int
    steps: int
    #: ε of Table 1, and its DP-SGD, Spectral-DP and GReDP
    epsilon: float
    table1: tuple[float, float, float]
    #: GReDP at ε = 0.5, 1, 1.5, 2 with C = 0.1 and with C = 1 (Table 3)
    small_clip: tuple[float, ...]
    unit_clip: tuple[float, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


NETWORKS = (
    Network("LeNet-5", "lenet", "mnist", 60_000, 1200, 1.0, (92.7, 95.3, 96.5),
            (95.47, 96.43, 96.42, 96.4), (95.68, 96.5, 96.65, 96.73)),
    Network("ResNet-20", "resnet20", "cifar10", 50_000, 3000, 1.5, (29.3, 54.9, 59.31),
            (43.85, 44.37, 44.41, 45.38), (49.06, 57.36, 59.31, 59.49)),
    Network("Model-3", "model3", "cifar10", 50_000, 3000, 2.0, (46.47, 63.20, 67.87),
            (60.2, 60.56, 60.31, 60.2), (56.15, 63.93, 66.3, 67.87)),
    Network("AlexNet", "alexnet", "cifar10", 50_000, 3000, 2.0, (20.54, 52.92, 57.39),
            (52.25, 52.49, 52.44, 52.44), (51.93, 55.8, 56.89, 57.39)),
)  # fmt: skip
EPSILONS = (0.5, 1.0, 1.5, 2.0)

#: mechanism, its options and further changes of each method
DP_SGD: dict[str, Any] = {"mechanism": "iso"}
SPECTRAL: dict[str, Any] = {"mechanism": "spectral", "mechanism_options": {"ratio": 0.5}}
GREDP: dict[str, Any] = {"mechanism": "gredp"}
SPECTRAL_PUBLISHED: dict[str, Any] = {
    "mechanism": "spectral", "mechanism_options": {"ratio": 0.5, "as_published": True}, "clipping": "per-layer",
}  # fmt: skip
GREDP_PUBLISHED: dict[str, Any] = {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}
#: its Algorithm 2 clips every layer at c (lines 5 to 7); the noise there is what Theorem 1, Eq. 11 or line 7 says
LAYERED: dict[str, dict[str, Any]] = {
    name: {"mechanism": "gredp", "mechanism_options": {"as_published": reading}, "clipping": "per-layer"}
    for name, reading in (("each layer clipped", "complex"), ("real", "real"), ("per-sample", "per-sample"))
}
AUTO_S: dict[str, Any] = {"mechanism": "iso", "clipping": "auto-s"}
CIRCULANT: dict[str, Any] = {"model_options": {"circulant": BLOCK}}

Methods = tuple[tuple[str, int, dict[str, Any]], ...]


def both(methods: Methods) -> Methods:
    """With dense and with block-circulant layers."""
    return (*methods, *((f"{name}, circulant", k, {**options, **CIRCULANT}) for name, k, options in methods))


#: (name, its place among DP-SGD, Spectral-DP and GReDP, options)
SOUND = both((("DP-SGD", 0, DP_SGD), ("Spectral-DP", 1, SPECTRAL), ("GReDP", 2, GREDP)))
CLAIMED = both((("GReDP as published", 2, GREDP_PUBLISHED),))


def config(network: Network, epsilon: float, **changes: Any) -> TrainConfig:
    """A run of this network at B = 500; the step length of the tuned DP-SGD baseline, with momentum."""
    values: dict[str, Any] = dict(
        data=network.data, model=network.model, max_grad_norm=1.0, epsilon=epsilon, delta=1e-5, batch=500,
        steps=network.steps, lr=0.1, momentum=0.9, ema=0.99, max_physical_batch=500 if network.model == "lenet" else 250,
    )  # fmt: skip
    return TrainConfig(**{**values, **changes})


def claimed(name: str, network: Network, epsilon: float, paper: float | None, **changes: Any) -> Cell:
    """A cell with the noise of the paper's claim."""
    return Cell(name, config(network, epsilon, **changes), paper, claimed_epsilon=epsilon, records=network.records)


def equal(name: str, network: Network, epsilon: float, paper: float | None = None, **changes: Any) -> Cell:
    """A cell at this true ε, compared with DP-SGD, plain and with momentum, and AUTO-S of the same network."""
    methods = ("DP-SGD", "DP-SGD with momentum", "AUTO-S")
    rivals = tuple(f"{network.label} {method}" for method in methods if name != f"{network.label} {method}")
    return Cell(name, config(network, epsilon, **changes), paper, records=network.records, against=rivals)


#: learning rate, C and momentum of LeNet-5 at ε = 1: the best of twelve on held-out training images, the same for each
TUNED: dict[str, tuple[float, float, float]] = {
    "DP-SGD": (1.0, 1.0, 0.0), "Spectral-DP": (10.0, 0.1, 0.0), "GReDP": (1.0, 1.0, 0.0), "AUTO-S": (10.0, 0.1, 0.0),
    "GReDP as published": (2.0, 1.0, 0.0), "DP-SGD, circulant": (1.0, 1.0, 0.0),
    "Spectral-DP, circulant": (10.0, 0.1, 0.0), "GReDP, circulant": (10.0, 0.1, 0.0),
    "GReDP as published, circulant": (20.0, 0.1, 0.0),
}  # fmt: skip


def _tuned(n: Network, method: str) -> dict[str, Any]:
    """Nothing where nothing was tuned: the defaults of `config`."""
    if n.model != "lenet":
        return {}
    lr, bound, momentum = TUNED[method]
    return {"lr": lr, "max_grad_norm": bound, "momentum": momentum}


def _table1(n: Network) -> list[Cell]:
    e, papers = n.epsilon, n.table1
    return [
        claimed(f"{n.label} Spectral-DP as published", n, e, papers[1], **SPECTRAL_PUBLISHED),
        *(claimed(f"{n.label} {m}", n, e, papers[k], **own, **_tuned(n, m)) for m, k, own in CLAIMED),
        *(claimed(f"{n.label} GReDP as published, {m}", n, e, papers[2], **own) for m, own in LAYERED.items()),
        *(equal(f"{n.label} {m}", n, e, papers[k], **own, **_tuned(n, m)) for m, k, own in SOUND),
        equal(f"{n.label} DP-SGD with momentum", n, e, papers[0], **DP_SGD),
        equal(f"{n.label} AUTO-S", n, e, papers[0], **AUTO_S, **_tuned(n, "AUTO-S")),
    ]


def _add(name: str, where: str, title: str, cells: list[Cell], note: str = "", seeds: int = 5) -> None:
    register_preset(Preset(name, f"{PAPER} ({where})", title, NETWORKS[0].records, tuple(cells), seeds, note))


_add(
    "gredp-table1", "Table 1", "Training from scratch: DP-SGD, Spectral-DP and GReDP",
    [cell for n in NETWORKS for cell in _table1(n)],
    "Algorithm 2 of the paper clips every layer at c and calls the multiplier σ: these are the rows \"each layer clipped\" "
    "(noise of Theorem 1), \"real\" (Eq. 11, no guarantee) and \"per-sample\" (line 7), and Spectral-DP as published. "
    "\"GReDP as published\" alone clips once, which is kinder to its ε.",
)  # fmt: skip


# -- Table 2: transfer ----------------------------------------------------------------------------------------------

#: data → (ε → (1Conv, 2Conv) of DP-SGD, Spectral-DP, GReDP); the table prints ε = 0.1 where its text says 1
TABLE_2 = {
    "cifar10": {
        0.5: ((63.87, 62.51), (70.22, 68.33), (70.57, 69.96)),
        1.0: ((65.98, 65.7), (74.18, 75.11), (74.76, 76.77)),
        2.0: ((67.05, 67.64), (76.48, 79.44), (76.83, 80.86)),
    },
    "cifar100": {
        0.5: ((19.41, 16.11), (26.78, 22.65), (27.13, 23.96)),
        1.0: ((26.89, 23.25), (37.36, 34.55), (37.7, 35.96)),
        2.0: ((30.44, 27.57), (43.46, 44.02), (44.14, 45.12)),
    },
}
#: what is trained privately, how many records it has, and where its public weights come from
TRANSFER = {
    "cifar10": ("cifar10_second_half", 25_000, "resnet18-cifar10-first-half"),
    "cifar100": ("cifar100", 50_000, "resnet18-cifar10"),
}


def _transfer(target: str, convolutions: int, method: str, epsilon: float, paper: float, **changes: Any) -> Cell:
    data, records, weights = TRANSFER[target]
    options = {"weights": weights, "convolutions": convolutions, **changes.pop("model_options", {})}
    run = TrainConfig(
        data=data, model="resnet18", model_options=options, max_grad_norm=1.0, epsilon=epsilon, delta=1e-5, batch=500,
        steps=30 * records // 500, lr=0.1, momentum=0.9, ema=0.99, max_physical_batch=250,
    )  # fmt: skip
    where = f"{target.upper()} {convolutions}Conv ε={epsilon:g}"
    name, rival = f"{where} {method}", f"{where} DP-SGD"
    claim = epsilon if "published" in method else None
    against = (rival,) if name != rival and claim is None else ()
    return Cell(
        name, dataclasses.replace(run, **changes), paper, claimed_epsilon=claim, records=records, against=against
    )


_add(
    "gredp-table2", "Table 2", "Fine-tuning the last one or two convolutions of ResNet-18",
    [
        _transfer(target, k, method, epsilon, papers[column][k - 1], **changes)
        for target, rows in TABLE_2.items()
        for epsilon, papers in rows.items()
        for k in (1, 2)
        for method, column, changes in (*SOUND, ("AUTO-S", 0, AUTO_S), *CLAIMED)
    ],
    "Public weights: one half of CIFAR-10 for the other half, all of CIFAR-10 for CIFAR-100 "
    "(python -m erlangen.experiments.pretrain). The paper fine-tunes ImageNet weights on all records.",
)  # fmt: skip


# -- Table 3 and the figures ----------------------------------------------------------------------------------------


def _beside(n: Network, where: str, epsilon: float, paper: float | None, **changes: Any) -> list[Cell]:
    """GReDP as published, and the three methods at equal true ε; the paper's number is GReDP's."""
    where = f"{n.label} {where}"
    rival = f"{where} DP-SGD"
    theirs = [claimed(f"{where} {name}", n, epsilon, paper, **{**own, **changes}) for name, _, own in CLAIMED]
    ours = [
        Cell(
            f"{where} {name}", config(n, epsilon, **{**own, **changes}), paper if k == 2 else None, records=n.records,
            against=(rival,) if name != "DP-SGD" else (),
        )
        for name, k, own in SOUND
    ]  # fmt: skip
    return theirs + ours


_add(
    "gredp-table3", "Table 3", "Clipping bounds 0.1 and 1 at four privacy levels",
    [
        cell for n in NETWORKS for bound, papers in ((0.1, n.small_clip), (1.0, n.unit_clip))
        for e, paper in zip(EPSILONS, papers, strict=True)
        for cell in _beside(n, f"C={bound:g} ε={e:g}", e, paper, max_grad_norm=bound, lr=0.1 / bound)
    ],
    "The learning rate is that of C = 1 divided by C: nearly every gradient is clipped, and their product counts.",
)  # fmt: skip
_add(
    "gredp-fig3", "Figure 3", "Accuracy against ε: DP-SGD, Spectral-DP and GReDP",
    [
        cell for n in NETWORKS for e, paper in zip(EPSILONS, n.unit_clip, strict=True)
        for cell in _beside(n, f"ε={e:g}", e, paper)
    ],
)  # fmt: skip

#: the paper prints these numbers for LeNet-5 only
BATCHES = {256: 97.67, 512: 96.73, 1024: 95.47, 2048: 93.51}
RATES = {0.001: 96.73, 0.01: 96.66, 0.025: None, 0.05: None, 0.1: 80.18}


def _ablation(n: Network, what: str, paper: float | None, **changes: Any) -> list[Cell]:
    return _beside(n, what, 2.0, paper if n.model == "lenet" else None, **changes)


_add(
    "gredp-fig4", "Figure 4", "Batch size at ε = 2",
    [
        cell for n in NETWORKS for b, paper in BATCHES.items()
        for cell in _ablation(n, f"B={b}", paper, batch=b, steps=round(n.steps * 500 / b))
    ],
    "The same number of epochs for every batch size.",
)  # fmt: skip
_add(
    "gredp-fig5", "Figure 5", "Learning rate at ε = 2",
    [
        cell for n in NETWORKS for lr, paper in RATES.items()
        for cell in _ablation(n, f"lr={lr:g}", paper, lr=lr)
    ],
    "With momentum 0.9, so that 0.1 here moves as 1 does without.",
)  # fmt: skip
