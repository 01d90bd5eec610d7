"""EAGLE-3: alignment, loss and supervision by slow code; the two faces agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SIZES, make_batch, make_head, random_rows, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch, counted
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.scoring import Teacher

# Weights large enough that the cap matters.
GEMMA = SIZES | {"initializer_range": 1.0, "final_logit_softcapping": 4.0}


def counts_slowly(reply: list[int], anchor: int, step: int) -> bool:
    needed = range(anchor + 1, anchor + 3 + step)
    if needed[-1] >= len(reply):
        return False
    return reply[needed[0]] > 0 and all(reply[i] == reply[needed[0]] for i in needed)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 6))
def test_counted_is_the_rule_of_the_spec(reply, step):
    """CASE 20: an anchor counts iff x[t+1] … x[t+2+k] lie in one reply."""
    got = counted(torch.tensor([reply]), step)[0].tolist()
    assert got == [counts_slowly(reply, anchor, step) for anchor in range(len(reply))]


@pytest.fixture(params=["reduced", "all tokens", "identity"])
def pair(request, tiny, whole):
    """A target and the size of a draft vocabulary: a part; all tokens of a target with padded rows
    (a map); every row of the target (no map)."""
    return {"reduced": (tiny, 120), "all tokens": (tiny, 384), "identity": (whole, 384)}[
        request.param
    ]


def slow_objective(head, batch: Batch):
    """SPEC §3–4 spelled out: row by row, step by step, everything recomputed."""
    config, layer, attention = head.config, head.midlayer, head.midlayer.self_attn
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    readout = head.readout
    ids = [i for i in range(config.vocab_size) if not head.reduced or head.t2d[i]]
    steps = config.steps
    loss = [torch.zeros(()) for _ in range(steps)]
    count, hits, seen = ([0] * steps for _ in range(3))

    def norm(x, module):
        return x * torch.rsqrt(x.pow(2).mean() + config.rms_norm_eps) * module.weight

    def rope(x, position):  # [heads, d]
        half = size // 2
        base = config.rope_parameters["rope_theta"]
        angle = position * base ** (-torch.arange(half) * 2 / size)
        cos, sin = angle.cos(), angle.sin()
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)

    def merged(token, hidden):
        embedding = readout.embedding.weight[token]
        parts = norm(embedding, layer.input_layernorm), norm(hidden, layer.hidden_norm)
        return torch.cat(parts)

    def key_value(x, position):
        key = rope((attention.k_proj.weight @ x).view(groups, size), position)
        return key, (attention.v_proj.weight @ x).view(groups, size)

    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        fused = [head.fc.weight @ a for a in batch.aux[b]]
        step0 = [key_value(merged(tokens[t + 1], fused[t]), t) for t in range(len(tokens) - 1)]
        for t in range(len(tokens)):
            hidden, own = fused[t], []
            for k in range(steps):
                if not counts_slowly(reply, t, k):
                    break
                x = merged(tokens[t + 1 + k], hidden)
                if k:
                    own.append(key_value(x, t + k))
                query = rope((attention.q_proj.weight @ x).view(heads, size), t + k)
                seen_rows = step0[: t + 1] + own
                out = []
                for h in range(heads):
                    g = h // (heads // groups)
                    scores = torch.stack([query[h] @ key[g] / size**0.5 for key, _ in seen_rows])
                    values = torch.stack([value[g] for _, value in seen_rows])
                    out.append(scores.softmax(0) @ values)
                hidden = hidden + attention.o_proj.weight @ torch.cat(out)
                x = norm(hidden, layer.post_attention_layernorm)
                gate = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ x)
                hidden = hidden + layer.mlp.down_proj.weight @ (
                    gate * (layer.mlp.up_proj.weight @ x)
                )
                logits = head.lm_head.weight @ norm(hidden, head.norm)
                teacher = readout.weight @ batch.last[b, t + 1 + k]
                best = int(teacher.argmax())
                seen[k] += 1
                hits[k] += ids[int(logits.argmax())] == best
                if best in ids:
                    target = teacher[ids].softmax(0)
                    loss[k] = loss[k] - (target * logits.log_softmax(0)).sum()
                    count[k] += 1
    return torch.stack(loss), count, hits, seen


def test_objective_and_gradients_equal_the_slow_reference(pair):
    tiny, draft_vocab = pair
    head = make_head(tiny, steps=3, draft_vocab=draft_vocab)
    generator = torch.Generator().manual_seed(8)
    tokens, reply = random_rows(generator)
    batch = make_batch(tiny, head, tokens, reply)
    weights = torch.tensor(head.weights(0.0))
    assert weights.tolist() == pytest.approx([1, 0.8, 0.64])

    fast = head.objective(batch)
    (fast.loss * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
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


def test_six_tokens_by_hand(tiny):
    """x = p p | r r r r: which anchors guess what, written out.

    position   0 1 2 3 4 5        reply 0 0 1 1 1 1
    step 0: anchors 1 2 3 guess x[3] x[4] x[5] (teacher rows 2 3 4)
    step 1: anchors 1 2   guess x[4] x[5]
    step 2: anchor  1     guesses x[5]
    """
    reply = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert counted(reply, 0)[0].nonzero().flatten().tolist() == [1, 2, 3]
    assert counted(reply, 1)[0].nonzero().flatten().tolist() == [1, 2]
    assert counted(reply, 2)[0].nonzero().flatten().tolist() == [1]
    assert counted(reply, 3).sum() == 0
    head = make_head(tiny, steps=4, draft_vocab=384)
    batch = make_batch(tiny, head, torch.tensor([[5, 6, 7, 8, 9, 10]]), reply)
    assert head.counts(batch).tolist() == [3, 2, 1, 0]
    # The teacher of step 0 are the target's rows 2 3 4: changing any other changes nothing.
    before = head.objective(batch).loss
    for position in (0, 1, 5):
        batch.last[0, position] += 10
    torch.testing.assert_close(head.objective(batch).loss, before, atol=0, rtol=0)
    batch.last[0, 4] += 10
    assert head.objective(batch).loss[0] != before[0]


def test_tokens_outside_the_draft_vocabulary_are_rejections(tiny):
    """They leave the loss and stay in `seen`."""
    head = make_head(tiny, steps=2, draft_vocab=40)
    tokens, reply = random_rows(torch.Generator().manual_seed(5))
    batch = make_batch(tiny, head, tokens, reply)
    outside = int((~head.t2d).nonzero()[0])
    batch.argmax.fill_(outside)
    objective = head.objective(batch)
    assert objective.count.tolist() == [0, 0] == objective.hits.tolist()
    assert objective.seen[0] == counted(reply, 0).sum() > 0
    assert objective.loss.tolist() == [0, 0]


def test_start_is_the_target_s_last_layer(tiny):
    """With init "target" the fused state is the highest auxiliary state, unchanged."""
    head = make_head(tiny, wild=False)
    tokens = torch.randint(3, 380, (1, 9))
    features = tiny.forward(tokens, aux_layers=head.needs.aux_layers)
    top = features.aux[..., -tiny.hidden_size :]
    torch.testing.assert_close(head.fc(features.aux), top)
    ids = head.to_target(torch.arange(120))
    torch.testing.assert_close(head.lm_head.weight, tiny.readout.weight[ids])
    last = tiny.decoder.layers[-1]
    torch.testing.assert_close(head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    half = head.midlayer.self_attn.q_proj.weight[:, tiny.hidden_size :]
    torch.testing.assert_close(half, last.self_attn.q_proj.weight)


def test_frozen_lm_head_is_frozen(tiny):
    head = make_head(tiny, train_lm_head=False)
    assert not head.lm_head.weight.requires_grad
    assert head.fc.weight.requires_grad


def test_impossible_aux_layers_are_refused(tiny):
    with pytest.raises(SpectrainError, match="aux_layers"):
        make_head(tiny, aux_layers=(0, 2, 9))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 700.0},
        {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rotary_positions_are_the_target_s(tmp_path, tokenizer, parameters):
    """Base and scaling reach the head: the same angles, the same attention scale."""
    folder = save_tiny(tmp_path / "target", tokenizer, rope_parameters=parameters)
    target = Target.load(str(folder), pack_weights=False)
    positions = torch.tensor([[0, 1, 7, 100, 400]])
    expected = target.decoder.rotary_emb(torch.zeros(1), positions)
    ours = make_head(target).rotary(positions, torch.float32)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)


def test_the_teacher_is_the_target_s_distribution(tmp_path, tokenizer):
    """Over the draft vocabulary, soft cap included (Gemma caps its logits)."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma2", **GEMMA)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = make_head(target)
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    batch = make_batch(target, head, tokens, reply)
    teacher = Teacher.of(head, batch)
    rows = (counted(reply, 0).flatten().nonzero().flatten()) + 1
    logits = target.logits(batch.last.flatten(0, 1)[rows])
    assert logits.abs().max() > 0.5 * config.final_logit_softcapping  # the cap matters here
    ids = head.to_target(torch.arange(120))
    torch.testing.assert_close(teacher.at(rows), logits[:, ids].softmax(-1))


def test_head_size_is_explicit(tiny):
    """CASE 25: hidden size 48, four heads of 16."""
    head = make_head(tiny)
    attention = head.midlayer.self_attn
    assert tiny.hidden_size == 48 != head.config.num_attention_heads * head.config.head_dim
    assert attention.q_proj.weight.shape == (64, 96)
    assert attention.k_proj.weight.shape == (32, 96)
    assert attention.o_proj.weight.shape == (48, 64)


def test_more_draft_tokens_than_there_are(tiny):
    with pytest.raises(SpectrainError, match="not between 1 and 384"):
        make_head(tiny, draft_vocab=385)
    assert make_head(tiny, draft_vocab=None).config.draft_vocab_size == 384
