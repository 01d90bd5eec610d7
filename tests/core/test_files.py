"""A name holds the old content or the new, never a part, and the disk's refusals are one line."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from spectrain.core import files
from spectrain.core.errors import RunFailed, SpectrainError


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def refuse(number: int):
    def fsync(handle):
        raise OSError(number, os.strerror(number))

    return fsync


def test_write_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "a" / "b.txt"
    files.atomic_write(path, "one")
    files.atomic_write(path, "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert leftovers(path.parent) == []


def test_write_keeps_a_link_and_writes_to_a_device(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    files.atomic_write(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    files.atomic_write("/dev/null", "gone")  # replacing it by a file would break the machine
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, RunFailed, "disk full"),
        (errno.EROFS, SpectrainError, "not allowed"),
        (errno.EACCES, SpectrainError, "not allowed"),
    ],
)
def test_refused_write_keeps_the_old_file(tmp_path, monkeypatch, number, kind, words):
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(files.os, "fsync", refuse(number))
    with pytest.raises(kind, match=words) as caught:
        files.atomic_write(path, "new")
    assert str(path) in str(caught.value)
    assert path.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "store"
    with files.atomic_folder(path) as folder:
        (folder / "old").write_text("1")
        assert not path.exists()

    def fail_half_way():
        with files.atomic_folder(path) as folder:
            (folder / "new").write_text("2")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert [p.name for p in path.iterdir()] == ["old"]
    with files.atomic_folder(path) as folder:
        (folder / "new").write_text("2")
    assert [p.name for p in path.iterdir()] == ["new"]
    assert leftovers(tmp_path) == []


def test_sha256(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"spectrain" * 300_000)  # more than one chunk
    assert files.sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_require_free_tells_both_numbers(tmp_path):
    files.require_free(tmp_path / "not" / "there", 1)
    with pytest.raises(RunFailed, match=r"1,000,000,000,000 MB needed, .* MB free"):
        files.require_free(tmp_path / "not" / "there", 10**18)


def test_require_writable(tmp_path):
    files.require_writable(tmp_path / "new" / "report.json")
    (tmp_path / "file").touch()
    files.require_writable(tmp_path / "file")
    files.require_writable("/dev/null")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.require_writable(tmp_path / "link")
    (tmp_path / "broken").symlink_to(tmp_path / "file" / "below")
    before = sorted(tmp_path.rglob("*"))
    for bad in (tmp_path, tmp_path / "file" / "below", tmp_path / "broken"):
        with pytest.raises(SpectrainError, match=str(bad)):
            files.require_writable(bad)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_nobody_can_make(tmp_path, monkeypatch):
    """The proc file system lets root do anything and has no files: found before the work."""
    with pytest.raises(SpectrainError, match=r"/proc/nope/x\.json: cannot be written"):
        files.require_writable("/proc/nope/x.json")
    with pytest.raises(SpectrainError, match=r"/proc/nope/x\.json: there is no folder /proc/nope"):
        files.write_json("/proc/nope/x.json", {})
    monkeypatch.setattr(files.Path, "mkdir", lambda self: refuse(errno.ENOSPC)(0))
    with pytest.raises(RunFailed, match="disk full"):
        files.require_writable(tmp_path / "x.json")


def test_a_missing_folder_is_one_line_and_a_missing_file_is_the_callers(tmp_path):
    absent = tmp_path / "absent" / "file"
    with (
        pytest.raises(SpectrainError, match=f"there is no folder {absent.parent}"),
        files.disk_errors(absent),
    ):
        absent.read_bytes()
    with pytest.raises(FileNotFoundError), files.disk_errors(tmp_path / "file"):
        (tmp_path / "file").read_bytes()
    with pytest.raises(FileNotFoundError), files.disk_errors("owner/model"):
        absent.read_bytes()  # another place: no word about a folder "owner"
    (tmp_path / "file").touch()
    with (
        pytest.raises(SpectrainError, match="in each other's way"),
        files.disk_errors(tmp_path / "file" / "below"),
    ):
        (tmp_path / "file" / "below").read_bytes()


def test_json_round_trip_and_refusals(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"text": "ü", "list": [1, None, 2.5]})
    assert files.read_json(path) == {"text": "ü", "list": [1, None, 2.5]}
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"x": float("nan")})
    assert files.read_json(path)["text"] == "ü"
    path.write_text('{"a": 1,\n "b": ')
    with pytest.raises(SpectrainError, match=r"a\.json:2: not valid JSON"):
        files.read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpectrainError, match="UTF-8"):
        files.read_json(path)
    with pytest.raises(SpectrainError, match="no such file"):
        files.read_json(tmp_path / "missing.json")
