"""MTP layers of checkpoints: read as their authors wrote them, fine-tuned, put back."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_layers
from head_kinds import create
from preparing import PROMPTS, write
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, make_batch, random_rows
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch
from spectrain.core.errors import SpectrainError
from spectrain.core.readout import Readout
from spectrain.core.target import Target
from spectrain.heads.base import TargetFacts
from spectrain.heads.io import load_head, save_head
from spectrain.heads.mtp_checkpoint import INDEX, SINGLE, Checkpoint
from spectrain.heads.mtp_module import LayerKind
from spectrain.heads.mtp_native import Native, put_back
from spectrain.heads.mtp_sequential import MtpSequentialConfig, MtpSequentialHead
from spectrain.recipes import prepare, train

H, V, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_hidden_layers"]
WITHOUT_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
CONFIGS = {
    "deepseek_v3": WITHOUT_HEAD_DIM
    | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    | {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4, "num_nextn_predict_layers": 2},
    "qwen2": WITHOUT_HEAD_DIM,  # MiMo is a Qwen2 with MTP layers
    "qwen3_next": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def swiglu(prefix, width):
    return {
        f"{prefix}.gate_proj.weight": (width, H),
        f"{prefix}.up_proj.weight": (width, H),
        f"{prefix}.down_proj.weight": (H, width),
    }


def deepseek_shapes(index):
    start = f"model.layers.{LAYERS + index}"
    shapes = {
        "enorm.weight": (H,),
        "hnorm.weight": (H,),
        "eh_proj.weight": (H, 2 * H),
        "shared_head.norm.weight": (H,),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_a_proj.weight": (24, H),
        "self_attn.q_a_layernorm.weight": (24,),
        "self_attn.q_b_proj.weight": (4 * 24, 24),
        "self_attn.kv_a_proj_with_mqa.weight": (16 + 8, H),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (4 * (16 + 12), 16),
        "self_attn.o_proj.weight": (H, 4 * 12),
        "mlp.gate.weight": (4, H),
        "mlp.gate.e_score_correction_bias": (4,),
        **swiglu("mlp.shared_experts", 32),
    }
    for expert in range(4):
        shapes |= swiglu(f"mlp.experts.{expert}", 32)
    return {f"{start}.{name}": shape for name, shape in shapes.items()}


def mimo_shapes(index):
    size, shapes = H // 4, {}
    for name, rows in (("q", 4 * size), ("k", 2 * size), ("v", 2 * size)):
        shapes |= {f"self_attn.{name}_proj.weight": (rows, H)}
        shapes |= {f"self_attn.{name}_proj.bias": (rows,)}
    shapes |= {"self_attn.o_proj.weight": (H, 4 * size), "input_proj.weight": (H, 2 * H)}
    for norm in ("token", "hidden", "final", "input", "post_attention"):
        shapes[f"{norm}_layernorm.weight"] = (H,)
    shapes |= swiglu("mlp", SIZES["intermediate_size"])
    return {f"model.mtp_layers.{index}.{name}": shape for name, shape in shapes.items()}


def qwen_shapes(_index):
    shapes = {
        "mtp.fc.weight": (H, 2 * H),
        "mtp.norm.weight": (H,),
        "mtp.pre_fc_norm_embedding.weight": (H,),
        "mtp.pre_fc_norm_hidden.weight": (H,),
    }
    layer = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (2 * 4 * 16, H),  # queries and their gates
        "self_attn.k_proj.weight": (2 * 16, H),
        "self_attn.v_proj.weight": (2 * 16, H),
        "self_attn.o_proj.weight": (H, 4 * 16),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate.weight": (4, H),
        "mlp.shared_expert_gate.weight": (1, H),
        **swiglu("mlp.shared_expert", 32),
    }
    for expert in range(4):
        layer |= swiglu(f"mlp.experts.{expert}", 32)
    return shapes | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}


SHAPES = {"deepseek_v3": deepseek_shapes, "qwen2": mimo_shapes, "qwen3_next": qwen_shapes}


def save_checkpoint(folder, tokenizer, kind, *, count=2, sharded=False):
    """A tiny bfloat16 model with `count` random MTP layers, in one file or several."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for index in range(count):
        for name, shape in SHAPES[kind](index).items():
            value = torch.randn(shape, generator=generator) * 0.15
            tensors[name] = (value + 1 if "norm" in name else value).bfloat16()
        if kind == "deepseek_v3":
            start = f"model.layers.{LAYERS + index}"
            tensors[f"{start}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
            tensors[f"{start}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    if sharded:
        index = json.loads((folder / INDEX).read_text())
        assert len(set(index["weight_map"].values())) > 2
        names = sorted(tensors)
        for number, part in enumerate((names[::2], names[1::2])):  # over two files
            save_file(
                {name: tensors[name].clone() for name in part}, folder / f"m{number}.safetensors"
            )
            index["weight_map"] |= dict.fromkeys(part, f"m{number}.safetensors")
        (folder / INDEX).write_text(json.dumps(index))
    else:
        own = load_file(folder / SINGLE)
        save_file(own | {name: value.clone() for name, value in tensors.items()}, folder / SINGLE)
    return tensors


def load_all(folder):
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        result |= load_file(path)
    return result


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer):
    """kind → (target, folder, its MTP tensors)"""
    made = {}

    def checkpoint(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "model"
            tensors = save_checkpoint(folder, tokenizer, kind)
            target = Target.load(str(folder), dtype="float32", pack_weights=False)
            made[kind] = target, folder, tensors
        return made[kind]

    return checkpoint


def native_head(target, **options):
    return create(target, "mtp-sequential", random=False, native=True, **options)


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
    "deepseek_v3": (slow_deepseek, f"model.layers.{LAYERS}+", "shared_head.norm.weight", False),
    "qwen2": (slow_mimo, "model.mtp_layers.0+", "final_layernorm.weight", True),
}


@pytest.mark.parametrize("kind", SLOW)
@torch.no_grad()
def test_modules_say_what_the_raw_tensors_say(checkpoints, kind):
    target, _, tensors = checkpoints(kind)
    slow, start, final, normed = SLOW[kind]
    head = native_head(target)
    assert head.config.steps == 2
    assert head.config.pass_on == ("after_norm" if normed else "before_norm")
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
        hidden = slow(get, embedding, hidden[:rows])
        out = rms(hidden, get(final))
        expected = target.readout.logits(out)[:, :384]
        counted = 12 - step
        torch.testing.assert_close(taught[step][:counted], expected[:counted], atol=1e-4, rtol=1e-4)
        hidden = out if normed else hidden


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
    head = native_head(target, pass_on="after_norm")
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


# ── putting back ─────────────────────────────────────────────────────────────


def qwen3_next_head(folder, tokenizer):
    """Its linear-attention layers keep it from being a target; the MTP layer is an ordinary one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, readout = model.config, Readout.of(model, model.config, tokenizer)
    kind = LayerKind.of(config)
    assert config.layer_types[kind.source] == "full_attention"
    facts = TargetFacts(
        name="qwen", fingerprint="none", hidden_size=H, num_layers=LAYERS, vocab_size=V
    )
    head = MtpSequentialHead(
        MtpSequentialConfig(
            **{"steps": 1, "shared": False, "native": "qwen3-next", "pass_on": "after_norm"},
            **{"loss": "ce", "lambda_first": 0.3, "lambda_then": 0.1, "lambda_switch": 0.67},
            **{"vocab_size": V, "draft_vocab_size": V, "layer": kind, "target": facts},
        )
    )
    Native(folder, LAYERS).load(head.chain, readout)
    return head.bind(readout), model


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


# ── steps, and what is refused ───────────────────────────────────────────────


def test_a_single_layer_is_used_again_and_again(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "model", tokenizer, "qwen2", count=1)
    target = Target.load(str(tmp_path / "model"), dtype="float32", pack_weights=False)
    one = native_head(target)
    assert (one.config.steps, one.config.shared, one.longest_draft) == (1, False, 1)
    three = native_head(target, steps=3)
    assert (three.config.steps, three.config.shared, three.longest_draft) == (3, True, 16)
    assert len(three.chain) == 1


def test_more_steps_than_layers_and_fewer(checkpoints):
    target, _, _ = checkpoints("qwen2")
    with pytest.raises(SpectrainError, match="has 2 MTP layers"):
        native_head(target, steps=3)
    with pytest.raises(SpectrainError, match="has 2 MTP layers"):
        native_head(target, steps=2, shared=True)
    assert len(native_head(target, steps=1).chain) == 1


def test_a_checkpoint_without_mtp_layers_is_refused(tiny):
    with pytest.raises(SpectrainError, match="no MTP layers"):
        native_head(tiny)


def change(folder, edit):
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.4.hnorm.weight"), "missing model.layers.4.hnorm.weight"),
        (
            lambda t: t.pop("model.layers.5.mlp.experts.3.up_proj.weight"),
            "missing model.layers.5.mlp.experts.3.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.4.enorm.weight": torch.ones(47)}),
            r"enorm.weight has shape \(47,\), expected \(48,\)",
        ),
        (
            lambda t: t.update({"model.layers.4.self_attn.surprise": torch.ones(2)}),
            "unknown model.layers.4.self_attn.surprise",
        ),
        (
            lambda t: t["model.layers.4.embed_tokens.weight"].add_(1),
            "embed_tokens.weight is not the target's own embedding",
        ),
        (
            lambda t: t["model.layers.5.shared_head.head.weight"].add_(1),
            "head.weight is not the target's own output",
        ),
        (
            lambda t: t.update(
                {"model.layers.4.enorm.weight": torch.ones(48).to(torch.float8_e4m3fn)}
            ),
            "stored as F8_E4M3",
        ),
    ],
    ids=["missing", "expert", "shape", "unknown", "embedding", "output", "float8"],
)
def test_damaged_layers_are_one_clear_line(checkpoints, tmp_path, edit, message):
    target, folder, _ = checkpoints("deepseek_v3")
    shutil.copytree(folder, tmp_path / "model")
    change(tmp_path / "model", edit)
    native = Native(tmp_path / "model", target.num_layers)
    head = native_head(target)
    with pytest.raises(SpectrainError, match=message) as caught:
        native.load(head.chain, target.readout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.py"],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SpectrainError, match="not the name of a safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 3}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(SpectrainError):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path, keep):
    save_file({"a": torch.ones(100), "b": torch.ones(3)}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:keep])
    with pytest.raises(SpectrainError, match="not a whole safetensors file"):
        Checkpoint(tmp_path)


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
