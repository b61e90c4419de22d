"""One image file → pixels in [0, 1]. Each file is judged alone, so reading costs no privacy."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from erlangen.data.preprocessing import DataError, Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
#: decoders that may run on a user's file; the others of Pillow are not needed, so they are not reachable
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = 100_000_000
_GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")
_ORIENTATION, _SWAPPED = 0x0112, (5, 6, 7, 8)


class BadImage(DataError):
    """This file cannot be used; the message is the reason, without the file's name."""


@dataclass(frozen=True)
class ImageFacts:
    """What the header says: size as it will be shown, and what has to be converted."""

    height: int
    width: int
    grey: bool
    bits: int
    alpha: bool = False
    turned: bool = False
    frames: int = 1


def facts(path: Path) -> ImageFacts:
    """From the header alone; pixels are not decoded. Raises `BadImage`."""
    with _opened(path.read_bytes() if path.stat().st_size < 1 << 16 else path) as image:
        return _facts(image, path)


def read(path: Path, prep: Preprocessing) -> tuple[np.ndarray, str]:
    """Pixels [C, H, W] in [0, 1] as ``prep`` wants them, and the SHA-256 of the file. Raises `BadImage`."""
    content = path.read_bytes()
    with _opened(content) as image:
        pixels = to_pixels(image, prep)
    return pixels, hashlib.sha256(content).hexdigest()


def to_pixels(image: PILImage, prep: Preprocessing) -> np.ndarray:
    """Orientation applied, alpha on black, 16 bits by their range, colours and size as the network expects."""
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        planes = _deep(image, prep) if image.mode.startswith("I") else _shallow(image, prep)
    except BadImage:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, …
        raise BadImage(f"cannot be read: {error}") from error
    return planes


def _opened(source: Path | bytes) -> PILImage:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadImage(f"is too large: {error}") from error
    except Exception as error:
        short = "is not an image" if isinstance(error, Image.UnidentifiedImageError) else f"cannot be read: {error}"
        raise BadImage(short) from error
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(f"is too large: {image.width}×{image.height} pixels")
    return image


def _facts(image: PILImage, path: Path) -> ImageFacts:
    try:
        orientation = int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF says nothing about the pixels
        orientation = 1
    if image.mode == "F":
        raise BadImage("holds floating-point pixels, which have no known range; save 8 or 16 bits, or use .npz")
    width, height = image.size if orientation not in _SWAPPED else image.size[::-1]
    deep = image.mode.startswith("I") or _bits_of_png(path) == 16
    alpha = "A" in image.mode or "a" in image.mode or "transparency" in image.info
    frames = int(getattr(image, "n_frames", 1))
    return ImageFacts(height, width, image.mode in _GREY, 16 if deep else 8, alpha, orientation != 1, frames)


def _bits_of_png(path: Path) -> int:
    """Pillow reads 16-bit colour as 8-bit without a word; the header tells."""
    with open(path, "rb") as file:
        head = file.read(25)
    return head[24] if head.startswith(b"\x89PNG") and len(head) == 25 else 8


def _deep(image: PILImage, prep: Preprocessing) -> np.ndarray:
    """16-bit grey."""
    from PIL import Image

    values = np.asarray(image).astype(np.float32)
    if values.min() < 0 or values.max() > 65535:
        raise BadImage(f"holds values from {values.min():g} to {values.max():g}, not 16-bit pixels")
    fitted = _fit(Image.fromarray(values), prep)
    grey = np.clip(np.asarray(fitted, dtype=np.float32) / np.float32(prep.white or 65535.0), 0.0, 1.0)
    return np.broadcast_to(grey, prep.shape).copy()  # the view is read-only, and pixels are scaled where they lie


def _shallow(image: PILImage, prep: Preprocessing) -> np.ndarray:
    from PIL import Image

    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colours.size, (0, 0, 0, 255)), colours)
    elif image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    fitted = _fit(image.convert("L" if prep.channels == 1 else "RGB"), prep)
    pixels = np.asarray(fitted, dtype=np.float32) / np.float32(255.0)
    return pixels[None] if prep.channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _fit(image: PILImage, prep: Preprocessing) -> PILImage:
    """Scaled to cover height × width, the middle taken; refused where resizing was not asked for."""
    from PIL import Image

    if (image.height, image.width) == (prep.height, prep.width):
        return image
    if not prep.resize:
        raise BadImage(f"is {image.width}×{image.height} pixels, not {prep.width}×{prep.height}")
    scale = max(prep.height / image.height, prep.width / image.width)
    size = (max(prep.width, round(image.width * scale)), max(prep.height, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (image.width - prep.width) // 2, (image.height - prep.height) // 2
    return image.crop((left, top, left + prep.width, top + prep.height))


def is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in path.relative_to(root).parts) or path.name == "Thumbs.db"


def files_under(folder: Path) -> tuple[list[Path], list[Path]]:
    """(images, other files) below a folder, sorted; hidden ones do not count."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not is_hidden(p, folder))
    images = [p for p in found if p.suffix.lower() in SUFFIXES]
    return images, [p for p in found if p.suffix.lower() not in SUFFIXES]


def named(paths: list[Path] | list[str], root: Path | None = None, most: int = 3) -> str:
    """The first few files and how many there are."""
    shown = [str(Path(p).relative_to(root)) if root is not None else str(p) for p in paths[:most]]
    rest = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(shown) + rest


def reasons(bad: list[tuple[Path, str]], root: Path) -> str:
    """Bad files by reason, the commonest first."""
    lines = []
    for reason, count in Counter(why for _, why in bad).most_common(5):
        paths: list[Any] = [path for path, why in bad if why == reason]
        lines.append(f"  {count} × {reason}: {named(paths, root)}")
    return "\n".join(lines)
