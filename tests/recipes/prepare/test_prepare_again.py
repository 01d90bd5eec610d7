"""prepare run again: nothing twice, nothing stale, the same bytes."""

import json
import shutil
from pathlib import Path

import pytest
from preparing import PROMPTS, content, prompt, write
from tiny_models import save_tiny

from spectrain.core.errors import SpectrainError
from spectrain.data.store import FeatureStore
from spectrain.generator import answering
from spectrain.recipes import prepare


def test_rerun_does_nothing_and_changes_nothing(config, clean, monkeypatch):
    prepare.run(config())
    monkeypatch.setattr(answering, "complete", None)
    monkeypatch.setattr(prepare, "capture", None)
    report = prepare.run(config())
    assert report["tokens_per_second"] == {"answer": None, "capture": None}
    assert content(config().store) == clean


def test_reordered_and_duplicated_source_gives_the_same_bytes(config, clean, tmp_path):
    """Case 13."""
    dropped = FeatureStore.open(tmp_path / "clean").manifest["counts"]["dropped"]
    write(Path(config().prompts[0].path), PROMPTS[5:] + PROMPTS[::-1])
    report = prepare.run(config())
    assert report["counts"]["dropped"] == dropped | {"duplicate": 11}
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
        ({"temperature": 0.5}, r"temperature = \[1.0\], now it is \[0.5\]"),
        ({"limit": 10}, "source"),
        ({"target_dtype": "bfloat16"}, r"target\.dtype"),
        ({"last_states": "replies"}, "last_states = 'everywhere', now it is 'replies'"),
        ({"length_stopped": "drop"}, "length_stopped = 'keep'"),
        ({"loops": "drop"}, "loops = 'keep'"),
        ({"teacher_top": 2}, "teacher_top = None, now it is 2"),
        ({"features": "none"}, "features = 'stored', now it is 'none'"),
        ({"shard_tokens": 100}, "shard_tokens = 300"),
        ({"batch_tokens": 100}, "batch_tokens = 200"),
        ({"heldout_temperatures": 0.5}, "heldout_temperatures"),
        ({"top_p": 0.5}, "top_p = 1.0"),
        ({"reply_batch": 7}, "reply_batch = 5"),
        ({"max_new_tokens": 9}, "max_new_tokens = 8"),
        ({"seed": 1}, "seed = 0"),
    ],
)
def test_other_settings_are_refused(config, changes, key):
    """Case 14: never stale features; the line names the first setting that differs."""
    prepare.run(config(limit=12))
    with pytest.raises(SpectrainError, match=f"prepared with .*{key}.*another --store"):
        prepare.run(config(**({"limit": 12} | changes)))


def test_replies_of_somebody_else_are_refused(config, monkeypatch):
    """Who answers is known by its identity alone: here that is another, all settings equal."""
    prepare.run(config(limit=4))
    real = answering.OwnTarget.__init__

    def other(self, *settings):
        real(self, *settings)
        self.identity += ", in another way"

    monkeypatch.setattr(answering.OwnTarget, "__init__", other)
    with pytest.raises(SpectrainError, match="prepared with backend = "):
        prepare.run(config(limit=4))


def test_other_template_is_refused(config, tiny_path, tmp_path):
    prepare.run(config(limit=4))
    other = shutil.copytree(tiny_path, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "bot"))
    with pytest.raises(SpectrainError, match="template = "):
        prepare.run(config(limit=4, target=str(other)))


def test_another_target_is_named_before_what_follows_from_it(config, tokenizer, tmp_path):
    """Its auxiliary layers are others too, since it has more of them."""
    prepare.run(config(limit=4))
    other = save_tiny(tmp_path / "other", tokenizer, num_hidden_layers=8)
    with pytest.raises(SpectrainError, match=r"prepared with target\.fingerprint = "):
        prepare.run(config(limit=4, target=str(other)))


def test_overwrite_keeps_replies_that_still_hold(config, monkeypatch):
    """Features are made anew; the target is not asked again for the same prompts."""
    prepare.run(config())
    monkeypatch.setattr(answering, "complete", None)
    prepare.run(config(dtype="float32", overwrite=True))
    assert FeatureStore.open(config().store).manifest["settings"]["dtype"] == "float32"


def test_other_stop_tokens_ask_anew(config, tiny_path, tmp_path):
    """A reply that is kept would run past a token that ends one now."""
    prepare.run(config())
    other = shutil.copytree(tiny_path, tmp_path / "other")
    file = other / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 70, 71]}))
    with pytest.raises(SpectrainError, match="prepared with backend"):
        prepare.run(config(target=str(other)))
    report = prepare.run(config(target=str(other), overwrite=True))
    assert report["kept"]["replies"] == 0


def test_damaged_shard_is_made_anew(config, clean):
    prepare.run(config())
    file = config().store / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    prepare.run(config())
    assert content(config().store) == clean


def test_further_prompts_alone_are_asked(config, monkeypatch):
    """Replies are kept by question: with four prompts more, or in another batch size, nothing else
    is asked again, and the replies that there were are the same."""
    first = prepare.run(config())
    path = Path(config().prompts[0].path)
    before = {row.id: FeatureStore.open(config().store).text(row) for row in all_rows(config())}
    write(path, [*PROMPTS, *(prompt(f"How many pears are {n}?") for n in range(4))])
    asked = []
    real = answering.complete

    def complete(target, prompts, *settings, **more):
        asked.extend(prompts)
        return real(target, prompts, *settings, **more)

    monkeypatch.setattr(answering, "complete", complete)
    report = prepare.run(config(overwrite=True, reply_batch=3))
    assert report["kept"]["replies"] == replies(first)
    assert len(asked) == replies(report) - replies(first) >= 4
    store = FeatureStore.open(config().store)
    after = {(row.id, row.temperature): store.text(row) for row in all_rows(config())}
    assert len(after) == sum(report["counts"]["rows"].values())
    texts = {tuple(tokens.tolist()) for tokens, _ in after.values()}
    assert all(tuple(tokens.tolist()) in texts for tokens, _ in before.values())


def replies(report) -> int:
    """Those that are rows and those that are none, such as empty ones."""
    return sum(report["counts"]["rows"].values()) + sum(report["counts"]["dropped"].values())


def all_rows(config):
    store = FeatureStore.open(config.store)
    return [*store.rows("train"), *store.rows("heldout")]
