"""prepare in several processes: each makes its own units and shards, the union is that of one."""

import json
import os
import subprocess
import sys

import pytest
from preparing import PROMPTS, content, talk, write

from spectrain.core.errors import SpectrainError
from spectrain.core.team import Team
from spectrain.data.writer import only_process
from spectrain.recipes import prepare


def two_processes(config, *more: str) -> subprocess.CompletedProcess:
    settings = config.model_dump(mode="json", exclude_unset=True)
    sources = settings.pop("prompts")
    flags = [f"--prompts={source['path']}" for source in sources]
    flags += [f"--set={key}={value}" for key, value in settings.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # One thread each, as in the run that they are compared with.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SPECTRAIN_QUIET": "1"}
    return subprocess.run(
        [*launcher, "-m", "spectrain", "prepare", *flags, *more],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_two_processes_make_the_store_of_one(config, tmp_path):
    """Replies of one and of two rounds, shards and manifest, byte for byte."""
    talks = [talk(f"hello {n}", "x", f"and {n}?", "y") for n in range(12)]
    settings = {
        "prompts": write(tmp_path / "talks.jsonl", [*PROMPTS, *talks]),
        "regenerate": True,
        "temperature": 0.0,
        "heldout_temperatures": 0.0,
    }
    prepare.run(config(**settings, store=tmp_path / "one"))
    one = content(tmp_path / "one")
    assert sum(name.startswith("shard-") for name in one) >= 6
    assert sum("unit-" in name for name in one) >= 4
    report = tmp_path / "report.json"
    done = two_processes(config(**settings, store=tmp_path / "two"), "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "two") == one
    assert done.stdout.count("process 1 of 2") == 1  # one of them reports
    own = json.loads(report.read_text())["own"]
    assert 0 < own["units"] < sum("unit-" in name for name in one)
    assert 0 < own["shards"] < sum(name.endswith(".safetensors") for name in one)


def test_bad_input_in_two_processes_is_one_line(config, tmp_path):
    """The first process finds it; nobody waits for ever, nothing is left behind."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "us')
    done = two_processes(config(prompts=bad))
    assert done.returncode != 0
    assert done.stderr.count("bad.jsonl:1: not valid JSON") == 1
    assert not config().store.exists()


def test_the_second_run_into_a_folder_is_refused(config):
    with only_process(config().store):
        with pytest.raises(SpectrainError, match="another process is preparing this store"):
            prepare.run(config())
        assert config().store.exists()
    prepare.run(config())


def test_alone_without_a_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    team = Team("cuda:1")
    assert (team.main, team.world, team.device) == (True, 1, "cuda:1")
    assert all(map(team.mine, range(5)))
    team.wait()
    team.leave()
