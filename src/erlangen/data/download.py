"""Files from the network: resumed where a transfer broke, refused where the checksum is wrong.

A file lies at its place only after its checksum was right; until then it is ``NAME.part``, which the next attempt goes
on with.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from erlangen.data.preprocessing import DataError
from erlangen.terminal import alone, bars

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_CHUNK = 1 << 18
#: told how many bytes have arrived in all, and how many there will be (None if the server does not say)
Told = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Remote:
    """A file, the addresses that serve it, and its checksum as ``sha256:…`` or ``md5:…`` (where that is what is published)."""

    name: str
    urls: tuple[str, ...]
    checksum: str


class _Broken(Exception):
    """The transfer stopped early; what came is kept."""


def fetch(remote: Remote, folder: Path, attempts: int = 4, wait: float = 1.0) -> Path:
    """The verified file in ``folder``, downloaded if it is not there. Raises `DataError`."""
    target = folder / remote.name
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{remote.name}.lock"):
        if target.is_file():
            return target
        failures: list[str] = []
        with progress(remote.name) as told:
            for url in remote.urls:
                part = _from(url, remote, folder, attempts, wait, told, failures)
                if part is not None:
                    os.replace(part, target)
                    return target
    raise DataError(f"{remote.name} could not be downloaded: {'; '.join(failures)}")


def _from(
    url: str, remote: Remote, folder: Path, attempts: int, wait: float, told: Told, failures: list[str]
) -> Path | None:
    """The complete and verified part file, or None with the reason added to ``failures``."""
    part = folder / f"{remote.name}.part"
    for attempt in range(attempts):
        try:
            _transfer(url, part, told)
        except _Broken as error:
            last = f"{url}: {error}"
            time.sleep(wait * attempt)
            continue
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {getattr(error, 'reason', None) or error}")
            return None
        found = checksum(part, remote.checksum.partition(":")[0])
        if found == remote.checksum:
            return part
        part.unlink()
        failures.append(f"{url}: the checksum is {found}, not {remote.checksum}; the file was refused and removed")
        return None
    failures.append(f"{last} (after {attempts} attempts; run it again to go on from there)")
    return None


def _transfer(url: str, part: Path, told: Told) -> None:
    """Append to ``part`` what is missing of it. A server that cannot resume starts again from nothing."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    request.add_header("User-Agent", "erlangen")
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing, or the part is longer than the file: the checksum decides
            return
        raise
    with response:
        start, total = _placed(response, have)
        with open(part, "r+b" if start else "wb") as file:
            file.seek(start)
            done = start
            try:
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    told(done, total)
            except (http.client.HTTPException, OSError) as error:
                raise _Broken(f"the transfer broke after {done:,} bytes ({type(error).__name__})") from error
    if total is not None and done < total:
        raise _Broken(f"the transfer ended after {done:,} of {total:,} bytes")


def _placed(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """(where this answer starts in the file, the file's length)."""
    length = response.headers.get("Content-Length")
    if response.status == 206:
        unit, _, rest = (response.headers.get("Content-Range") or "").partition(" ")
        first, _, _ = rest.partition("-")
        if unit == "bytes" and first.isdigit() and int(first) == have:
            return have, have + int(length) if length else None
        raise urllib.error.URLError(f"the server resumed at {rest or 'an unknown place'}, not at byte {have}")
    return 0, int(length) if length else None


def checksum(path: Path, kind: str) -> str:
    """``kind:hex`` of a file."""
    digest = hashlib.new(kind, usedforsecurity=False) if kind == "md5" else hashlib.new(kind)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def unpack(archive: Path, folder: Path, holds: str) -> Path:
    """Unpack a tar or zip archive into ``folder``; ``holds`` is its top folder, which appears at once and complete."""
    target = folder / holds
    with _alone(folder / f"{archive.name}.lock"):
        if target.is_dir():
            return target
        work = folder / f".{archive.name}.unpacking"
        _remove(work)
        work.mkdir(parents=True)
        try:
            _extract(archive, work)
            inside = work / holds
            os.replace(inside if inside.is_dir() else work, target)
        except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from error
        finally:
            _remove(work)
    return target


def _extract(archive: Path, folder: Path) -> None:
    """Files and folders below ``folder`` only: no links, no absolute or climbing names."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                _refuse_outside(name, archive)
            packed.extractall(folder)
        return
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        for member in members:
            _refuse_outside(member.name, archive)
            if not (member.isfile() or member.isdir()):
                raise DataError(f"{archive} holds {member.name!r}, which is neither a file nor a folder; it was not unpacked")
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, members, **safe)  # type: ignore[arg-type]


def _refuse_outside(name: str, archive: Path) -> None:
    if name.startswith(("/", "\\")) or ".." in Path(name).parts or ":" in name:
        raise DataError(f"{archive} holds the path {name!r}, which leaves its folder; it was not unpacked")


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; runs that start together share one download."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def progress(name: str) -> Iterator[Told]:
    """A bar on stderr: what has come, how fast, how long still."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with alone(), bars(name, DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
