"""From several sources into the spool: weights, limits, places of what is dropped."""

import pytest
from preparing import prompt, write

from spectrain.core.errors import SpectrainError
from spectrain.data.fates import Fates
from spectrain.data.reading import read_into
from spectrain.data.sources import Source
from spectrain.data.spool import Spool


def read(folder, sources, limit=None, on_bad_row="stop"):
    """(domains of the chosen conversations, sizes of the sources, fates)"""
    fates = Fates()
    with Spool(folder) as spool:
        sizes = read_into(spool, sources, "auto", on_bad_row, limit, fates)
        return [c.domain for _, c in spool.conversations()], sizes, fates


@pytest.fixture
def two(tmp_path):
    """Files of 30 and 10 conversations, told apart by their domain."""
    for name, count in (("a", 30), ("b", 10)):
        rows = [prompt(f"{name}{n}") | {"domain": name} for n in range(count)]
        write(tmp_path / f"{name}.jsonl", rows)
    return lambda **weights: [
        Source(path=str(tmp_path / f"{name}.jsonl"), weight=weights.get(name)) for name in "ab"
    ]


@pytest.mark.parametrize(
    ("weights", "limit", "expected"),
    [
        ({}, None, (30, 10)),
        ({"a": 1, "b": 1}, None, (10, 10)),
        ({"a": 3, "b": 1}, None, (30, 10)),
        ({"a": 1, "b": 4}, None, (2, 10)),  # 12 rows are as near to 1 : 4 as b's ten allow
        ({"a": 1, "b": 1}, 8, (4, 4)),
    ],
)
def test_weights_are_shares_of_what_is_taken(tmp_path, two, weights, limit, expected):
    domains, sizes, _ = read(tmp_path, two(**weights), limit)
    assert sizes == [30, 10]
    assert (domains.count("a"), domains.count("b")) == expected


def test_without_weights_a_limit_is_of_all_together(tmp_path, two):
    everything, _, _ = read(tmp_path, two())
    limited, _, _ = read(tmp_path, two(), limit=13)
    assert limited == everything[:13]


def test_a_source_that_gives_nothing_is_told(tmp_path, two):
    with pytest.raises(SpectrainError, match=r"b.jsonl: of its 10 conversations none is taken"):
        read(tmp_path, two(a=1000, b=1), limit=20)


def test_places_of_what_is_dropped(tmp_path):
    """By file and line, with what is wrong of a bad row."""
    path = tmp_path / "mixed.jsonl"
    good, bad = '{"prompt": "hi %d"}', '{"prompt": "half a'
    lines = [good % 0, bad, good % 0, bad, bad, bad, good % 1, '{"messages": [{"role": "critic"}]}']
    path.write_text("\n".join(lines))
    _, sizes, fates = read(tmp_path, [Source(path=str(path))], on_bad_row="skip")
    assert sizes == [2]
    assert fates == {"bad-row": 5, "duplicate": 1}
    bad = [place.split(" (")[0] for place in fates.places.pop("bad-row")]
    assert bad == [f"{path}:{line}" for line in (2, 4, 5, 6, 8)]
    assert fates.places == {"duplicate": [f"{path}:3"]}
    with pytest.raises(SpectrainError, match=f"{path}:2: not valid JSON"):
        read(tmp_path, [Source(path=str(path))])
