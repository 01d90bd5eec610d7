"""`spectrain prepare`: from prompts to a feature store, in stages that each go on where they were.

read → answer (the target's own replies) → tokenise → capture, shard by shard → store complete
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from spectrain.core.config import Config, as_list
from spectrain.core.errors import SpectrainError
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.data.capture import capture, check_logits
from spectrain.data.conversations import Conversation, read_conversations
from spectrain.data.replies import Answer, Question, Sampling, answer, plan_units
from spectrain.data.rows import build_rows, count_rows, questions_for, source_hash
from spectrain.data.shard import DTYPES, Row, bytes_needed, key_of, plan_shards
from spectrain.data.tokenise import rendering, require_template
from spectrain.data.writer import REPLIES, StoreWriter
from spectrain.generator.decode import complete

SHIPPED_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
Temperatures = Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(as_list)]


class PrepareConfig(Config):
    """What `spectrain prepare` is told."""

    target: str = Field("smollm2-135m", description="name, folder or hub id of the target")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what the target computes in; auto: its own on a GPU, float32 on a CPU"
    )
    device: str = Field("auto", description="where the target runs: auto, cpu, cuda, cuda:1")
    prompts: Path = Field(
        SHIPPED_PROMPTS,
        description="JSONL of prompts, conversations or plain texts; default: the shipped prompts",
    )
    store: Path = Field(Path("runs/store"), description="folder of the feature store")
    limit: int | None = Field(
        None, ge=1, description="use this many conversations, the first in order of content hash"
    )
    max_length: int = Field(2048, ge=2, description="tokens at which a row is cut")
    heldout: float = Field(
        0.1, ge=0, le=1, description="fraction of the prompts kept for evaluation; 1: all"
    )
    regenerate: bool | Literal["auto"] = Field(
        "auto",
        description="true: the target answers every last user turn anew; false: given replies "
        "only; auto: it answers the conversations that do not end with a reply",
    )
    temperature: Temperatures = Field(
        (0.7,), description="every train prompt is answered once at each"
    )
    heldout_temperatures: Temperatures = Field(
        (0.0, 1.0), description="every held-out prompt is answered once at each"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of the replies, 1: everything")
    max_new_tokens: int = Field(256, ge=1, description="longest reply in tokens")
    reply_batch: int = Field(32, ge=1, description="prompts answered together, saved together")
    length_stopped: Literal["keep", "drop"] = Field(
        "keep", description="what to do with replies that were cut off by their length"
    )
    seed: int = Field(0, ge=0, description="of the sampled replies")
    features: Literal["stored", "none"] = Field(
        "stored",
        description="none: tokens and replies alone, a fraction of the disk; the target is then "
        "asked for its features while a head is trained or measured",
    )
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "bfloat16",
        description="what the features are stored in; int8 takes about half of bfloat16's disk and "
        "rounds them by 1 %",
    )
    aux_layers: tuple[int, ...] | None = Field(
        None, description="layers whose outputs are kept, from 0; default: the target's three"
    )
    last_states: Literal["everywhere", "replies"] = Field(
        "everywhere",
        description="where the last state is kept: everywhere serves every family, replies is "
        "enough for EAGLE-3 and Medusa and takes less disk",
    )
    teacher_top: int = Field(
        0,
        ge=0,
        le=256,
        description="log-probabilities of the target that are kept at each predicting position, "
        "the likeliest; for distillation from another tool, no head of ours reads them",
    )
    shard_tokens: int = Field(16384, ge=1, description="tokens of a shard; the unit of a rerun")
    batch_tokens: int = Field(4096, ge=1, description="padded tokens that the target reads at once")
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop", description="what to do at a line that is no conversation or text"
    )
    overwrite: bool = Field(False, description="replace a store that other settings made")

    @field_validator("temperature", "heldout_temperatures")
    @classmethod
    def _each_once(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("give one or more different temperatures")
        return value


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)


def run(config: PrepareConfig) -> dict:
    """Make (or finish) the store and return the report; see `_report` for its keys.

    Raises SpectrainError for input that cannot be used, RunFailed on a full disk. Whatever was
    finished before stays, and the same call goes on from there.
    """
    clock, fates = Clock(), Counter()
    with clock.stage("read"):
        conversations = read_conversations(
            config.prompts, config.regenerate, config.on_bad_row, fates, texts=True
        )[: config.limit]
        _require_some(conversations, fates, config)
    with clock.stage("load"):
        target = Target.load(config.target, dtype=config.target_dtype, device=config.device)
        if any(conversation.text is None for conversation in conversations):
            require_template(target.tokenizer)
        layers = _aux_layers(config, target)
        settings = _settings(config, target, layers, conversations)
    about = {"target": target.name, "source": config.prompts.name}
    with StoreWriter.claim(config.store, settings, about, config.overwrite) as writer:
        with clock.stage("answer"):
            questions, answers, answered = _answer(config, target, conversations, fates)
        with clock.stage("tokenise"):
            rows = build_rows(
                conversations,
                questions,
                answers,
                target,
                heldout=config.heldout,
                max_length=min(config.max_length, target.max_length),
                drop_length_stopped=config.length_stopped == "drop",
                fates=fates,
            )
            _require_some(rows, fates, config)
        with clock.stage("capture"):
            facts, captured = _capture(config, target, layers, rows, writer)
            for shard in facts:
                fates.update(shard["dropped"])
            kept = [row for shard in facts for row in shard["rows"]]
            _require_some(kept, fates, config)
            manifest = writer.finish(len(facts), count_rows(kept, fates))
    return _report(config, manifest, clock, answered, captured)


def _answer(
    config: PrepareConfig, target: Target, conversations: list[Conversation], fates: Counter
) -> tuple[list[Question], list[Answer], int]:
    """Ask what has to be asked; returns questions, answers and the tokens produced now."""
    longest = min(config.max_length - 1, target.max_length - config.max_new_tokens)
    if longest < 1:
        raise SpectrainError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt: the target reads "
            f"{target.max_length} tokens",
            where="--max-new-tokens",
            fix="ask for fewer",
        )
    questions = questions_for(
        conversations,
        target.tokenizer,
        longest=longest,
        heldout=config.heldout,
        temperatures=config.temperature,
        heldout_temperatures=config.heldout_temperatures,
        fates=fates,
    )
    sampling = Sampling(
        target=f"{target.fingerprint}/{target.dtype}",
        max_new_tokens=config.max_new_tokens,
        top_p=config.top_p,
        seed=config.seed,
    )

    def ask(prompts, temperature, seed):
        return complete(
            target,
            prompts,
            config.max_new_tokens,
            temperature=temperature,
            top_p=config.top_p,
            seed=seed,
        )

    units = plan_units(questions, config.reply_batch, sampling)
    answers, fresh = answer(config.store / REPLIES, units, ask, target.tokenizer.decode)
    return questions, answers, fresh


def _capture(
    config: PrepareConfig, target: Target, layers: tuple[int, ...], rows: list[Row], writer
) -> tuple[list[dict], int]:
    """Capture the shards that are not finished; returns the facts of all and the tokens read."""
    shards = plan_shards(rows, config.shard_tokens)
    keys = [key_of(shard) for shard in shards]
    facts = [writer.shard(number, key) for number, key in enumerate(keys)]
    todo = [number for number, found in enumerate(facts) if found is None]
    if not todo:
        return facts, 0
    waiting = [row for number in todo for row in shards[number]]
    hidden = target.hidden_size if config.features == "stored" else 0
    everywhere = config.last_states == "everywhere"
    dtype, top = DTYPES[config.dtype], config.teacher_top
    size = bytes_needed(waiting, hidden, len(layers) * hidden, dtype, everywhere, top)
    writer.require_space(size)
    if config.features == "none":
        for number in todo:
            rows = [(row, None) for row in shards[number]]
            facts[number] = writer.write_shard(number, keys[number], rows)
        return facts, 0
    check_logits(target, waiting[0])
    tokens = sum(len(row.tokens) for row in waiting)
    with progress(tokens, f"capture, {size / 1e6:,.0f} MB", "tokens") as bar:
        for number in todo:
            shard = shards[number]
            states, dropped = {}, Counter()
            for place, found in capture(
                target, shard, layers, dtype, config.batch_tokens, everywhere, top
            ):
                if found.states is None:
                    dropped[found.reason] += 1
                else:
                    states[place] = (found.row, found.states)
                bar.update(len(found.row.tokens))
            kept = [states[place] for place in sorted(states)]
            facts[number] = writer.write_shard(number, keys[number], kept, dict(dropped))
    return facts, tokens


def _aux_layers(config: PrepareConfig, target: Target) -> tuple[int, ...]:
    if config.features == "none":
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


def _settings(
    config: PrepareConfig, target: Target, layers: tuple[int, ...], conversations
) -> dict:
    """Everything that shapes the store; a store with other settings is never continued."""
    rendered = json.dumps(rendering(target.tokenizer), sort_keys=True).encode()
    shaped_by = {
        "target": {"fingerprint": target.fingerprint, "dtype": str(target.dtype)},
        "template": hashlib.sha256(rendered).hexdigest()[:16],
        "source": source_hash(conversations),
        "aux_layers": list(layers),
    }
    plain = ("max_length", "heldout", "dtype", "length_stopped", "shard_tokens")
    plain += ("features",) if config.features == "none" else ("last_states", "batch_tokens")
    plain += ("teacher_top",) if config.teacher_top and config.features == "stored" else ()
    asked = (
        "temperature",
        "heldout_temperatures",
        "top_p",
        "max_new_tokens",
        "reply_batch",
        "seed",
    )
    # How replies are drawn matters only where the target is asked for one.
    if not all(conversation.answered for conversation in conversations):
        plain += asked
    return shaped_by | config.model_dump(mode="json", include=set(plain))


def _require_some(rows: list, fates: Counter, config: PrepareConfig) -> None:
    if not rows:
        raise SpectrainError(
            f"no row is left: {', '.join(f'{n} {reason}' for reason, n in sorted(fates.items()))}",
            where=str(config.prompts),
            fix="mend the source or the settings that drop its rows",
        )


def render(report: dict) -> str:
    """What a person reads: rows by split, what was dropped, what the work cost."""
    counts, rates = report["counts"], report["tokens_per_second"]
    lines = [
        f"store {report['store']} ({report['bytes'] / 1e6:,.0f} MB) of {report['target']}",
        f"{'':<10}{'rows':>8}{'tokens':>12}{'supervised':>12}",
    ]
    for split in counts["rows"]:
        rows, tokens, supervised = (
            counts[key][split] for key in ("rows", "tokens", "supervised_tokens")
        )
        lines.append(f"{split:<10}{rows:>8,}{tokens:>12,}{supervised:>12,}")
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(counts["dropped"].items()))
    lines += [
        f"dropped: {dropped or 'nothing'}",
        f"replies cut off by their length: {counts['length_stopped']:,}, "
        f"rows cut at max_length: {counts['truncated']:,}",
    ]
    total = sum(counts["rows"].values())
    if counts["length_stopped"] > total / 2:
        lines.append(
            "note: most replies were cut off, so the head learns little of how they end; "
            "raise --max-new-tokens if you can"
        )
    if not counts["rows"].get("heldout"):
        lines.append("note: no held-out rows, eval-alpha has nothing to measure; raise --heldout")
    stages = []
    for stage, seconds in report["seconds"].items():
        rate = f" ({rates[stage]:,.0f} tokens/s)" if rates.get(stage) else ""
        stages.append(f"{stage} {seconds:.0f}{rate}")
    return "\n".join([*lines, f"seconds: {', '.join(stages)}"])


def _report(
    config: PrepareConfig, manifest: dict, clock: Clock, answered: int, captured: int
) -> dict:
    """counts (rows, tokens, supervised_tokens by split; dropped by reason; truncated,
    length_stopped), supervised_tokens by split, bytes, seconds by stage, tokens_per_second of this
    run's own work (None where there was none), store, fingerprint, target."""
    rates = {"answer": answered, "capture": captured}
    return {
        "store": str(config.store),
        "fingerprint": manifest["fingerprint"],
        "target": manifest["about"]["target"],
        "counts": manifest["counts"],
        "supervised_tokens": manifest["counts"]["supervised_tokens"],
        "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
        "seconds": clock.seconds,
        "tokens_per_second": {
            stage: round(tokens / max(clock.seconds[stage], 1e-3), 1) if tokens else None
            for stage, tokens in rates.items()
        },
    }
