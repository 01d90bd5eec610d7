"""`spectrain prepare`: from prompts to a feature store, in stages that each go on where they were.

read → answer (the target's own replies) → tokenise → capture, shard by shard → store complete

The first process of a launch reads, tokenises and writes the manifest; answering and capturing are
shared by all, unit by unit and shard by shard.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from spectrain.core.errors import SpectrainError
from spectrain.core.progress import progress, say
from spectrain.core.target import Target
from spectrain.core.team import Team
from spectrain.data.capture import capture, check_logits
from spectrain.data.dates import date_printed, dated
from spectrain.data.fates import Fates
from spectrain.data.questions import Backend
from spectrain.data.reading import read_into
from spectrain.data.rows import RowRules, count_rows, no_rows, rows_of, source_hash
from spectrain.data.shard import Cutter, bytes_needed, key_of
from spectrain.data.spool import Spool
from spectrain.data.tokenise import rendering_hash, require_template
from spectrain.data.writer import StoreWriter, only_process
from spectrain.generator.answering import OwnTarget
from spectrain.recipes.prepare_answers import answer
from spectrain.recipes.prepare_config import SHIPPED_PROMPTS, PrepareConfig
from spectrain.recipes.prepare_estimate import estimate
from spectrain.recipes.prepare_report import Work, make_report, render
from spectrain.trainer.launch import start_all

__all__ = ["SHIPPED_PROMPTS", "PrepareConfig", "render", "run"]


def run(config: PrepareConfig) -> dict:
    """Make (or finish) the store and return the report; see `make_report` for its keys.

    Raises SpectrainError for input that cannot be used, RunFailed on a full disk. Whatever was
    finished before stays, and the same call goes on from there.
    """
    with dated(config.day):
        return _run(config)


def _run(config: PrepareConfig) -> dict:
    if config.dry_run:
        say(f"loading {config.target}")
        target = Target.load(config.target, dtype=config.target_dtype, device=config.device)
        return estimate(config, target, _rules(config, target), _aux_layers(config, target))
    start_all()
    team = Team(config.device)
    work, fates = Work(), Fates()
    try:
        with ExitStack() as held:
            if team.main:
                held.enter_context(only_process(config.store))
                spool = held.enter_context(Spool(config.store))
                with work.stage("read"):
                    sources = read_into(
                        spool,
                        config.prompts,
                        config.regenerate,
                        config.on_bad_row,
                        config.limit,
                        fates,
                    )
                    _require_some(len(spool), fates, config)
            with work.stage("load"):
                say(f"loading {config.target}")
                target = Target.load(config.target, dtype=config.target_dtype, device=team.device)
                rules = _rules(config, target)
                backend = _backend(config, target)
            if team.main:
                writer = _begin(config, target, backend, spool)
            team.wait()
            if not team.main:
                spool = held.enter_context(Spool(config.store, new=False))
                writer = StoreWriter.join(config.store)
            with work.stage("answer"):
                answer(config, team, target, backend, spool, writer, rules, work, fates)
            if team.main:
                with work.stage("tokenise"):
                    given = _tokenise(config, target, spool, rules, fates)
                    _require_some(spool.shards(), fates, config)
            team.wait()
            with work.stage("capture"):
                _capture(config, team, target, spool, writer, work)
                team.wait()
            if not team.main:
                return {}
            counts = _counts(writer, spool.shards(), fates)
            _require_some(sum(counts["rows"].values()), fates, config)
            manifest = writer.finish(spool.shards(), counts)
            facts = {
                "sources": [
                    {"path": source.path, "found": found, "used": used}
                    for source, found, used in zip(
                        config.prompts, sources, spool.sizes(len(sources), chosen=True), strict=True
                    )
                ],
                "given_heldout": given,
            }
            return make_report(config, manifest, work, fates, team.world, facts)
    finally:
        team.leave()


def _rules(config: PrepareConfig, target: Target) -> RowRules:
    longest = min(config.max_length - 1, target.max_length - config.max_new_tokens)
    if longest < 1:
        raise SpectrainError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt: the target reads "
            f"{target.max_length} tokens",
            where="--max-new-tokens",
            fix="ask for fewer",
        )
    return RowRules(
        temperatures=config.temperature,
        heldout_temperatures=config.heldout_temperatures,
        heldout=config.heldout,
        longest=longest,
        max_length=min(config.max_length, target.max_length),
        drop_length_stopped=config.length_stopped == "drop",
        drop_loops=config.loops == "drop",
        seed=config.seed,
    )


def _backend(config: PrepareConfig, target: Target) -> Backend:
    """Who answers: the target loaded here, or a server that has it."""
    if config.server is None:
        return OwnTarget(target, config.max_new_tokens, config.top_p)
    from spectrain.data.server import Server

    told = config.server.model_dump()
    return Server(
        **told | {"model": told["model"] or config.target},
        target=target.fingerprint,
        max_new_tokens=config.max_new_tokens,
        top_p=config.top_p,
        seed=config.seed,
    )


def _begin(config: PrepareConfig, target: Target, backend: Backend, spool: Spool) -> StoreWriter:
    conversations = (conversation for _, conversation in spool.conversations())
    facts = Counter()

    def told(conversations):
        for conversation in conversations:
            facts["talks"] += conversation.text is None
            facts["asked"] += not conversation.answered
            yield conversation

    source = source_hash(told(conversations))
    if facts["talks"]:
        require_template(target.tokenizer)
    settings = _settings(config, target, source, backend.identity if facts["asked"] else None)
    names = ", ".join(Path(source.path).name for source in config.prompts)
    about = {"target": target.name, "source": names}
    return StoreWriter.begin(config.store, settings, about, config.overwrite)


def _tokenise(
    config: PrepareConfig, target: Target, spool: Spool, rules: RowRules, fates: Fates
) -> int:
    """Put the rows into the spool; returns how many held-out rows have replies of somebody else."""
    cutter, given = Cutter(config.shard_tokens), 0
    with spool.writing(), progress(len(spool), "tokenise", "conversations") as bar:
        for place, conversation in spool.conversations():
            for row in rows_of(conversation, place, spool, target, rules, fates):
                spool.add_row(cutter.place(row), row)
                given += (
                    row.split == "heldout" and conversation.answered and conversation.text is None
                )
            bar.update(1)
    return given


def _capture(
    config: PrepareConfig, team: Team, target: Target, spool: Spool, writer: StoreWriter, work: Work
) -> None:
    """Make this process's shards that are not finished."""
    layers, everywhere = tuple(writer.settings["aux_layers"]), config.keeps_last_everywhere
    stored = config.features == "stored"
    hidden = target.hidden_size if stored else 0
    todo, size, tokens = {}, 0, 0
    for number in filter(team.mine, range(spool.shards())):
        work.shards += 1
        rows = spool.rows(number)
        key = key_of(rows)
        if writer.shard(number, key) is not None:
            work.kept_shards += 1
            continue
        todo[number] = key
        found = sum(len(row.tokens) for row in rows)
        tokens += found
        size += bytes_needed(
            found,
            sum(row.supervised for row in rows),
            len(rows),
            hidden,
            len(layers),
            writer.dtype,
            everywhere,
            config.teacher_top,
        )
    if not todo:
        return
    writer.require_space(size * team.world)
    if not stored:
        for number, key in todo.items():
            writer.write_shard(number, key, [(row, None) for row in spool.rows(number)])
        return
    check_logits(target, spool.rows(next(iter(todo)))[0])
    with progress(tokens, f"capture, {size / 1e6:,.0f} MB", "tokens") as bar:
        for number, key in todo.items():
            rows, dropped = spool.rows(number), Counter()
            states: dict[int, tuple] = {}
            for place, found in capture(
                target,
                rows,
                layers,
                writer.dtype,
                config.batch_tokens,
                everywhere,
                config.teacher_top,
            ):
                if found.states is None:
                    dropped[found.reason] += 1
                else:
                    states[place] = (found.row, found.states)
                bar.update(len(found.row.tokens))
            kept = [states[place] for place in sorted(states)]
            writer.write_shard(number, key, kept, dict(dropped))
    work.captured = tokens


def _counts(writer: StoreWriter, shards: int, fates: Fates) -> dict:
    """What the manifest tells of the rows, shard by shard; drops of the capture go to `fates`."""
    counts = no_rows()
    for number in range(shards):
        facts = writer.facts(number)
        count_rows(counts, facts["rows"])
        fates.update(facts["dropped"])
    return counts | {"dropped": dict(sorted(fates.items()))}


def _aux_layers(config: PrepareConfig, target: Target) -> tuple[int, ...]:
    if not config.keeps_aux:
        return ()
    layers = target.default_aux_layers() if config.aux_layers is None else config.aux_layers
    valid = all(0 <= layer < target.num_layers for layer in layers)
    if not valid or list(layers) != sorted(set(layers)):
        raise SpectrainError(
            f"auxiliary layers {list(layers)} are not ascending layers of 0 … "
            f"{target.num_layers - 1}",
            where="aux_layers",
            fix="leave it out for the target's default",
        )
    return tuple(layers)


def _settings(config: PrepareConfig, target: Target, source: str, backend: str | None) -> dict:
    """Everything that shapes the store; a store with other settings is never continued."""
    shaped_by = {
        "target": {"fingerprint": target.fingerprint, "dtype": str(target.dtype)},
        "template": rendering_hash(target.tokenizer),
        "source": source,
        "aux_layers": list(_aux_layers(config, target)),
    }
    if day := date_printed(target.tokenizer):
        shaped_by["template_date"] = day
    plain = ("max_length", "heldout", "dtype", "features", "length_stopped", "loops")
    plain += ("shard_tokens",)
    if config.features == "stored":
        plain += ("batch_tokens",)
        shaped_by["last_states"] = "everywhere" if config.keeps_last_everywhere else "replies"
        if config.teacher_top:
            plain += ("teacher_top",)
    # How replies are drawn matters only where the target is asked for one.
    if backend is not None:
        plain += ("temperature", "heldout_temperatures", "top_p", "max_new_tokens")
        plain += ("reply_batch", "seed")
        shaped_by["backend"] = backend
    return shaped_by | config.model_dump(mode="json", include=set(plain))


def _require_some(rows: int, fates: Fates, config: PrepareConfig) -> None:
    if not rows:
        raise SpectrainError(
            f"no row is left: {', '.join(f'{n} {reason}' for reason, n in sorted(fates.items()))}",
            where=", ".join(source.path for source in config.prompts),
            fix="mend the source or the settings that drop its rows",
        )
