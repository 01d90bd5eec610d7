"""The small draft model is trained: alignment and loss by slow code and by hand."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create
from tiny_models import make_batch, random_rows
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch
from spectrain.heads import draft_model


def stock_of(head):
    """The library's own model with the head's weights and the library's own attention."""
    config = AutoConfig.for_model(**head.config.model)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    stock.get_decoder().load_state_dict(head.decoder.state_dict())
    if head.lm_head is not None:
        stock.get_output_embeddings().load_state_dict(head.lm_head.state_dict())
    return stock.eval()


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
    for chunk in (draft_model.CHUNK, rows * 384):
        monkeypatch.setattr(draft_model, "CHUNK", chunk)
        head = create(tiny, "draft", train_embeddings=True)
        batch = make_batch(tiny, head, tokens, reply)
        objective = head.objective(batch)
        objective.loss.sum().backward()
        results.append((objective, [p.grad for p in head.parameters()]))
    (one, grads), (two, other) = results
    assert one.hits.tolist() == two.hits.tolist()
    torch.testing.assert_close(one.loss, two.loss)
    torch.testing.assert_close(grads, other, atol=1e-4, rtol=1e-4)
