"""What training says of the vocabulary it chose, and what a narrow corpus cannot leave out."""

from __future__ import annotations

import json
import re

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from chat_tokenizers import KINDS
from preparing import talk, write
from tiny_models import TEMPLATE, save_tiny
from transformers import AutoTokenizer
from typer.testing import CliRunner

from spectrain import cli
from spectrain.data.store import FeatureStore
from spectrain.heads.io import load_head
from spectrain.recipes.train_report import vocabulary_line


@pytest.fixture
def target_path(request, tiny_path, tmp_path):
    """The tiny target, or one with 1400 tokens of a kind of tokenizer."""
    if not hasattr(request, "param"):
        return tiny_path
    tokenizer = KINDS[request.param]()
    tokenizer.add_tokens([f"word{n}" for n in range(1400 - len(tokenizer))])
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, "<|im_end|>"
    return save_tiny(tmp_path / "target", tokenizer, vocab_size=1408)


@pytest.fixture
def spectrain(target_path, monkeypatch):
    """Run a command line; returns what it printed."""
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")

    def run(*arguments):
        done = CliRunner().invoke(cli.app, [*map(str, arguments), "--target", str(target_path)])
        assert done.exit_code == 0, done.output
        return done

    yield run
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def store(spectrain, tmp_path):
    """Replies of one letter, all of them cut off before they end: no count has a stop token."""
    rows = [talk(f"Say it {n} times", "a" * 200) for n in range(20)]
    source, path = write(tmp_path / "narrow.jsonl", rows), tmp_path / "store"
    settings = ("--set", "regenerate=false", "--set", "max_length=60", "--heldout", 0.3)
    spectrain("prepare", "--prompts", source, "--store", path, *settings)
    return path


def train(spectrain, store, out, size):
    settings = {"head.steps": 2, "head.draft_vocab_size": size, "batch_size": 4}
    flags = [part for pair in settings.items() for part in ("--set", "{}={}".format(*pair))]
    report = out.with_suffix(".json")
    done = spectrain(
        "train-eagle", "--store", store, "--out", out, "--steps", 2, "--json", report, *flags
    )
    return json.loads(report.read_text()), done


def test_a_narrow_corpus_cannot_lose_its_stop_tokens(spectrain, store, tiny, tmp_path):
    """CASE 30: a head whose vocabulary lacks them drafts on for ever."""
    counts = FeatureStore.open(store).token_counts("train", tiny.vocab_size)
    pinned = sorted({*tiny.tokenizer.all_special_ids, *tiny.stop_ids})
    assert not counts[pinned].any()
    train(spectrain, store, tmp_path / "run", 60)
    ids = load_head(tmp_path / "run" / "head").t2d.nonzero().flatten().tolist()
    assert len(ids) == 60
    assert set(pinned) <= set(ids)
    assert int(counts.argmax()) in ids


@pytest.mark.parametrize(
    ("target_path", "names"),
    [("byte_level", r"(?s)."), ("metaspace", "<0x[0-9A-F]{2}>")],
    indirect=["target_path"],
)
def test_any_text_can_be_drafted_whatever_the_corpus(
    target_path, names, spectrain, store, tmp_path
):
    """CASE 30: the tokens of single bytes are in, seen or not; `draft-vocab` tells of them."""
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    single = {i for name, i in tokenizer.get_vocab().items() if re.fullmatch(names, name)}
    counts = FeatureStore.open(store).token_counts("train", 1408)
    assert len(single) == 256
    assert (counts[sorted(single)] > 0).sum() <= 1
    train(spectrain, store, tmp_path / "run", 1024)
    held = load_head(tmp_path / "run" / "head").t2d
    assert set(tokenizer("жж ℵ\x07", add_special_tokens=False)["input_ids"]) & single
    assert held[sorted(single)].all()
    done = spectrain(
        *("draft-vocab", "--store", store, "--sizes", "1000,1024", "--out", tmp_path / "plot")
    )
    fixed = len({*tokenizer.all_special_ids, tokenizer.eos_token_id})
    told = f"{fixed} of them in every vocabulary ({fixed + 256} from size 1,024 on)"
    assert told in " ".join(done.stdout.split())


def test_coverage_is_that_of_the_target_s_choices(spectrain, store, tiny, tmp_path):
    """The tiny target chooses at random, so that a corpus of one letter covers little of it: it is
    said before training starts and again at its end."""
    report, done = train(spectrain, store, tmp_path / "run", 60)
    found = report["vocabulary"]
    assert (found["size"], found["of"]) == (60, 384)
    t2d, opened = load_head(tmp_path / "run" / "head").t2d, FeatureStore.open(store)
    for split in ("train", "heldout"):
        choices = torch.cat([opened.teacher(row)[0] for row in opened.rows(split)])
        assert found[split] == pytest.approx(t2d[choices].float().mean().item())
    line = vocabulary_line(found)
    assert "of 384 tokens" in line
    assert "note: below 95% on held-out rows" in line
    assert line in done.stderr
    assert line in done.stdout


def test_a_vocabulary_that_leaves_nothing_out_is_not_spoken_of(spectrain, store, tmp_path):
    report, done = train(spectrain, store, tmp_path / "run", 384)
    assert report["vocabulary"] is None
    assert "draft vocabulary" not in done.output


def test_the_note_is_about_held_out_text():
    found = {"size": 5, "of": 9, "by": "reply tokens", "train": 0.5, "heldout": 0.95}
    assert vocabulary_line(found) == (
        "draft vocabulary of 5 of 9 tokens: 50.0% of the reply tokens on training rows, "
        "95.0% on held-out rows"
    )
    assert "note" in vocabulary_line(found | {"heldout": 0.949})
    assert "held-out" not in vocabulary_line(found | {"heldout": None})
