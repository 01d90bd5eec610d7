"""Where a result comes from: enough to run it again."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from spectrain.core.environment import cpu_cores

PACKAGE = Path(__file__).resolve().parent.parent
PACKAGES = (
    "spectrain",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
)


def provenance(
    arguments: Mapping[str, Any] | None = None, seed: int | None = None, **more: Any
) -> dict[str, Any]:
    """A JSON-ready record of command line, settings, versions, revision and machine.

    arguments: the configuration as plain values (`config.model_dump(mode="json")`).
    more: facts only the caller knows, such as fingerprints and checksums.
    """
    return {
        "command": list(sys.argv),
        "arguments": dict(arguments or {}),
        "seed": seed,
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": cpu_cores(),
        "cpu_threads": _threads(),
        **more,
    }


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a result; None when absent."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_revision(folder: Path = PACKAGE) -> dict[str, Any] | None:
    """`{"revision", "dirty"}` when `folder` is the top of a git checkout with a commit, else None.

    A package installed below somebody else's checkout (a .venv in a project) is not that project.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != folder.resolve():
        return None
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    if not revision:
        return None
    return {"revision": revision, "dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _threads() -> int | None:
    """Torch's threads, if torch is in use at all; this record is not worth importing it."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else None
