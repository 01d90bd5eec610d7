"""Heads that go to the `speculators` package and come from it, run by that package's own code.

Rows of both are the same: row t reads the features at t and the embedding of x[t+1], step k goes on
with the row's own output and x[t+1+k]. Their attention wants a multiple of 128 rows.
"""

from __future__ import annotations

import pytest
import torch
from head_kinds import create, wild
from tiny_models import make_batch, save_tiny

from spectrain.core.target import Target
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.write import write

pytestmark = pytest.mark.interop

STEPS, ROWS = 4, 128
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name → (what is other in the target, what in the head)
CASES = {
    "reduced vocabulary": ({}, {"draft_vocab_size": 120}),
    "every token": ({"vocab_size": 384, "tie_word_embeddings": False}, {}),
    "llama3 rotary positions": ({"rope_parameters": LLAMA3}, {"draft_vocab_size": 90}),
    "heads of another size": (
        {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32},
        {"draft_vocab_size": 384},
    ),
    "two layers, other features": (
        {"num_key_value_heads": 1},
        {"draft_vocab_size": 120, "layers": 2, "aux_layers": (1, 3)},
    ),
    "an embedding of its own": ({}, {"draft_vocab_size": 120, "embeddings": "own"}),
}


@pytest.fixture
def case(request, tmp_path, tokenizer):
    changes, options = CASES[request.param]
    folder = save_tiny(tmp_path / "target", tokenizer, **changes)
    return Target.load(str(folder), pack_weights=False), options


def rows_of(target, head):
    """A text of one row more than is fed, and what the target says of it."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 380, (1, ROWS + 1), generator=generator)
    reply = torch.ones_like(tokens)
    reply[:, 0] = 0
    return make_batch(target, head, tokens, reply)


@torch.no_grad()
def our_logits(head, batch):
    """[T, D] for each step, NaN where a row has no text left."""
    for unrolled in head.unroll(batch, STEPS):
        logits = head.logits(unrolled.hidden, unrolled.step)
        full = torch.full((ROWS, logits.shape[-1]), torch.nan)
        known = unrolled.anchors + 1 + unrolled.step <= ROWS
        full[unrolled.anchors[known]] = logits[known]
        yield full


@torch.no_grad()
def their_logits(model, batch):
    said = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: said.append(out[0]))
    model(
        hidden_states=batch.aux[:, :-1],
        input_ids=batch.tokens[:, 1:],
        document_ids=torch.zeros(1, ROWS, dtype=torch.int64),
        ttt_steps=STEPS,
    )
    hook.remove()
    return said


def assert_same(head, model, target):
    batch = rows_of(target, head)
    pairs = list(zip(our_logits(head, batch), their_logits(model, batch), strict=True))
    assert len(pairs) == STEPS
    for step, (ours, theirs) in enumerate(pairs):
        known = ~ours.isnan().any(-1)
        # Every anchor (the last row has nothing to guess) whose tokens are all there.
        assert known.sum() == min(ROWS - 1, ROWS - step)
        torch.testing.assert_close(ours[known], theirs[known], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_their_package_runs_our_head(case, tmp_path):
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import PreTrainedModel

    target, options = case
    head = create(target, "eagle3", steps=STEPS, **options)
    folder = tmp_path / "out"
    folder.mkdir()
    write(writer("speculators", "eagle3").encode(head, Reference(target, target.name)), folder)

    # What the library tells of its loading, which the package's own method does not hand on.
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    bare = PreTrainedModel.from_pretrained.__func__
    _, info = bare(Eagle3DraftModel, str(folder), config=config, output_loading_info=True)
    assert not any(info.values()), info

    model = SpeculatorModel.from_pretrained(str(folder))
    assert model.config.eagle_aux_hidden_state_layer_ids == [n + 1 for n in head.needs.aux_layers]
    assert_same(head, model, target)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", list(CASES)[:3], indirect=True)
def test_we_run_a_head_of_their_package(case, norm, tmp_path):
    """Made, filled and saved by its own code; one with another norm is told from ours."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    target, options = case
    layer = AutoConfig.from_pretrained(target.name)
    layer.num_hidden_layers = 1
    layer.tie_word_embeddings = False
    size = options.get("draft_vocab_size", target.vocab_size)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=size,
        norm_before_residual=norm,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(target.name),
        ),
    )
    torch.manual_seed(5)
    model = Eagle3DraftModel(config)
    if size < target.vocab_size:
        ids = torch.randperm(target.vocab_size)[:size].sort().values
        known = torch.zeros(target.vocab_size, dtype=torch.bool)
        known[ids] = True
        model.load_vocab_mappings(known, ids - torch.arange(size))
    model.load_verifier_weights()
    wild(model.layers)
    model.save_pretrained(tmp_path / "theirs")

    found = Found.open(tmp_path / "theirs")
    reader = reader_of(found)
    assert reader.name == "speculators"
    failed = [one.text for one in reader.findings(found, target) if one.verdict == "fail"]
    if norm:
        assert len(failed) == 1
        assert failed[0].startswith("norm_before_residual")
        return
    assert failed == []
    head = load(reader, found, target)
    assert head.needs.aux_layers == (0, 1, 3)
    assert head.config.steps == STEPS
    assert_same(head, model.eval(), target)
