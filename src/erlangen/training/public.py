"""What a finished run leaves about the *public* test set, so that its report needs neither the data nor another pass.

``public.safetensors``: ``logits`` [n, classes] and ``labels`` [n] of every test image, ``images`` [k, C, H, W] of a few,
and ``shown`` [k], their places in the test set. All of it is computed from public images with the released weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from erlangen.atomic import write_atomically
from erlangen.training.metrics import answers

FILE = "public.safetensors"
#: images kept: one of each class first, then the mistakes of which the network was most sure
SHOWN = 36


@dataclass(frozen=True)
class PublicPredictions:
    """Predictions on the public test set, and some of its images."""

    logits: Tensor
    labels: Tensor
    images: Tensor
    shown: Tensor

    @property
    def probabilities(self) -> np.ndarray:
        return self.logits.double().softmax(1).numpy()

    def save(self, folder: Path) -> None:
        tensors = {name: getattr(self, name).contiguous() for name in ("logits", "labels", "images", "shown")}
        write_atomically(folder / FILE, save(tensors))

    @classmethod
    def load(cls, folder: Path) -> PublicPredictions | None:
        """Those of a run; None if it left none (no public test set). A file that does not fit together is refused."""
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            found = cls(**load_file(str(path)))
            rows, classes = found.logits.shape
            fits = found.labels.shape == (rows,) and found.images.ndim == 4 and found.shown.shape == (len(found.images),)
            inside = all(int(t.min()) >= 0 and int(t.max()) < n for t, n in ((found.labels, classes), (found.shown, rows)))
        except (SafetensorError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read: {error}; remove it to go without predictions") from error
        if not (fits and inside):
            raise ValueError(f"{path} holds tensors that do not fit together; remove it to go without predictions")
        return found


def predictions(model: nn.Module, x: Tensor, y: Tensor) -> PublicPredictions:
    """Of ``model`` in evaluation mode on public images ``x`` with labels ``y``."""
    logits, labels = answers(model, x).cpu(), y.cpu()
    places = examples(logits, labels, SHOWN)
    return PublicPredictions(logits, labels, x[places.to(x.device)].float().cpu(), places)


def examples(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Places of the first image of each class (at most half of ``count``), then of the surest mistakes."""
    firsts = [int((labels == c).nonzero()[0]) for c in labels.unique()[: max(1, count // 2)]]
    confidence, predicted = logits.nan_to_num().softmax(1).max(1)
    wrong = (predicted != labels).nonzero().flatten()
    surest = wrong[confidence[wrong].argsort(descending=True, stable=True)]
    places = list(dict.fromkeys([*firsts, *surest.tolist()]))[:count]
    return torch.tensor(places, dtype=torch.int64)
