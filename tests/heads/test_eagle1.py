"""EAGLE-1 and EAGLE-2: alignment, loss and supervision by hand and by slow code."""

from __future__ import annotations

import math

import pytest
import torch
from head_kinds import create
from tiny_models import gemma, make_batch, random_rows
from torch import nn

from spectrain.core.batch import Batch, counted
from spectrain.core.readout import Readout
from spectrain.heads import linear_loss
from spectrain.heads.base import TargetFacts
from spectrain.heads.eagle1 import Eagle1Config, Eagle1Head
from spectrain.heads.io import load_head, save_head
from spectrain.heads.recurrent import RecurrentHead

LN2 = math.log(2)


def by_hand(steps: int) -> Eagle1Head:
    """H = 2, three tokens with logits (0, f[0], f[1]); the head hands its feature on unchanged."""
    facts = TargetFacts(name="t", fingerprint="0", hidden_size=2, num_layers=1, vocab_size=3)
    config = Eagle1Config(
        steps=steps,
        vocab_size=3,
        draft_vocab_size=3,
        target=facts,
        hidden_size=2,
        intermediate_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},
        max_position_embeddings=16,
        step_decay=0.8,
        fc_bias=False,
        regression_weight=1.0,
        classification_weight=0.1,
        noise=0.2,
    )
    head = Eagle1Head(config)
    lm_head = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        lm_head.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        head.fc.weight.copy_(torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
    return head.bind(Readout(nn.Embedding(3, 2), lm_head, None, 3)).eval()


def test_six_tokens_by_hand():
    """x = p p | r r r r: every number worked out.

    position   0  1      2        3        4         5
    reply      0  0      1        1        1         1
    f          –  (0,0)  (L,0)    (0,L)    (2L,0)    –        L = ln 2
    p          –  1 1 1  1 2 1    1 1 2    1 4 1     –        in thirds, quarters, quarters, sixths
    Anchors 1 2 3 at step 0 have the teacher rows 2 3 4, anchors 1 2 at step 1 the rows 3 4;
    f̂ = f[anchor] at each step.
    """
    head = by_hand(steps=2)
    last = torch.tensor([[[9, 9], [0, 0], [LN2, 0], [0, LN2], [2 * LN2, 0], [9, 9]]])
    reply = torch.tensor([[0, 0, 1, 1, 1, 1]])
    argmax = torch.tensor([[-1, -1, 1, 2, 1, -1]])
    batch = Batch(torch.tensor([[0, 1, 2, 0, 1, 2]]), reply, None, last, argmax)
    objective = head.objective(batch)
    square = LN2**2
    distances = [
        square / 4,  # (0,0) and (L,0): ½L² over two dimensions
        square / 2,  # (L,0) and (0,L)
        (2 * LN2 - 0.5 + square / 2) / 2,  # (0,L) and (2L,0): the first is beyond 1
    ]
    # (0,0) guesses thirds: ln 3; the others in units of L, their logits being halves and quarters.
    entropies = [math.log(3), 1.75 * LN2, 11 / 6 * LN2]
    first = sum(distances) + 0.1 * sum(entropies)
    second = square / 4 + 0.1 * math.log(3)  # (0,0) and (0,L)
    second += square / 4 + 0.1 * 8 / 6 * LN2  # (L,0) and (2L,0)
    assert objective.loss.tolist() == pytest.approx([first, second], rel=1e-5)
    assert objective.count.tolist() == [3, 2] == head.counts(batch).tolist()
    assert objective.seen.tolist() == [3, 2]
    # First choices 0 1 2 against 1 2 1; at step 1 0 1 against 2 1.
    assert objective.hits.tolist() == [0, 1]
    assert head.weights(0.3) == [1.0, 0.8]


def slow_objective(head, batch: Batch):
    """SPEC §3–4 spelled out: row by row, step by step, everything recomputed."""
    config, layer = head.config, head.layers[0]
    attention = layer.self_attn
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    readout = head.readout
    ids = [i for i in range(config.vocab_size) if not head.reduced or head.t2d[i]]
    steps = config.steps
    loss = [torch.zeros(()) for _ in range(steps)]
    count, hits, seen = ([0] * steps for _ in range(3))

    def rope(x, position):  # [heads, d]
        half = size // 2
        base = config.rope_parameters["rope_theta"]
        angle = position * base ** (-torch.arange(half) * 2 / size)
        cos, sin = angle.cos(), angle.sin()
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)

    def entered(token, hidden):
        pair = torch.cat([readout.embedding.weight[token], hidden])
        return head.fc.weight @ pair + (0 if head.fc.bias is None else head.fc.bias)

    def key_value(x, position):
        key = rope((attention.k_proj.weight @ x).view(groups, size), position)
        return key, (attention.v_proj.weight @ x).view(groups, size)

    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        last = batch.last[b]
        step0 = [key_value(entered(tokens[t + 1], last[t]), t) for t in range(len(tokens) - 1)]
        for t in range(len(tokens)):
            hidden, own = last[t], []
            for k in range(steps):
                needed = reply[t + 1 : t + 3 + k]
                if len(needed) < 2 + k or not needed[0] or len(set(needed)) > 1:
                    break
                x = entered(tokens[t + 1 + k], hidden)
                if k:
                    own.append(key_value(x, t + k))
                query = rope((attention.q_proj.weight @ x).view(heads, size), t + k)
                visible = step0[: t + 1] + own
                out = []
                for h in range(heads):
                    g = h // (heads // groups)
                    scores = torch.stack([query[h] @ key[g] / size**0.5 for key, _ in visible])
                    out.append(scores.softmax(0) @ torch.stack([value[g] for _, value in visible]))
                hidden = x + attention.o_proj.weight @ torch.cat(out)
                scale = torch.rsqrt(hidden.pow(2).mean() + config.rms_norm_eps)
                normed = hidden * scale * layer.post_attention_layernorm.weight
                gate = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ normed)
                hidden = hidden + layer.mlp.down_proj.weight @ (
                    gate * (layer.mlp.up_proj.weight @ normed)
                )
                truth = last[t + 1 + k]
                teacher = readout.weight @ truth
                logits = (readout.weight @ hidden)[ids]
                best = int(teacher.argmax())
                seen[k] += 1
                hits[k] += ids[int(logits.argmax())] == best
                if best in ids:
                    gap = (hidden - truth).abs()
                    distance = torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
                    entropy = -(teacher[ids].softmax(0) * logits.log_softmax(0)).sum()
                    loss[k] = loss[k] + 1.0 * distance + 0.1 * entropy
                    count[k] += 1
    return torch.stack(loss), count, hits, seen


@pytest.mark.parametrize(("steps", "fc_bias"), [(1, False), (3, True)])
@pytest.mark.parametrize("pieces", [1 << 24, 1000], ids=["at once", "in pieces"])
@pytest.mark.parametrize("vocabulary", ["reduced", "all tokens", "identity"])
def test_objective_and_gradients_equal_the_slow_reference(
    tiny, whole, monkeypatch, steps, fc_bias, pieces, vocabulary
):
    target, size = {"reduced": (tiny, 120), "all tokens": (tiny, None), "identity": (whole, None)}[
        vocabulary
    ]
    monkeypatch.setattr(linear_loss, "CPU_CHUNK", pieces)
    head = create(target, "eagle1", steps=steps, draft_vocab_size=size, fc_bias=fc_bias)
    assert head.config.draft_vocab_size == (size or 384)
    batch = make_batch(target, head, *random_rows(torch.Generator().manual_seed(8)))
    weights = torch.tensor(head.weights(0.0))
    fast = head.objective(batch)
    (fast.loss * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    loss, count, hits, seen = slow_objective(head, batch)
    (loss * weights).sum().backward()
    assert fast.count.tolist() == count == head.counts(batch).tolist()
    assert count[0] > 0
    assert fast.hits.tolist() == hits
    assert fast.seen.tolist() == seen
    torch.testing.assert_close(fast.loss, loss, atol=1e-3, rtol=1e-4)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, atol=2e-4, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@torch.no_grad()
def test_logits_are_the_target_s(tmp_path, tokenizer):
    """lm_head over the draft vocabulary, without a norm, with the soft cap (Gemma)."""
    target = gemma(tmp_path, tokenizer)
    last = target.forward(torch.randint(3, 380, (1, 9))).last
    for size in (120, 384):
        head = create(target, "eagle1", draft_vocab_size=size)
        expected = target.logits(last)[..., head.draft_ids]
        assert expected.abs().max() > 2.0  # the cap matters here
        for mode in (True, False):  # the two routes through the output layer
            torch.testing.assert_close(head.train(mode).logits(last, 0), expected)


def test_supervision_decides_what_counts(tiny):
    """Without a reply of two tokens nothing does; states outside teacher rows and prefixes are not
    looked at."""
    head = create(tiny, "eagle1", draft_vocab_size=384)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    single = torch.tensor([[0, 0, 1, 0, 2, 0, 0, 3]])
    assert not head.objective(make_batch(tiny, head, tokens, single)).loss.any()
    reply = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0]])
    batch = make_batch(tiny, head, tokens, reply)
    before = head.objective(batch)
    assert before.count.tolist() == [counted(reply, 0).sum()] == [2]
    batch.last[0, 4:] += 10  # the last teacher row is 3
    assert torch.equal(head.objective(batch).loss, before.loss)
    batch.last[0, 3] += 10
    assert not torch.equal(head.objective(batch).loss, before.loss)


def test_drafting_before_training_spoils_nothing(tiny):
    """The output rows made in inference mode serve a later backward."""
    head = create(tiny, "eagle1", draft_vocab_size=120)
    tokens, reply = random_rows(torch.Generator().manual_seed(3))
    with torch.inference_mode():
        state = head.start(2, 64)
        head.begin(state, tokens, tiny.forward(tokens)[:, :-1], torch.tensor([5, 7]))
    head.objective(make_batch(tiny, head, tokens, reply)).loss.sum().backward()
    assert head.fc.weight.grad.any()


def test_the_vocabulary_may_change_after_a_forward(tiny):
    head = create(tiny, "eagle1", draft_vocab_size=120)
    last = torch.randn(2, 48)
    head.logits(last, 0)
    ids = torch.arange(100, 220)
    head.use_vocabulary(ids)
    torch.testing.assert_close(head.logits(last, 0), tiny.logits(last)[:, ids])


def test_eagle2_names_its_tree(tiny, tmp_path):
    assert create(tiny, "eagle1").tree is None
    assert create(tiny, "eagle3").tree is None
    tree = create(tiny, "eagle2").tree
    assert (tree.top_k, tree.depth, tree.nodes) == (10, 6, 60)
    save_head(create(tiny, "eagle2", tree={"depth": 4}), tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert (again.family, again.tree.depth, again.tree.nodes) == ("eagle2", 4, 60)


def test_it_drafts_further_than_it_was_trained(tiny):
    head = create(tiny, "eagle1")
    assert isinstance(head, RecurrentHead)
    assert (head.config.steps, head.longest_draft) == (1, 16)
    assert head.needs.last_everywhere
    assert not head.needs.aux_layers


def test_the_target_s_state_does_not_come_to_meet_the_guess(tiny):
    """Trained along, the target gets gradients as an input and none as what is regressed: the last
    teacher row of a reply is no input of any anchor."""
    head = create(tiny, "eagle1", steps=1)
    tokens, reply = random_rows(torch.Generator().manual_seed(6), rows=1)
    batch = make_batch(tiny, head, tokens, reply)
    batch.last.requires_grad_()
    head.objective(batch).loss.sum().backward()
    anchors = counted(reply, 0)[0].nonzero().flatten()
    last = int(anchors[-1])
    assert batch.last.grad[0, last].any()
    assert not batch.last.grad[0, last + 1].any()
