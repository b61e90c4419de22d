"""What a selective update (SUR) accepts: GeoDP's CNN on MNIST with small batches, beside DP-SGD with the same options.

    python benchmarks/selective.py --data FOLDER --length 12.8 --momentum 0.9

FOLDER holds mnist.npz. σ is that of a batch of 16,384 times batch/16,384, so the noise on the average is Table II's; ε is
another one. One line a run: accepted updates, test accuracy, and the decisions in their order. A decision is a private
release of the run, so the line shows nothing that the run's ε does not cover.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from erlangen.data import Dataset, load
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

#: the batch of the table whose noise is kept
TABLE = 16_384


def config(options: argparse.Namespace, selective: bool) -> TrainConfig:
    return TrainConfig(
        data="mnist", model="geodp-cnn", epsilon=None, delta=1e-5, ema=0.0, batch=options.batch, steps=options.steps,
        noise_multiplier=options.sigma * options.batch / TABLE, max_grad_norm=options.bound, momentum=options.momentum,
        lr=options.length / options.bound * (1 - options.momentum), seed=options.seed, max_physical_batch=1024,
        device="cpu", evaluations=1, selective=selective,
        selective_options={"bound": options.clip} if selective else {},
    )  # fmt: skip


def decisions(settings: TrainConfig, data: Dataset) -> tuple[list[bool], float]:
    """What was accepted, step by step (everything, without SUR), and the final test accuracy."""
    session, accepted = Session(settings, data, "selective" if settings.selective else "plain"), []
    while session.step_count < session.config.steps:
        before = session.judge.kept if session.judge else 0
        session.step()
        accepted.append(session.judge is None or session.judge.kept > before)
    return accepted, session.evaluate()["test_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz")
    parser.add_argument("--sigma", type=float, default=1.0, help="of Table II")
    parser.add_argument("--length", type=float, default=12.8, help="lr·C/(1 − momentum)")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--bound", type=float, default=1.0, help="C of the gradient")
    parser.add_argument("--clip", type=float, default=0.1, help="bound of a record's change of loss")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=73)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["ERLANGEN_DATA"] = str(options.data)
    data = load("mnist")
    for selective in (False, True):
        accepted, accuracy = decisions(config(options, selective), data)
        marks = "".join("+" if yes else "-" for yes in accepted)
        print(
            f"{'SUR' if selective else 'DP '} {sum(accepted)} of {len(accepted)} accepted, {100 * accuracy:.2f} %  {marks}"
        )


if __name__ == "__main__":
    main()
