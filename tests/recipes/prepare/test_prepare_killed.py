"""prepare killed, or out of disk, at any moment: the rerun equals a clean run byte for byte."""

import errno
import shutil
import subprocess
import sys
import time

import pytest
from preparing import content

from spectrain.core import files
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.store import FeatureStore
from spectrain.recipes import prepare


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


AT_ANY_MOMENT = """
import functools, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from spectrain.recipes.prepare import PrepareConfig, Target, run

config = PrepareConfig.model_validate_json(sys.argv[1])
Target.load = functools.cache(Target.load)
Target.load(config.target, dtype=config.target_dtype, device=config.device)  # once, before forking
random = random.Random(0)
kills = runs = 0
longest = float(sys.argv[2])
while kills < 20:
    folder = config.store.with_name(f"run-{runs}")
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        run(config.model_copy(update={"store": folder}))
        os._exit(0)
    time.sleep(random.uniform(0, longest))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        kills += 1
    else:  # it was faster: the next one gets a folder of its own
        assert os.WEXITSTATUS(status) == 0
        runs += 1
print(runs)
"""


def test_killed_at_20_random_moments_the_rerun_equals_a_clean_run(config, clean, tmp_path):
    """Case 15, whatever it was doing: 20 kills after random times (seeded, so spread over a run's
    length), each run going on from what the one before it left; every folder, finished at last,
    equals the clean one."""
    started = time.perf_counter()
    prepare.run(config(store=tmp_path / "timed"))
    longest = 1.2 * (time.perf_counter() - started)
    text = config().model_dump_json()
    command = [sys.executable, "-c", AT_ANY_MOMENT, text, str(longest)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for number in range(int(done.stdout) + 1):
        folder = tmp_path / f"run-{number}"
        prepare.run(config(store=folder))
        assert content(folder) == clean
