"""The tables and figures of the papers that can be reproduced."""

from __future__ import annotations

from erlangen.experiments.presets import Cell, Preset, register_preset
from erlangen.training.config import TrainConfig

# GReDP, Table 1, the DP-SGD column for LeNet-5 on MNIST. Their settings: B = 500, clip 1, δ = 1e-5. The paper does not
# state the number of epochs; 10 is ours. Learning rate and momentum: chosen on a split of the training set.
_LENET = TrainConfig(
    data="mnist", model="lenet", mechanism="iso", max_grad_norm=1.0, epsilon=1.0, delta=1e-5, batch=500, steps=1200,
    optimizer="sgd", lr=0.1, momentum=0.9, ema=0.99,
)  # fmt: skip

register_preset(
    Preset(
        name="gredp-table1-lenet5",
        paper="GReDP (Table 1)",
        title="LeNet-5 on MNIST at ε = 1, DP-SGD",
        records=60_000,
        cells=(Cell("DP-SGD", _LENET, paper=92.7),),
    )
)
