"""The picture of made-up images: python docs/img/make_prior.py"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from erlangen.prior import made_up_images

ROWS, COLUMNS, SIDE, LARGER = 4, 12, 40, 2


def main() -> None:
    images = made_up_images(ROWS * COLUMNS, 3, SIDE, torch.Generator().manual_seed(3))
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    grid = torch.nn.functional.pad(images, (1, 1, 1, 1), value=1.0).unflatten(0, (ROWS, COLUMNS)).permute(0, 3, 1, 4, 2)
    pixels = grid.flatten(0, 1).flatten(1, 2).mul(255).round().byte().numpy()
    picture = Image.fromarray(pixels)
    size = (LARGER * picture.width, LARGER * picture.height)
    picture.resize(size, Image.Resampling.NEAREST).quantize(128).save(Path(__file__).parent / "made-up.png", optimize=True)


if __name__ == "__main__":
    main()
