"""Provenance is plain JSON, and speaks of our own checkout or of none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from spectrain.core import environment
from spectrain.core.provenance import git_revision, provenance


def test_record_is_json_with_all_facts():
    record = json.loads(json.dumps(provenance({"steps": 3}, seed=7, data="abc")))
    assert record["arguments"] == {"steps": 3}
    assert record["seed"] == 7
    assert record["data"] == "abc"
    assert record["versions"]["torch"]
    assert record["time_utc"].endswith("+00:00")
    assert record["cpu_cores"] >= 1


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_revision_of_a_checkout(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    assert git_revision(tmp_path) is None
    git("init", "--quiet")
    assert git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    clean = git_revision(tmp_path)
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path)["dirty"] is True
    below = tmp_path / "site-packages"
    below.mkdir()
    assert git_revision(below) is None  # installed inside somebody else's checkout


def test_settle_never_overrides_the_user(monkeypatch):
    for name in environment.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    environment.settle()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_describe_and_memory():
    facts = environment.describe()
    assert facts["device"] == "cpu"
    assert facts["threads"] >= 1
    assert facts["cpu"]
    json.dumps(facts)
    before = environment.peak_rss_mb()
    block = bytearray(os.urandom(1 << 20)) * 200  # touched, hence resident
    assert environment.peak_rss_mb() >= before
    assert environment.peak_rss_mb() > len(block) / 1e6
