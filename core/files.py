"""Writing files so that the final name never holds half a file, killed or out of disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from spectrain.core.errors import RunFailed, SpectrainError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn the disk's refusals while working on `path` into one line each.

    Raises RunFailed when the disk is full, SpectrainError when the path cannot be read or written
    or the folder it lies in is missing. Every other OSError passes through, so does
    FileNotFoundError of the path itself.
    """
    try:
        yield
    except SafetensorError as error:
        # safetensors tells of the disk in its own words.
        if not any(f"os error {number}" in str(error) for number in _FULL):
            raise
        raise RunFailed(
            "disk full", where=str(path), fix="free some space and run the same command again"
        ) from error
    except OSError as error:
        if error.errno in _FULL:
            raise RunFailed(
                "disk full", where=str(path), fix="free some space and run the same command again"
            ) from error
        if error.errno in _FORBIDDEN:
            raise SpectrainError(
                f"not allowed to use this path ({error.strerror})",
                where=str(error.filename or path),
                fix="choose another path or change its permissions",
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            raise SpectrainError(
                f"a file and a folder are in each other's way ({error.strerror})",
                where=str(error.filename or path),
                fix="choose another path",
            ) from error
        if error.errno == errno.ENOENT and _lacks_folder(Path(path).absolute(), error.filename):
            raise SpectrainError(
                f"there is no folder {Path(path).parent}", where=str(path), fix="check the path"
            ) from error
        raise


def _lacks_folder(path: Path, failed: str | None) -> bool:
    """Whether `failed`, a name that the system did not find, is missing for want of path's folder:
    it is that folder, one above it, or something in it. (An error about another place is not.)"""
    missing = Path(failed or path).absolute()
    return not path.parent.is_dir() and (missing in path.parents or missing.parent == path.parent)


def _sibling(path: Path) -> Path:
    """A free name beside `path`: on the same file system, so that the rename is atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def leftovers(folder: Path) -> list[Path]:
    """Temporary files and folders in `folder` whose writer was killed (nobody writes there now)."""
    names = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
    return [path for path in folder.glob(".*.tmp") if names.fullmatch(path.name)]


def _sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) so that `path` holds the old or the new content, never a part.

    Missing parent folders are made, a link keeps pointing where it does, and a device or pipe is
    simply written to. Raises RunFailed on a full disk, SpectrainError on a path that cannot be
    written.
    """
    content = data.encode() if isinstance(data, str) else data
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with disk_errors(path):
            path.write_bytes(content)
        return
    path = path.resolve()
    temporary = _sibling(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary sibling of `path`; on success it takes the place of `path`.

    An exception inside removes the temporary folder and leaves `path` as it was. A folder already
    at `path` is replaced as a whole, files the new one lacks included.
    """
    path = Path(path)
    temporary = _sibling(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.mkdir()
            yield temporary
            _sync_tree(temporary)
            _replace_folder(temporary, path)
            _sync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for found in sorted(folder.rglob("*")):
        if found.is_file():
            with open(found, "rb") as file:
                os.fsync(file.fileno())


def _replace_folder(new: Path, path: Path) -> None:
    """Rename `new` to `path`; an old folder goes aside first, for it cannot be overwritten.

    A kill between the two renames loses no data, only the name: both lie beside `path`.
    """
    if not path.is_dir():
        os.rename(new, path)
        return
    old = _sibling(path)
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sha256_file(path: str | Path) -> str:
    """The SHA-256 of a file's bytes in hex."""
    with disk_errors(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: str | Path) -> int:
    """Bytes free on the disk that holds (or will hold) `path`."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_free(path: str | Path, size: int) -> None:
    """Raise RunFailed unless the disk that holds (or will hold) `path` has `size` bytes free."""
    free = free_bytes(path)
    if free < size:
        raise RunFailed(
            f"{size / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free on the disk",
            where=str(path),
            fix="free some space or choose another path",
        )


def require_writable(path: str | Path) -> None:
    """Raise SpectrainError unless a file can be written at `path`, its missing folders made.

    It is tried, for permissions alone do not tell: /proc grants root everything and holds no file.
    Raises RunFailed on a full disk. Nothing is left behind.
    """
    path = Path(path)
    if path.is_dir():
        raise SpectrainError("this is a folder", where=str(path), fix="name a file")
    if path.exists() and not path.is_file():  # a device or pipe is simply written to
        reason = "" if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
    else:
        with disk_errors(path):
            reason = _refusal(path.resolve())
    if reason:
        raise SpectrainError(
            f"cannot be written ({reason})",
            where=str(path),
            fix="choose another path or change its permissions",
        )


def _refusal(path: Path) -> str:
    """Why no file can be made at `path`, in the system's words; nothing when one can."""
    if path.is_file() and not os.access(path, os.W_OK):
        return os.strerror(errno.EACCES)
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    probe = _sibling(folder / path.name)
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        if error.errno in _FULL:
            raise
        return error.strerror
    return ""


def give_normal_mode(path: str | Path) -> None:
    """Give a file the mode that new files get here; safetensors makes its own private."""
    probe = _sibling(Path(path))
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    os.chmod(path, mode)


def write_json(path: str | Path, value: Any, *, compact: bool = False) -> None:
    """Write `value` atomically as indented JSON, or without any space where nobody reads it; NaN
    and infinity are refused with ValueError."""
    way: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, **way)
    atomic_write(path, text + "\n")


def read_json(path: str | Path, longest: int | None = None) -> Any:
    """The value in a JSON file. Raises SpectrainError when it is missing, is not JSON, or has more
    bytes than `longest` (for files that others wrote: they are not read whatever their size)."""
    try:
        with disk_errors(path):
            if longest is not None and Path(path).stat().st_size > longest:
                raise SpectrainError(f"more than {longest:,} bytes of JSON", where=str(path))
            text = Path(path).read_text(encoding="utf-8")
        return json.loads(text)
    except FileNotFoundError:
        raise SpectrainError("no such file", where=str(path), fix="check the path") from None
    except json.JSONDecodeError as error:
        raise SpectrainError(
            f"not valid JSON ({error.msg})",
            where=f"{path}:{error.lineno}",
            fix="repair the file, or remove it and make it again",
        ) from None
    except (ValueError, RecursionError) as error:
        text = isinstance(error, UnicodeDecodeError)
        reason = "not UTF-8 text" if text else "too deep, or a number too long"
        raise SpectrainError(
            f"not valid JSON ({reason})",
            where=str(path),
            fix="repair the file, or remove it and make it again",
        ) from None
