"""What holds for every draft head, whatever its family: see tests/head_kinds.py."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from head_kinds import KINDS, STEPS, create
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import documents, pack, require_same_sums
from tiny_models import make_batch, random_rows

from spectrain.core.batch import Batch, counted
from spectrain.heads.io import load_head, save_head
from spectrain.heads.registry import FAMILIES, kept_for
from spectrain.trainer.changes import digests, require_changes
from spectrain.trainer.loop import Data, train
from spectrain.trainer.settings import TrainerSettings

TENSORS = ("tokens", "reply", "aux", "last", "argmax")

every_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_family_is_under_test(tiny):
    assert {make(tiny, 120).family for make in KINDS.values()} == set(FAMILIES)


@every_kind
def test_what_a_family_says_it_reads_is_what_its_heads_need(tiny, kind):
    """So a store that keeps only `kept_for` a family serves every head of it."""
    head = KINDS[kind](tiny, 120)
    aux, last = kept_for(head.family)
    assert (aux, last == "everywhere") == (
        bool(head.needs.aux_layers),
        head.needs.last_everywhere,
    )


@pytest.fixture(params=["reduced", "all tokens", "identity"])
def pair(request, tiny, whole):
    """A target and the size of a draft vocabulary: a part; all tokens of a target with padded rows
    (a map); every row of the target (no map)."""
    return {"reduced": (tiny, 120), "all tokens": (tiny, 384), "identity": (whole, 384)}[
        request.param
    ]


@every_kind
@torch.no_grad()
def test_the_two_faces_agree(pair, kind):
    """CASE 23: step-k logits in training = logits when drafting from the same prefix, 1e-4."""
    target, draft_vocab = pair
    head = KINDS[kind](target, draft_vocab)
    generator = torch.Generator().manual_seed(3)
    steps = min(STEPS, head.longest_draft)
    compared = 0
    for _ in range(8):
        tokens, reply = random_rows(generator)
        batch = make_batch(target, head, tokens, reply)
        taught = [(u.anchors, head.logits(u.hidden, u.step)) for u in head.unroll(batch, steps)]
        live = [counted(reply, step) for step in range(steps)]
        for row, flat in enumerate(taught[0][0].tolist()):
            b, t = divmod(flat, tokens.shape[1])
            # Each anchor drafts from a state that has read its prefix in two uneven pieces.
            state = head.start(1, 64)
            cut = int(torch.randint(1, t + 2, (), generator=generator))
            features = target.forward(tokens[b : b + 1], aux_layers=head.needs.aux_layers)
            one = torch.tensor([cut])
            logits = head.begin(state, tokens[b : b + 1, : cut + 1], features[:, :cut], one)
            if cut < t + 1:
                # A draft that comes to nothing must leave no trace.
                if head.longest_draft > 1:
                    head.expand(state, torch.tensor([[7]]), torch.tensor([[0]]))
                rest = torch.tensor([t + 1 - cut])
                logits = head.extend(
                    state, tokens[b : b + 1, cut + 1 : t + 2], features[:, cut : t + 1], rest
                )
            for step in range(steps):
                if not live[step][b, t]:
                    break
                if step:
                    fed = tokens[b, t + 1 + step].view(1, 1)
                    logits = head.expand(state, fed, torch.tensor([[0]]))[:, 0]
                expected = taught[step][1][row]
                error = (logits[0] - expected).abs().max() / expected.abs().max()
                assert error < 1e-4, (b, t, step, float(error))
                compared += 1
    assert compared > 100


@every_kind
@torch.no_grad()
def test_unequal_rows_and_trees_draft_like_single_chains(tiny, kind):
    """A batch of rows of unequal length, each with a two-branch tree, equals row by row, branch by
    branch; also when the rows go on with unequal numbers of tokens."""
    head = KINDS[kind](tiny, 120)
    tokens = torch.randint(3, 380, (2, 16), generator=torch.Generator().manual_seed(4))
    features = tiny.forward(tokens, aux_layers=head.needs.aux_layers)
    first, more = torch.tensor([6, 9]), torch.tensor([3, 1])
    state = head.start(2, 40)
    head.begin(state, tokens[:, :11], features[:, :10], first)
    index = first[:, None] + torch.arange(4)
    rows = torch.arange(2)[:, None]
    guess = head.extend(state, tokens[rows, index + 1], features[rows, index], more)
    level1 = torch.tensor([[11, 12], [13, 14]])
    level2 = torch.tensor([[21, 22], [23, 24]])
    parents = torch.tensor([[1, 0], [0, 1]])
    deep = min(2, head.longest_draft - 1)
    if deep >= 1:
        one_level = head.expand(state, level1, torch.tensor([[0, 0], [0, 0]]))
    if deep >= 2:
        two_levels = head.expand(state, level2, parents)
    for row in range(2):
        n = int(first[row] + more[row])
        one, zero = slice(row, row + 1), torch.zeros(1, 1, dtype=torch.int64)
        for node in range(2):
            alone = head.start(1, 40)
            count = torch.tensor([n])
            got = head.begin(alone, tokens[one, : n + 1], features[one, :n], count)
            torch.testing.assert_close(guess[row], got[0], atol=1e-5, rtol=1e-4)
            parent = int(parents[row, node])
            if deep >= 1:
                got = head.expand(alone, level1[row, parent].view(1, 1), zero)
                torch.testing.assert_close(one_level[row, parent], got[0, 0], atol=1e-5, rtol=1e-4)
            if deep >= 2:
                got = head.expand(alone, level2[row, node].view(1, 1), zero)
                torch.testing.assert_close(two_levels[row, node], got[0, 0], atol=1e-5, rtol=1e-4)


@every_kind
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_padding_and_micro_batching_change_nothing(tiny, kind, seed, extra):
    """CASE 22: the same rows with more padding, or one by one, give the same sums."""
    head = KINDS[kind](tiny, 120)
    tokens, reply = random_rows(torch.Generator().manual_seed(seed))
    whole = make_batch(tiny, head, tokens, reply)

    def change(way) -> Batch:
        values = (getattr(whole, name) for name in TENSORS)
        return Batch(*(None if value is None else way(value) for value in values))

    def pad(value):
        return torch.cat([value, value.new_zeros(value.shape[0], extra, *value.shape[2:])], dim=1)

    padded = change(pad)
    rows = [change(lambda value, i=i: value[i : i + 1]) for i in range(2)]
    with torch.no_grad():
        full, more = head.objective(whole), head.objective(padded)
        parts = [head.objective(row) for row in rows]
    for name in ("loss", "count", "hits", "seen"):
        expected = getattr(full, name)
        torch.testing.assert_close(getattr(more, name), expected, atol=1e-3, rtol=1e-5)
        summed = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(summed, expected, atol=1e-3, rtol=1e-5)
    bare = Batch(whole.tokens, whole.reply, None, None, whole.argmax)
    assert head.counts(bare).tolist() == full.count.tolist()
    assert len(head.weights(0.5)) == len(full.loss)


@every_kind
@pytest.mark.parametrize("training", [False, True])
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_packing_changes_nothing(tiny, kind, training, seed):
    """CASE 22: conversations that share a row give the sums that they give one by one, whoever is
    beside them; in training, too, where some kinds add noise."""
    head = KINDS[kind](tiny, 120).train(training)
    require_same_sums(head, documents(tiny, head, seed))


@every_kind
@torch.no_grad()
def test_conversations_of_one_row_do_not_meet(tiny, kind):
    """Another conversation in the middle of a row: every logit of the others stays as it was."""
    head = KINDS[kind](tiny, 120)
    before, own, after = documents(tiny, head, 3, count=3)
    other = make_batch(tiny, head, (own.tokens + 5) % 380, own.reply)
    first, second = pack([[before, own, after]]), pack([[before, other, after]])
    begin = before.tokens.shape[1]
    steps, compared = min(STEPS, head.longest_draft), 0
    for one, two in zip(head.unroll(first, steps), head.unroll(second, steps), strict=True):
        place = one.anchors
        outside = (place < begin) | (place >= begin + own.tokens.shape[1])
        live = counted(first.reply, one.step).flatten()[place]
        left, right = (head.logits(u.hidden, u.step) for u in (one, two))
        assert torch.equal(left[live & outside], right[live & outside])
        assert not torch.equal(left[live], right[live])
        compared += int((live & outside).sum())
    assert compared > 10


@every_kind
def test_nothing_to_learn_is_a_zero_with_a_graph(tiny, kind):
    """CASE 21: a batch without replies gives zeros, finite gradients and no error."""
    head = KINDS[kind](tiny, 120)
    tokens = torch.randint(3, 380, (2, 9))
    objective = head.objective(make_batch(tiny, head, tokens, torch.zeros_like(tokens)))
    assert not objective.loss.any()
    assert not objective.seen.any()
    if objective.loss.requires_grad:
        objective.loss.sum().backward()
    for parameter in head.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@every_kind
def test_bf16_autocast(tiny, kind):
    head = KINDS[kind](tiny, 120)
    tokens, reply = random_rows(torch.Generator().manual_seed(6))
    batch = make_batch(tiny, head, tokens, reply)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = head.objective(batch)
    low.loss.sum().backward()
    full = head.objective(batch)
    torch.testing.assert_close(low.loss, full.loss, atol=0.5, rtol=0.05)
    assert low.loss.dtype == torch.float32
    assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())


@every_kind
@torch.no_grad()
def test_saved_and_loaded_strictly_it_says_the_same(tiny, kind, tmp_path):
    """CASE 32."""
    head = KINDS[kind](tiny, 120)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    again.check_target(tiny, "head")
    again.bind(tiny.readout)
    assert again.config == head.config
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    batch = make_batch(tiny, head, tokens, reply)
    steps = min(STEPS, head.longest_draft)
    for one, two in zip(head.unroll(batch, steps), again.unroll(batch, steps), strict=True):
        assert torch.equal(head.logits(one.hidden, one.step), again.logits(two.hidden, two.step))


@every_kind
def test_training_changes_what_is_trainable_and_nothing_else(tiny, kind, tmp_path):
    """CASE 34; and a second training from the same start ends in the same weights, bit for bit."""
    generator = torch.Generator().manual_seed(9)
    results = []
    corpus = [random_rows(generator) for _ in range(4)]
    for attempt in ("a", "b"):
        head = KINDS[kind](tiny, 120)
        batches = [make_batch(tiny, head, *rows) for rows in corpus]
        before, frozen = digests(head), digests_of(tiny)
        data = Data(
            lengths=[b.tokens.shape[1] for b in batches],
            supervised=[int((b.reply > 0).sum()) for b in batches],
            load=lambda places, batches=batches: batches[places[0][0]],
        )
        config = TrainerSettings(steps=4, batch_size=1, micro_batch=1, lr=1e-3)
        train(head, data, config, Accelerator(cpu=True), tmp_path / attempt, {"steps": 4})
        require_changes(head, before, str(tmp_path))
        assert digests_of(tiny) == frozen
        results.append(digests(head))
    assert results[0] == results[1]


def digests_of(target) -> list[float]:
    return [value.double().sum().item() for value in target.model.state_dict().values()]


@every_kind
@torch.no_grad()
def test_tokens_the_head_cannot_guess_are_rejections(tiny, kind):
    """What the target chose outside the draft vocabulary is in `seen` and never in `hits`."""
    head = KINDS[kind](tiny, 40)
    if not head.reduced:
        pytest.skip("this family guesses every token of the target")
    tokens, reply = random_rows(torch.Generator().manual_seed(5))
    batch = make_batch(tiny, head, tokens, reply)
    batch.argmax.fill_(int((~head.t2d).nonzero()[0]))
    objective = head.objective(batch)
    assert not objective.hits.any()
    assert objective.seen[0] == counted(reply, 0).sum() > 0


def test_created_heads_start_alike_for_one_seed(tiny):
    one, two = (create(tiny, "eagle3", random=False, steps=2) for _ in range(2))
    assert digests(one) == digests(two)
