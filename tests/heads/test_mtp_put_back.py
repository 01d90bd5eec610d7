"""MTP layers of a checkpoint, fine-tuned and put back: these tensors change and no others."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create
from mtp_checkpoints import CONFIGS, load_all, native_head, qwen3_next_head, save_checkpoint
from preparing import PROMPTS, write
from tiny_models import make_batch, random_rows

from spectrain.core.checkpoint import SINGLE, Checkpoint
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.io import load_head, save_head
from spectrain.heads.mtp_native import put_back
from spectrain.recipes import prepare, train


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_put_back_untouched_is_the_same_checkpoint(tmp_path, tokenizer, kind, sharded):
    """And a changed head changes its own tensors and no other byte."""
    folder = tmp_path / "model"
    count = 1 if kind == "qwen3_next" else 2
    tensors = save_checkpoint(folder, tokenizer, kind, count=count, sharded=sharded)
    if kind == "qwen3_next":
        with pytest.raises(SpectrainError, match="linear_attention"):
            Target.load(str(folder), pack_weights=False)
        head, _ = qwen3_next_head(folder, tokenizer)
    else:
        target = Target.load(str(folder), dtype="float32", pack_weights=False)
        head = native_head(target)
    put_back(head, folder, tmp_path / "same")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "same" / name).read_bytes(), name

    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.5)
    put_back(head, folder, tmp_path / "changed")
    before, after = load_all(folder), load_all(tmp_path / "changed")
    assert before.keys() == after.keys()
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    # The rest are copies of the target's own, and a buffer that no gradient reaches.
    copies = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    assert differ == {name for name in tensors if not name.endswith(copies)}
    for name in differ:
        torch.testing.assert_close(after[name], (before[name].float() + 0.5).bfloat16())


def test_fine_tuning_changes_exactly_the_mtp_tensors(checkpoints, tmp_path):
    """Train, save, load, put back; what is loaded from the copy drafts like the trained head."""
    target, folder, tensors = checkpoints("qwen2")
    head = native_head(target).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    batch = make_batch(target, head, *random_rows(torch.Generator().manual_seed(4), rows=4))
    losses = []
    for _ in range(12):
        objective = head.objective(batch)
        loss = (objective.loss / objective.count).sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head").bind(target.readout)
    assert again.config.native == "mimo"
    put_back(again, folder, tmp_path / "tuned")
    before, after = load_all(folder), load_all(tmp_path / "tuned")
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    assert differ == tensors.keys()
    tuned = native_head(Target.load(str(tmp_path / "tuned"), dtype="float32", pack_weights=False))
    for name, value in tuned.state_dict().items():
        torch.testing.assert_close(value, head.state_dict()[name], atol=1e-2, rtol=1e-2)


def test_put_back_refuses_what_it_cannot_do(checkpoints, tiny, tmp_path):
    target, folder, _ = checkpoints("qwen2")
    head = native_head(target)
    for out in (folder, folder / "inside", tmp_path):
        with pytest.raises(SpectrainError, match="something already"):
            put_back(head, folder, out)
    with pytest.raises(SpectrainError, match="layout deepseek, the head mimo"):
        put_back(head, checkpoints("deepseek_v3")[1], tmp_path / "out")
    plain = create(tiny, "mtp-sequential", steps=1)
    with pytest.raises(SpectrainError, match="not made from"):
        put_back(plain, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_on_the_way_leaves_nothing(checkpoints, tmp_path, monkeypatch):
    target, folder, _ = checkpoints("qwen2")
    head = native_head(target)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        put_back(head, folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_trained_layers_go_back_into_the_checkpoint(tmp_path, checkpoints):
    """prepare, train-mtp, put back: a target that differs in its MTP layers alone."""
    _, folder, _ = checkpoints("qwen2")
    prepare.run(
        prepare.PrepareConfig(
            target=str(folder),
            prompts=write(tmp_path / "prompts.jsonl", PROMPTS[:6]),
            store=tmp_path / "store",
            max_new_tokens=8,
        )
    )
    settings = {"target": str(folder), "store": tmp_path / "store", "out": tmp_path / "run"}
    settings |= {"family": "mtp-sequential", "steps": 2, "batch_size": 2, "lr": 1e-2}
    with pytest.raises(SpectrainError, match=r"head\.native=true"):
        train.run(train.TrainConfig(**settings, put_back=tmp_path / "new"))
    settings["head"] = {"native": True}
    train.run(train.TrainConfig(**settings, put_back=tmp_path / "new"))
    before, after = load_all(folder), load_all(tmp_path / "new")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "mtp" in name}
    # A run that is finished can be put back later.
    train.run(train.TrainConfig(**settings, put_back=tmp_path / "again"))
    assert (tmp_path / "again" / SINGLE).read_bytes() == (tmp_path / "new" / SINGLE).read_bytes()
