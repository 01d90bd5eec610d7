"""Where rows come from: files of lines, parquet files, saved datasets, datasets of the hub.

Rows are told one by one and never held: memory does not grow with the source. They come as they
are, a line's bytes or a decoded row; what they mean is for data/shapes.py.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from spectrain.core.config import Config
from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors
from spectrain.core.models import offline_without_hub

_FILES = (".jsonl", ".json", ".gz", ".parquet", ".txt")
_OTHERS = (".csv", ".tsv", ".arrow", ".zip", ".zst", ".bz2", ".xz", ".tar")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_PARQUET_BATCH = 256  # rows decoded at once
_PARQUET_BUFFER = 1 << 20  # bytes of each column


class Source(Config):
    """One input. A plain text is read as its path."""

    path: str = Field(
        min_length=1,
        description="a JSONL file (.gz, too), a .parquet file, a folder saved by the datasets "
        "library, or the name of a dataset on the hub; what exists here goes first",
    )
    name: str | None = Field(None, description="configuration of a dataset that has several")
    split: str = Field("train", description="split of a dataset; a file has none")
    weight: float | None = Field(
        None,
        description="share of the conversations taken from this source, against the other weights; "
        "give every source one or none",
    )
    rows: int | None = Field(None, ge=1, description="read only so many rows, the first")
    streaming: bool = Field(
        False,
        description="read a dataset of the hub over the network, row by row, "
        "instead of fetching all of it to the disk first; to its end unless rows is given",
    )

    @model_validator(mode="before")
    @classmethod
    def from_text(cls, value: Any) -> Any:
        """A text or Path stands for a source with this path."""
        if isinstance(value, (str, Path)):
            return {"path": str(value)}
        if not isinstance(value, (dict, cls)):
            raise ValueError("give a path or the name of a dataset, or {path: …, weight: …}")
        return value

    @field_validator("path", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("weight")
    @classmethod
    def _gives_something(cls, value: float | None) -> float | None:
        if value is not None and value <= 0:
            raise ValueError("a weight is above 0; leave out a source that is to give nothing")
        return value


def read_rows(source: Source) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """(where, row) of a source in its own order, the first `source.rows` of them.

    where: "file:line", lines from 1; "dataset[split]:row" or "parquet-file:row", rows from 0
    row: the bytes of a line that is not blank, or a row as the datasets library decodes it

    Raises SpectrainError for a source that is missing, of another kind, damaged or without a row.
    """
    path, place = Path(source.path).expanduser(), f"{source.path}[{source.split}]"
    if path.is_dir():
        rows = _dataset_rows(place, lambda: _saved(source, path))
    elif path.suffix == ".parquet" and path.exists():
        _require_plain(source)
        rows = _dataset_rows(source.path, lambda: _parquet(path))
    elif path.exists() or not _may_be_hub_name(source.path):
        _require_plain(source)
        rows = file_lines(path)
    else:
        what = "neither a file or folder here nor a dataset that the hub gives"
        rows = _dataset_rows(place, lambda: _from_hub(source), what)
    empty = True
    for found in islice(rows, source.rows):
        empty = False
        yield found
    if empty:
        raise SpectrainError("there is no row in it", where=source.path, fix="check the source")


def quotas(
    sizes: Sequence[int], weights: Sequence[float | None], limit: int | None
) -> list[int] | None:
    """How many of its `sizes[i]` conversations source i gives; None where no source has a weight:
    then all are taken, and `limit` is for the caller to apply to them together.

    The shares are as the weights say, to the nearest row or the one beside it, of the largest total
    (at most `limit`) at which no source is asked for more than it has.

    Raises SpectrainError where some have a weight and others have none.
    """
    if all(weight is None for weight in weights):
        return None
    if any(weight is None for weight in weights):
        raise SpectrainError(
            "some sources have a weight and others have none",
            where="weight",
            fix="give every source a weight, or none",
        )
    # 0.7 and 0.3 as they are written, not as binary fractions: 70 and 30 rows make 100.
    given = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(given) for weight in given]
    total = min(size // share for size, share in zip(sizes, shares, strict=True))
    total = total if limit is None else min(total, limit)
    taken = [int(total * share) for share in shares]
    # Rows that rounding down has left go where it took most. A share with a remainder is below its
    # source's size, so that there is one row more to take.
    cut = sorted(range(len(shares)), key=lambda i: taken[i] - total * shares[i])
    for place in cut[: total - sum(taken)]:
        taken[place] += 1
    return taken


# ── files of lines ───────────────────────────────────────────────────────────


def file_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(file:line, content) of the lines that are not blank; a name that ends with .gz is unpacked.

    Raises SpectrainError for a missing, damaged or other kind of file.
    """
    if not path.exists():
        raise SpectrainError("no such file", where=str(path), fix="check the path")
    if path.is_dir():
        raise SpectrainError("a folder, not a JSONL file", where=str(path), fix="check the path")
    if path.suffix in _OTHERS:
        _refuse_kind(path, f"a {path.suffix} file is not read")
    number = 0
    try:
        with disk_errors(path), _opened(path) as file:
            if _is_array(path, file.peek(64)):
                _refuse_kind(path, "one JSON array, not a row a line")
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpectrainError(
            f"not a whole gzip file ({error})",
            where=f"{path}:{number + 1}",
            fix="fetch or pack it again",
        ) from None


def _opened(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _is_array(path: Path, start: bytes) -> bool:
    """Whether a file with this beginning is one list: on many lines, or called .json."""
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    alone = start[1:].split(b"\n")[0].strip() == b""
    return start[:1] == b"[" and (alone or Path(path.name.removesuffix(".gz")).suffix == ".json")


def _refuse_kind(path: Path, what: str) -> None:
    raise SpectrainError(what, where=str(path), fix="convert it to JSONL, a row a line")


# ── datasets ─────────────────────────────────────────────────────────────────


def _may_be_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and Path(name).suffix not in _FILES + _OTHERS


def _require_plain(source: Source) -> None:
    """A file has neither configurations nor splits; asking for one is a misunderstanding."""
    for key, value, usual in (("name", source.name, None), ("split", source.split, "train")):
        if value != usual:
            raise SpectrainError(
                f"a file has no {key} {value!r}", where=source.path, fix=f"leave out {key}"
            )


def _dataset_rows(
    place: str, load: Callable[[], Iterable[dict]], failed: str = "cannot be read as a dataset"
) -> Iterator[tuple[str, dict[str, Any]]]:
    with _library_errors(place, failed):
        for number, row in enumerate(load()):
            yield f"{place}:{number}", row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import Features
    from pyarrow.parquet import ParquetFile

    # A row group may be the whole file: it is read piece by piece, not fetched before.
    with ParquetFile(path, pre_buffer=False, buffer_size=_PARQUET_BUFFER) as file:
        features = Features.from_arrow_schema(file.schema_arrow)
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
            yield from map(features.decode_example, batch.to_pylist())


def _saved(source: Source, path: Path) -> Iterable[dict[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    if not any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        raise SpectrainError(
            "a folder that no dataset was saved to", where=source.path, fix="name the files in it"
        )
    if source.name is not None:
        raise SpectrainError(
            "a saved dataset has no configurations", where=source.path, fix="leave out name"
        )
    found = load_from_disk(str(path))
    splits = found if isinstance(found, DatasetDict) else {str(found.split or "train"): found}
    if source.split not in splits:
        raise SpectrainError(
            f"there is no split {source.split!r}",
            where=source.path,
            fix=f"split: {' or '.join(splits)}",
        )
    # The format it was saved with might be tensors.
    return splits[source.split].with_format(None)


def _from_hub(source: Source) -> Iterable[dict[str, Any]]:
    offline_without_hub()
    from datasets import load_dataset

    return load_dataset(
        source.path, source.name, split=source.split, streaming=source.streaming
    ).with_format(None)


@contextmanager
def _library_errors(place: str, failed: str) -> Iterator[None]:
    """Whatever the datasets library raises becomes one line about this source."""
    try:
        with disk_errors(place):
            yield
    except SpectrainError:
        raise
    except Exception as error:
        raise SpectrainError(
            f"{failed} ({_reason(error)})",
            where=place,
            fix="check path, name and split",
        ) from error


def _reason(error: BaseException) -> str:
    """The library's own words; of an error that only wraps another, the other's."""
    while type(error).__name__.startswith("DatasetGeneration") and error.__cause__:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
