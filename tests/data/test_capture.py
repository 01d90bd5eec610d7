"""Capture: every row gets exactly what the stock model says about it, or is rejected aloud."""

import pytest
import torch
from fake_rows import random_row

from spectrain.core.batch import Features, predicting
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data.capture import batches, capture, check_logits


@pytest.fixture(scope="module")
def rows():
    return [random_row(seed, length)[0] for seed, length in enumerate((9, 40, 3, 17, 17, 25))]


LAYERS = (0, 1, 2)


def captured(target, rows, dtype=torch.float32, batch_tokens=60, **more):
    return dict(capture(target, rows, LAYERS, dtype, batch_tokens, **more))


def test_batches_hold_every_row_once_within_the_limit(rows):
    groups = batches(rows, 60)
    assert sorted(place for group in groups for place in group) == list(range(len(rows)))
    for group in groups:
        longest = max(len(rows[place].tokens) for place in group)
        assert len(group) == 1 or longest * len(group) <= 60
    assert max(map(len, batches(rows, 1))) == 1


def test_states_are_those_of_the_stock_model(tiny, rows):
    """Whatever a row is batched with: auxiliary states are outputs of the named layers (SPEC §5:
    output of layer i = hidden_states[i + 1]), lm_head(last) and the teacher facts are the stock
    logits' own."""
    found = captured(tiny, rows)
    assert sorted(found) == list(range(len(rows)))
    for place, row in enumerate(rows):
        states = found[place].states
        with torch.no_grad():
            stock = tiny.model(input_ids=row.tokens[None].long(), output_hidden_states=True)
        where = predicting(row.reply.long())
        aux = torch.cat([stock.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        logits = stock.logits[0][where]
        torch.testing.assert_close(states.aux, aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tiny.logits(states.last), logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(states.argmax.long(), logits.argmax(-1))
        best = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(states.logprob, best, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states.lognorm, logits.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 5])
def test_top_log_probabilities_are_those_of_a_plain_softmax(tiny, rows, top_k):
    """The k largest of log_softmax over the stock logits, likeliest first, to the rounding of
    float16 (2⁻¹¹ of the value); the first is the argmax."""
    for place, found in captured(tiny, rows, top_k=top_k).items():
        row, states = rows[place], found.states
        with torch.no_grad():
            logits = tiny.model(input_ids=row.tokens[None].long()).logits[0]
        plain = logits[predicting(row.reply.long())].log_softmax(-1)
        values, ids = plain.sort(descending=True)
        assert states.top_ids.dtype == torch.int32
        assert torch.equal(states.top_ids.long(), ids[:, :top_k])
        assert torch.equal(states.top_ids[:, 0], states.argmax)
        assert states.top_logprob.dtype == torch.float16
        torch.testing.assert_close(
            states.top_logprob.float(), values[:, :top_k], rtol=2**-11, atol=1e-4
        )
    assert captured(tiny, rows)[0].states.top_ids is None


def test_states_for_int8_stay_as_they_are_until_they_are_laid_out(tiny, rows):
    """Rounded once, to the group; not by way of another type."""
    found, exact = captured(tiny, rows, dtype=torch.int8), captured(tiny, rows)
    for place in exact:
        assert torch.equal(found[place].states.aux, exact[place].states.aux)
        assert torch.equal(found[place].states.last, exact[place].states.last)


def test_last_state_is_kept_on_predicting_rows_only(tiny, rows):
    for place, found in captured(tiny, rows).items():
        assert len(found.states.last) == rows[place].supervised
        assert len(found.states.aux) == len(rows[place].tokens)


def test_same_rows_same_bytes(tiny, rows):
    first, second = captured(tiny, rows), captured(tiny, rows)
    for place in first:
        assert torch.equal(first[place].states.aux, second[place].states.aux)
        assert torch.equal(first[place].states.lognorm, second[place].states.lognorm)


class Altered:
    """A target whose features are changed on the way out."""

    def __init__(self, target, change):
        self._target, self._change = target, change

    def __getattr__(self, name):
        return getattr(self._target, name)

    def forward(self, tokens, *, aux_layers=()):
        features = self._target.forward(tokens, aux_layers=aux_layers)
        return self._change(tokens, features)


def test_fewer_states_than_tokens_reject_the_row(tiny, rows):
    """Case 17: rows that are covered stay, the others come back with the reason."""

    def shorten(tokens, features):
        return Features(features.last[:, :20], features.aux[:, :20])

    found = captured(Altered(tiny, shorten), rows)
    reasons = [found[place].reason for place in range(len(rows))]
    short, long = None, "fewer-states-than-tokens"
    assert reasons == [short, long, short, short, short, long]
    assert all((f.states is None) == (f.reason is not None) for f in found.values())


def test_states_that_are_not_finite_reject_their_row_alone(tiny, rows):
    def poison(tokens, features):
        features.aux[(tokens[:, :9] == rows[0].tokens).all(1), 4, 7] = float("nan")
        return features

    with torch.inference_mode():
        found = captured(Altered(tiny, poison), rows)
    assert [found[place].reason for place in range(6)] == ["states-not-finite"] + [None] * 5


def test_states_that_do_not_fit_the_stored_type_reject_the_row(tiny, rows):
    """float16 ends at 65504; an infinite feature would poison training much later."""

    def enlarge(tokens, features):
        return Features(features.last, features.aux * 1e6)

    found = captured(Altered(tiny, enlarge), rows, dtype=torch.float16)
    assert {f.reason for f in found.values()} == {"states-not-finite"}
    found = captured(Altered(tiny, enlarge), rows, dtype=torch.bfloat16)
    assert {f.reason for f in found.values()} == {None}


def test_state_before_the_norm_is_refused(tiny, rows):
    """Case 18: the un-normed state has the right shape and trains without complaint."""
    check_logits(tiny, rows[1])

    def unnormed(tokens, features):
        last_layer = tiny.num_layers - 1
        return Features(tiny.forward(tokens, aux_layers=(last_layer,)).aux, features.aux)

    with pytest.raises(SpectrainError, match="and the model's own logits differ by"):
        check_logits(Altered(tiny, unnormed), rows[1])


def test_bfloat16_target(tiny_path, rows):
    """The check's tolerance knows the type; facts stay float32."""
    target = Target.load(str(tiny_path), dtype="bfloat16")
    check_logits(target, rows[1])
    found = captured(target, rows, dtype=torch.bfloat16)
    assert found[1].states.aux.dtype == torch.bfloat16
    assert found[1].states.lognorm.dtype == torch.float32


def test_packed_target(tiny_path, rows):
    """The default way to load a target on a CPU passes the check, too."""
    check_logits(Target.load(str(tiny_path)), rows[1])
