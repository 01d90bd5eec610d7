"""The second stage of `prepare`: everything that is asked, a round for each assistant turn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from spectrain.core.files import free_bytes
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.core.team import Team
from spectrain.data.fates import Fates
from spectrain.data.questions import Backend, Unit
from spectrain.data.replies import ReplyFolder, plan_units
from spectrain.data.rows import RowRules, ask_round, questions_of
from spectrain.data.shard import bytes_needed
from spectrain.data.spool import Spool
from spectrain.data.writer import REPLIES, StoreWriter
from spectrain.recipes.prepare_config import PrepareConfig
from spectrain.recipes.prepare_report import Work


def answer(
    config: PrepareConfig,
    team: Team,
    target: Target,
    backend: Backend,
    spool: Spool,
    writer: StoreWriter,
    rules: RowRules,
    work: Work,
    fates: Fates,
) -> None:
    """Ask what has to be asked, a round for each assistant turn; the replies are in the spool."""
    folder = ReplyFolder(config.store / REPLIES)
    keys: set[str] = set()
    turn = 0
    while True:
        if team.main:
            ask_round(spool, turn, target.tokenizer, rules, fates)
        team.wait()
        if not spool.asked():
            break
        if team.main and not turn:
            _require_room(config, target, writer, spool)
        _ask_units(config, team, backend, spool, folder, turn, work)
        team.wait()
        if team.main:
            with spool.writing():
                for unit in _units(config, backend, spool):
                    keys.add(unit.key)
                    replies = folder.load(unit)
                    assert replies is not None, "every unit has just been answered"
                    for question, reply in zip(unit.questions, replies, strict=True):
                        spool.take(question.place, reply)
        turn += 1
    if team.main:
        folder.prune(keys)


def _require_room(config: PrepareConfig, target: Target, writer: StoreWriter, spool: Spool) -> None:
    """Before hours of answering: the prompts alone have to fit on the disk; a store that might not
    fit is told of."""
    replies, prompts = spool.asked(), spool.prompt_tokens()
    longest = replies * config.max_new_tokens
    sizes = [
        bytes_needed(
            prompts + tokens,
            tokens,
            replies,
            target.hidden_size,
            len(writer.settings["aux_layers"]),
            writer.dtype,
            config.keeps_last_everywhere,
            config.teacher_top,
        )
        for tokens in (0, longest)
    ]
    if config.features == "none":
        return
    writer.require_space(sizes[0])
    if sizes[1] > (free := free_bytes(config.store)):
        print(
            f"note: the store may take up to {sizes[1] / 1e6:,.0f} MB (replies of full length), "
            f"{free / 1e6:,.0f} MB are free",
            file=sys.stderr,
        )


def _units(config: PrepareConfig, backend: Backend, spool: Spool) -> Iterator[Unit]:
    return plan_units(questions_of(spool), config.reply_batch, backend.identity, config.seed)


def _ask_units(
    config: PrepareConfig,
    team: Team,
    backend: Backend,
    spool: Spool,
    folder: ReplyFolder,
    turn: int,
    work: Work,
) -> None:
    """Answer this process's units of a round that have no file yet."""
    label = "answer" if not turn else f"answer, turn {turn + 1}"
    with progress(spool.asked(), label, "replies") as bar:

        def waiting() -> Iterable[Unit]:
            for number, unit in enumerate(_units(config, backend, spool)):
                if not team.mine(number):
                    bar.skip(len(unit.questions))
                elif folder.has(unit):
                    work.kept_replies += len(unit.questions)
                    bar.skip(len(unit.questions))
                else:
                    yield unit

        for unit, replies in folder.ask(backend, waiting()):
            work.answered += sum(len(reply.tokens or ()) for reply in replies)
            bar.update(len(unit.questions))
