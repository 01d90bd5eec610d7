"""Names of targets: embedded ones, local folders, hub ids; one line when one cannot be had."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from spectrain.core import adapter
from spectrain.core.config import nearest
from spectrain.core.embedded import EMBEDDED, converted
from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors

_NO_CODE_FIX = "use a checkpoint whose architecture and tokenizer transformers has itself"


def resolve(name: str) -> str:
    """A local folder or a hub id that `from_pretrained` takes.

    An embedded name is fetched and converted when it is not in the cache yet (RunFailed when that
    is impossible); an existing path and a hub id pass through. Raises SpectrainError for a text
    that cannot be either.
    """
    if name in EMBEDDED:
        with load_errors(name):
            return str(converted(EMBEDDED[name]))
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        if not ((path / "config.json").is_file() or adapter.is_adapter(path)):
            raise SpectrainError(
                f"{name!r} holds no model (no config.json)",
                where="--target",
                fix="give the folder that a model was saved to",
            )
        return str(path)
    if not name.strip() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SpectrainError(f"no such model folder {name!r}", where="--target", fix=_choices(name))
    offline_without_hub()
    return name


def offline_without_hub() -> None:
    """Where the hub cannot be reached, what its own cache holds still loads, and a failure comes at
    once. Before the library that asks it is imported, if possible."""
    if not _hub_answers():
        _stay_offline()


def lasting_name(name: str) -> str:
    """`name`, a folder as its absolute path: what leads to the target from any folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in EMBEDDED and path.exists() else name


def fetch(name: str) -> str:
    """Put an embedded target into the cache and return its folder.

    Raises SpectrainError for any other name: hub models are fetched when they are first used.
    """
    if name not in EMBEDDED:
        raise SpectrainError(
            f"no embedded target {name!r}{nearest(name, EMBEDDED)}",
            where="--fetch",
            fix=f"give one of: {', '.join(EMBEDDED)} (hub models are fetched when first used)",
        )
    return resolve(name)


def list_targets() -> list[dict[str, Any]]:
    """The embedded targets and the hub cache: rows of name, title, cached (bool) and folder."""
    rows = [
        {
            "name": model.name,
            "title": model.title,
            "cached": model.cached,
            "folder": str(model.folder) if model.cached else None,
        }
        for model in EMBEDDED.values()
    ]
    return rows + _hub_cache()


def _hub_cache() -> list[dict[str, Any]]:
    """Models that the hub's own cache holds: folders models--OWNER--NAME/snapshots/REVISION."""
    from huggingface_hub.constants import HF_HUB_CACHE

    rows = []
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        if any(folder.glob("snapshots/*/config.json")):
            name = folder.name.removeprefix("models--").replace("--", "/", 1)
            title = "from the model hub"
            rows.append({"name": name, "title": title, "cached": True, "folder": str(folder)})
    return rows


@contextmanager
def load_errors(name: str, where: str = "--target", fix: str | None = None) -> Iterator[None]:
    """Around calls that load a model: whatever they raise becomes one line about `name`, by default
    a target."""
    try:
        with disk_errors(name):
            yield
    except SpectrainError:
        raise
    except Exception as error:
        fix = _NO_CODE_FIX if _wants_code(error) else fix or _choices(name)
        raise SpectrainError(
            f"cannot load {name!r} ({reason(error)})", where=where, fix=fix
        ) from error


def snapshot(
    name: str,
    where: str = "--target",
    fix: str | None = None,
    endings: Iterable[str] = (),
    weights: str = "*.safetensors",
) -> Path:
    """The folder with the safetensors (of a pattern) and JSON files of a hub id, and those with
    further `endings`, fetched where they are not here yet. Raises SpectrainError when they cannot
    be had."""
    offline_without_hub()
    from huggingface_hub import snapshot_download

    patterns = [weights, *(f"*{ending}" for ending in (".json", *endings))]
    with load_errors(name, where, fix):
        return Path(snapshot_download(name, allow_patterns=patterns))


def weights_of(source: str) -> Path:
    """The folder with the weights of what `resolve` gave; of a hub id the files that the library
    loads: some models lie there twice, the second time under other names."""
    folder = Path(source)
    return folder if folder.is_dir() else snapshot(source, weights="model*.safetensors")


def _choices(name: str) -> str:
    known = ", ".join(EMBEDDED)
    return f"give {known}, a model folder or a hub id{nearest(name, EMBEDDED)}"


def reason(error: BaseException) -> str:
    """Why a load failed, told by the names in the exception chain: all that hub versions share."""
    if _wants_code(error):
        return "it asks for code of its own to be run, which is not done"
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if names & {"GatedRepoError"}:
        return "the hub wants you to accept its licence and log in first"
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        return "the hub knows no such model, or not for you"
    if names & {"HFValidationError"}:
        return "it is neither an existing folder nor a well-formed hub id"
    if names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "gaierror"}:
        return "no such folder here, not in the hub's cache, and no network to ask the hub"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]


def _wants_code(error: BaseException) -> bool:
    """Whether the library would go on if it were allowed to run what lies in the checkpoint."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def _hub_answers() -> bool:
    """Whether the hub can be reached; behind a proxy that is not ours to judge."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def _stay_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if loaded := sys.modules.get("huggingface_hub.constants"):
        loaded.HF_HUB_OFFLINE = True  # it read the variable when it was imported
