"""Multi-token prediction, sequential and parallel: alignment and loss by slow code and by hand."""

from __future__ import annotations

import pytest
import torch
from mtp_variants import every_variant, make
from tiny_models import make_batch, random_rows

from spectrain.core.batch import Batch, counted

# ── the slow reference ───────────────────────────────────────────────────────


class SlowLayer:
    """A Llama layer, one row at a time; what it has read so far is its list of keys."""

    def __init__(self, layer, config):
        self.layer, self.config = layer, config

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean() + self.config["rms_norm_eps"]) * weight

    def rope(self, x, position):  # [heads, d]
        half = x.shape[1] // 2
        base = self.config["rope_parameters"]["rope_theta"]
        angle = position * base ** (-torch.arange(half) * 2 / (2 * half))
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    def row(self, x, position, seen):
        """One row; `seen` (keys and values it may look at) grows by its own."""
        size, attention = self.config["head_dim"], self.layer.self_attn
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        normed = self.norm(x, self.layer.input_layernorm.weight)
        query = self.rope((attention.q_proj.weight @ normed).view(heads, size), position)
        key = self.rope((attention.k_proj.weight @ normed).view(groups, size), position)
        seen.append((key, (attention.v_proj.weight @ normed).view(groups, size)))
        out = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = torch.stack([query[head] @ key[group] / size**0.5 for key, _ in seen])
            values = torch.stack([value[group] for _, value in seen])
            out.append(scores.softmax(0) @ values)
        x = x + attention.o_proj.weight @ torch.cat(out)
        normed = self.norm(x, self.layer.post_attention_layernorm.weight)
        gate = torch.nn.functional.silu(self.layer.mlp.gate_proj.weight @ normed)
        return x + self.layer.mlp.down_proj.weight @ (
            gate * (self.layer.mlp.up_proj.weight @ normed)
        )


def slow_states(head, tokens, last, steps):
    """{(k, t): state before lm_head} of one row of tokens, by the definitions alone."""
    parallel, config = head.family == "mtp-parallel", head.config.layer.config
    parts = list(head.heads if parallel else head.chain)
    shared = not parallel and head.config.shared
    states, length = {}, len(tokens)

    def merged(part, slow, token, hidden):
        embedding = slow.norm(head.readout.embedding.weight[token], part.enorm.weight)
        return part.eh_proj.weight @ torch.cat([embedding, slow.norm(hidden, part.hnorm.weight)])

    passed = dict(enumerate(last))
    first_keys = []
    own_keys = {t: [] for t in range(length)}
    for step in range(steps):
        part = parts[0 if shared else step]
        slow = SlowLayer(part.layer, config)
        keys, following = [], {}
        for t in range(length if parallel else length - 1 - step):
            if parallel:
                out = slow.row(slow.norm(last[t], part.hnorm.weight), t, keys)
            elif shared and step:
                seen = first_keys[: t + 1] + own_keys[t]
                x = merged(part, slow, tokens[t + 1 + step], passed[t])
                out = slow.row(x, t + step, seen)
                own_keys[t].append(seen[-1])
            else:
                out = slow.row(merged(part, slow, tokens[t + 1 + step], passed[t]), t, keys)
            states[step, t] = slow.norm(out, part.norm.weight)
            normed = not parallel and head.config.pass_on == "after_norm"
            following[t] = states[step, t] if normed else out
        if step == 0:
            first_keys = keys
        passed = following
    return states


def slow_objective(head, batch: Batch):
    steps, readout = head.config.steps, head.readout
    ids = [i for i in range(head.config.vocab_size) if not head.reduced or head.t2d[i]]
    loss = [torch.zeros(()) for _ in range(steps)]
    count, hits, seen = ([0] * steps for _ in range(3))
    for row in range(len(batch.tokens)):
        tokens, reply = batch.tokens[row].tolist(), batch.reply[row]
        states = slow_states(head, tokens, batch.last[row], steps)
        for step in range(steps):
            for t in range(len(tokens) - 2 - step):
                needed = reply[t + 1 : t + 3 + step]
                if needed[0] == 0 or (needed != needed[0]).any():
                    continue
                logits = readout.weight[ids] @ states[step, t]
                teacher = readout.weight @ batch.last[row, t + 1 + step]
                best, text = int(teacher.argmax()), tokens[t + 2 + step]
                seen[step] += 1
                hits[step] += ids[int(logits.argmax())] == best
                log_q = logits.log_softmax(0)
                if head.config.loss == "ce" and text in ids:
                    loss[step] = loss[step] - log_q[ids.index(text)]
                    count[step] += 1
                elif head.config.loss == "soft" and best in ids:
                    loss[step] = loss[step] - (teacher[ids].softmax(0) * log_q).sum()
                    count[step] += 1
    return torch.stack(loss), count, hits, seen


@pytest.mark.parametrize("vocabulary", ["reduced", "all tokens", "identity"])
@pytest.mark.parametrize("loss", ["ce", "soft"])
@every_variant
def test_objective_and_gradients_equal_the_slow_reference(tiny, whole, variant, loss, vocabulary):
    target = whole if vocabulary == "identity" else tiny
    head = make(target, variant, draft_vocab=250 if vocabulary == "reduced" else None, loss=loss)
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    batch = make_batch(target, head, tokens[:, :18], reply[:, :18])
    weights = torch.tensor(head.weights(0.0))

    fast = head.objective(batch)
    (fast.loss * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in head.named_parameters()}
    head.zero_grad()
    expected, count, hits, seen = slow_objective(head, batch)
    (expected * weights).sum().backward()

    assert fast.count.tolist() == count == head.counts(batch).tolist()
    assert min(count) > 0
    assert fast.hits.tolist() == hits
    assert fast.seen.tolist() == seen
    torch.testing.assert_close(fast.loss, expected, atol=1e-3, rtol=1e-4)
    for name, parameter in head.named_parameters():
        scale = parameter.grad.abs().max()
        assert scale > 0, name
        assert (gradients[name] - parameter.grad).abs().max() < 1e-3 * scale, name


@every_variant
def test_six_tokens_by_hand(tiny, variant):
    """x = p p | r r r r: which row of which step reads and guesses what, written out.

    position   0 1 2 3 4 5        reply 0 0 1 1 1 1
    step 0: anchors 1 2 3 embed x[2] x[3] x[4], guess x[3] x[4] x[5]
    step 1: anchors 1 2   embed x[3] x[4]     , guess x[4] x[5]
    step 2: anchor  1     embeds x[4]         , guesses x[5]
    """
    head = make(tiny, variant, draft_vocab=None, steps=4)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    reply = torch.tensor([[0, 0, 1, 1, 1, 1]])
    batch = make_batch(tiny, head, tokens, reply)
    assert head.counts(batch).tolist() == [3, 2, 1, 0]

    def guesses(batch):
        """{(step, anchor): logits}"""
        return {
            (u.step, anchor): head.logits(u.hidden[i], u.step)
            for u in head.unroll(batch, 3)
            for i, anchor in enumerate(u.anchors.tolist())
            if counted(reply, u.step)[0, anchor]
        }

    before = guesses(batch)
    assert sorted(before) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)]
    parallel = head.family == "mtp-parallel"
    for position in range(6):
        # What changes when the token, or the target's state, at one position changes.
        other = make_batch(tiny, head, tokens, reply)
        other.tokens = tokens.clone()
        other.tokens[0, position] = 99
        changed = {key for key, value in guesses(other).items() if not value.equal(before[key])}
        reads = {(k, t) for k, t in before if 1 <= position <= t + 1 + k and not parallel}
        assert changed == reads
        other = make_batch(tiny, head, tokens, reply)
        other.last[0, position] += 1
        changed = {key for key, value in guesses(other).items() if not value.equal(before[key])}
        assert changed == {(k, t) for k, t in before if position <= t}
    # The labels: step k teaches x[t+2+k] and nothing else.
    with torch.no_grad():
        loss = head.objective(batch).loss
    for step, anchors in enumerate([[1, 2, 3], [1, 2], [1]]):
        by_hand = sum(
            -before[step, t].log_softmax(0)[tokens[0, t + 2 + step]].detach() for t in anchors
        )
        torch.testing.assert_close(loss[step], by_hand)


@pytest.mark.parametrize("loss", ["ce", "soft"])
@torch.no_grad()
def test_capped_logits_are_capped_in_the_loss(targets, loss):
    """Gemma caps its logits, the head's and the teacher's alike."""
    target = targets("gemma2")
    head = make(target, "chain", draft_vocab=None, loss=loss)
    for module in head.chain:
        module.norm.weight.add_(40)  # so that the cap matters
    batch = make_batch(target, head, *random_rows(torch.Generator().manual_seed(1)))
    objective = head.objective(batch)
    for unrolled in head.unroll(batch, 3):
        live = counted(batch.reply, unrolled.step).flatten()[unrolled.anchors]
        rows = unrolled.anchors[live] + 1 + unrolled.step
        logits = head.logits(unrolled.hidden[live], unrolled.step)
        assert 3 < logits.abs().max() <= 4
        if loss == "ce":
            taught = torch.nn.functional.one_hot(batch.tokens.flatten()[rows + 1], logits.shape[1])
        else:
            taught = target.logits(batch.last.flatten(0, 1)[rows])[:, :384].softmax(-1)
            taught = taught * (batch.argmax.flatten()[rows] < 384)[:, None]  # padding is not taught
        by_hand = -(taught * logits.log_softmax(-1)).sum()
        # Some hundred float32 numbers, added up in another order.
        torch.testing.assert_close(objective.loss[unrolled.step], by_hand, rtol=1e-5, atol=1e-5)


def test_weights_follow_the_published_schedule(tiny):
    """λ/K for each step: 0.3, then 0.1; the parallel kind counts every head alike."""
    head = make(tiny, "chain", steps=2)
    assert head.weights(0.0) == head.weights(0.66) == [0.15, 0.15]
    assert head.weights(0.67) == head.weights(1.0) == [0.05, 0.05]
    head = make(tiny, "recurrent", steps=4, lambda_first=1.0, lambda_then=0.5, lambda_switch=0.5)
    assert head.weights(0.49) == [0.25] * 4
    assert head.weights(0.5) == [0.125] * 4
    assert make(tiny, "parallel", steps=2).weights(0.3) == [1.0, 1.0]
