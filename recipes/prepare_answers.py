"""The second stage of `prepare`: everything that is asked, a round for each assistant turn."""

from __future__ import annotations

from collections.abc import Iterator

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
    if team.main:
        spool.know(folder.read())
    turn = 0
    while True:
        known = 0
        if team.main:
            known = ask_round(spool, turn, target.tokenizer, rules, backend.identity, fates)
            work.kept_replies += known
        team.wait()
        if not spool.asked() and not spool.answered(turn):
            break
        if team.main and not turn:
            _require_room(config, target, writer, spool)
        _ask_units(config, team, backend, spool, folder, known, turn, work)
        team.wait()
        if team.main:
            spool.know(folder.read(unit.key for unit in _units(config, spool)))
            spool.end_round()
        turn += 1


def _require_room(config: PrepareConfig, target: Target, writer: StoreWriter, spool: Spool) -> None:
    """Before hours of answering: the first prompts alone have to fit on the disk. (All of it is
    checked before the capture; `--dry-run` tells how much it may be.)"""
    if config.features == "none":
        return
    writer.require_space(
        bytes_needed(
            spool.prompt_tokens(),
            0,
            spool.asked(),
            target.hidden_size,
            len(writer.settings["aux_layers"]),
            writer.dtype,
            config.keeps_last_everywhere,
            config.teacher_top,
        )
    )


def _units(config: PrepareConfig, spool: Spool) -> Iterator[Unit]:
    return plan_units(questions_of(spool), config.reply_batch)


def _ask_units(
    config: PrepareConfig,
    team: Team,
    backend: Backend,
    spool: Spool,
    folder: ReplyFolder,
    known: int,
    turn: int,
    work: Work,
) -> None:
    """Answer this process's units of a round."""
    label = "answer" if not turn else f"answer, turn {turn + 1}"
    with progress(known + spool.asked(), label, "replies", done=known) as bar:

        def mine() -> Iterator[Unit]:
            for number, unit in enumerate(_units(config, spool)):
                if team.mine(number):
                    yield unit
                else:
                    bar.skip(len(unit.questions))

        for unit, replies in folder.ask(backend, mine()):
            work.units += 1
            work.answered += sum(len(reply.tokens or ()) for reply in replies)
            bar.update(len(unit.questions))
