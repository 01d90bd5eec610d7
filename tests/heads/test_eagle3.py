"""EAGLE-3: alignment, loss and supervision by slow code and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import gemma, make_batch, make_head, random_rows

from spectrain.core.batch import Batch, counted
from spectrain.heads.losses import ROW_LOSSES
from spectrain.heads.scoring import Teacher


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
    config, layers = head.config, [head.midlayer, *head.layers.values()]
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    readout = head.readout
    own = config.embeddings == "own"
    table = head.embed_tokens.weight if own else readout.embedding.weight
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

    def through(token, hidden, position, visible):
        """One row through all layers; its keys join those it sees: a list for each layer."""
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            if index == 0:
                parts = norm(table[token], layer.input_layernorm), norm(hidden, layer.hidden_norm)
                x = torch.cat(parts)
            else:
                x = norm(hidden, layer.input_layernorm)
            key = rope((attention.k_proj.weight @ x).view(groups, size), position)
            visible[index].append((key, (attention.v_proj.weight @ x).view(groups, size)))
            query = rope((attention.q_proj.weight @ x).view(heads, size), position)
            out = []
            for h in range(heads):
                g = h // (heads // groups)
                scores = torch.stack([query[h] @ key[g] / size**0.5 for key, _ in visible[index]])
                values = torch.stack([value[g] for _, value in visible[index]])
                out.append(scores.softmax(0) @ values)
            hidden = hidden + attention.o_proj.weight @ torch.cat(out)
            x = norm(hidden, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ x)
            hidden = hidden + layer.mlp.down_proj.weight @ (gate * (layer.mlp.up_proj.weight @ x))
        return hidden

    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        fused = [head.fc.weight @ a for a in batch.aux[b]]
        prefix = [[] for _ in layers]  # step-0 keys of the positions before t
        for t in range(len(tokens) - 1):
            hidden = fused[t]
            visible = [list(keys) for keys in prefix]
            for k in range(steps):
                if k and not counts_slowly(reply, t, k):
                    break
                hidden = through(tokens[t + 1 + k], hidden, t + k, visible)
                if k == 0:
                    prefix = [list(keys) for keys in visible]
                    if not counts_slowly(reply, t, 0):
                        break
                logits = head.lm_head.weight @ norm(hidden, head.norm)
                teacher = readout.weight @ batch.last[b, t + 1 + k]
                best = int(teacher.argmax())
                seen[k] += 1
                hits[k] += ids[int(logits.argmax())] == best
                if best in ids:
                    target = teacher[ids].softmax(0)
                    row_loss = ROW_LOSSES[config.loss](logits[None], target[None])
                    loss[k] = loss[k] + row_loss[0]
                    count[k] += 1
    return torch.stack(loss), count, hits, seen


def require_equal_to_slow_code(head, batch):
    weights = torch.tensor(head.weights(0.0))
    assert weights.tolist() == pytest.approx([0.8**k for k in range(head.config.steps)])
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


def test_objective_and_gradients_equal_the_slow_reference(pair):
    tiny, draft_vocab = pair
    head = make_head(tiny, steps=3, draft_vocab=draft_vocab)
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    require_equal_to_slow_code(head, make_batch(tiny, head, tokens, reply))


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 2},
        {"layers": 3, "aux_layers": (3,), "embeddings": "own"},
        {"aux_layers": (0, 1, 2, 3), "loss": "lk_alpha"},
        {"embeddings": "own", "loss": "lk_lambda"},
        {"layers": 2, "loss": "tv"},
        {"loss": "reverse_kl"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_every_variant_equals_the_slow_reference(tiny, options):
    head = make_head(tiny, steps=3, **options)
    # Smaller weights than elsewhere: through three layers rounding would grow with them.
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.7)
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    require_equal_to_slow_code(head, make_batch(tiny, head, tokens[:1], reply[:1]))


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


def test_the_teacher_is_the_target_s_distribution(tmp_path, tokenizer):
    """Over the draft vocabulary, soft cap included (Gemma caps its logits)."""
    target = gemma(tmp_path, tokenizer)
    head = make_head(target)
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    batch = make_batch(target, head, tokens, reply)
    teacher = Teacher.of(head, batch)
    rows = (counted(reply, 0).flatten().nonzero().flatten()) + 1
    logits = target.logits(batch.last.flatten(0, 1)[rows])
    assert logits.abs().max() > 0.5 * target.config.final_logit_softcapping  # the cap matters here
    ids = head.to_target(torch.arange(120))
    torch.testing.assert_close(teacher.at(rows), logits[:, ids].softmax(-1))
