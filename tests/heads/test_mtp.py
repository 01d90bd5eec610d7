"""Multi-token prediction, sequential and parallel: alignment, loss and supervision by slow code."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create, wild
from tiny_models import SIZES, make_batch, random_rows
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch, counted
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.mtp_module import LayerBuilder, LayerKind, MtpModule, check_layer

DEEPSEEK = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"num_key_value_heads": 4, "num_nextn_predict_layers": 0},
}
ARCHITECTURES = {
    "qwen3": SIZES,
    # Every other layer looks at a window; logits and attention are capped.
    "gemma2": SIZES | {"sliding_window": 6, "final_logit_softcapping": 4.0},
    # Kinds of layers with rotary bases of their own, embeddings that are scaled.
    "gemma3_text": SIZES | {"sliding_window": 6, "rope_local_base_freq": 500.0},
    # Nothing but windows.
    "mistral": SIZES | {"sliding_window": 6},
    # Latent attention, experts.
    "deepseek_v3": DEEPSEEK,
}
VARIANTS = {
    "parallel": ("mtp-parallel", {}),
    "chain": ("mtp-sequential", {}),
    "chain after norm": ("mtp-sequential", {"pass_on": "after_norm"}),
    "recurrent": ("mtp-sequential", {"shared": True}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(target, variant, *, steps=3, draft_vocab=120, random=True, **more):
    name, options = VARIANTS[variant]
    options = {"steps": steps, "draft_vocab_size": draft_vocab} | options | more
    return create(target, name, random=random, **options)


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
        torch.testing.assert_close(objective.loss[unrolled.step], by_hand)


def test_weights_follow_the_published_schedule(tiny):
    """λ/K for each step: 0.3, then 0.1; the parallel kind counts every head alike."""
    head = make(tiny, "chain", steps=2)
    assert head.weights(0.0) == head.weights(0.66) == [0.15, 0.15]
    assert head.weights(0.67) == head.weights(1.0) == [0.05, 0.05]
    head = make(tiny, "recurrent", steps=4, lambda_first=1.0, lambda_then=0.5, lambda_switch=0.5)
    assert head.weights(0.49) == [0.25] * 4
    assert head.weights(0.5) == [0.125] * 4
    assert make(tiny, "parallel", steps=2).weights(0.3) == [1.0, 1.0]


# ── the two faces ────────────────────────────────────────────────────────────


def require_both_faces(target, head, steps, rows):
    """Guesses in drafting equal those in training, for every anchor that counts."""
    tokens, reply = rows
    batch = make_batch(target, head, tokens, reply)
    taught = [(u.anchors, head.logits(u.hidden, u.step)) for u in head.unroll(batch, steps)]
    compared = 0
    for row, flat in enumerate(taught[0][0].tolist()):
        b, t = divmod(flat, tokens.shape[1])
        features = target.forward(tokens[b : b + 1])
        state = head.start(1, 64)
        logits = head.begin(state, tokens[b : b + 1], features[:, :-1], torch.tensor([t + 1]))
        for step in range(steps):
            if not counted(reply, step)[b, t]:
                break
            if step:
                fed = tokens[b, t + 1 + step].view(1, 1)
                logits = head.expand(state, fed, torch.zeros(1, 1, dtype=torch.int64))[:, 0]
            expected = taught[step][1][row]
            error = (logits[0] - expected).abs().max() / expected.abs().max()
            assert error < 1e-4, (b, t, step, float(error))
            compared += 1
    assert compared > 15


@pytest.fixture(scope="module")
def targets(tmp_path_factory, tokenizer):
    made = {}

    def target(name) -> Target:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **ARCHITECTURES[name])
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[name] = Target.load(str(folder), pack_weights=False)
        return made[name]

    return target


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@every_variant
@torch.no_grad()
def test_both_faces_agree_for_every_kind_of_layer(targets, architecture, variant):
    target = targets(architecture)
    head = make(target, variant)
    require_both_faces(target, head, 3, random_rows(torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("variant", ["chain", "chain after norm", "recurrent"])
@torch.no_grad()
def test_deep_and_wide_trees_draft_like_single_chains(tiny, variant):
    """Three levels of three nodes over unequal rows, one of them shorter than the tree is deep, and
    once more after unequal numbers of tokens were accepted."""
    head = make(tiny, variant, steps=4)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 380, (3, 20), generator=generator)
    features = tiny.forward(tokens)
    lengths = torch.tensor([1, 2, 9])
    state = head.start(3, 64)
    head.begin(state, tokens[:, :10], features[:, :9], lengths)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    # A row that pauses (0) goes on as if nothing had been.
    for accepted in torch.tensor([[1, 4, 2], [3, 0, 1], [2, 1, 3]]):
        index = lengths[:, None] + torch.arange(4)
        rows = torch.arange(3)[:, None]
        guess = head.extend(state, tokens[rows, index + 1], features[rows, index], accepted)
        lengths = lengths + accepted
        levels = [torch.randint(3, 380, (3, 3), generator=generator) for _ in range(3)]
        parents = [torch.zeros(3, 3, dtype=torch.int64)]
        parents += [torch.randint(0, 3, (3, 3), generator=generator) for _ in range(2)]
        got = [head.expand(state, *level) for level in zip(levels, parents, strict=True)]
        for row in range(3):
            if accepted[row] == 0:
                continue
            n = int(lengths[row])
            for node in range(3):
                path, at = [], node
                for depth in (2, 1, 0):
                    path.insert(0, at)
                    at = int(parents[depth][row, at])
                alone, one = head.start(1, 64), slice(row, row + 1)
                logits = head.begin(
                    alone, tokens[one, : n + 1], features[one, :n], torch.tensor([n])
                )
                torch.testing.assert_close(guess[row], logits[0], atol=1e-4, rtol=1e-4)
                for depth, at in enumerate(path):
                    logits = head.expand(alone, levels[depth][row, at].view(1, 1), zero)
                    torch.testing.assert_close(
                        got[depth][row, at], logits[0, 0], atol=1e-4, rtol=1e-4
                    )


@torch.no_grad()
def test_one_module_drafts_further_than_it_learnt(tiny):
    head = make(tiny, "recurrent", steps=2)
    assert head.longest_draft == 16
    assert make(tiny, "chain", steps=2).longest_draft == 2
    assert make(tiny, "parallel", steps=2).longest_draft == 2
    tokens = torch.full((2, 30), 7)
    reply = torch.ones_like(tokens)
    tokens[:, ::3] = torch.arange(20).view(2, 10) + 11
    require_both_faces(tiny, head, 9, (tokens, reply))


# ── where a head starts ──────────────────────────────────────────────────────


@every_variant
@torch.no_grad()
def test_the_layer_starts_in_the_residual_stream(tiny, variant):
    """What the first layer reads is the state before the target's final norm, up to each row's
    size; the chain's later modules keep the size."""
    streams = []
    hook = tiny.decoder.norm.register_forward_pre_hook(lambda _m, args: streams.append(args[0]))
    tokens = torch.randint(3, 380, (1, 30), generator=torch.Generator().manual_seed(7))
    last = tiny.forward(tokens).last
    hook.remove()
    head = make(tiny, variant, random=False)
    parts = list(head.heads if variant == "parallel" else head.chain)
    sizes = streams[0].pow(2).mean(-1, keepdim=True).sqrt()
    for index, part in enumerate(parts):
        normed = variant in ("parallel", "chain after norm") or index == 0
        got = part.hnorm(last if normed else streams[0])
        assert 0.7 < got.pow(2).mean().sqrt() / sizes.mean() < 1.4
        got = got / got.pow(2).mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(got, streams[0] / sizes, atol=1e-3, rtol=1e-3)


@every_variant
def test_start_is_the_target_s_last_layer(tiny, variant):
    head = make(tiny, variant, random=False)
    last = tiny.decoder.layers[-1].state_dict()
    parts = list(head.heads if variant == "parallel" else head.chain)
    assert len(parts) == (1 if variant == "recurrent" else 3)
    for part in parts:
        for name, value in part.layer.state_dict().items():
            assert value.equal(last[name]), name
        assert part.norm.weight.equal(tiny.decoder.norm.weight)
        assert all(value.requires_grad for value in part.parameters())
    if variant != "parallel":
        hidden = tiny.hidden_size
        assert parts[0].eh_proj.weight[:, hidden:].equal(torch.eye(hidden))
        assert 0 < parts[0].eh_proj.weight[:, :hidden].abs().max() < 0.2
    other = make(tiny, variant, random=False, init="random")
    part = next(iter(other.heads if variant == "parallel" else other.chain))
    assert not part.layer.mlp.up_proj.weight.equal(last["mlp.up_proj.weight"])


def test_norms_start_without_effect_also_where_weights_are_counted_from_one(targets):
    """Gemma stores weight − 1."""
    head = make(targets("gemma3_text"), "chain", random=False)
    x = torch.randn(4, 48)
    torch.testing.assert_close(
        head.chain[0].enorm(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    )


def test_the_layer_looks_everywhere_where_some_of_the_target_s_do(targets):
    """Gemma alternates windows and full attention; the last layer may be of either kind."""
    target = targets("gemma2")
    kinds = target.config.layer_types
    kind = LayerKind.of(target.config)
    assert kinds[kind.source] == "full_attention"
    assert "full_attention" not in kinds[kind.source + 1 :]
    assert LayerKind.of(targets("mistral").config).source == 3


def test_rotary_positions_stay_exact_in_a_lower_type(tiny):
    """Angles of far positions need more digits than bfloat16 has."""
    head = make(tiny, "chain").to(torch.bfloat16)
    positions = torch.tensor([[0, 1, 7, 500]])
    got = head._parts.rotary(torch.zeros(1), positions)
    expected = tiny.decoder.rotary_emb(torch.zeros(1), positions)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_all_tokens_need_no_copy_of_the_output_layer(tiny, whole):
    for target in (tiny, whole):
        weight, _ = make(target, "chain", draft_vocab=None).rows
        assert len(weight) == target.readout.usable
        assert weight.data_ptr() == target.readout.weight.data_ptr()


# ── refusals ─────────────────────────────────────────────────────────────────


def test_an_unknown_architecture_is_one_line():
    kind = LayerKind(model_type="no-such-model", source=0, config={})
    with pytest.raises(SpectrainError, match="no-such-model"):
        LayerBuilder(kind)


def test_a_layer_that_acts_differently_outside_its_model_is_refused(tiny):
    kind = LayerKind.of(tiny.config)
    changed = kind.config | {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}
    with pytest.raises(SpectrainError, match="inside and outside"):
        check_layer(LayerBuilder(kind.model_copy(update={"config": changed})), tiny)


def test_a_layer_that_needs_more_than_states_and_positions_is_refused(tiny, monkeypatch):
    layer = tiny.decoder.layers[-1]
    plain = layer.forward

    def forward(hidden, **more):
        if "use_cache" not in more:
            raise TypeError("forward() missing 1 required argument: 'per_layer_input'")
        return plain(hidden, **more)

    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(SpectrainError, match="per_layer_input"):
        make(tiny, "chain")


def test_options_that_do_not_exist_are_refused(tiny):
    for name, options in [("mtp-parallel", {"shared": True}), ("mtp-sequential", {"steps": 0})]:
        with pytest.raises(ValueError, match=r"shared|steps"):
            create(tiny, name, **options)


def test_modules_have_a_layer_of_the_cache_each(tiny):
    builder = LayerBuilder(LayerKind.of(tiny.config))
    modules = [wild(MtpModule(builder, index)) for index in range(3)]
    assert [module.layer.self_attn.layer_idx for module in modules] == [0, 1, 2]
