"""What `settle` does to the process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spectrain.core import environment


@pytest.fixture
def told(monkeypatch):
    """What glibc is told; the process itself is left as it is."""
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda what, value: calls.append((what, value)))
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: library)
    for name in [name for name in environment.os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    return calls


def test_freed_memory_is_kept(told):
    environment.settle()
    # mallopt(3): M_MMAP_THRESHOLD is -3 and takes at most 32 MiB, M_TRIM_THRESHOLD is -1.
    assert told == [(-3, 32 * 2**20), (-1, 512 * 2**20)]


def test_somebody_who_has_set_glibc_up_is_left_alone(told, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    environment.settle()
    assert told == []


def test_another_c_library_is_no_error(monkeypatch, told):
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: SimpleNamespace())
    environment.settle()
    assert told == []
