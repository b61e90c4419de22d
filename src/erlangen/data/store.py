"""Where published data sets are: in $ERLANGEN_DATA, in the user's cache, or at their official addresses.

``ERLANGEN_OFFLINE=1`` forbids the last step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from erlangen.data.download import Remote, fetch, unpack
from erlangen.data.preprocessing import DataError
from erlangen.places import user_cache


@dataclass(frozen=True)
class Published:
    """The files of a data set; an archive unpacks into ``folder``, single files are kept in it."""

    folder: str
    files: tuple[Remote, ...]
    size: str
    archive: bool = False


def _idx(base: tuple[str, ...], sums: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    files = [f"{name}-ubyte.gz" for name in names]
    return tuple(Remote(f, tuple(b + f for b in base), s) for f, s in zip(files, sums, strict=True))


def _archive(url: str, checksum: str) -> tuple[Remote, ...]:
    return (Remote(url.rpartition("/")[2], (url,), checksum),)


PUBLISHED: dict[str, Published] = {
    "mnist": Published(
        "mnist",
        _idx(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
            (
                "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        "12 MB",
    ),
    "fashion_mnist": Published(
        "fashion_mnist",
        _idx(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            (
                "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "md5:25c81989df183df01b3e8a0aad5dffbe",
                "md5:bef4ecab320f06d8554ea6380940ec79",
                "md5:bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
        "31 MB",
    ),
    "cifar10": Published(
        "cifar-10-batches-bin",
        _archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        "170 MB",
        archive=True,
    ),
    "cifar100": Published(
        "cifar-100-binary",
        _archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
        "169 MB",
        archive=True,
    ),
    "tiny_imagenet_200": Published(
        "tiny-imagenet-200",
        _archive("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de"),
        "248 MB",
        archive=True,
    ),
    "imagenette": Published(
        "imagenette2-160",
        _archive(
            "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz", "md5:e793b78cc4c9e9a4ccc0c1155377a412"
        ),
        "99 MB",
        archive=True,
    ),
    "mnist_rot_12k": Published(
        "mnist_rot_12k",
        _archive(
            "http://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip",
            "md5:0f9a947ff3d30e95cd685462cbf3b847",
        ),
        "56 MB",
        archive=True,
    ),
}


def cache() -> Path:
    """The user's cache of data sets, by the custom of the platform."""
    return user_cache() / "data"


def roots() -> list[Path]:
    """Where to look, in order."""
    given = os.environ.get("ERLANGEN_DATA")
    return [*([Path(given)] if given else []), cache()]


def locate(name: str) -> Path | None:
    """``NAME.npz`` or the data set's own folder with all it needs, if it is on this machine."""
    published = PUBLISHED[name]
    for root in roots():
        if (root / f"{name}.npz").is_file():
            return root / f"{name}.npz"
        folder = root / published.folder
        if folder.is_dir() and (published.archive or all((folder / f.name).is_file() for f in published.files)):
            return folder
    return None


def obtain(name: str) -> Path:
    """`locate`, and if it is nowhere, download it into the cache."""
    found = locate(name)
    if found is not None:
        return found
    published = PUBLISHED[name]
    where = " or ".join(str(root) for root in roots())
    cure = f"set ERLANGEN_DATA to the folder that holds {name}.npz or {published.folder}/"
    if os.environ.get("ERLANGEN_OFFLINE", "0") not in ("", "0"):
        raise DataError(f"data set {name!r} was not found in {where} and ERLANGEN_OFFLINE forbids downloads: {cure}")
    try:
        if not published.archive:
            for file in published.files:
                fetch(file, cache() / published.folder)
            return cache() / published.folder
        archive = fetch(published.files[0], cache())
        folder = unpack(archive, cache(), published.folder)
        archive.unlink(missing_ok=True)
    except DataError as error:
        raise DataError(f"data set {name!r} was not found in {where}. {error}. Or {cure}") from error
    except OSError as error:
        raise DataError(f"data set {name!r} cannot be kept in {cache()}: {error}; {cure}") from error
    return folder
