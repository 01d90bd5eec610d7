"""Sources: every row of every kind of input, with its place, in bounded memory; all else is told in
one line."""

import gzip
import json
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import Field

from spectrain.core.config import Config, load_config
from spectrain.core.errors import SpectrainError
from spectrain.data.shapes import parse
from spectrain.data.sources import Source, file_lines, read_rows

CALL = {"name": "f", "arguments": {"a": 1}}
ROWS = [{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(5)]
ROWS[3]["messages"].append({"role": "assistant", "content": None, "tool_calls": [CALL]})
PARSED = [parse(json.dumps(row).encode(), False) for row in ROWS]


def write_lines(path: Path, rows=ROWS) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with the same rows in every kind of file and folder."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("rows.jsonl", "rows.json", "rows", "rows.jsonl.gz"):
        write_lines(folder / name)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(folder / "rows [1].parquet")
    table.save_to_disk(folder / "saved")
    table.with_format("numpy").save_to_disk(folder / "formatted")
    split = {"train": table, "test": table.select([2])}
    datasets.DatasetDict(split).save_to_disk(folder / "splits")
    return folder


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("rows.jsonl", ":5"),
        ("rows.json", ":5"),
        ("rows", ":5"),
        ("rows.jsonl.gz", ":5"),
        ("rows [1].parquet", ":4"),
        ("saved", "[train]:4"),
        ("formatted", "[train]:4"),
        ("splits", "[train]:4"),
    ],
)
def test_the_same_rows_from_every_kind_of_source(places, name, last):
    """What a file of lines and a table mean is the same, so that their rows have the same ids."""
    source = Source(path=str(places / name))
    found = list(read_rows(source))
    assert [parse(row, False) for _, row in found] == PARSED
    assert found[-1][0] == f"{places / name}{last}"
    assert list(read_rows(source.model_copy(update={"rows": 2}))) == found[:2]


def test_split_of_a_saved_dataset(places):
    ((where, row),) = read_rows(Source(path=str(places / "splits"), split="test"))
    assert where == f"{places / 'splits'}[test]:0"
    assert parse(row, False) == PARSED[2]


def test_values_that_a_parquet_file_keeps_as_json_are_decoded(tmp_path):
    """Arguments of different types are no column; the library writes them as JSON."""
    row = {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}
    other = {"messages": [{"role": "assistant", "tool_calls": [CALL | {"arguments": {"a": "x"}}]}]}
    table = datasets.Dataset.from_list([row, other], on_mixed_types="use_json")
    table.to_parquet(tmp_path / "rows.parquet")
    found = [parse(row, False) for _, row in read_rows(Source(path=str(tmp_path / "rows.parquet")))]
    calls = [row["messages"][0]["tool_calls"][0]["function"] for row in found]
    assert [call["arguments"] for call in calls] == [{"a": 1}, {"a": "x"}]


def test_blank_lines_are_counted_and_not_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n{}\n  \r\n[1]")
    place = tmp_path / "a.jsonl"
    assert list(file_lines(place)) == [(f"{place}:2", b"{}\n"), (f"{place}:4", b"[1]")]


@pytest.mark.parametrize("name", ["many.jsonl", "many.jsonl.gz", "many.parquet"])
def test_memory_does_not_grow_with_the_source(tmp_path, name):
    """The rows are 13 MB and more as objects, of which little is held at once. The parquet file is
    one row group, which its reader would hold as a whole unless it is told otherwise."""
    path = tmp_path / name
    if path.suffix == ".parquet":
        rows, texts = 20_000, [f"{n:0640}" for n in range(20_000)]
        pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False)
        assert pq.ParquetFile(path).num_row_groups == 1
    else:
        rows, line = 200_000, b'{"messages": [{"role": "user", "content": "%d"}]}\n'
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "wb") as file:
            file.writelines(line % n for n in range(rows))
    source = Source(path=str(path))
    next(read_rows(source))  # imports
    tracemalloc.start()
    arrow = 0
    try:
        for count, _ in enumerate(read_rows(source), start=1):
            if count % 1000 == 0:
                arrow = max(arrow, pa.total_allocated_bytes())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == rows
    assert peak < 1e6
    assert arrow < 3e6  # the column has 13 MB


def test_hub_dataset_is_streamed_and_read_no_further_than_asked(monkeypatch):
    asked, produced = [], []

    def rows():
        for n in range(10**9):
            produced.append(n)
            yield {"text": str(n)}

    def load_dataset(*names, **options):
        asked.append((names, options))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Source(path="owner/name", name="en", split="test", streaming=True, rows=3)
    found = list(read_rows(source))
    assert asked == [(("owner/name", "en"), {"split": "test", "streaming": True})]
    assert found == [(f"owner/name[test]:{n}", {"text": str(n)}) for n in range(3)]
    assert len(produced) <= 4


def test_an_error_in_the_middle_of_a_dataset_is_one_line(monkeypatch):
    def rows():
        yield {"text": "x"}
        raise ValueError("the shard\n\nis gone")

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows)
    )
    reading = read_rows(Source(path="owner/name"))
    assert next(reading)[1] == {"text": "x"}
    with pytest.raises(SpectrainError, match=r"^owner/name\[train\]: .*the shard is gone\)[^\n]*$"):
        next(reading)


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_that_cannot_be_had(streaming):
    with pytest.raises(SpectrainError, match=r"^nobody/nothing\[train\]: neither a file .* \(Conn"):
        list(read_rows(Source(path="nobody/nothing", streaming=streaming)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"path": "absent.jsonl"}, r"absent.jsonl: no such file"),
        ({"path": "owner/absent.parquet"}, r"absent.parquet: no such file"),
        ({"path": "./absent"}, r"absent: no such file"),
        ({"path": "a/b/c"}, r"a/b/c: no such file"),
        ({"path": "~/absent-rows"}, r"absent-rows: no such file"),
        ({"path": "{}/rows.jsonl", "split": "test"}, r"no split 'test'; leave out split"),
        ({"path": "{}/rows [1].parquet", "name": "en"}, r"no name 'en'; leave out name"),
        ({"path": "{}/saved", "name": "en"}, r"no configurations; leave out name"),
        ({"path": "{}/saved", "split": "test"}, r"no split 'test'; split: train"),
        ({"path": "{}/splits", "split": "val"}, r"no split 'val'; split: train or test"),
        ({"path": "{}"}, r"a folder that no dataset was saved to; name the files"),
    ],
)
def test_what_is_not_there_is_told(places, given, reason):
    given = {key: value.format(places) for key, value in given.items()}
    with pytest.raises(SpectrainError, match=reason):
        list(read_rows(Source(**given)))


# The same bytes whenever they are made: they are in the names of tests.
ARRAY = gzip.compress(b'[{"text": "x"}]', mtime=0)
CUT = gzip.compress(b"{}\n" * 9, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"\n \n", "there is no row in it"),
        ("a.jsonl", b"[\n{}\n]\n", "one JSON array, not a row a line; convert it to JSONL"),
        ("a.json", b'\xef\xbb\xbf [{"text": "x"}]', "one JSON array, not a row a line"),
        (
            "a.json.gz",
            ARRAY,
            "one JSON array, not a row a line",
        ),
        ("a.csv", b"a,b\n", "a .csv file is not read; convert it to JSONL"),
        ("a.jsonl.zst", b"x", "a .zst file is not read"),
        ("a.jsonl.gz", b"{}\n", r"a.jsonl.gz:1: not a whole gzip file"),
        (
            "a.jsonl.gz",
            CUT,
            r"a.jsonl.gz:\d+: not a whole gzip file",
        ),
        ("a.parquet", b"PAR1" + b"x" * 99, r"a.parquet: cannot be read as a dataset \(Arrow"),
        ("a.parquet", b"", r"a.parquet: cannot be read as a dataset \(Arrow"),
    ],
)
def test_damaged_and_other_files_are_told(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpectrainError, match=reason):
        list(read_rows(Source(path=str(tmp_path / name))))


def test_a_cut_gzip_file_gives_its_whole_lines_first(tmp_path):
    """As case 12: the place is told, and nothing before it is lost."""
    lines = [f"{n * 2654435761 % 2**32}\n".encode() for n in range(20_000)]
    packed = gzip.compress(b"".join(lines))
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    found = []
    with pytest.raises(SpectrainError) as error:
        found.extend(file_lines(tmp_path / "a.jsonl.gz"))
    assert len(found) > 5000
    assert [row for _, row in found] == lines[: len(found)]
    assert error.value.where == f"{tmp_path / 'a.jsonl.gz'}:{len(found) + 1}"


class Wants(Config):
    sources: tuple[Source, ...] = Field((), description="Inputs.")


def test_a_text_stands_for_a_source():
    config = load_config(Wants, "prepare", overrides=["sources=[a.jsonl, {path: b, weight: 2}]"])
    assert config.sources == (Source(path="a.jsonl"), Source(path="b", weight=2))
    assert Source.model_validate(Path("x/y.jsonl")) == Source(path=Path("x/y.jsonl"))
    assert Source.model_validate(config.sources[0]) == config.sources[0]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("[3]", "sources.0: 3 refused, give a path or the name of a dataset, or {path: …"),
        ("['']", "sources.0.path: '' refused"),
        ("[{path: a, weight: 0}]", "leave out a source that is to give nothing"),
        ("[{path: a, weight: -1}]", "leave out a source that is to give nothing"),
        ("[{path: a, weight: .inf}]", "sources.0.weight: inf refused"),
        ("[{path: a, rows: 0}]", "sources.0.rows: 0 refused"),
        ("[{path: a, wieght: 1}]", "unknown key 'sources.0.wieght', did you mean 'weight'?"),
        ("[{weight: 1}]", "sources.0.path: not given"),
    ],
)
def test_a_source_that_makes_no_sense_is_told(given, reason):
    with pytest.raises(SpectrainError) as error:
        load_config(Wants, "prepare", overrides=[f"sources={given}"])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
