"""``model.json`` of a run: what prediction needs besides the weights. All of it is public or was released."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from erlangen.atomic import write_atomically
from erlangen.data import Dataset, datasets, load
from erlangen.data.base import renormalised
from erlangen.data.preprocessing import DataError, Preprocessing

if TYPE_CHECKING:
    from torch import nn

    from erlangen.training.session import Session

FILE = "model.json"
FORMAT = "erlangen-model-1"


@dataclass(frozen=True)
class ModelCard:
    """The network by name and options, its input, its classes."""

    model: str
    model_options: dict[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...]
    preprocessing: Preprocessing | None

    @classmethod
    def of(cls, session: Session) -> ModelCard:
        data, config = session.dataset, session.config
        return cls(
            config.model, config.model_options, data.input_shape, data.classes, data.class_names, data.preprocessing
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for every class: the folder's, or the number."""
        return self.class_names or tuple(str(k) for k in range(self.classes))

    def load(self, source: str | Path, skip_bad: bool = False) -> Dataset:
        """Other records, read as this model's own were: size, colours, constants, and classes by their names.

        Floats are taken as they are: only their owner knows how they were scaled.
        """
        prep = self.preprocessing
        options: dict[str, Any] = {}
        if prep is not None and prep.kind == "image" and str(source) not in datasets():
            options = {"channels": "grey" if prep.channels == 1 else "rgb", "white": prep.white}
            options |= {"image_size": [prep.height, prep.width]} if prep.resize else {}
        if skip_bad:
            options["skip_bad"] = True
        data = load(source, **options)
        if prep is not None and data.preprocessing is not None and data.preprocessing.kind == prep.kind == "image":
            data = renormalised(data, prep.mean, prep.std)
        return self._renumbered(data, source)

    def _renumbered(self, data: Dataset, source: str | Path) -> Dataset:
        """Folders number their classes by name, so a missing folder would shift the others."""
        if not self.class_names or not data.class_names or data.class_names == self.class_names:
            return data
        strange = [name for name in data.class_names if name not in self.class_names]
        if strange:
            known = ", ".join(self.class_names[:10])
            raise DataError(f"{source} has the class {strange[0]!r}, which the model does not know; it knows {known}")
        place = np.array([self.class_names.index(name) for name in data.class_names])
        return dataclasses.replace(data, y_train=place[data.y_train], classes=self.classes, class_names=self.class_names)

    def save(self, folder: Path) -> None:
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        write_atomically(folder / FILE, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> ModelCard:
        path = folder / FILE
        if not path.is_file():
            raise DataError(f"{folder} holds no trained model: there is no {FILE}; give the folder of a finished run")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise ValueError(f"it is not in the format {FORMAT}")
            prep = values["preprocessing"]
            card = cls(**{
                **values, "input_shape": tuple(values["input_shape"]), "class_names": tuple(values["class_names"]),
                "preprocessing": None if prep is None else Preprocessing.from_json(prep),
            })  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if card.class_names and len(card.class_names) != card.classes:
            raise DataError(f"{path} has {len(card.class_names)} class names for {card.classes} classes")
        return card


def load_model(folder: Path, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The trained model of a run folder, ready to predict on the CPU."""
    from safetensors.torch import load_file

    from erlangen.models import make_model
    from erlangen.training.config import ConfigError, TrainConfig
    from erlangen.training.folder import how_to_finish

    if not (folder / "weights.safetensors").is_file():
        raise ConfigError(f"{folder} holds no trained model: there is no weights.safetensors; {how_to_finish(folder)}")
    config = TrainConfig.from_file(folder / "config.json")
    model = make_model(config.model, input_shape, classes, **config.model_options)
    try:
        model.load_state_dict(load_file(str(folder / "weights.safetensors")))
    except RuntimeError as error:
        cause = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"the weights of {folder} do not fit images of shape {input_shape} with {classes} classes: {cause}"
        ) from error
    return model.eval()


def load_run(folder: str | Path, average_views: bool | None = None) -> tuple[nn.Module, ModelCard]:
    """The trained model of a run folder, ready to predict on the CPU, and its card.

    With ``average_views`` its answers are means over the views it was trained on; by default as the run was told to.
    """
    from erlangen.deploy.averaged import answering
    from erlangen.training.config import TrainConfig

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"no folder at {folder}; give the folder of a finished run, e.g. runs/first")
    card = ModelCard.read(folder)
    model = load_model(folder, card.input_shape, card.classes)
    config = TrainConfig.from_file(folder / "config.json")
    average = config.average_views if average_views is None else average_views
    return answering(model, average, config.augment).eval(), card
