"""Stop anywhere, go on, and get what an uninterrupted run gets."""

from __future__ import annotations

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from preparing import content

from spectrain.core import files
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.trainer import checkpoint, loop

TIMED = {"tokens_per_second"}


class Crash(Exception):
    pass


def at_load(number, action):
    """Do something when the given load (from 0) is asked for."""
    count = iter(range(1000))

    def before_load(_batch):
        if next(count) == number:
            action()

    return before_load


def crash():
    raise Crash


def untimed(rows):
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


def assert_same(one, two):
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_equals_uninterrupted_bit_for_bit(  # case 26
    make_head, make_data, fit, tmp_path, optimizer
):
    options = {"steps": 9, "save_every": 4, "log_every": 3, "optimizer": optimizer}
    whole = make_head()
    _, expected = fit(whole, make_data(), tmp_path / "whole", **options)

    with pytest.raises(Crash):
        fit(make_head(), make_data(before_load=at_load(7, crash)), tmp_path / "cut", **options)
    assert checkpoint.newest(tmp_path / "cut")[1]["step"] == 4
    resumed = make_head(seed=1)  # what the head was before does not matter
    state, rows = fit(resumed, make_data(), tmp_path / "cut", **options)
    # The row of step 6 was written twice and is there once; its window began before the crash.
    assert untimed(rows) == untimed(expected)
    assert_same(resumed, whole)
    assert state.supervised == expected[-1]["supervised_tokens"]


def test_resumed_with_other_micro_batches_sees_the_same_rows(make_head, make_data, fit, tmp_path):
    _, expected = fit(make_head(), make_data(), tmp_path / "whole", steps=6, micro_batch=4)
    with pytest.raises(Crash):
        fit(
            make_head(),
            make_data(before_load=at_load(3, crash)),
            tmp_path / "cut",
            steps=6,
            micro_batch=4,
        )
    _, rows = fit(  # case 27
        make_head(), make_data(), tmp_path / "cut", steps=6, micro_batch=1, pack_length=70
    )
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-5)
    assert [r["seen"] for r in rows] == [r["seen"] for r in expected]


def damage(file, how):
    content = file.read_bytes()
    if how == "cut":
        file.write_bytes(content[:-10])
    elif how == "gone":
        file.unlink()
    else:  # one bit of a number: JSON and tensors can be read as before
        start = content.find(b'"supervised"') if file.suffix == ".json" else len(content) // 2
        place = next(i for i in range(start, len(content)) if chr(content[i]).isdigit())
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    make_head, make_data, fit, tmp_path, capsys, name, how
):
    whole = make_head()
    fit(whole, make_data(), tmp_path)
    broken = tmp_path / "checkpoints" / "step-00000006" / name
    damage(broken, how)
    again = make_head(seed=1)
    fit(again, make_data(), tmp_path)
    error = capsys.readouterr().err
    assert "step-00000006 is damaged" in error
    assert "going on from step 4 of 6" in error
    assert_same(again, whole)


def test_the_state_of_another_step_or_run_is_refused(make_head, make_data, fit, tmp_path, capsys):
    for run, lr in (("one", 1e-3), ("two", 1e-2)):
        fit(make_head(), make_data(), tmp_path / run, lr=lr)
    folder = tmp_path / "one" / "checkpoints"
    for source, problem in [
        (tmp_path / "two" / "checkpoints" / "step-00000006", "model.safetensors does not have"),
        (folder / "step-00000004", "state.json is that of step 4"),
    ]:
        shutil.copy(source / "state.json", folder / "step-00000006")
        fit(make_head(), make_data(), tmp_path / "one")
        assert f"step-00000006 is damaged ({problem}" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
def test_with_all_damaged_the_run_does_not_begin_anew(make_head, make_data, fit, tmp_path, how):
    """Hours of work may be in them; what is there stays there, the metrics, too."""
    fit(make_head(), make_data(), tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        damage(folder / "model.safetensors", how)
    before = content(tmp_path)
    with pytest.raises(SpectrainError, match=r"every checkpoint .*damaged; .*--overwrite"):
        fit(make_head(), make_data(), tmp_path)
    assert content(tmp_path) == before


def test_a_checkpoint_of_an_earlier_version_is_gone_on_with(make_head, make_data, fit, tmp_path):
    """It has no checksum of its own state."""
    whole = make_head()
    fit(whole, make_data(), tmp_path / "whole")
    with pytest.raises(Crash):
        fit(make_head(), make_data(before_load=at_load(5, crash)), tmp_path / "cut")
    file = tmp_path / "cut" / "checkpoints" / "step-00000004" / "state.json"
    state = json.loads(file.read_text())
    del state["own_sha256"]
    file.write_text(json.dumps(state))
    resumed = make_head(seed=1)
    fit(resumed, make_data(), tmp_path / "cut")
    assert_same(resumed, whole)


def test_checkpoints_by_the_clock(make_head, make_data, fit, tmp_path, monkeypatch):
    """Four minutes a step and ten at most: every third one; the run is the same as without."""
    clock = SimpleNamespace(minutes=0.0)
    monkeypatch.setattr(loop.time, "monotonic", lambda: 60 * clock.minutes)
    saved, save = [], checkpoint.save

    def watch(run, head, update, ema, state, *rest):
        saved.append(state["step"])
        return save(run, head, update, ema, state, *rest)

    monkeypatch.setattr(checkpoint, "save", watch)
    heads = []
    for minutes in (10, 0):

        def pass_time(_batch):
            clock.minutes += 4

        saved.clear()
        head = make_head()
        options = {"steps": 9, "save_every": 8, "save_minutes": minutes}
        fit(head, make_data(before_load=pass_time), tmp_path / str(minutes), **options)
        assert saved == ([3, 6, 8, 9] if minutes else [8, 9])
        heads.append(head)
    assert_same(*heads)


def test_killed_before_the_rename_leaves_the_checkpoint_before(make_head, make_data, fit, tmp_path):
    whole = make_head()
    fit(whole, make_data(), tmp_path / "whole")
    child = os.fork()
    if child == 0:
        replace = files._replace_folder

        def killed(new, path):
            if path.name == "step-00000004":
                os._exit(9)
            replace(new, path)

        files._replace_folder = killed
        fit(make_head(), make_data(), tmp_path / "cut")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    folder = tmp_path / "cut" / "checkpoints"
    assert sorted(path.name[:6] for path in folder.iterdir()) == [".step-", "step-0"]
    (tmp_path / "cut" / ".metrics.jsonl.123-0a1b2c3d.tmp").touch()
    (tmp_path / "cut" / ".mine.tmp").touch()
    resumed = make_head(seed=1)
    fit(resumed, make_data(), tmp_path / "cut")
    assert_same(resumed, whole)
    assert not list(folder.glob(".*"))
    assert [path.name for path in (tmp_path / "cut").glob(".*")] == [".mine.tmp"]


def test_a_full_disk_ends_the_run_and_the_checkpoint_before_stays(
    make_head, make_data, fit, tmp_path, monkeypatch
):
    def full():
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))

    with pytest.raises(RunFailed, match="MB needed, 0 MB free on the disk"):
        fit(make_head(), make_data(before_load=at_load(3, full)), tmp_path)
    assert checkpoint.newest(tmp_path)[1]["step"] == 2
    with pytest.raises(RunFailed, match="free some space"):  # said before the first step
        fit(make_head(), make_data(before_load=at_load(0, crash)), tmp_path)


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_a_disk_that_fills_while_a_checkpoint_is_written(
    make_head, make_data, fit, tmp_path, monkeypatch, after
):
    """ENOSPC from the system at one of its writes, the first of which is in the checkpoint of step
    4 (or that of step 6): nothing half-written stays, and the rerun goes on to the same end."""
    whole = make_head()
    fit(whole, make_data(), tmp_path / "whole")
    real, left = files.os.fsync, iter(range(after, -100, -1))

    def fsync(handle):
        if next(left) < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    def fill():
        monkeypatch.setattr(files.os, "fsync", fsync)

    cut = tmp_path / "cut"
    with pytest.raises(RunFailed, match=r"step-0000000[46].*: disk full; free some space"):
        fit(make_head(), make_data(before_load=at_load(3, fill)), cut)
    monkeypatch.setattr(files.os, "fsync", real)
    assert not list(cut.rglob("*.tmp"))
    assert checkpoint.newest(cut)[1]["step"] in (2, 4)
    resumed = make_head(seed=1)
    fit(resumed, make_data(), cut)
    assert_same(resumed, whole)


def test_only_the_newest_are_kept(make_head, make_data, fit, tmp_path):
    fit(make_head(), make_data(), tmp_path, steps=7, save_every=1, keep=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006", "step-00000007"]


def test_damaged_checkpoints_of_later_steps_do_not_push_out_good_ones(
    make_head, make_data, fit, tmp_path
):
    """Behind step 4 the run has no whole one, so it begins there again, and `keep` counts what is
    written from then on: at no moment is there nothing to go on from."""
    head = make_head()
    fit(head, make_data(), tmp_path, steps=7, save_every=1, keep=4)
    for step in (5, 6, 7):
        file = tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    stopped = make_data(before_load=at_load(1, crash))
    with pytest.raises(Crash):
        fit(make_head(), stopped, tmp_path, steps=7, save_every=1, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    fit(again := make_head(), make_data(), tmp_path, steps=7, save_every=1, keep=1)
    assert_same(again, head)


def test_other_settings_are_refused_by_the_first_that_differs(make_head, make_data, fit, tmp_path):
    fit(make_head(), make_data(), tmp_path)
    with pytest.raises(SpectrainError, match=r"started with lr = 0\.001, now it is 0\.01"):
        fit(make_head(), make_data(), tmp_path, lr=1e-2, steps=8)


def test_steps_grow_only_when_asked_to(make_head, make_data, fit, tmp_path):
    fit(make_head(), make_data(), tmp_path)
    with pytest.raises(SpectrainError, match=r"steps = 6, now it is 8; add --set extend=true"):
        fit(make_head(), make_data(), tmp_path, steps=8)
    with pytest.raises(SpectrainError, match="steps = 6, now it is 4"):
        fit(make_head(), make_data(), tmp_path, steps=4, extend=True)
    state, rows = fit(make_head(), make_data(), tmp_path, steps=8, extend=True)
    assert state.step == 8
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_a_longer_run_says_how_its_rate_goes_on(make_head, make_data, fit, tmp_path, capsys):
    """A finished cosine has come down to almost nothing; that of more steps has not. A run that
    goes on as it was, or whose rate stays what it was, has nothing to say."""
    cosine, constant = tmp_path / "cosine", tmp_path / "constant"
    fit(make_head(), make_data(), cosine)
    shutil.rmtree(cosine / "checkpoints" / "step-00000006")
    fit(make_head(), make_data(), cosine)
    for steps in (6, 8):
        options = {"steps": steps, "schedule": "constant", "warmup": 0, "extend": True}
        fit(make_head(), make_data(), constant, **options)
    assert "schedule" not in capsys.readouterr().err
    _, rows = fit(make_head(), make_data(), cosine, steps=8, extend=True)
    before, after = rows[5]["lr"], rows[6]["lr"]
    assert before < after
    told = f"rate was {before:.2g} in step 6, it goes on with {after:.2g}"
    assert f"the cosine schedule is now that of 8 steps: the learning {told}\n" in (
        capsys.readouterr().err
    )


def test_all_files_of_a_checkpoint_have_the_mode_of_new_files(make_head, make_data, fit, tmp_path):
    before = os.umask(0o027)
    try:
        fit(make_head(), make_data(), tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("step-*/*")}
    assert set(modes) > {"model.safetensors", "optimizer.safetensors"}
    assert set(modes.values()) == {0o640}, modes


def test_a_checkpoint_holds_no_pickle(make_head, make_data, fit, tmp_path):
    fit(make_head(), make_data(), tmp_path)
    names = {path.name for path in (tmp_path / "checkpoints" / "step-00000006").iterdir()}
    assert names == {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"}
