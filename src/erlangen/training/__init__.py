"""The training loop, its configuration, run folders, checkpoints, averages of weights."""

from erlangen.training.config import TrainConfig

__all__ = ["TrainConfig"]
