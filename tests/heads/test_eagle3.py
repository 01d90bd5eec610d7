"""EAGLE-3: alignment, loss and supervision by slow code; the two faces agree."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SIZES, make_batch, make_head, random_rows, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch, Features, counted
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.eagle3 import Eagle3Options
from spectrain.heads.io import load_head, save_head
from spectrain.heads.layers import Rotary
from spectrain.heads.losses import ROW_LOSSES
from spectrain.heads.scoring import Teacher
from spectrain.recipes import train

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


@pytest.mark.parametrize("layers", [(0, 2, 9), (-1, 2), (2, 1), (1, 1), (4,)])
def test_impossible_aux_layers_are_refused(tiny, layers):
    with pytest.raises(SpectrainError, match=r"aux_layers.*are not ascending layers of 0"):
        make_head(tiny, aux_layers=layers)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"aux_layers": []}, {"layers": 0}, {"loss": "kl"}])
def test_impossible_options_are_one_line(bad):
    (key,) = bad
    with pytest.raises(SpectrainError, match=f"head.{key}: .* refused") as caught:
        train._options(Eagle3Options, train.TrainConfig(head=bad))
    assert "\n" not in str(caught.value)


LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def test_names_are_those_of_the_published_layout(tiny):
    """One layer has the names every engine knows; more of them are added behind it."""
    one = {f"midlayer.{name}" for name in LAYER} | {"midlayer.hidden_norm.weight"}
    one |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert make_head(tiny).state_dict().keys() == one
    further = {f"layers.{i}.{name}" for i in (1, 2) for name in LAYER}
    assert make_head(tiny, layers=3).state_dict().keys() == one | further
    own = make_head(tiny, embeddings="own").state_dict()
    assert own.keys() == one | {"embed_tokens.weight"}
    assert own["embed_tokens.weight"].shape == (tiny.vocab_size, tiny.hidden_size)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_auxiliary_layers(tiny, count):
    """Whatever their number, a new head passes the highest one on."""
    layers = (0, 1, 2, 3)[-count:]
    head = make_head(tiny, wild=False, aux_layers=layers)
    assert head.needs.aux_layers == layers
    features = tiny.forward(torch.randint(3, 380, (1, 9)), aux_layers=layers)
    torch.testing.assert_close(head.read(features), features.aux[..., -tiny.hidden_size :])


@torch.no_grad()
def test_several_layers_start_as_the_target_s_last_ones(tiny):
    """Fed with a hidden state alone (no embedding), the stack computes what those layers do."""
    head = make_head(tiny, wild=False, layers=2, aux_layers=(1,))
    assert torch.equal(head.midlayer.mlp.up_proj.weight, tiny.decoder.layers[-2].mlp.up_proj.weight)
    for layer in head.stack:
        if layer is head.midlayer:
            layer.input_layernorm.weight.zero_()
    tokens = torch.randint(3, 380, (1, 9))
    features = tiny.forward(tokens, aux_layers=(1,))
    # The target's layers 2 and 3 over the output of layer 1 and the final norm are its last state.
    state = head.start(1, 16)
    head.begin(state, torch.cat([tokens, tokens[:, :1]], 1), features, torch.tensor([9]))
    torch.testing.assert_close(
        head.norm(state.hidden[:, 0]), features.last[:, -1], atol=1e-4, rtol=1e-4
    )


def test_own_embeddings_start_as_the_target_s(tiny):
    head = make_head(tiny, wild=False, embeddings="own")
    assert head.embed_tokens.weight.requires_grad
    ids = torch.tensor([[5, 391]])
    assert torch.equal(head.embed(ids), tiny.readout.embed(ids))
    assert head.embed_tokens.weight.data_ptr() != tiny.readout.embedding.weight.data_ptr()


def test_feature_noise_in_training_alone(tiny):
    """Uniform, in parts of each layer's own size at each position."""
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    head = make_head(tiny, feature_noise=0.5)
    batch = make_batch(tiny, head, tokens, reply)
    quiet = head.objective(batch).loss
    assert torch.equal(head.objective(batch).loss, quiet)
    torch.manual_seed(1)
    assert not torch.equal(head.train().objective(batch).loss, quiet)
    plain = make_head(tiny).train()
    assert torch.equal(plain.objective(batch).loss, quiet)

    aux = torch.ones(1, 50, 3 * 48)
    aux[..., 48:96] = -20.0
    reply = torch.ones(1, 50, dtype=torch.int64)
    row = Batch(reply, reply, aux, None, reply)
    noise = (head.disturb(Features(None, aux), row).aux - aux).unflatten(-1, (3, 48))
    for part, size in enumerate((1.0, 20.0, 1.0)):
        widest = 0.5 * size
        assert 0.99 * widest < noise[..., part, :].abs().max() <= widest * (1 + 1e-4)


def test_a_config_written_before_there_were_these_options_loads(tiny, tmp_path):
    head = make_head(tiny)
    save_head(head, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    for name in ("layers", "embeddings", "loss", "feature_noise"):
        del config[name]
    path.write_text(json.dumps(config))
    assert load_head(tmp_path / "head").config == head.config


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


def test_rotary_positions_stay_exact_in_a_lower_type():
    rotary = Rotary(64, 8192, {"rope_type": "default", "rope_theta": 10000.0})
    places = torch.tensor([5, 700, 8000])
    expected = rotary(places, torch.float32)
    got = rotary.to(torch.bfloat16)(places, torch.float32)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


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
