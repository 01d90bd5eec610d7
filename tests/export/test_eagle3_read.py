"""EAGLE-3 files of others: their spellings are read, and every known fault of such a file is a
finding, or a suspect that mends it.

D draft vocabulary, V the target's.
"""

from __future__ import annotations

import pytest
import torch
from eagle_files import (
    OTHERWISE,
    edit,
    export,
    failures,
    findings,
    head_of,
    mended,
    read,
    same,
    target_of,
)

from spectrain.core.errors import SpectrainError
from spectrain.export import aux_layers
from spectrain.export.eagle3 import Eagle3Reader
from spectrain.export.found import Found
from spectrain.export.parity import differences

# ── public files ─────────────────────────────────────────────────────────────


@pytest.fixture
def written(tmp_path):
    """A head and its export for vLLM, to be altered."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90)
    return head, export(head, target, "vllm", tmp_path / "out"), target


def rename(change):
    def apply(tensors):
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return apply


@pytest.mark.parametrize("change", [
    lambda n: n.replace("midlayer.", "layers.0."),
    lambda n: "model." + n,
    lambda n: n if n in ("d2t", "t2d", "lm_head.weight") else "model." + n,
    lambda n: "model." + n.replace("midlayer.", "layers.0."),
], ids=["layers.0", "model.", "model. of some", "both"])  # fmt: skip
def test_names_of_public_files(written, change):
    head, folder, target = written
    same(head, edit(folder, rename(change)), target)


def test_what_public_files_hold_besides(written):
    """Buffers of positions, maps of 32 bits, no t2d, the target's embedding: as good as ours."""
    head, folder, target = written

    def change(tensors):
        tensors["d2t"] = tensors["d2t"].int()
        del tensors["t2d"]
        tensors["embed_tokens.weight"] = target.readout.embedding.weight.detach().half()
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = head.rotary._table.inv_freq.half()

    same(head, edit(folder, change), target)
    texts = {one.check: one.text for one in findings(folder, target)}
    assert texts["embedding"] == "in the file, equal to the target's"
    # Offsets of an ascending map may stay the same from token to token, ids may not.
    assert texts["draft vocabulary"] == "no t2d to check d2t by"


def test_old_configs(written):
    """Only old rotary keys, no draft_vocab_size, no head_dim: as transformers 4 wrote them."""
    head, folder, target = written
    drop = ("rope_parameters", "head_dim", "draft_vocab_size", "norm_before_residual")
    same(head, edit(folder, drop=drop), target)


def test_maps_of_a_whole_vocabulary(tmp_path):
    """Zeros say that every draft id is its own; 0, 1, 2 … say twice that."""
    target = target_of(padded=0)
    head = head_of(target)
    folder = export(head, target, "eagle", tmp_path / "out")
    size = target.vocab_size
    edit(folder, lambda t: t.update(d2t=torch.zeros(size).long(), t2d=torch.ones(size).bool()))
    same(head, folder, target)
    edit(folder, lambda t: t.update(d2t=torch.arange(size)))
    assert "double every id" in failures(folder, target)


def test_a_head_of_another_width(tmp_path):
    """Wider than its target: with an embedding of its own, and `target_hidden_size`."""
    target, wide = target_of(), target_of(hidden_size=64, head_dim=16)
    twin = head_of(wide, draft_vocab_size=90, embeddings="own", aux_layers=(1, 3, 4))
    folder = export(twin, wide, "vllm", tmp_path / "out")
    columns = 3 * target.hidden_size
    edit(folder, lambda t: t.update({"fc.weight": t["fc.weight"][:, :columns].contiguous()}),
         {"target_hidden_size": target.hidden_size})  # fmt: skip
    head = read(folder, target)
    assert (head.config.hidden_size, head.config.target.hidden_size) == (64, 48)
    for format in ("vllm", "sglang", "trtllm"):  # no engine lends it an embedding
        same(head, export(head, target, format, tmp_path / format), target)
    edit(folder, lambda t: t.pop("embed_tokens.weight"))
    assert "has none of its own" in failures(folder, target)


# ── faults ───────────────────────────────────────────────────────────────────


def absolute(tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def put(name, make):
    """Replace one tensor."""
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(("change", "config", "says"), [
    (absolute, {}, "absolute target ids"),
    (lambda t: (absolute(t), t.pop("t2d")), {}, "absolute target ids"),
    (lambda t: t.pop("d2t"), {}, "no map d2t"),
    (put("d2t", lambda m: m.roll(1)), {}, "d2t"),
    (put("t2d", lambda m: m.roll(1)), {}, "do not describe the same"),
    (put("d2t", lambda m: m + 10_000), {}, "leads out"),
    (put("d2t", lambda m: m.float()), {}, "d2t is stored as F32"),
    (put("lm_head.weight", lambda m: m.long()), {}, "lm_head.weight is stored as I64"),
    (put("lm_head.weight", lambda m: m[:-1]), {}, "lm_head.weight has shape"),
    (lambda t: t.pop("midlayer.hidden_norm.weight"), {}, "missing midlayer.hidden_norm.weight"),
    (lambda t: t.pop("fc.weight"), {}, "missing fc.weight"),
    (lambda t: t.update(extra=torch.ones(1)), {}, "unknown extra"),
    (lambda t: t.update({"fc.bias": torch.ones(48)}), {}, "unknown fc.bias"),
    (lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(48)}), {}, "unknown layers.0"),
    (None, {"num_hidden_layers": 2}, "missing layers.1.input_layernorm.weight"),
    (None, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    (None, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    (None, {"eagle_config": [1]}, "eagle_config is no JSON object"),
    *((None, {key: value}, f"{key} is ") for key, value in OTHERWISE.items()),
    (None, {"layer_types": ["sliding_attention"]}, "attend to the whole text"),
    (None, {"layer_types": "full_attention"}, "attend to the whole text"),
    (None, {"rope_theta": 0, "rope_parameters": None}, "with a base of 0"),
    (None, {"rope_theta": -5.0, "rope_parameters": None}, "with a base of -5.0"),
    (None, {"hidden_size": "48"}, "hidden_size is '48'"),
    (None, {"hidden_size": None}, "hidden_size is missing"),
    (None, {"hidden_size": -1}, "hidden_size is -1"),
    (None, {"head_dim": 2**15}, "expected"),
    (None, {"head_dim": 2**40}, "not a size"),
    (None, {"num_key_value_heads": 3}, "no multiple"),
    (None, {"vocab_size": 7}, "the target are (48, 392)"),
    (None, {"target_hidden_size": 64}, "the target are (48, 392)"),
    (None, {"draft_vocab_size": 10_000}, "lm_head.weight has shape"),
    (None, {"rms_norm_eps": "small"}, "rms_norm_eps"),
    (None, {"rope_theta": 500.0}, "say different things"),
    (None, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "say different things"),
    (None, {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1.0}}, "cannot be made"),
    (None, {"rope_scaling": [1]}, "cannot be made"),
    (None, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "only a part of each head"),
    (None, {aux_layers.KEY: [0, 3, 4]}, "names the embedding"),
    (None, {aux_layers.KEY: [2, 3, 9]}, "that a target of 8 lacks"),
    (None, {aux_layers.KEY: [4, 3, 2]}, "not ascending"),
    (None, {aux_layers.KEY: "234"}, "not a list"),
    (None, {aux_layers.KEY: [2, 4]}, "fc.weight has shape"),
    (None, {aux_layers.KEY: [2, 4, 5], aux_layers.COUNT: 4}, "is not the number of layers"),
    (None, {aux_layers.COUNT: 4}, "is not the number of layers that are read, 3"),
    (None, {"layer_types": ["sliding_attention"], "sliding_window": 511}, "whole text"),
])  # fmt: skip
def test_a_fault_is_found(written, change, config, says):
    """Each is refused in one line, before the head is made."""
    _, folder, target = written
    edit(folder, change, config)
    assert says in failures(folder, target)
    with pytest.raises(SpectrainError):
        read(folder, target)


@pytest.mark.parametrize("format", ["vllm", "eagle"])
def test_an_embedding_of_its_own_that_is_lost(tmp_path, format):
    """The target's would be read in its place, and drafts would be another head's."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90, embeddings="own")
    folder = export(head, target, format, tmp_path / "out")
    edit(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert "embed_tokens.weight is not in the file" in failures(folder, target)
    with pytest.raises(SpectrainError, match=r"embed_tokens\.weight is not in the file"):
        read(folder, target)


def test_positions_of_a_buffer_are_compared(written):
    """Old files hold the frequencies themselves; a config that has lost their base is found."""
    _, folder, target = written
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda t: t.update({name: 500.0 ** -(torch.arange(6) / 6)}))
    assert "is not what the config's rotary keys make" in failures(folder, target)


@pytest.mark.parametrize(("change", "config", "check", "says"), [
    (None, {"rope_theta": 500.0, "rope_parameters": None}, "rope", "not the rotary positions"),
    (None, {"tie_word_embeddings": True}, "lm_head", "embedding as lm_head"),
    (None, {"sliding_window": 64}, "config", "sliding_window is 64"),
    (None, {"architectures": ["EagleLlama4ForCausalLM"]}, "config", "not known to be a Llama's"),
    (None, {"max_position_embeddings": 256}, "config", "those of the target at 512"),
    (None, {"rms_norm_eps": 1e-3}, "config", "rms_norm_eps is 0.001"),
    (lambda t: t.update(d2t=torch.zeros(90).long(), t2d=torch.arange(392) < 90), {},
     "draft vocabulary", "all zeros"),
    (lambda t: t.update(d2t=torch.arange(90) // 2 * 2 + 3, t2d=None), {}, "draft vocabulary",
     "stop tokens"),
    (lambda t: t.update(d2t=torch.arange(90), t2d=None), {}, "draft vocabulary",
     "may hold absolute ids"),
    (None, {aux_layers.KEY: [2, 4, 5], "eagle_config": {aux_layers.KEY: [2, 4, 5]}},
     "auxiliary layers", "disagree"),
])  # fmt: skip
def test_a_doubt_is_a_warning(written, change, config, check, says):
    """It may be meant, so it is said and read all the same."""
    _, folder, target = written

    def apply(tensors):
        change(tensors)
        if tensors.get("t2d", 0) is None:
            del tensors["t2d"]

    edit(folder, apply if change else None, config)
    warned = [o for o in findings(folder, target) if o.verdict == "warn" and o.check == check]
    assert any(says in one.text for one in warned)
    read(folder, target)


@pytest.mark.parametrize("config", [
    {"sliding_window": 64, "use_sliding_window": False}, {"layer_types": ["full_attention"]},
    {"sliding_window": 512, "layer_types": ["sliding_attention"]}, {"sliding_window": 4096},
    {"architectures": ["Eagle3LlamaForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]},
    {"rms_norm_eps": 1e-5}, {"max_position_embeddings": 1024}, {"logit_scale": 1},
])  # fmt: skip
def test_what_good_heads_say(written, config):
    """Keys that come from the target's config and change nothing."""
    _, folder, target = written
    edit(folder, None, config)
    assert {one.verdict for one in findings(folder, target)} == {"ok"}


@pytest.mark.parametrize(("kind", "ids", "outputs", "verdict"), [
    ("llama", [1, 2, 6], (1, 2, 6), "note"),
    ("llama", [2, 3, 8], (1, 2, 7), "note"),  # the last can only be an input
    *((kind, [2, 4, 6], (1, 3, 5), "warn") for kind in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")),
    ("deepseek_v3", [1, 2, 6], (1, 2, 6), "warn"),  # after a first 1 they are outputs there as well
    ("deepseek_v3", [0, 2, 6], (0, 2, 6), "warn"),  # as an input, 0 would be the embedding
    ("minimax_m3_vl", None, (1, 3, 4), "warn"),
    ("llama", None, (1, 3, 4), "ok"),
])  # fmt: skip
def test_layer_ids_that_engines_take_for_different_layers(kind, ids, outputs, verdict):
    """What SGLang makes of ids depends on the target: said, with the key that leaves no doubt."""
    config = {} if ids is None else {"eagle_config": {aux_layers.KEY: ids}}
    found, seen = aux_layers.read(config, 8, kind)
    assert found == outputs
    assert seen[-1].verdict == verdict
    if verdict == "warn":
        plain = [i + 1 for i in outputs]
        assert f"at the top of config.json: {plain}" in seen[-1].fix
        assert aux_layers.read({aux_layers.KEY: plain}, 8, kind)[0] == outputs


def test_a_doubtful_layer_id_has_suspects_on_both_sides(written):
    """Behaviour decides between neighbours, so both are offered."""
    head, folder, target = written
    edit(folder, None, {"eagle_config": {aux_layers.KEY: [2, 4, 5]}})
    again = mended(Eagle3Reader(), folder, target, "one too high")
    assert differences(head, again, target) == []


def test_no_default_for_a_shallow_target(tiny, tmp_path):
    """A config that names no layers means none that fit, so ours always names them there."""
    head = head_of(tiny, draft_vocab_size=90)
    folder = export(head, tiny, "vllm", tmp_path / "out")
    same(head, folder, tiny)
    edit(folder, drop=(aux_layers.KEY, aux_layers.COUNT))
    assert "default does not fit a target of 4 layers" in failures(folder, tiny)


# ── suspects ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("change", "config", "name"), [
    (None, {aux_layers.KEY: [3, 5, 6]}, "one too high"),
    (None, {aux_layers.KEY: [1, 3, 4]}, "one too low"),
    (absolute, {}, "absolute"),
    (put("fc.weight", lambda m: torch.cat(m.chunk(3, 1)[::-1], 1)), {}, "high to low"),
    (lambda t: [t.update({n: torch.cat(m.chunk(2, 1)[::-1], 1)})
                for n, m in t.items() if n[-13:] in ("q_proj.weight", "k_proj.weight",
                                                     "v_proj.weight")], {}, "q, k and v"),
    (None, {"rope_theta": 500.0, "rope_parameters": None}, "rotary"),
])  # fmt: skip
def test_a_suspect_mends_what_it_names(written, change, config, name):
    """Each common mistake, planted and undone, gives the head that was exported."""
    head, folder, target = written
    edit(folder, change, config)
    again = mended(Eagle3Reader(), folder, target, name)
    assert differences(head, again, target) == []


def test_a_healthy_file_has_no_absolute_suspect(written):
    """Where undoing a mistake leads nowhere it is not offered."""
    _, folder, target = written
    names = [one.name for one in Eagle3Reader().suspects(Found.open(folder), target)]
    assert len(names) == 4
    assert not any("absolute" in one or "rotary" in one for one in names)
