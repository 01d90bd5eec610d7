"""The small draft model: alignment, loss by slow code, tokenizers, sizes, where it may start."""

from __future__ import annotations

import copy
import math
import types
from pathlib import Path

import pytest
import torch
from head_kinds import create
from safetensors.torch import load_file
from tiny_models import SIZES, make_batch, make_tokenizer, random_rows, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch, counted
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads import draft_init, draft_model
from spectrain.heads.draft_config import DraftOptions
from spectrain.heads.draft_model import DraftModelHead
from spectrain.heads.io import load_head, save_head
from spectrain.heads.tokenizers import first_difference


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 380, (n,), generator=generator) for n in (1, 5, 17, 30, 9, 2)]


@pytest.fixture(params=["tied, padded rows", "untied"])
def target(request, tiny, whole):
    return tiny if request.param.startswith("tied") else whole


def folder_of(tmp_path, tokenizer, name="draft", **changes):
    """A one-layer model in the layout of transformers, of other sizes than the targets'."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 40} | changes
    return save_tiny(tmp_path / name, tokenizer, **sizes)


def stock_of(head):
    """The library's own model with the head's weights and the library's own attention."""
    config = AutoConfig.for_model(**head.config.model)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    stock.get_decoder().load_state_dict(head.decoder.state_dict())
    if head.lm_head is not None:
        stock.get_output_embeddings().load_state_dict(head.lm_head.state_dict())
    return stock.eval()


# ── training face ────────────────────────────────────────────────────────────


def slow_objective(head, stock, readout, batch: Batch):
    """Position by position: each reply's second to last token, guessed from the text before it."""
    size, total = head.config.draft_vocab_size, torch.zeros(())
    count = hits = seen = 0
    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        for place in range(2, len(tokens)):
            known = [place - 1, place]
            if reply[place] == 0 or any(reply[i] != reply[place] for i in known):
                continue
            logits = stock(torch.tensor([tokens[:place]])).logits[0, -1, :size]
            teacher = readout.weight @ batch.last[b, place - 1]
            best = int(teacher.argmax())
            seen += 1
            hits += int(logits.argmax()) == best
            if best >= size:
                continue
            count += 1
            p, q = teacher[:size].softmax(0), logits.softmax(0)
            if head.config.loss == "kl":
                total = total + (p * (p.log() - q.log())).sum()
            else:
                total = total + 1 - torch.minimum(p, q).sum()
    return total, count, hits, seen


@pytest.mark.parametrize("loss", ["kl", "tv"])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_objective_and_gradients_equal_the_slow_reference(target, loss, train_embeddings):
    head = create(target, "draft", layers=2, loss=loss, train_embeddings=train_embeddings)
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    batch = make_batch(target, head, tokens, reply)
    stock = stock_of(head)

    fast = head.objective(batch)
    fast.loss.sum().backward()
    total, count, hits, seen = slow_objective(head, stock, target.readout, batch)
    total.backward()
    assert fast.count.tolist() == [count] == head.counts(batch).tolist()
    assert (fast.hits.tolist(), fast.seen.tolist()) == ([hits], [seen])
    assert count > 10
    torch.testing.assert_close(fast.loss[0], total, atol=1e-3, rtol=1e-4)
    expected = dict(stock.get_decoder().named_parameters(prefix="decoder"))
    expected |= dict(stock.get_output_embeddings().named_parameters(prefix="lm_head"))
    table = "decoder.embed_tokens.weight"
    for name, parameter in head.named_parameters():
        if not train_embeddings and name in (table, "lm_head.weight"):
            assert parameter.grad is None
            continue
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, atol=2e-4, rtol=2e-3, msg=lambda m, n=name: n + m
        )


def test_six_tokens_by_hand(whole):
    """x = p p | r r r r: row 2 reads x[2], the reply's first token, and guesses x[3], …

    position   0 1 2 3 4 5        reply 0 0 1 1 1 1
    anchors 1 2 3, drafted first from rows 2 3 4: x[3] x[4] x[5]; teacher rows 2 3 4
    step 1 of anchor 1 is step 0 of anchor 2
    """
    head = create(whole, "draft", layers=2)
    tokens, reply = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    batch = make_batch(whole, head, tokens, reply)
    assert head.counts(batch).tolist() == [3]
    assert head.weights(0.3) == [1.0]
    stock = stock_of(head)(tokens).logits[0]
    for unrolled in head.unroll(batch, 3):
        assert unrolled.anchors.tolist() == [1, 2, 3]
        logits = head.logits(unrolled.hidden, unrolled.step)
        for row, anchor in enumerate(range(1, 4 - unrolled.step)):
            torch.testing.assert_close(
                logits[row], stock[anchor + 1 + unrolled.step], atol=1e-4, rtol=1e-4
            )
    p = whole.logits(batch.last[0, 2:5]).softmax(-1)
    q = stock[2:5].softmax(-1)
    objective = head.objective(batch)
    torch.testing.assert_close(
        objective.loss, (p * (p / q).log()).sum()[None], atol=1e-4, rtol=1e-4
    )
    assert objective.hits.tolist() == [int((p.argmax(-1) == q.argmax(-1)).sum())]
    for position in (0, 1, 5):
        batch.last[0, position] += 10
    torch.testing.assert_close(head.objective(batch).loss, objective.loss, atol=0, rtol=0)
    batch.last[0, 4] += 10
    assert head.objective(batch).loss[0] != objective.loss[0]


def test_losses_are_zero_where_draft_and_target_agree(whole):
    """All of the target's layers are the target: nothing to learn, and every guess is a hit."""
    tokens, reply = random_rows(torch.Generator().manual_seed(3))
    for loss in ("kl", "tv"):
        head = create(whole, "draft", random=False, layers=4, loss=loss)
        objective = head.objective(make_batch(whole, head, tokens, reply))
        assert abs(objective.loss.item()) < 1e-3
        assert objective.hits.tolist() == objective.seen.tolist() != [0]


@pytest.mark.parametrize("rows", [1, 5])
def test_logits_in_pieces_change_nothing(tiny, monkeypatch, rows):
    """Memory is bounded by computing logits part by part, and again on the way back."""
    tokens, reply = random_rows(torch.Generator().manual_seed(4))
    results = []
    for chunk in (draft_model._CHUNK, rows * 384):
        monkeypatch.setattr(draft_model, "_CHUNK", chunk)
        head = create(tiny, "draft", train_embeddings=True)
        batch = make_batch(tiny, head, tokens, reply)
        objective = head.objective(batch)
        objective.loss.sum().backward()
        results.append((objective, [p.grad for p in head.parameters()]))
    (one, grads), (two, other) = results
    assert one.hits.tolist() == two.hits.tolist()
    torch.testing.assert_close(one.loss, two.loss)
    torch.testing.assert_close(grads, other, atol=1e-4, rtol=1e-4)


# ── drafting ─────────────────────────────────────────────────────────────────


def plain(target, prompts, new):
    return [c.tokens for c in Generator(target).generate(prompts, new)]


@pytest.mark.parametrize("together", [True, False])
def test_greedy_text_is_the_target_s(target, prompts, tmp_path, tokenizer, together):
    """With a draft of random weights, and with one that is right half of the time; in one batch of
    unequal rows and one by one."""
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    stranger = load_head(folder_of(tmp_path, tokenizer, vocab_size=384))
    stranger.check_target(target, "draft")
    near = create(target, "draft", random=False, layers=3)
    accepted = 0
    for head in (stranger.bind(target.readout), near):
        generator = Generator(target, head, 4)
        for group in groups:
            done = generator.generate(group, 24)
            assert [c.tokens for c in done] == plain(target, group, 24)
            accepted += sum(run * times for c in done for run, times in c.runs.items())
    assert accepted > 0


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_the_target_as_its_own_draft_is_always_right(whole, prompts, gamma):
    """τ is γ+1 up to the end of the reply: no forward commits less before the last."""
    head = load_head(whole.name)
    head.check_target(whole, "draft")
    head.bind(whole.readout)
    done = Generator(whole, head, gamma).generate(prompts, 25)
    assert [c.tokens for c in done] == plain(whole, prompts, 25)
    for completion in done:
        assert completion.forwards == math.ceil(completion.committed / (gamma + 1))
        short = [run for run, times in completion.runs.items() for _ in range(times) if run < gamma]
        assert len(short) <= 1


def test_sampled_text_from_its_own_draft_is_accepted(whole, prompts):
    head = load_head(whole.name)
    head.check_target(whole, "draft")
    head.bind(whole.readout)
    done = Generator(whole, head, 3).generate(prompts, 25, Sampling(temperature=0.8))
    assert sum(c.committed for c in done) / sum(c.forwards for c in done) > 3.5


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "opt"])
def test_other_architectures(tmp_path, tokenizer, kind):
    """Sliding windows, soft caps and scaled embeddings, learned positions: its own draft again."""
    sizes = {**SIZES, "vocab_size": 384, "sliding_window": 6, "initializer_range": 0.3}
    if kind == "opt":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 48}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = load_head(tmp_path)
    head.check_target(target, "draft")
    head.bind(target.readout)
    prompts = [torch.randint(3, 380, (n,)) for n in (4, 20)]
    done = Generator(target, head, 3).generate(prompts, 30)
    assert [c.tokens for c in done] == plain(target, prompts, 30)
    assert all(c.forwards == math.ceil(c.committed / 4) for c in done)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head").bind(target.readout)
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    batch = make_batch(target, head, tokens, reply)
    torch.testing.assert_close(again.objective(batch).loss, head.objective(batch).loss)


def test_positions_beyond_the_draft_s_own(tmp_path, tokenizer, tiny):
    """CASE 36: rotary positions go on; learned ones end, and that is said."""
    head = load_head(folder_of(tmp_path, tokenizer, max_position_embeddings=8))
    head.check_target(tiny, "draft")
    head.bind(tiny.readout)
    prompt = torch.randint(3, 380, (30,))
    done = Generator(tiny, head, 3).generate([prompt], 8)
    assert [c.tokens for c in done] == plain(tiny, [prompt], 8)

    config = AutoConfig.for_model(
        "opt", **{**SIZES, "max_position_embeddings": 16, "ffn_dim": 64, "word_embed_proj_dim": 48}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "learned")
    tokenizer.save_pretrained(tmp_path / "learned")
    head = load_head(tmp_path / "learned")
    head.check_target(tiny, "draft")
    head.bind(tiny.readout)
    with pytest.raises(SpectrainError, match="16 positions"):
        Generator(tiny, head, 3).generate([prompt], 8)
    tokens, reply = torch.randint(3, 380, (1, 17)), torch.ones(1, 17, dtype=torch.int64)
    with pytest.raises(SpectrainError, match="16 positions, 17 are needed"):
        head.objective(make_batch(tiny, head, tokens, reply))


# ── vocabularies ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("own", [384, 392, 400])
def test_tables_of_other_sizes(target, prompts, tmp_path, tokenizer, own):
    """Rows beyond the tokenizer may be as many as they like, and are never drafted."""
    head = load_head(folder_of(tmp_path, tokenizer, vocab_size=own))
    with torch.no_grad():
        head.decoder.get_input_embeddings().weight[384:] *= 100
    head.check_target(target, "draft")
    head.bind(target.readout)
    assert head.config.vocab_size == target.vocab_size
    assert head.config.draft_vocab_size == 384
    assert head.reduced == (target.vocab_size > 384)
    assert head.draft_ids.tolist() == list(range(384))
    done = Generator(target, head, 3).generate(prompts, 12)
    assert [c.tokens for c in done] == plain(target, prompts, 12)
    probabilities = torch.rand(2, 384)
    torch.testing.assert_close(head.spread(probabilities)[:, :384], probabilities)
    save_head(head, tmp_path / "saved")
    again = load_head(tmp_path / "saved")
    again.check_target(target, "saved")
    assert again.bind(target.readout).config == head.config


def words(tokenizer, change):
    """Its vocabulary with some ids put elsewhere or left out (None)."""
    content = {i: t for t, i in tokenizer.get_vocab().items()} | change
    ids = {token: i for i, token in content.items() if token is not None}
    return types.SimpleNamespace(get_vocab=lambda: ids)


def test_the_first_entry_that_differs_is_named(tokenizer):
    known = {i: t for t, i in tokenizer.get_vocab().items()}
    assert first_difference(tokenizer, make_tokenizer()) is None
    cases = {
        f"id 17: the draft has {known[17]!r}, the target 'abd'": {17: "abd", 99: "x"},
        f"id 383: the draft has {known[383]!r}, the target nothing": {383: None},
        "id 384: the draft has nothing, the target 'more'": {384: "more"},
    }
    for message, change in cases.items():
        assert first_difference(tokenizer, words(tokenizer, change)) == message


def test_another_end_of_reply_is_no_obstacle(tiny):
    """A base model and its chat version share ids and end replies differently."""
    other = copy.deepcopy(tiny.tokenizer)
    other.eos_token = "<|endoftext|>"
    assert other.eos_token_id != tiny.tokenizer.eos_token_id
    assert first_difference(other, tiny.tokenizer) is None


def test_another_tokenizer_is_refused(tmp_path, tiny, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    folder = folder_of(tmp_path, other)
    head = load_head(folder)
    with pytest.raises(SpectrainError, match=r"^here: .*id 384: the draft has '<new>'"):
        head.check_target(tiny, "here")
    with pytest.raises(SpectrainError, match=f"{folder}: .*id 384"):
        create(tiny, "draft", model=str(folder))
    with pytest.raises(SpectrainError, match="385 tokens, the target one of 384"):
        head.bind(tiny.readout)


# ── files, and what a draft starts from ──────────────────────────────────────


def test_a_folder_of_transformers_is_a_head(tmp_path, tokenizer, tiny, whole):
    """For every target with its tokenizer; once saved with one, it is that target's."""
    folder = folder_of(tmp_path, tokenizer)
    head = load_head(folder)
    assert isinstance(head, DraftModelHead)
    assert not head.training
    for target in (whole, tiny):
        head.check_target(target, "draft")
        head.bind(target.readout)
    save_head(head, tmp_path / "saved")
    again = load_head(tmp_path / "saved")
    again.check_target(tiny, "saved")
    with pytest.raises(SpectrainError, match="trained for"):
        again.check_target(whole, "saved")


def test_the_file_holds_each_tensor_once(target, tmp_path):
    """Tied tables are one tensor under one name; nothing is missing, nothing is shared."""
    head = create(target, "draft", train_embeddings=True)
    save_head(head, tmp_path / "head")
    names = set(load_file(tmp_path / "head/model.safetensors"))
    tied = target.model.config.tie_word_embeddings
    assert ("lm_head.weight" in names) is not tied
    assert "decoder.embed_tokens.weight" in names
    again = load_head(tmp_path / "head")
    assert {n for n, p in again.named_parameters() if p.requires_grad} == names - {"d2t", "t2d"}
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_frozen_tables_are_copies(target):
    head = create(target, "draft", random=False)
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    tied = target.model.config.tie_word_embeddings
    assert frozen == {"decoder.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    own, theirs = head.decoder.get_input_embeddings().weight, target.readout.embedding.weight
    assert torch.equal(own, theirs)
    assert own.data_ptr() != theirs.data_ptr()


def test_a_draft_of_the_target_s_layers(whole):
    """Evenly chosen from first to last, with embedding, final norm and output layer."""
    assert draft_init.chosen_layers(9, 4) == [0, 2, 5, 8]
    assert draft_init.chosen_layers(30, 1) == [0]
    for total in range(1, 40):
        for count in range(1, total + 1):
            assert sorted(set(layers := draft_init.chosen_layers(total, count))) == layers
            assert layers[-1] == (total - 1 if count > 1 else 0)
    head = create(whole, "draft", random=False, layers=2)
    assert head.decoder.config.num_hidden_layers == len(head.decoder.layers) == 2
    for own, theirs in zip(head.decoder.layers, (0, 3), strict=True):
        expected = whole.decoder.layers[theirs].state_dict()
        for name, value in own.state_dict().items():
            assert torch.equal(value, expected[name])
    assert torch.equal(head.decoder.norm.weight, whole.decoder.norm.weight)
    tokens = torch.randint(3, 380, (2, 11))
    every = create(whole, "draft", random=False, layers=4)
    reply = torch.ones_like(tokens)
    (unrolled,) = every.unroll(make_batch(whole, every, tokens, reply), 1)
    rows = counted(reply, 0).flatten().nonzero().flatten() + 1
    expected = whole.logits(whole.forward(tokens).last).flatten(0, 1)[rows]
    torch.testing.assert_close(every.logits(unrolled.hidden, 0), expected)


def test_layers_of_two_kinds(tmp_path, tokenizer):
    """Facts that a config gives layer by layer follow the chosen layers."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **SIZES)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = create(target, "draft", random=False, layers=3)
    kinds = target.config.layer_types
    assert head.decoder.config.layer_types == [kinds[0], kinds[1], kinds[3]]


def test_a_model_to_start_from(tmp_path, tokenizer, tiny):
    folder = folder_of(tmp_path, tokenizer)
    head = create(tiny, "draft", random=False, model=str(folder), steps=3)
    assert head.config.steps == 3
    stock = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in stock.get_decoder().state_dict().items():
        assert torch.equal(head.decoder.state_dict()[name], value)
    with pytest.raises(SpectrainError, match=r"head\.model: .*nowhere"):
        create(tiny, "draft", model="./nowhere")


def test_impossible_options(tiny):
    with pytest.raises(SpectrainError, match=r"head\.layers: 5 is not between 1 and 4"):
        create(tiny, "draft", layers=5)
    with pytest.raises(ValueError, match="exclude each other"):
        DraftOptions(model="a", layers=2)


def test_a_target_that_cannot_be_cut_is_one_line(tiny, monkeypatch):
    strange = copy.copy(tiny)
    strange.decoder = copy.deepcopy(tiny.decoder)
    strange.decoder.layers[3].extra = torch.nn.Linear(2, 2)
    with pytest.raises(SpectrainError, match=r"cannot be cut .*extra.*head\.model") as caught:
        create(strange, "draft", layers=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no head here"),
        ("runs/nowhere", "not usable as a draft model: cannot load"),
        ("./runs/deep/nowhere", "no head here"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpectrainError, match=message) as caught:
        load_head(Path(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2-135m", "owner/name"])
def test_a_name_is_taken_for_a_model_where_there_is_no_such_folder(
    name, tmp_path, monkeypatch, tokenizer, tiny
):
    monkeypatch.chdir(tmp_path)
    asked = []
    real = Target.load
    folder = str(folder_of(tmp_path, tokenizer))
    monkeypatch.setattr(
        Target, "load", lambda asked_for, **more: asked.append(asked_for) or real(folder, **more)
    )
    assert load_head(Path(name)).family == "draft"
    assert asked == [name]
    save_head(create(tiny, "draft"), tmp_path / name)
    assert load_head(Path(name)).decoder.config.num_hidden_layers == 2
    assert asked == [name]


def test_a_config_that_cannot_be_built_is_one_line(tiny, tmp_path):
    head = create(tiny, "draft")
    head.config = head.config.model_copy(
        update={"model": head.config.model | {"model_type": "of the future"}}
    )
    save_head(head, tmp_path / "head")
    with pytest.raises(SpectrainError, match="cannot build the draft model") as caught:
        load_head(tmp_path / "head")
    assert "\n" not in str(caught.value)


def test_rotary_frequencies_keep_their_type(tiny):
    """In bfloat16 they would be off by whole turns after a few hundred positions."""
    head = create(tiny, "draft", random=False)
    before = head.decoder.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.decoder.norm.weight.dtype == torch.bfloat16
    assert torch.equal(head.decoder.rotary_emb.inv_freq, before)
