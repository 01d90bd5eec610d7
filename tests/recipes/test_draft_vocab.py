"""`draft-vocab` on a store: every share is that of a slow loop over the text and the target."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import make_head
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.capture import capture
from spectrain.data.shard import Row
from spectrain.data.store import FeatureStore
from spectrain.data.writer import StoreWriter
from spectrain.evaluation.coverage import members
from spectrain.heads import vocab
from spectrain.heads.io import save_head
from spectrain.recipes import draft_vocab, evaluate
from spectrain.recipes.draft_vocab import DraftVocabConfig, render, run

LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def rows():
    """18 rows, every third held out. Their tokens are few, so that some are seen often."""
    random = torch.Generator().manual_seed(0)
    result = []
    for number in range(18):
        before, after = torch.randint(1, 9, (2,), generator=random).tolist()
        tokens = 30 + torch.randint(0, 12, (before + after,), generator=random).square()
        reply = torch.tensor([0] * before + [1] * after, dtype=torch.int16)
        split = "train" if number % 3 else "heldout"
        result.append(Row(f"{number:016x}", split, tokens.int(), reply, temperature=0.0))
    return result


@pytest.fixture(scope="module")
def make_store(tiny, rows, tmp_path_factory):
    """make_store(splits, **settings) → folder of a store of the rows of these splits"""

    def make(*splits, **settings):
        path = tmp_path_factory.mktemp("stores") / "store"
        kept = [row for row in rows if row.split in splits]
        settings = {
            "dtype": "float32",
            "aux_layers": list(LAYERS),
            "target": {"fingerprint": tiny.fingerprint},
            **settings,
        }
        found = dict(capture(tiny, kept, LAYERS, torch.float32, 64))
        with StoreWriter.claim(path, settings, {"target": tiny.name}) as writer:
            writer.write_shard(0, "all", [(row, found[n].states) for n, row in enumerate(kept)])
            writer.finish(1)
        return path

    return make


@pytest.fixture(scope="module")
def store(make_store):
    return make_store("train", "heldout")


@pytest.fixture
def config(tiny, tiny_path, store, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    monkeypatch.setattr(draft_vocab.Target, "load", lambda *_, **__: tiny)

    def make(**changes):
        settings = {"store": store, "out": tmp_path / "out", "sizes": (6, 20, 100, "all")}
        return DraftVocabConfig(target=str(tiny_path), **(settings | changes))

    return make


def test_shares_are_those_of_a_slow_loop(config, tiny, rows):
    report = run(config())
    produced = [t for row in rows if row.split == "train" for t in row.tokens[row.reply > 0]]
    counts = torch.bincount(torch.stack(produced), minlength=tiny.vocab_size)
    pinned = {*tiny.tokenizer.all_special_ids, *tiny.stop_ids}
    assert [row["size"] for row in report["sizes"]] == [6, 20, 100, 384]
    assert report["vocabulary"] == 384
    assert {row["pinned"] for row in report["sizes"]} == {len(pinned)}
    assert report["seen"] == int((counts > 0).sum())
    for found in report["sizes"]:
        size = found["size"]
        ids = vocab.choose_tokens(counts, size, list(pinned), 384).tolist()
        assert pinned <= set(ids)
        assert found["never_seen"] == sum(int(counts[i]) == 0 for i in ids)
        assert found["lm_head_bytes"] == size * tiny.hidden_size * 4
        for split in ("train", "heldout"):
            tokens, choices, masses = [], [], []
            for row in (row for row in rows if row.split == split):
                with torch.no_grad():
                    p = tiny.model(input_ids=row.tokens[None].long()).logits[0].softmax(-1)
                for place in range(1, len(row.tokens)):
                    if row.reply[place]:
                        tokens.append(int(row.tokens[place]) in ids)
                        choices.append(int(p[place - 1].argmax()) in ids)
                        masses.append(float(p[place - 1, ids].sum()))
            assert report["counts"][split]["tokens"] == len(tokens)
            assert report["counts"][split]["sampled"] == len(masses)  # the sample is everything
            for name, own in (("tokens", tokens), ("argmax", choices), ("mass", masses)):
                share = found[split][name]["value"]
                assert share == pytest.approx(sum(own) / len(own), abs=1e-5), (size, split, name)


def test_a_sample_is_seeded_and_near_the_whole(config):
    """Of some 60 positions half are drawn: the mean of a part is within 0.25 of that of the whole
    (masses lie in [0, 1], so it has a standard error below 0.07 · √½)."""
    whole, half = run(config()), run(config(sample=30))
    assert half["counts"]["train"]["sampled"] == 30
    assert run(config(sample=30)) == half
    assert run(config(sample=30, seed=1)) != half
    for left, right in zip(whole["sizes"], half["sizes"], strict=True):
        for split in ("train", "heldout"):
            near = pytest.approx(left[split]["mass"]["value"], abs=0.25)
            assert right[split]["mass"]["value"] == near
            assert left[split]["argmax"] == right[split]["argmax"]
    assert run(config(sample=0))["sizes"][0]["heldout"]["mass"] is None


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_sample_is_of_the_drawn_positions(config, tiny, rows, store, monkeypatch, split):
    """Conversation by conversation: the positions that were drawn, in whatever order, and no
    others; each of their masses counts for its own conversation."""
    masses, of_row, own_rows = [], [], [row for row in rows if row.split == split]
    ids = torch.randperm(384)
    held = members([ids[:20], ids[:100]], tiny.vocab_size)
    for number, row in enumerate(own_rows):
        with torch.no_grad():
            p = tiny.model(input_ids=row.tokens[None].long()).logits[0].softmax(-1)
        for place in (row.reply[1:] > 0).nonzero().flatten().tolist():
            masses.append((p[place][:, None] * held).sum(0).numpy())
            of_row.append(number)
    drawn = np.random.default_rng(3).permutation(len(masses))[: len(masses) // 2]
    drawing = SimpleNamespace(choice=lambda *_, **__: drawn.copy())
    monkeypatch.setattr(draft_vocab.np.random, "default_rng", lambda seed: drawing)
    settings = config(sample=len(drawn))
    inside, count = draft_vocab._mass(FeatureStore.open(store), split, tiny, held, settings)
    expected = np.zeros((len(own_rows), 2))
    for place in drawn:
        expected[of_row[place]] += masses[place]
    drawn_of = np.bincount([of_row[place] for place in drawn], minlength=len(own_rows))
    assert count[:, 0].tolist() == drawn_of.tolist()
    assert any(0 < n < of_row.count(number) for number, n in enumerate(drawn_of))
    assert inside == pytest.approx(expected, abs=1e-5)


def test_coverage_is_a_ceiling_of_acceptance(config, tiny, tiny_path, store, tmp_path):
    """A head that starts as the target's own last layers is accepted where it can guess the token
    and nowhere else: not more often than coverage lets it."""
    head = make_head(tiny, draft_vocab=20, wild=False, aux_layers=LAYERS)
    counts = FeatureStore.open(store).token_counts("train", tiny.vocab_size)
    head.use_vocabulary(vocab.choose(20, tiny, counts))
    save_head(head, tmp_path / "head")
    settings = {"target": str(tiny_path), "store": store, "out": tmp_path / "eval"}
    measured = evaluate.run(
        evaluate.EvalConfig(head=tmp_path / "head", temperature=[0.0], **settings)
    )["temperatures"][0]["positions"][0]
    report = run(config())
    (found,) = (row["heldout"] for row in report["sizes"] if row["size"] == 20)
    positions = report["counts"]["heldout"]["tokens"]
    accepted = measured["marginal"]["value"] * measured["anchors"]
    assert accepted <= found["argmax"]["value"] * positions < positions


def test_the_smallest_size_that_is_enough(config):
    report = run(config())
    found = report["recommended"]
    assert found["by"] == "argmax"
    covered = {row["size"]: row["heldout"]["argmax"]["value"] for row in report["sizes"]}
    enough = [size for size, share in covered.items() if share >= covered[384] - 0.005]
    assert found["size"] == min(enough)
    shown = render(report)
    assert max(map(len, shown.splitlines()[:-1])) <= 80  # the last one is a path
    for part in ("held-out, %", "is a ceiling of α", "too few conversations for an interval"):
        assert part in " ".join(shown.split())
    assert (config().out / "draft-vocab.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_rows_of_another_store(config, make_store):
    """As when everything was trained on and a second store was prepared to measure."""
    together = run(config())
    apart = run(config(store=make_store("train"), heldout_store=make_store("heldout")))
    assert apart["counts"] == together["counts"]
    assert apart["recommended"] == together["recommended"]
    for left, right in zip(apart["sizes"], together["sizes"], strict=True):
        for split in ("train", "heldout"):
            for name in ("tokens", "argmax", "mass"):  # captured in other batches: to rounding
                assert left[split][name] == pytest.approx(right[split][name], abs=1e-5)


def test_without_held_out_rows_nothing_is_recommended(config, make_store):
    report = run(config(store=make_store("train")))
    assert report["recommended"] is None
    assert report["sizes"][0]["heldout"] == {"tokens": None, "argmax": None, "mass": None}
    assert "no held-out rows" in render(report)
    assert (config().out / "draft-vocab.png").is_file()


def test_a_store_of_tokens_alone_tells_of_tokens_alone(config, make_store, monkeypatch):
    bare = make_store("train", "heldout", features="none")
    for name in ("teacher", "batch", "packed"):
        monkeypatch.setattr(FeatureStore, name, lambda *_, **__: pytest.fail("nothing is stored"))
    report = run(config(store=bare))
    assert report["sizes"][0]["train"]["argmax"] is None
    assert report["sizes"][0]["train"]["tokens"]["value"] > 0
    assert report["recommended"]["by"] == "tokens"
    assert "of the reply tokens" in " ".join(render(report).split())


def test_sizes(config):
    """Larger than the target's vocabulary is all of it; no room for the pinned ones is refused."""
    assert [row["size"] for row in run(config(sizes=(40, 4096, 32000)))["sizes"]] == [40, 384]
    with pytest.raises(SpectrainError, match="no room for the 3 special tokens"):
        run(config(sizes=(2, 40)))


def test_other_targets_are_refused(config, make_store):
    other = make_store("heldout", target={"fingerprint": "0" * 16})
    with pytest.raises(SpectrainError, match="not of this target"):
        run(config(heldout_store=other))
    with pytest.raises(SpectrainError, match="no training row has a reply"):
        run(config(store=make_store("heldout")))


def test_a_plot_that_cannot_be_written_costs_nothing_else(config, monkeypatch, capsys):
    def full(path, data):
        raise RunFailed("disk full", where=str(path))

    monkeypatch.setattr(draft_vocab, "atomic_write", full)
    report = run(config())
    assert report["plot"] is None
    assert report["sizes"]
    assert "no plot: " in capsys.readouterr().err


def test_the_command(config, store, tmp_path):
    out = tmp_path / "report.json"
    arguments = ["--store", str(store), "--sizes", "20,100", "--sizes", "all"]
    arguments += ["--out", str(tmp_path / "plot"), "--json", str(out)]
    done = CliRunner().invoke(cli.app, ["draft-vocab", *arguments])
    assert done.exit_code == 0, done.output
    assert [row["size"] for row in json.loads(out.read_text())["sizes"]] == [20, 100, 384]
    done = CliRunner().invoke(cli.app, ["draft-vocab", "--store", str(store), "--sizes", "many"])
    assert done.exit_code == 2
    assert "'many'" in done.stderr
