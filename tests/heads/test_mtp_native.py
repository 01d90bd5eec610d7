"""MTP layers of checkpoints compute what their authors' code does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_layers
from mtp_checkpoints import LAYERS, H, native_head, qwen3_next_head, save_checkpoint
from tiny_models import make_batch
from transformers import AutoModelForCausalLM

from spectrain.core.batch import Batch

# ── the slow computation from raw tensors ────────────────────────────────────


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def causal(query, key, value, scale):
    """[T, heads, d] each → [T, heads · d]"""
    scores = torch.einsum("thd,shd->hts", query, key) * scale
    hidden = torch.ones(len(query), len(query)).triu(1).bool()
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value).flatten(1)


def angles(length, size, base=10000.0):
    return torch.arange(length)[:, None] * base ** (-torch.arange(0, size, 2) / size)


def feed(x, get, prefix):
    gate = F.silu(x @ get(f"{prefix}.gate_proj.weight").T)
    return (gate * (x @ get(f"{prefix}.up_proj.weight").T)) @ get(f"{prefix}.down_proj.weight").T


def slow_mimo(get, embedding, hidden):
    """Module over rows: embedding, hidden [T, H] → before the final norm [T, H]."""
    both = [
        rms(hidden, get("hidden_layernorm.weight")),
        rms(embedding, get("token_layernorm.weight")),
    ]
    x = torch.cat(both, -1) @ get("input_proj.weight").T
    normed, size = rms(x, get("input_layernorm.weight")), H // 4
    angle = angles(len(x), size)[:, None]

    def project(name):
        weight, bias = get(f"self_attn.{name}_proj.weight"), get(f"self_attn.{name}_proj.bias")
        return (normed @ weight.T + bias).view(len(x), -1, size)

    def turn(heads):
        a, b = heads.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    key, value = (t.repeat_interleave(2, 1) for t in (turn(project("k")), project("v")))
    out = causal(turn(project("q")), key, value, size**-0.5)
    x = x + out @ get("self_attn.o_proj.weight").T
    return x + feed(rms(x, get("post_attention_layernorm.weight")), get, "mlp")


def slow_deepseek(get, embedding, hidden):
    both = [rms(embedding, get("enorm.weight")), rms(hidden, get("hnorm.weight"))]
    x = torch.cat(both, -1) @ get("eh_proj.weight").T
    normed, length = rms(x, get("input_layernorm.weight")), len(x)
    angle = angles(length, 8)[:, None]

    def turn(heads):  # neighbouring pairs turn together
        a, b = heads[..., ::2], heads[..., 1::2]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    query = rms(normed @ get("self_attn.q_a_proj.weight").T, get("self_attn.q_a_layernorm.weight"))
    query = (query @ get("self_attn.q_b_proj.weight").T).view(length, 4, 24)
    query = torch.cat([query[..., :16], turn(query[..., 16:])], -1)
    latent = normed @ get("self_attn.kv_a_proj_with_mqa.weight").T
    turned = turn(latent[:, None, 16:]).expand(-1, 4, -1)
    latent = rms(latent[:, :16], get("self_attn.kv_a_layernorm.weight"))
    key_value = (latent @ get("self_attn.kv_b_proj.weight").T).view(length, 4, 28)
    key = torch.cat([key_value[..., :16], turned], -1)
    out = causal(query, key, key_value[..., 16:], 24**-0.5)
    x = x + out @ get("self_attn.o_proj.weight").T
    normed = rms(x, get("post_attention_layernorm.weight"))
    mixed = feed(normed, get, "mlp.shared_experts")
    score = (normed @ get("mlp.gate.weight").T).sigmoid()
    chosen = (score + get("mlp.gate.e_score_correction_bias")).topk(2).indices
    for row in range(length):
        weights = score[row, chosen[row]]
        weights = weights / weights.sum() * 2.5
        for weight, expert in zip(weights, chosen[row].tolist(), strict=True):
            expert_out = feed(normed[row : row + 1], get, f"mlp.experts.{expert}")[0]
            mixed[row] = mixed[row] + weight * expert_out
    return x + mixed


SLOW = {
    "deepseek_v3": (slow_deepseek, f"model.layers.{LAYERS}+", "shared_head.norm.weight"),
    "qwen2": (slow_mimo, "model.mtp_layers.0+", "final_layernorm.weight"),
}


@pytest.mark.parametrize("kind", SLOW)
@torch.no_grad()
def test_modules_say_what_the_raw_tensors_say(checkpoints, kind):
    target, _, tensors = checkpoints(kind)
    slow, start, final = SLOW[kind]
    head = native_head(target)
    assert head.config.steps == 2
    tokens = torch.randint(3, 380, (1, 14), generator=torch.Generator().manual_seed(2))
    batch = make_batch(target, head, tokens, torch.ones_like(tokens))
    taught = {u.step: head.logits(u.hidden, u.step) for u in head.unroll(batch, 2)}
    hidden = batch.last[0]
    first = int(start.split(".")[2][:-1])
    base = start.rsplit(".", 1)[0]
    for step in range(2):
        rows = 13 - step  # rows with a token to embed

        def get(name, step=step):
            return tensors[f"{base}.{first + step}.{name}"].float()

        embedding = target.readout.embed(tokens[0, 1 + step :])
        hidden = rms(slow(get, embedding, hidden[:rows]), get(final))
        expected = target.readout.logits(hidden)[:, :384]
        counted = 12 - step
        torch.testing.assert_close(taught[step][:counted], expected[:counted], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(
    not hasattr(transformers.modeling_layers, "MtpModel"), reason="transformers 5.20 brought it"
)
@torch.no_grad()
def test_transformers_own_runner_says_the_same(checkpoints):
    """It reads the layers by itself, and hands on the normed state."""
    target, folder, _ = checkpoints("deepseek_v3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # The class knows the number of the released model's MTP layer, 61.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.[{LAYERS}{LAYERS + 1}]\."]
    theirs = transformers.modeling_layers.MtpModel.from_pretrained(model).float().eval()
    head = native_head(target)
    tokens = torch.randint(3, 380, (1, 14), generator=torch.Generator().manual_seed(3))
    batch = make_batch(target, head, tokens, torch.ones_like(tokens))
    hidden = batch.last
    for unrolled in head.unroll(batch, 2):
        rows = 13 - unrolled.step
        layer = theirs.layers[unrolled.step]
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        hidden = layer(
            theirs.embed_tokens(tokens[:, 1 + unrolled.step :]),
            hidden[:, :rows],
            position_embeddings=theirs.rotary_emb(hidden, positions),
            attention_mask=mask,
            position_ids=positions,
            cache=None,
        )
        counted = 12 - unrolled.step
        expected = theirs._project_to_logits(hidden)[0, :counted, :384]
        ours = head.logits(unrolled.hidden, unrolled.step)[:counted]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_layer_of_qwen3_next(tmp_path, tokenizer):
    """Against the library's own decoder layer, filled by hand; norms are counted from one."""
    tensors = save_checkpoint(tmp_path / "model", tokenizer, "qwen3_next", count=1)
    head, model = qwen3_next_head(tmp_path / "model", tokenizer)
    model.set_attn_implementation("eager")
    plain = {name.removeprefix("mtp."): value.float() for name, value in tensors.items()}
    layer, start = model.model.layers[3], "layers.0."
    own = {name[len(start) :]: plain[name] for name in plain if name.startswith(start)}
    for kind in ("gate_proj", "up_proj", "down_proj"):
        experts = [own.pop(f"mlp.experts.{expert}.{kind}.weight") for expert in range(4)]
        own[f"mlp.experts.{kind}"] = torch.stack(experts)
    both = [own.pop("mlp.experts.gate_proj"), own.pop("mlp.experts.up_proj")]
    own["mlp.experts.gate_up_proj"] = torch.cat(both, dim=1)
    layer.load_state_dict(own, strict=True)

    tokens = torch.randint(3, 380, (1, 12), generator=torch.Generator().manual_seed(5))
    last, argmax = torch.randn(1, 12, H), torch.zeros_like(tokens)
    batch = Batch(tokens, torch.ones_like(tokens), None, last, argmax)
    unrolled = next(iter(head.unroll(batch, 1)))
    merged = torch.cat(
        [
            rms(
                model.get_input_embeddings()(tokens[:, 1:]),
                1 + plain["pre_fc_norm_embedding.weight"],
            ),
            rms(last[:, :-1], 1 + plain["pre_fc_norm_hidden.weight"]),
        ],
        dim=-1,
    )
    merged = merged @ plain["fc.weight"].T
    positions = torch.arange(11)[None]
    out = layer(
        merged,
        position_embeddings=model.model.rotary_emb(merged, positions),
        attention_mask=torch.full((11, 11), float("-inf")).triu(1)[None, None],
    )
    expected = model.lm_head(rms(out, 1 + plain["norm.weight"]))[0, :10]
    ours = head.logits(unrolled.hidden, 0)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
