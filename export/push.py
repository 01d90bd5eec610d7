"""Put an export on the model hub; whatever the hub answers becomes one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spectrain.core.errors import RunFailed, SpectrainError


def require_token() -> None:
    """Raise SpectrainError where nobody is logged in: before any work is done."""
    from huggingface_hub import get_token

    if not get_token():
        raise SpectrainError(
            "no token for the model hub",
            where="--push",
            fix="log in with `hf auth login`, or set HF_TOKEN",
        )


def push(folder: Path, repo: str, private: bool, endpoint: str | None = None) -> str:
    """Upload `folder` to OWNER/NAME, which is made if it does not exist (an existing one stays as
    public or private as it is); returns its address.

    endpoint: address of the hub, default its own. Raises RunFailed, with the export still there.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    with _told(folder, repo):
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Export a draft head with spectrain"
        )
    return str(address)


@contextmanager
def _told(folder: Path, repo: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries below have each their own kinds
        raise RunFailed(
            f"not pushed: {_reason(error)}",
            where=repo,
            fix=f"the export is complete in {folder}; try again: hf upload {repo} {folder}",
        ) from error


def _reason(error: Exception) -> str:
    """By the status that the hub answered with, else by the names in the error's class."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the hub does not know the token"
    if status == 403:
        return "the token may not write there"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"ConnectError", "ConnectTimeout", "OfflineModeIsEnabled", "ConnectionError"}:
        return "the hub cannot be reached"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]
