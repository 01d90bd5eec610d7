"""prepare as a whole: what comes out, what is refused, and that a killed run loses nothing."""

import errno
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.core import files
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.recipes import prepare
from spectrain.recipes.prepare import PrepareConfig


@pytest.fixture(scope="module")
def load():
    """Target.load, each target once."""
    return functools.cache(Target.load)


@pytest.fixture(autouse=True)
def quick(monkeypatch, load):
    monkeypatch.setattr(prepare.Target, "load", load)
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompt(text: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], "domain": "chat", **more}


def talk(*texts: str, **more) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, **more}


PROMPTS = [prompt(f"How many apples are left of {n}?" + " Please." * (n % 4)) for n in range(16)]


@pytest.fixture
def config(tmp_path, tiny_path):
    """Settings for sixteen prompts: several units and several shards."""

    def make(**changes) -> PrepareConfig:
        prompts = tmp_path / "prompts.jsonl"
        if not prompts.exists():
            write(prompts, PROMPTS)
        settings = {
            "target": str(tiny_path),
            "prompts": prompts,
            "store": tmp_path / "store",
            "heldout": 0.3,
            "max_new_tokens": 8,
            "reply_batch": 5,
            "shard_tokens": 300,
            "batch_tokens": 200,
            "temperature": 1.0,
        }
        return PrepareConfig(**(settings | changes))

    return make


def content(store: Path) -> dict[str, bytes]:
    return {str(f.relative_to(store)): f.read_bytes() for f in store.rglob("*") if f.is_file()}


@pytest.fixture
def clean(config, tmp_path):
    """Bytes of an uninterrupted run."""
    prepare.run(config(store=tmp_path / "clean"))
    return content(tmp_path / "clean")


# ── what comes out ───────────────────────────────────────────────────────────


def test_prompts_become_rows_with_the_targets_own_replies(config, tiny):
    """Train prompts once at their temperature, held-out ones once at each of theirs; report,
    manifest and store agree; at temperature 0 every supervised token is the target's argmax."""
    report = prepare.run(config())
    store = FeatureStore.open(config().store, verify=True)
    store.require_target(tiny.fingerprint)
    train, heldout = store.rows("train"), store.rows("heldout")
    assert {row.temperature for row in train} == {1.0}
    assert [row.temperature for row in heldout] == [0.0, 1.0] * (len(heldout) // 2)
    assert len(train) + len(heldout) // 2 == 16
    assert heldout
    assert report["counts"]["rows"] == {"train": len(train), "heldout": len(heldout)}
    assert report["supervised_tokens"]["train"] == sum(row.supervised for row in train)
    assert report["supervised_tokens"]["train"] == store.token_counts("train", 392).sum()
    assert report["fingerprint"] == store.manifest["fingerprint"]
    assert report["bytes"] == sum(f.stat().st_size for f in config().store.glob("*.safetensors"))
    assert set(report["seconds"]) == {"read", "load", "answer", "tokenise", "capture"}
    assert all(rate > 0 for rate in report["tokens_per_second"].values())
    assert store.manifest["settings"]["aux_layers"] == list(tiny.default_aux_layers())
    for row in heldout[::2]:
        batch = store.batch([row])
        where = batch.argmax[0] >= 0
        assert int(where.sum()) == row.supervised
        assert batch.tokens[0][1:][where[:-1]].tolist() == batch.argmax[0][where].tolist()
        assert tiny.tokenizer.decode(batch.tokens[0]).startswith("<|im_start|>user\nHow many")


def test_given_replies_are_not_asked_for(config, tmp_path, monkeypatch):
    """`auto` keeps them with their own facts; the target is asked for nothing."""
    monkeypatch.setattr(prepare, "complete", None)
    rows = [talk(f"q{n}", "a reply", temperature=0.7, finish_reason="stop") for n in range(4)]
    prompts = write(tmp_path / "given.jsonl", [*rows, talk("q", "cut", finish_reason="length")])
    report = prepare.run(config(prompts=prompts, heldout=0.0))
    rows = FeatureStore.open(config().store).rows("train")
    assert sorted(row.temperature or 0 for row in rows) == [0, 0.7, 0.7, 0.7, 0.7]
    assert report["counts"]["length_stopped"] == 1
    assert report["tokens_per_second"]["answer"] is None


def test_regenerate_replaces_given_replies(config, tmp_path):
    prompts = write(tmp_path / "given.jsonl", [talk("q", "not the target's words")])
    prepare.run(config(prompts=prompts, heldout=0.0, regenerate=True))
    store = FeatureStore.open(config().store)
    (row,) = store.rows("train")
    assert row.temperature == 1.0
    assert row.supervised <= 8


def test_every_dropped_row_is_counted(config, tmp_path):
    """Cases 1, 2, 7, 8 and 12 in one file: the sum of fates is the number of lines."""
    prompts = write(
        tmp_path / "mixed.jsonl",
        [
            talk("q", "good"),
            talk("q", "good"),
            {"messages": [{"role": "system", "content": "only"}]},
            prompt("unanswered"),
            talk("long " * 100, "behind the limit"),
            talk("q", ""),
            talk("q", "cut", finish_reason="length"),
            {"text": "no messages"},
        ],
    )
    report = prepare.run(
        config(
            prompts=prompts,
            regenerate=False,
            on_bad_row="skip",
            max_length=60,
            length_stopped="drop",
        )
    )
    assert report["counts"]["dropped"] == {
        "bad-row": 1,
        "duplicate": 1,
        "empty-reply": 1,
        "length-stopped": 1,
        "no-assistant-turn": 1,
        "no-user-turn": 1,
        "truncated-away": 1,
    }
    assert sum(report["counts"]["rows"].values()) == 1


def test_all_rows_dropped_is_an_error_with_the_reasons(config, tmp_path):
    prompts = write(tmp_path / "none.jsonl", [talk("q", ""), talk("word " * 200, "x")])
    with pytest.raises(SpectrainError, match=r"no row is left: 1 empty-reply, 1 truncated-away"):
        prepare.run(config(prompts=prompts, max_length=50))
    with pytest.raises(SpectrainError, match="incomplete"):
        FeatureStore.open(config().store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 512}, "leaves no room for a prompt"),
        ({"aux_layers": (0, 1, 4)}, "not ascending layers of 0 … 3"),
        ({"aux_layers": (2, 1, 0)}, "not ascending layers"),
        ({"prompts": Path("absent.jsonl")}, "no such file"),
    ],
)
def test_impossible_settings_are_one_line(config, changes, message):
    with pytest.raises(SpectrainError, match=message) as caught:
        prepare.run(config(**changes))
    assert "\n" not in str(caught.value)


# ── the same again ───────────────────────────────────────────────────────────


def test_rerun_does_nothing_and_changes_nothing(config, clean, monkeypatch):
    prepare.run(config())
    monkeypatch.setattr(prepare, "complete", None)
    monkeypatch.setattr(prepare, "capture", None)
    report = prepare.run(config())
    assert report["tokens_per_second"] == {"answer": None, "capture": None}
    assert content(config().store) == clean


def test_reordered_and_duplicated_source_gives_the_same_bytes(config, clean):
    """Case 13."""
    write(config().prompts, PROMPTS[5:] + PROMPTS[::-1])
    report = prepare.run(config())
    assert report["counts"]["dropped"] == {"duplicate": 11}
    now = content(config().store)
    # the count of duplicates is the one thing that may differ
    assert now.keys() == clean.keys()
    assert [name for name in now if now[name] != clean[name]] == ["manifest.json"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_length": 100}, "max_length = 2048, now it is 100"),
        ({"heldout": 0.5}, "heldout = 0.3"),
        ({"dtype": "float32"}, "dtype = 'bfloat16', now it is 'float32'"),
        ({"aux_layers": (0, 1, 2)}, "aux_layers"),
        ({"temperature": 0.5}, "temperature = 1.0, now it is 0.5"),
        ({"limit": 10}, "source"),
        ({"target_dtype": "bfloat16"}, r"target\.dtype"),
    ],
)
def test_other_settings_are_refused(config, changes, key):
    """Case 14: never stale features; the line names the first setting that differs."""
    prepare.run(config(limit=12))
    with pytest.raises(SpectrainError, match=f"prepared with .*{key}.*another --store"):
        prepare.run(config(**({"limit": 12} | changes)))


def test_other_template_is_refused(config, tiny_path, tmp_path):
    prepare.run(config(limit=4))
    other = shutil.copytree(tiny_path, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "bot"))
    with pytest.raises(SpectrainError, match="template = "):
        prepare.run(config(limit=4, target=str(other)))


def test_overwrite_keeps_replies_that_still_hold(config, monkeypatch):
    """Features are made anew; the target is not asked again for the same prompts."""
    prepare.run(config())
    monkeypatch.setattr(prepare, "complete", None)
    prepare.run(config(dtype="float32", overwrite=True))
    assert FeatureStore.open(config().store).manifest["settings"]["dtype"] == "float32"


def test_damaged_shard_is_made_anew(config, clean):
    prepare.run(config())
    file = config().store / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    prepare.run(config())
    assert content(config().store) == clean


# ── killed ───────────────────────────────────────────────────────────────────


class Killed(BaseException):
    """Not an Exception: nothing may catch it and tidy up."""


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_stopped_at_every_write_the_rerun_equals_a_clean_run(config, clean, monkeypatch, late):
    """Case 15, in one process: stop before and after each rename, rerun, compare every byte."""
    real = files.os.replace
    stops = 0
    while True:
        left = stops

        def replace(source, target):
            nonlocal left
            if not late and left == 0:
                raise Killed
            real(source, target)
            if late and left == 0:
                raise Killed
            left -= 1

        monkeypatch.setattr(files.os, "replace", replace)
        try:
            prepare.run(config())
        except Killed:
            monkeypatch.setattr(files.os, "replace", real)
            prepare.run(config())
            assert content(config().store) == clean, f"stopped at write {stops}"
            shutil.rmtree(config().store)
            stops += 1
            continue
        break
    names = [name for name in clean if name != ".lock"]
    assert stops == len(names) + 1  # each file once, the manifest at the beginning and at the end


KILLER = """
import functools, os, signal, sys
import torch
torch.set_num_threads(1)
from spectrain.recipes.prepare import PrepareConfig, Target, run

config = PrepareConfig.model_validate_json(sys.argv[1])
Target.load = functools.cache(Target.load)
Target.load(config.target, dtype=config.target_dtype, device=config.device)  # once, before forking
real = os.fsync

def child(point):
    calls = 0
    def fsync(handle):
        nonlocal calls
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)  # the temporary file is written, not renamed
        real(handle)
    os.fsync = fsync
    run(config)

for point in map(int, sys.argv[2:]):
    pid = os.fork()
    if pid == 0:
        child(point)
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)
"""


def test_killed_with_sigkill_the_rerun_equals_a_clean_run(config, clean):
    """Case 15: one process after the other is killed while writing (each gets a little further:
    manifest, replies, shards); what they leave, temporary files included, is mended by a rerun."""
    text = config().model_dump_json()
    subprocess.run([sys.executable, "-c", KILLER, text, "1", "3", "5", "9", "7"], check=True)
    left = content(config().store)
    assert any(name.endswith(".tmp") for name in left)
    assert any(name.endswith(".safetensors") for name in left)
    with pytest.raises(SpectrainError, match="incomplete"):
        FeatureStore.open(config().store)
    prepare.run(config())
    assert content(config().store) == clean


@pytest.mark.parametrize("after", [0, 2, 6, 10])
def test_disk_full_anywhere_then_on(config, clean, monkeypatch, after):
    """Case 16: one clear line, exit code 1, a store marked incomplete; freed, the rerun goes on."""
    real = files.os.fsync
    left = after

    def fsync(handle):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(RunFailed, match="disk full"):
        prepare.run(config())
    monkeypatch.setattr(files.os, "fsync", real)
    assert not list(config().store.rglob("*.tmp"))
    with pytest.raises(SpectrainError):
        FeatureStore.open(config().store)
    prepare.run(config())
    assert content(config().store) == clean


def test_free_disk_is_checked_before_capture(config, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(prepare, "capture", None)
    with pytest.raises(RunFailed, match="MB needed"):
        prepare.run(config())
