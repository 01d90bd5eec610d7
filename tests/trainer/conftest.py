"""A small corpus with real features, heads of the tiny target, and a run of the loop."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from packed_rows import pack

from spectrain.core.batch import Batch
from spectrain.trainer.loop import Data, train
from spectrain.trainer.metrics import read_metrics
from spectrain.trainer.settings import TrainerSettings

AUX_LAYERS = (0, 1, 2)


@pytest.fixture(scope="session")
def corpus(tiny) -> list[Batch]:
    """Twelve rows, each a batch of its own: a prompt of a few tokens, then the reply."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(12):
        length = 14 + 2 * (number * 5 % 12)
        tokens = torch.randint(3, 120, (1, length), generator=generator)
        reply = torch.zeros_like(tokens)
        reply[:, 3 + number % 3 :] = 1
        with torch.no_grad():
            features = tiny.forward(tokens, aux_layers=AUX_LAYERS)
            argmax = tiny.logits(features.last).argmax(-1)
        rows.append(Batch(tokens, reply, features.aux, features.last, argmax))
    return rows


@pytest.fixture
def make_data(corpus):
    """make_data(padding=0, before_load=None, rows=corpus, ahead=None) → Data; before_load(batch)
    sees each, and then nothing is read ahead by default: what it does happens in the step."""

    def make(padding=0, before_load=None, rows=corpus, ahead=None) -> Data:
        def load(places):
            batch = pack([[rows[i] for i in row] for row in places], padding)
            if all(len(row) == 1 for row in places):
                batch.starts = None
            if before_load:
                before_load(batch)
            return batch

        return Data(
            lengths=[row.tokens.shape[1] for row in rows],
            supervised=[int((row.reply > 0).sum()) for row in rows],
            load=load,
            ahead=before_load is None if ahead is None else ahead,
        )

    return make


@pytest.fixture
def make_head(tiny):
    """make_head(seed=0, **options) → an EAGLE-3 head that guesses 150 of the target's tokens."""
    from spectrain.heads.eagle3 import Eagle3Head, Eagle3Options

    def make(seed=0, **options):
        torch.manual_seed(seed)
        chosen = {"steps": 3, "draft_vocab_size": 150, "aux_layers": AUX_LAYERS} | options
        counts = torch.arange(tiny.vocab_size, 0, -1)
        return Eagle3Head.create(Eagle3Options(**chosen), tiny, counts)

    return make


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def fit(accelerator):
    """fit(head, data, run, extend=False, **settings) → (state, rows of metrics)."""

    def fit(head, data, run, extend=False, identity=None, **changes):
        settings = TrainerSettings(
            **{"steps": 6, "batch_size": 4, "log_every": 1, "save_every": 2} | changes
        )
        identity = identity or {"lr": settings.lr, "steps": settings.steps}
        state = train(head, data, settings, accelerator, run, identity, extend)
        return state, read_metrics(run)

    return fit
