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
    #: without privacy (Table 1)
    plain: float
    #: GReDP at ε = 0.5, 1, 1.5, 2 with C = 0.1 and with C = 1 (Table 3)
    small_clip: tuple[float, ...]
    unit_clip: tuple[float, ...]
    #: DP-SGD, Spectral-DP and GReDP at the same ε (Figure 3 left) where the text prints them or how far GReDP is above
    left: tuple[tuple[float | None, ...], ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def papers(self, level: int) -> Papers:
        """The paper's numbers of the three methods at one of the four ε of Figure 3."""
        first, second, third = (row[level] for row in self.left)
        return first, second, third


#: of DP-SGD, Spectral-DP and GReDP
Papers = tuple[float | None, float | None, float | None]

NETWORKS = (
    Network("LeNet-5", "lenet", "mnist", 60_000, 1200, 1.0, (92.7, 95.3, 96.5), 98.72,
            (95.47, 96.43, 96.42, 96.4), (95.68, 96.5, 96.65, 96.73),
            ((None, 92.7, None, None), (None, 95.3, None, None), (95.68, 96.5, 96.65, 96.73))),
    Network("ResNet-20", "resnet20", "cifar10", 50_000, 3000, 1.5, (29.3, 54.9, 59.31), 70.44,
            (43.85, 44.37, 44.41, 45.38), (49.06, 57.36, 59.31, 59.49),
            ((29.55, 31.35, 31.91, 32.1), (42.91, 51.61, 54.9, 55.68), (49.06, 57.36, 59.31, 58.83))),
    Network("Model-3", "model3", "cifar10", 50_000, 3000, 2.0, (46.47, 63.20, 67.87), 79.17,
            (60.2, 60.56, 60.31, 60.2), (56.15, 63.93, 66.3, 67.87),
            ((42.93, 45.78, 46.27, 46.47), (50.53, 60.15, 62.19, 63.2), (56.15, 63.93, 66.3, 67.87))),
    Network("AlexNet", "alexnet", "cifar10", 50_000, 3000, 2.0, (20.54, 52.92, 57.39), 64.58,
            (52.25, 52.49, 52.44, 52.44), (51.93, 55.8, 56.89, 57.39),
            ((22.86, 21.11, 20.78, 20.54), (None, None, None, 52.92), (51.93, 55.8, 56.89, 57.39))),
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
#: without privacy: no noise, a bound that nothing reaches, the paper's learning rate
PLAIN: dict[str, Any] = {"mechanism": "iso", "noise_multiplier": 0.0, "max_grad_norm": 1e6, "lr": 0.01}

Methods = tuple[tuple[str, int, dict[str, Any]], ...]


def both(methods: Methods) -> Methods:
    """With dense and with block-circulant layers."""
    return (*methods, *((f"{name}, circulant", k, {**options, **CIRCULANT}) for name, k, options in methods))


#: (name, its place among DP-SGD, Spectral-DP and GReDP, options)
SOUND = both((("DP-SGD", 0, DP_SGD), ("Spectral-DP", 1, SPECTRAL), ("GReDP", 2, GREDP)))
CLAIMED = both((("GReDP as published", 2, GREDP_PUBLISHED),))


def config(network: Network, epsilon: float | None, **changes: Any) -> TrainConfig:
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
    """A cell at this true ε, compared with DP-SGD, with and without momentum and at two bounds, and AUTO-S."""
    methods = ["DP-SGD", "DP-SGD with momentum", "AUTO-S"]
    if network.model != "lenet":  # tuned: C is the best of two, and momentum 0 the best of two
        methods = [*rivals(config(network, epsilon))]
    against = tuple(f"{network.label} {method}" for method in methods if name != f"{network.label} {method}")
    return Cell(name, config(network, epsilon, **changes), paper, records=network.records, against=against)


def plain(name: str, network: Network, paper: float) -> Cell:
    """A cell without privacy; its ε is ∞."""
    return Cell(name, config(network, None, **PLAIN), paper, records=network.records)


#: the second bound of a rival that is not tuned
OTHER_BOUND = 0.1


def rivals(run: TrainConfig, other_bound: float | None = OTHER_BOUND) -> dict[str, TrainConfig]:
    """What an advantage over this DP-SGD run has to stand against: at the same ε and the same lr·C/(1 − momentum)."""
    run = dataclasses.replace(run, mechanism="iso", mechanism_options={}, clipping="flat")
    found = {
        "DP-SGD": run,
        "AUTO-S": dataclasses.replace(run, clipping="auto-s"),
        "DP-SGD without momentum": dataclasses.replace(run, momentum=0.0, lr=round(run.lr / (1 - run.momentum), 9)),
    }
    if other_bound is not None and other_bound != run.max_grad_norm:
        rate = round(run.lr * run.max_grad_norm / other_bound, 9)
        found[f"DP-SGD, C={other_bound:g}"] = dataclasses.replace(run, max_grad_norm=other_bound, lr=rate)
    return found


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
        plain(f"{n.label} plain", n, n.plain),
        claimed(f"{n.label} Spectral-DP as published", n, e, papers[1], **SPECTRAL_PUBLISHED),
        *(claimed(f"{n.label} {m}", n, e, papers[k], **own, **_tuned(n, m)) for m, k, own in CLAIMED),
        *(claimed(f"{n.label} GReDP as published, {m}", n, e, papers[2], **own) for m, own in LAYERED.items()),
        *(equal(f"{n.label} {m}", n, e, papers[k], **own, **_tuned(n, m)) for m, k, own in SOUND),
        *_table1_rivals(n, e, papers[0]),
    ]


def _table1_rivals(n: Network, epsilon: float, paper: float) -> list[Cell]:
    """DP-SGD is tuned for LeNet-5 and has no momentum there; elsewhere it has, and the others stand beside it."""
    if n.model == "lenet":
        return [
            equal(f"{n.label} DP-SGD with momentum", n, epsilon, paper, **DP_SGD),
            equal(f"{n.label} AUTO-S", n, epsilon, paper, **AUTO_S, **_tuned(n, "AUTO-S")),
        ]
    beside = rivals(config(n, epsilon))
    del beside["DP-SGD"]
    return [dataclasses.replace(equal(f"{n.label} {m}", n, epsilon, paper), config=run) for m, run in beside.items()]


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
#: without privacy: (1Conv, 2Conv)
PLAIN_2 = {"cifar10": (80.27, 86.59), "cifar100": (52.74, 59.32)}
#: what is trained privately, how many records it has, and where its public weights come from
TRANSFER = {
    "cifar10": ("cifar10_second_half", 25_000, "resnet18-cifar10-first-half"),
    "cifar100": ("cifar100", 50_000, "resnet18-cifar10"),
}


def _transfer(target: str, convolutions: int, method: str, epsilon: float, paper: float, **changes: Any) -> Cell:
    data, records, weights = TRANSFER[target]
    options = {"convolutions": convolutions, **changes.pop("model_options", {})}
    base = TrainConfig(
        data=data, model="resnet18", model_options=options, weights=weights, max_grad_norm=1.0, epsilon=epsilon, delta=1e-5,
        batch=500, steps=30 * records // 500, lr=0.1, momentum=0.9, ema=0.99, max_physical_batch=250,
    )  # fmt: skip
    where, beside = f"{target.upper()} {convolutions}Conv ε={epsilon:g}", rivals(base)
    run = dataclasses.replace(beside.get(method, base), **changes)
    claim = epsilon if "published" in method else None
    against = () if claim is not None else tuple(f"{where} {rival}" for rival in beside if rival != method)
    return Cell(f"{where} {method}", run, paper, claimed_epsilon=claim, records=records, against=against)


def _transfer_plain(target: str, convolutions: int) -> Cell:
    """Fine-tuned without privacy: one row for all ε, compared with none."""
    cell = _transfer(target, convolutions, "plain", 1.0, PLAIN_2[target][convolutions - 1])
    run = dataclasses.replace(cell.config, epsilon=None, **PLAIN)
    return dataclasses.replace(cell, name=f"{target.upper()} {convolutions}Conv plain", config=run, against=())


#: DP-SGD is among the sound methods; the other rivals have its number
TRANSFER_RIVALS: Methods = (("AUTO-S", 0, {}), ("DP-SGD without momentum", 0, {}), (f"DP-SGD, C={OTHER_BOUND:g}", 0, {}))

_add(
    "gredp-table2", "Table 2", "Fine-tuning the last one or two convolutions of ResNet-18",
    [
        *(_transfer_plain(target, k) for target in TABLE_2 for k in (1, 2)),
        *(
            _transfer(target, k, method, epsilon, papers[column][k - 1], **changes)
            for target, rows in TABLE_2.items()
            for epsilon, papers in rows.items()
            for k in (1, 2)
            for method, column, changes in (*SOUND, *TRANSFER_RIVALS, *CLAIMED)
        ),
    ],
    "Public weights: one half of CIFAR-10 for the other half, all of CIFAR-10 for CIFAR-100 "
    "(python -m erlangen.experiments.pretrain). The paper fine-tunes ImageNet weights on all records.",
)  # fmt: skip


# -- Table 3 and the figures ----------------------------------------------------------------------------------------


def _beside(n: Network, where: str, epsilon: float, papers: Papers, other: str = "", **changes: Any) -> list[Cell]:
    """GReDP as published, the three methods at equal true ε, and what an advantage has to stand against.

    ``other`` names the point of another bound, where there is one already; else DP-SGD is run with a second bound here.
    """
    beside = rivals(config(n, epsilon, **changes), None if other else OTHER_BOUND)
    names = (*(f"{n.label} {where} {m}" for m in beside), *((f"{n.label} {other} DP-SGD",) if other else ()))

    def cell(method: str, paper: float | None, run: TrainConfig) -> Cell:
        name = f"{n.label} {where} {method}"
        return Cell(name, run, paper, records=n.records, against=tuple(r for r in names if r != name))

    theirs = [
        claimed(f"{n.label} {where} {method}", n, epsilon, papers[k], **{**own, **changes}) for method, k, own in CLAIMED
    ]
    sound = [cell(method, papers[k], config(n, epsilon, **{**own, **changes})) for method, k, own in SOUND]
    return [*theirs, *sound, *(cell(method, None, run) for method, run in beside.items() if method != "DP-SGD")]


_add(
    "gredp-table3", "Table 3", "Clipping bounds 0.1 and 1 at four privacy levels",
    [
        cell for n in NETWORKS for bound, papers in ((0.1, n.small_clip), (1.0, n.unit_clip))
        for e, paper in zip(EPSILONS, papers, strict=True)
        for cell in _beside(
            n, f"C={bound:g} ε={e:g}", e, (None, None, paper), f"C={0.1 / bound:g} ε={e:g}", max_grad_norm=bound, lr=0.1 / bound
        )
    ],
    "The learning rate is that of C = 1 divided by C: nearly every gradient is clipped, and their product counts.",
)  # fmt: skip

#: DP-SGD, Spectral-DP and GReDP on LeNet-5 "at the beginning of the training procedure" (Figure 3 middle)
BEGINNING = (33.38, 68.78, 78.37)


def _dynamics(n: Network, cell: Cell) -> Cell:
    """With its accuracy after every epoch (Figure 3 middle and right), and the paper's number after the first."""
    epochs = round(n.steps * 500 / n.records)
    method = cell.name.removeprefix(f"{n.label} ε=2 ")
    known = {"DP-SGD": 0, "Spectral-DP": 1, "GReDP": 2, "GReDP as published": 2}
    first = BEGINNING[known[method]] if n.model == "lenet" and method in known else None
    return dataclasses.replace(
        cell, config=dataclasses.replace(cell.config, evaluations=epochs), curve=True, paper_first=first
    )


_add(
    "gredp-fig3", "Figure 3", "Accuracy against ε, and training dynamics at ε = 2: DP-SGD, Spectral-DP and GReDP",
    [
        _dynamics(n, cell) if e == 2 else cell
        for n in NETWORKS for k, e in enumerate(EPSILONS) for cell in _beside(n, f"ε={e:g}", e, n.papers(k))
    ],
    "Rows at ε = 2 have their accuracy and ε after every epoch (middle and right). The paper's numbers are those of its text, "
    "Model-3's baselines by their distance from GReDP; the text has 58.83 for ResNet-20 at ε = 2 where Table 3 has 59.49, and "
    "31.91 for DP-SGD at ε = 1.5 where Table 1 has 29.3. It says that ε is about 0.31 when it begins, not after how many steps.",
)  # fmt: skip

#: the paper prints these numbers for LeNet-5 only
BATCHES = {256: 97.67, 512: 96.73, 1024: 95.47, 2048: 93.51}
RATES = {0.001: 96.73, 0.01: 96.66, 0.025: None, 0.05: None, 0.1: 80.18}


def _ablation(n: Network, what: str, paper: float | None, **changes: Any) -> list[Cell]:
    return _beside(n, what, 2.0, (None, None, paper if n.model == "lenet" else None), **changes)


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
