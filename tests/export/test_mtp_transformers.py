"""transformers' own MtpModel runs what is exported for it: same text, same logits, same acceptance.

Its generator keeps caches of its own, rolls tokens and throws away what was not accepted by code
that nobody here wrote; that it needs the same number of target forwards for the same text shows
that every draft was the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from head_kinds import create
from mtp_variants import ARCHITECTURES
from tiny_models import SIZES, make_batch, save_tiny
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from spectrain.core.target import Target
from spectrain.export.formats import writer
from spectrain.export.layout import Reference
from spectrain.export.write import write
from spectrain.generator.decode import complete
from spectrain.generator.speculate import Generator
from spectrain.heads.base import DraftHead

pytest.importorskip(
    "transformers", minversion="5.20", reason="transformers has MtpModel since 5.20"
)
from transformers.modeling_layers import MtpModel

NEW, PROMPTS = 40, 4
EXAONE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Of the first, the library knows that MTP layers may lie beside them; others are told by a line.
NATIVE = {"exaone_moe": EXAONE | {"sliding_window": 8}}
TOLD = {"llama": {}, "qwen3": SIZES, "deepseek_v3": ARCHITECTURES["deepseek_v3"]}
CASES = [("exaone_moe", 1), ("exaone_moe", 3), ("llama", 1), ("llama", 2), ("llama", 3)]
CASES += [("qwen3", 2), ("deepseek_v3", 2), ("gemma2", 2)]


@dataclass
class Case:
    target: Target
    head: DraftHead
    model: Any  # the library's, loaded from the export
    launch: str


def save(kind, folder, tokenizer):
    size = {"vocab_size": len(tokenizer)}  # rows of padding could be guessed by the library alone
    if kind == "llama":
        return save_tiny(folder, tokenizer, **size)
    torch.manual_seed(0)
    sizes = {**ARCHITECTURES, **NATIVE, **TOLD}[kind] | size
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 380, (6 + 3 * i,), generator=generator) for i in range(PROMPTS)]


@torch.enable_grad()  # whichever test asks first
def teach(target, steps):
    """A head that has learnt the first half of what the target says behind the test's prompts, so
    that its drafts are accepted there and are not further on."""
    head = create(target, "mtp-sequential", steps=steps, pass_on="after_norm", random=False)
    replies = complete(target, prompts(1), NEW // 2)
    texts = [
        torch.cat([p, torch.tensor(r.tokens)]) for p, r in zip(prompts(1), replies, strict=True)
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    reply = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], batch_first=True)
    batch = make_batch(target, head, tokens, reply)
    optimizer = torch.optim.AdamW(head.train().parameters(), lr=5e-3)
    for _ in range(25):
        objective = head.objective(batch)
        optimizer.zero_grad()
        (objective.loss / objective.count.clamp(min=1)).sum().backward()
        optimizer.step()
    return head.eval()


@pytest.fixture(scope="module")
def cases(tmp_path_factory, tokenizer):
    made = {}
    patterns = {}

    def case(kind, steps):
        if (kind, steps) in made:
            return made[kind, steps]
        root = tmp_path_factory.mktemp(kind)
        target = Target.load(str(save(kind, root / "target", tokenizer)), pack_weights=False)
        head = teach(target, steps)
        way, reference = writer("mtp-transformers", head.family), Reference(target, target.name)
        assert way.refusals(head, reference) == []
        (root / "out").mkdir()
        write(way.encode(head, reference), root / "out", files="link")
        config = AutoConfig.from_pretrained(root / "out")
        assert config.num_mtp_layers == steps
        known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        stock = patterns.setdefault(known, known._keys_to_ignore_on_load_unexpected)
        known._keys_to_ignore_on_load_unexpected = stock  # as before another case
        launch = way.launch(head, reference)[0]
        if kind not in NATIVE:
            (line,) = (x for x in launch.text.splitlines() if x.startswith(known.__name__))
            exec(line, {known.__name__: known})  # the card's own line
        model = AutoModelForCausalLM.from_pretrained(root / "out", dtype=torch.float32).eval()
        made[kind, steps] = Case(target, head, model, launch.text)
        return made[kind, steps]

    yield case
    for known, before in patterns.items():
        known._keys_to_ignore_on_load_unexpected = before


def counted(model, prompt, **how):
    """The library's greedy reply, and the forwards of the target behind the prefill."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        out = model.generate(prompt[None], do_sample=False, max_new_tokens=NEW, **how)
    finally:
        hook.remove()
    return out[0, len(prompt) :].tolist(), len(calls) - 1


@pytest.mark.parametrize(("kind", "steps"), CASES)
def test_same_text_by_the_same_number_of_forwards(cases, kind, steps):
    made = cases(kind, steps)
    generator = Generator(made.target, made.head)
    forwards = tokens = 0
    for prompt in prompts(1):
        plain, _ = counted(made.model, prompt)
        theirs, calls = counted(made.model, prompt, use_mtp=True)
        (ours,) = generator.generate([prompt], NEW)
        assert theirs == plain
        assert ours.tokens == plain
        assert ours.forwards == calls
        forwards, tokens = forwards + calls, tokens + ours.committed
    # Not every draft was accepted and not none, so that a wrong one would have been seen.
    assert 1.1 < tokens / forwards < 1 + 0.97 * steps


@pytest.mark.parametrize(("kind", "steps"), CASES)
@torch.no_grad()
def test_same_logits_at_every_step(cases, kind, steps):
    made = cases(kind, steps)
    theirs = MtpModel.from_pretrained(made.model).eval()
    theirs.config._attn_implementation = "eager"
    tokens = prompts(2)[-1][None]
    batch = make_batch(made.target, made.head, tokens, torch.ones_like(tokens))
    length = tokens.shape[1] - 1
    hidden = made.model.model(tokens).last_hidden_state[:, :-1]
    torch.testing.assert_close(hidden, batch.last[:, :-1], atol=1e-4, rtol=1e-4)
    for unrolled in made.head.unroll(batch, steps):
        rows = length - unrolled.step  # rows with a token to embed
        layer = theirs.layers[unrolled.step]
        positions = torch.arange(1 + unrolled.step, length + 1)[None]
        embedded = theirs.embed_tokens(tokens[:, 1 + unrolled.step :])
        more = {}
        if theirs.has_per_layer_rope:
            more["layer_type"] = theirs.config.layer_types[unrolled.step]
        hidden = layer(
            embedded,
            hidden[:, :rows],
            position_embeddings=theirs.rotary_emb(embedded, position_ids=positions, **more),
            attention_mask=torch.full((rows, rows), float("-inf")).triu(1)[None, None],
            position_ids=positions,
            cache=None,
        )
        expected = made.target.readout.cap(theirs._project_to_logits(hidden))[0, : rows - 1]
        ours = made.head.logits(unrolled.hidden, unrolled.step)[: rows - 1]
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_the_line_is_needed(cases):
    """Without it the library says that it finds no layers; were that to change, the line may go."""
    made = cases("llama", 1)
    kind = type(made.model)
    told = made.model._keys_to_ignore_on_load_unexpected
    assert f"{kind.__name__}._keys_to_ignore_on_load_unexpected" in made.launch
    made.model._keys_to_ignore_on_load_unexpected = []
    try:
        with pytest.raises(ValueError, match="MTP layer patterns"):
            MtpModel.get_mtp_weights_regex(made.model)
    finally:
        made.model._keys_to_ignore_on_load_unexpected = told
    assert "_keys_to_ignore" not in cases("exaone_moe", 1).launch


def test_a_window_that_the_library_would_not_keep(tmp_path, tokenizer):
    """Mistral's layers have one and its config no layer_types: drafts differ beyond it."""
    target = Target.load(str(save("mistral", tmp_path / "target", tokenizer)), pack_weights=False)
    head = create(target, "mtp-sequential", steps=1)
    (reason,) = writer("mtp-transformers", head.family).refusals(
        head, Reference(target, target.name)
    )
    assert "window of 6 tokens" in reason


def test_a_target_with_other_parts(tmp_path, tokenizer):
    """Starcoder2 has no rms_norm_eps, which MtpModel asks for."""
    folder, sizes = tmp_path / "target", {k: v for k, v in SIZES.items() if k != "head_dim"}
    config = AutoConfig.for_model("starcoder2", **sizes | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target = Target.load(str(folder), pack_weights=False)
    head = create(target, "mtp-sequential", steps=1)
    (reason,) = writer("mtp-transformers", head.family).refusals(
        head, Reference(target, target.name)
    )
    assert "MtpModel cannot be made" in reason
    assert "rms_norm_eps" in reason
