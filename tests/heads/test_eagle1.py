"""EAGLE-1 and EAGLE-2: alignment and loss by hand and by slow code, noise, names, start."""

from __future__ import annotations

import math

import pytest
import torch
from head_kinds import create
from tiny_models import SIZES, make_batch, random_rows, save_tiny
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch, Features, counted
from spectrain.core.errors import SpectrainError
from spectrain.core.readout import Readout
from spectrain.core.target import Target
from spectrain.heads import eagle1_init, linear_loss
from spectrain.heads.base import TargetFacts
from spectrain.heads.eagle1 import Eagle1Config, Eagle1Head, Eagle1Options
from spectrain.heads.io import load_head, save_head
from spectrain.heads.recurrent import RecurrentHead
from spectrain.recipes import train

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


def gemma(folder, tokenizer) -> Target:
    """Weights so large that its soft cap matters."""
    torch.manual_seed(0)
    sizes = SIZES | {"initializer_range": 1.0, "final_logit_softcapping": 4.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), pack_weights=False)


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


def test_noise_in_training_alone(tiny):
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    head = create(tiny, "eagle1")
    batch = make_batch(tiny, head, tokens, reply)
    quiet = head.objective(batch).loss
    assert torch.equal(head.objective(batch).loss, quiet)
    head.train()
    torch.manual_seed(1)
    noisy = head.objective(batch).loss
    torch.manual_seed(1)
    assert torch.equal(head.objective(batch).loss, noisy)
    assert not torch.equal(noisy, quiet)
    # What is regressed stays true, and drafting has none even while the module is training.
    features = tiny.forward(tokens)
    drafts = []
    for mode in (True, False):
        state = head.train(mode).start(len(tokens), 64)
        drafts.append(head.begin(state, tokens, features[:, :-1], torch.tensor([5, 7])))
    assert torch.equal(*drafts)
    plain = create(tiny, "eagle1", noise=0.0).train()
    assert torch.equal(plain.objective(batch).loss, plain.eval().objective(batch).loss)


def test_noise_is_as_wide_as_published(tiny):
    """(rand − ½) · 0.2 · 512 / length, with the row's own length and not that of the padding."""
    head = create(tiny, "eagle1")
    last = torch.ones(2, 64, 48)
    reply = torch.zeros(2, 64, dtype=torch.int64)
    reply[0, 40:], reply[1, 9:16] = 1, 1
    batch = Batch(torch.randint(3, 99, (2, 64)), reply, None, last, reply - 1)
    noise = head.disturb(Features(last, None), batch).last - last
    assert not noise[1, 16:].any()
    for row, length in ((0, 64), (1, 16)):
        widest = 0.5 * 0.2 * 512 / length
        own = noise[row, :length]
        assert 0.99 * widest < own.abs().max() <= widest * (1 + 1e-4)
        assert own.mean().abs() < 0.05 * widest


def test_names_are_those_of_the_published_layout(tiny, whole):
    """No input norm, no final norm, no lm_head, no bias; a map only where tokens are left out."""
    linear = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up")]
    layer = [*linear, "mlp.down_proj", "post_attention_layernorm"]
    names = {"fc.weight", *(f"layers.0.{name}.weight" for name in layer)}
    assert create(whole, "eagle1").state_dict().keys() == names
    assert create(tiny, "eagle2").state_dict().keys() == names | {"d2t", "t2d"}
    assert create(whole, "eagle1", fc_bias=True).state_dict().keys() == names | {"fc.bias"}
    shapes = {n: tuple(v.shape) for n, v in create(whole, "eagle1").state_dict().items()}
    assert shapes["fc.weight"] == (48, 96)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64, 48)


@pytest.fixture
def scaled(tmp_path, tokenizer):
    """A target whose norms have weights worth the name, its last state at one token, and the
    residual stream h it was made of."""
    target = Target.load(str(save_tiny(tmp_path / "t", tokenizer)), pack_weights=False)
    torch.manual_seed(1)
    source = target.decoder.layers[-1]
    for norm in (target.decoder.norm, source.input_layernorm, source.post_attention_layernorm):
        norm.weight.uniform_(0.5, 2.0)
    stream = 5 * torch.randn(1, 48)
    return target, stream, target.decoder.norm(stream)


@torch.no_grad()
def test_start_is_the_target_s_last_layer(scaled, monkeypatch):
    """Piece by piece what the target's layer does to h, said of f: its own coordinates."""
    target, stream, state = scaled
    size, final = stream.pow(2).mean().sqrt(), target.decoder.norm.weight
    monkeypatch.setattr(
        eagle1_init, "sizes", lambda _: (size.item(), state.pow(2).mean().sqrt().item())
    )
    head = create(target, "eagle1", random=False, init="target")
    layer, source = head.layers[0], target.decoder.layers[-1]
    residual, x = head.enter(torch.zeros_like(state), state)
    torch.testing.assert_close(residual, state)
    assert head.fc.weight[:, :48].abs().max() < 0.02
    for name in ("q_proj", "k_proj", "v_proj"):
        own, theirs = (getattr(one.self_attn, name) for one in (layer, source))
        torch.testing.assert_close(own(x), theirs(source.input_layernorm(stream)))
    attended = torch.randn(1, 64)
    moved = source.self_attn.o_proj(attended)
    torch.testing.assert_close(layer.self_attn.o_proj(attended), moved * final / size)
    moved = source.mlp(source.post_attention_layernorm(stream))
    ours = layer.mlp(layer.post_attention_layernorm(state))
    torch.testing.assert_close(ours, moved * final / size, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_sizes_are_those_of_the_states(scaled):
    target = scaled[0]
    tokens = torch.randint(0, 384, (1, 64), generator=torch.Generator().manual_seed(3))
    state = target.forward(tokens).last
    stream = target.forward(tokens, aux_layers=(3,)).aux
    found = eagle1_init.sizes(target)
    for got, rows in zip(found, (stream, state), strict=True):
        assert got == pytest.approx(rows.pow(2).mean(-1).sqrt().median().item(), rel=0.3)


def test_what_does_not_fit_starts_at_random(tmp_path, tokenizer):
    """Gemma's layers have four norms: nothing of them is taken over, and nothing fails."""
    target = gemma(tmp_path, tokenizer)
    head = create(target, "eagle1", random=False, init="target")
    own, theirs = head.layers[0].mlp.up_proj.weight, target.decoder.layers[-1].mlp.up_proj.weight
    assert own.shape == theirs.shape
    assert own.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(own, theirs)
    assert (head.layers[0].post_attention_layernorm.weight == 1).all()


def test_random_start(tiny):
    head = create(tiny, "eagle1", random=False, fc_bias=True)
    assert not head.fc.bias.any()
    for name, value in head.named_parameters():
        if value.dim() == 2:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.mark.parametrize("init", ["random", "target"])
def test_a_few_steps_of_training_lower_both_losses(tiny, init):
    """With noise on; the losses are measured without it."""
    head = create(tiny, "eagle1", random=False, init=init)
    batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(4)))
    both = {
        "distance": create(tiny, "eagle1", classification_weight=0.0),
        "entropy": create(tiny, "eagle1", regression_weight=0.0),
    }

    def measure():
        for other in both.values():
            other.load_state_dict(head.state_dict())
        return {name: other.objective(batch).loss.item() for name, other in both.items()}

    before = measure()
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    head.train()
    for step in range(30):
        torch.manual_seed(step)  # as the training loop does: other noise in every step
        optimizer.zero_grad()
        head.objective(batch).loss.sum().backward()
        optimizer.step()
    after = measure()
    assert after["distance"] < 0.9 * before["distance"]
    assert after["entropy"] < 0.96 * before["entropy"]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "head.steps: 0 refused"),
        ({"step": 2}, "unknown key head.step.*steps"),
        ({"noise": -1}, "head.noise"),
    ],
)
def test_bad_options_are_one_line(options, message):
    config = train.TrainConfig(family="eagle1", head=options)
    with pytest.raises(SpectrainError, match=message) as caught:
        train._options(Eagle1Options, config)
    assert "\n" not in str(caught.value)


def test_partly_rotated_heads_are_refused(tiny, monkeypatch):
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    monkeypatch.setattr(tiny.config, "rope_parameters", parameters)
    for family in ("eagle1", "eagle2", "eagle3"):
        with pytest.raises(SpectrainError, match="partial_rotary_factor"):
            create(tiny, family)


def test_more_draft_tokens_than_there_are(tiny):
    with pytest.raises(SpectrainError, match="not between 1 and 384"):
        create(tiny, "eagle1", draft_vocab_size=385)


@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle1", {"noise": 0.2}), ("eagle1", {"steps": 3}), ("eagle3", {"feature_noise": 0.3})],
)
def test_noise_does_not_depend_on_how_a_batch_is_cut(tiny, name, options):
    """In training, noise included: rows one by one, padded and in another order give the same."""
    head = create(tiny, name, draft_vocab_size=120, **options).train()
    tokens, reply = random_rows(torch.Generator().manual_seed(5), rows=3)
    whole = make_batch(tiny, head, tokens, reply)
    names = ("tokens", "reply", "aux", "last", "argmax")

    def loss(rows, padding=0):
        torch.manual_seed(77)
        values = []
        for name in names:
            value = getattr(whole, name)
            if value is not None:
                value = value[rows]
                more = value.new_zeros(len(value), padding, *value.shape[2:])
                value = torch.cat([value, more], dim=1)
            values.append(value)
        return head.objective(Batch(*values)).loss.detach()

    expected = loss([0, 1, 2])
    torch.testing.assert_close(loss([2, 0, 1], padding=5), expected)
    torch.testing.assert_close(loss([0]) + loss([1]) + loss([2], padding=3), expected)
    torch.manual_seed(78)
    assert not torch.allclose(head.objective(whole).loss, expected)
    assert not torch.allclose(head.eval().objective(whole).loss, expected)


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
