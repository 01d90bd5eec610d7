"""The store: what is read is what was written, and anything else is one clear line."""

import errno
import json
import shutil
from dataclasses import replace

import pytest
import torch
from damaged import edit
from fake_rows import SETTINGS, random_row
from packed_rows import pack
from preparing import content

from spectrain.core import files
from spectrain.core.batch import predicting
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.manifest import MANIFEST
from spectrain.data.store import FeatureStore
from spectrain.data.writer import StoreWriter

pytestmark = pytest.mark.filterwarnings("error")


def test_batch_gives_back_what_was_written(store_path, pairs):
    """Every row, in a batch across shards: features on their positions, zeros and −1 elsewhere."""
    store = FeatureStore.open(store_path, verify=True)
    rows = store.rows("heldout") + store.rows("train")
    batch = store.batch(rows)
    assert batch.tokens.shape == (6, 30)
    for place, info in enumerate(rows):
        row, states = pairs[info.index]
        where = predicting(row.reply.long())
        n = len(row.tokens)
        assert info.id == row.id
        assert (info.length, info.supervised) == (n, row.supervised)
        assert torch.equal(batch.tokens[place, :n], row.tokens.long())
        assert torch.equal(batch.reply[place, :n], row.reply.long())
        assert torch.equal(batch.aux[place, :n], states.aux)
        assert torch.equal(batch.last[place, :n][where], states.last)
        assert torch.equal(batch.argmax[place, :n][where], states.argmax.long())
        assert not batch.last[place, :n][~where].any()
        assert (batch.argmax[place, :n][~where] == -1).all()
        for padded in (batch.tokens, batch.reply, batch.aux, batch.last):
            assert not padded[place, n:].any()
        argmax, logprob, lognorm = store.teacher(info)
        assert torch.equal(argmax, states.argmax.long())
        assert torch.equal(logprob, states.logprob)
        assert torch.equal(lognorm, states.lognorm)


@pytest.mark.parametrize("everywhere", [False, True])
def test_packed_rows_hold_what_the_conversations_hold(tmp_path, everywhere):
    """Bins of several conversations across shards = the conversations put side by side, in a batch
    with a single one and padding; the second conversation begins with a reply."""
    settings = SETTINGS | ({"last_states": "everywhere"} if everywhere else {})
    pairs = [random_row(seed, length) for seed, length in enumerate((6, 11, 4, 9))]
    pairs[1][0].reply[:] = 1
    pairs[2][0].reply[1] = 2  # two replies, the numbers as they come
    made = []
    for row, states in pairs:
        count = len(row.tokens) if everywhere else int(predicting(row.reply.long()).sum())
        said = int(predicting(row.reply.long()).sum())
        states = replace(
            states,
            last=torch.randn(count, 4),
            argmax=torch.arange(said, dtype=torch.int32),
            logprob=torch.zeros(said),
            lognorm=torch.zeros(said),
        )
        made.append((row, states))
    with StoreWriter.claim(tmp_path / "s", settings) as writer:
        writer.write_shard(0, "a", made[:2])
        writer.write_shard(1, "b", made[2:])
        writer.finish(2)
    store = FeatureStore.open(tmp_path / "s")
    rows = store.rows("train")
    alone = [store.batch([row]) for row in rows]
    assert all(one.starts is None for one in alone)
    got = store.packed([[rows[0], rows[1], rows[2]], [rows[3]]])
    alone[1].reply[0, 0] = 0  # nobody predicts it, whoever lies before it
    expected = pack([alone[:3], alone[3:]])
    for name in ("tokens", "reply", "aux", "last", "argmax", "starts"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.reply[0].tolist() == [0] * 3 + [1] * 3 + [0] + [2] * 10 + [0, 4, 3, 3]
    assert torch.equal(predicting(got.reply)[1], predicting(expected.reply)[1])
    assert got.positions[0].tolist() == [*range(6), *range(11), *range(4)]
    assert got.positions[1].tolist() == [*range(9), *[0] * 12]
    assert store.packed([[rows[0], rows[1]]], with_aux=False).aux is None


def test_top_log_probabilities_are_given_back_row_by_row(tmp_path, pairs):
    """Ids and values of each row; a store without them says how to get them."""
    made, expected = [], []
    for row, states in pairs:
        ids = torch.randint(0, 50, (len(states.argmax), 3), dtype=torch.int32)
        values = -torch.rand(len(states.argmax), 3).sort(-1).values.half()
        expected.append((ids.long(), values.float()))
        made.append((row, replace(states, top_ids=ids, top_logprob=values)))
    for name, given in (("with", made), ("without", pairs)):
        with StoreWriter.claim(tmp_path / name, SETTINGS) as writer:
            writer.write_shard(0, "a", given[:4])
            writer.write_shard(1, "b", given[4:])
            writer.finish(2)
    store = FeatureStore.open(tmp_path / "with")
    for info in store.rows("train") + store.rows("heldout"):
        ids, values = store.teacher_top(info)
        assert torch.equal(ids, expected[info.index][0])
        assert torch.equal(values, expected[info.index][1])
    store = FeatureStore.open(tmp_path / "without")
    with pytest.raises(SpectrainError, match="--set teacher_top=8"):
        store.teacher_top(store.rows("train")[0])


def test_a_row_costs_little_memory(store_path):
    """Millions of rows are known at once: no dictionary for each, shared words kept once."""
    rows = FeatureStore.open(store_path).rows("train")
    assert not hasattr(rows[0], "__dict__")
    assert all(row.split is rows[0].split and row.domain is rows[0].domain for row in rows)
    assert b": " not in (store_path / "shard-00000.json").read_bytes()


def test_rows_of_a_split_keep_their_order(store_path):
    store = FeatureStore.open(store_path)
    assert [row.index for row in store.rows("train")] == [0, 1, 3, 4]
    assert [row.index for row in store.rows("heldout")] == [2, 5]


def test_counts_are_of_supervised_tokens_of_the_split(store_path, pairs):
    store = FeatureStore.open(store_path)
    expected = torch.zeros(60, dtype=torch.int64)
    for row, _ in pairs:
        if row.split == "train":
            for token in row.tokens[row.reply > 0].tolist():
                expected[token] += 1
    assert torch.equal(store.token_counts("train", 60), expected)


def test_features_are_rounded_once_to_the_type_of_the_store(tmp_path, pairs):
    with StoreWriter.claim(tmp_path / "s", SETTINGS | {"dtype": "bfloat16"}) as writer:
        writer.write_shard(0, "k", pairs)
        writer.finish(1)
    store = FeatureStore.open(tmp_path / "s")
    batch = store.batch(store.rows("train")[:1])
    assert batch.aux.dtype == batch.last.dtype == torch.bfloat16
    assert torch.equal(batch.aux[0], pairs[0][1].aux.bfloat16())


def test_store_without_auxiliary_states(tmp_path, pairs):
    bare = [(row, type(s)(None, s.last, s.argmax, s.logprob, s.lognorm)) for row, s in pairs]
    with StoreWriter.claim(tmp_path / "s", SETTINGS) as writer:
        writer.write_shard(0, "k", bare)
        writer.finish(1)
    store = FeatureStore.open(tmp_path / "s")
    assert store.batch(store.rows("train")).aux is None


def test_target_is_required(store_path):
    """Features of another target are refused, naming both."""
    store = FeatureStore.open(store_path)
    store.require_target(SETTINGS["target"]["fingerprint"])
    with pytest.raises(SpectrainError, match=r"of a target \(feedbeefcafe0123\).*\(other\)"):
        store.require_target("other")


# ── damage ───────────────────────────────────────────────────────────────────


def read_all(path):
    store = FeatureStore.open(path)
    return store.batch(store.rows("train") + store.rows("heldout"))


def test_flipped_byte_is_found_before_its_shard_is_used(store_path):
    """Lazily: a batch of the other shard still comes; with verify=True opening already fails."""
    file = store_path / "shard-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    store = FeatureStore.open(store_path)
    store.batch(store.rows("train")[:2])
    with pytest.raises(SpectrainError, match=r"shard-00001\.safetensors: damaged"):
        store.batch(store.rows("train"))
    with pytest.raises(SpectrainError, match="damaged"):
        FeatureStore.open(store_path, verify=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("shard-00000.safetensors", lambda data: data[:-10], "truncated: "),
        ("shard-00000.safetensors", lambda data: b"", "truncated: 0 bytes"),
        ("shard-00000.safetensors", None, "missing from the store"),
        ("shard-00001.json", lambda data: data.replace(b"chat", b"code"), "damaged"),
        ("shard-00001.json", None, "missing from the store"),
        ("manifest.json", lambda data: data[:50], "not valid JSON"),
        ("manifest.json", lambda data: b"{}", "not the manifest"),
        (
            "manifest.json",
            lambda data: data.replace(b'"format": 1', b'"format": 9'),
            "store format 9, this version reads format 1",
        ),
        (
            "manifest.json",
            lambda data: data.replace(b'"complete": true', b'"complete": false'),
            "incomplete",
        ),
        ("manifest.json", None, "no feature store here"),
    ],
)
def test_damage_is_one_line_that_names_the_file(store_path, name, change, message):
    file = store_path / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(SpectrainError, match=message) as caught:
        read_all(store_path)
    assert "\n" not in str(caught.value)
    assert str(store_path) in str(caught.value)


# ── continuing ───────────────────────────────────────────────────────────────


def test_other_settings_are_refused_by_name(store_path):
    """Case 14: the first setting that differs, both values, and how to mend; nothing is lost."""
    before = {file.name: file.read_bytes() for file in store_path.iterdir()}
    other = SETTINGS | {"max_length": 128}
    with (
        pytest.raises(SpectrainError, match=r"max_length = 64, now it is 128.*--overwrite"),
        StoreWriter.claim(store_path, other),
    ):
        pass
    changed = SETTINGS | {"target": SETTINGS["target"] | {"fingerprint": "new"}}
    with (
        pytest.raises(SpectrainError, match=r"target\.fingerprint = 'feed"),
        StoreWriter.claim(store_path, changed),
    ):
        pass
    assert before == {file.name: file.read_bytes() for file in store_path.iterdir()}


def test_overwrite_starts_anew(store_path):
    with StoreWriter.claim(store_path, SETTINGS | {"max_length": 128}, overwrite=True) as writer:
        assert writer.shard(0, "first") is None
    with pytest.raises(SpectrainError, match="incomplete"):
        FeatureStore.open(store_path)


def test_finished_shards_are_known_by_key_and_checksum(store_path):
    """A shard of other rows, or a damaged one, is captured again."""
    with StoreWriter.claim(store_path, SETTINGS) as writer:
        assert writer.shard(0, "first") is not None
        assert writer.shard(0, "other rows") is None
        assert writer.shard(7, "first") is None
        file = store_path / "shard-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert writer.shard(1, "second") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["rows"][0].update(split="heldout"),
        lambda facts: facts["rows"][0].update(temperature=0.5),
        lambda facts: facts["rows"].reverse(),
        lambda facts: facts.update(dropped={"states-not-finite": 2}),
        lambda facts: facts.update(bytes=1),
        lambda facts: facts.pop("own_sha256"),
    ],
)
@pytest.mark.parametrize("interrupted", [True, False])
def test_facts_that_were_changed_are_not_believed(store_path, change, interrupted):
    """Neither with a manifest that knows their checksum nor, of an interrupted preparation, with
    one that knows no shard."""
    if interrupted:
        edit(store_path, lambda manifest: manifest.update(complete=False, shards=[]))
    with StoreWriter.claim(store_path, SETTINGS) as writer:
        assert writer.shard(0, "first") is not None
        assert writer.shard(1, "second") is not None
    file = store_path / "shard-00000.json"
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))
    with StoreWriter.claim(store_path, SETTINGS) as writer:
        assert writer.shard(0, "first") is None
        assert writer.shard(1, "second") is not None


def test_leftovers_of_a_killed_run_are_removed(store_path):
    (store_path / "replies").mkdir()
    left = [store_path / ".shard-00002.safetensors.9-ab.tmp", store_path / "replies/.u.json.9.tmp"]
    for file in left:
        file.write_bytes(b"half")
    with StoreWriter.claim(store_path, SETTINGS):
        assert not any(file.exists() for file in left)


def test_shards_beyond_the_last_one_are_removed(store_path, pairs):
    with StoreWriter.claim(store_path, SETTINGS) as writer:
        writer.write_shard(0, "all", pairs)
        writer.finish(1)
    assert sorted(f.name for f in store_path.glob("shard-*")) == [
        "shard-00000.json",
        "shard-00000.safetensors",
    ]
    assert len(read_all(store_path).tokens) == 6


@pytest.mark.parametrize(
    "names",
    [
        ["thesis.txt"],
        ["thesis.txt", ".lock", ".spool.sqlite", ".a.json.9-ab.tmp", "replies/.u.json.9.tmp"],
        ["thesis.tmp"],
        [".git/HEAD", ".lock"],
    ],
)
def test_a_folder_of_other_things_is_not_touched(tmp_path, names):
    """Every name and every byte, also of files that are called as ours are."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("years of work")
    before = content(tmp_path)
    for overwrite in (False, True):
        with (
            pytest.raises(SpectrainError, match="not empty and holds no feature store"),
            StoreWriter.claim(tmp_path, SETTINGS, overwrite=overwrite),
        ):
            pass
        assert content(tmp_path) == before


def test_a_lock_is_not_emptied_and_the_folder_is_looked_at_once_it_is_held(tmp_path, monkeypatch):
    """What another process wrote between the first look and the lock is not swept away."""
    (tmp_path / ".lock").write_text("mine")
    with StoreWriter.claim(tmp_path, SETTINGS):
        assert (tmp_path / ".lock").read_text() == "mine"
    (tmp_path / MANIFEST).unlink()
    left = tmp_path / ".a.json.9-ab.tmp"

    def locked(*_):
        left.write_text("half")
        (tmp_path / "thesis.txt").write_text("years of work")

    monkeypatch.setattr("spectrain.data.writer.fcntl.flock", locked)
    with (
        pytest.raises(SpectrainError, match="not empty and holds no feature store"),
        StoreWriter.claim(tmp_path, SETTINGS),
    ):
        pass
    assert left.read_text() == "half"


def test_second_process_is_kept_out(store_path):
    with (
        StoreWriter.claim(store_path, SETTINGS),
        pytest.raises(SpectrainError, match="another process"),
        StoreWriter.claim(store_path, SETTINGS),
    ):
        pass
    with StoreWriter.claim(store_path, SETTINGS):
        pass


def test_same_rows_give_the_same_bytes(tmp_path, store_path, pairs):
    with StoreWriter.claim(tmp_path / "again", SETTINGS, {"target": "a target"}) as writer:
        writer.write_shard(0, "first", pairs[:4])
        writer.write_shard(1, "second", pairs[4:])
        writer.finish(2)
    for file in store_path.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_disk_full_leaves_an_incomplete_store_that_goes_on(tmp_path, pairs, monkeypatch):
    """Case 16: at the second shard the disk is full; the first stays, and a rerun ends well."""
    path = tmp_path / "store"
    real = files.os.fsync
    calls = []

    def full(handle):
        calls.append(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    with StoreWriter.claim(path, SETTINGS) as writer:
        writer.write_shard(0, "first", pairs[:4])
        monkeypatch.setattr(files.os, "fsync", full)
        with pytest.raises(RunFailed, match="disk full"):
            writer.write_shard(1, "second", pairs[4:])
    assert calls
    monkeypatch.setattr(files.os, "fsync", real)
    assert sorted(f.name for f in path.iterdir()) == [
        ".lock",
        "manifest.json",
        "shard-00000.json",
        "shard-00000.safetensors",
    ]
    with pytest.raises(SpectrainError, match="incomplete"):
        FeatureStore.open(path)
    with StoreWriter.claim(path, SETTINGS) as writer:
        assert writer.shard(0, "first") is not None
        writer.write_shard(1, "second", pairs[4:])
        writer.finish(2)
    assert len(read_all(path).tokens) == 6


def test_space_is_asked_for_first(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with StoreWriter.claim(tmp_path / "s", SETTINGS) as writer:
        with pytest.raises(RunFailed, match="needed"):
            writer.require_space(1000)
        writer.require_space(10)


def test_shard_whose_rows_were_all_dropped(tmp_path):
    """It is written, empty, so that a rerun knows it; opening skips it."""
    with StoreWriter.claim(tmp_path / "s", SETTINGS) as writer:
        writer.write_shard(0, "a", [], {"states-not-finite": 2})
        writer.write_shard(1, "b", [random_row(1, 8)])
        writer.finish(2)
        assert json.loads((tmp_path / "s/shard-00000.json").read_text())["dropped"] == {
            "states-not-finite": 2
        }
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert store.batch(store.rows("train")).tokens.shape == (1, 8)
