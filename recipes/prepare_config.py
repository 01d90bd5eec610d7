"""What `spectrain prepare` is told."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from spectrain.core.config import Config, as_list
from spectrain.data.conversations import Regenerate
from spectrain.data.sources import Source
from spectrain.heads.registry import kept_for

SHIPPED_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
Temperatures = Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(as_list)]


def _a_day(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"{value!r} is no date: give YYYY-MM-DD") from None


TemplateDate = Annotated[str, AfterValidator(_a_day)] | None
TEMPLATE_DATE = "2026-01-01"


class ServerConfig(Config):
    """A running server with an OpenAI-compatible interface that has the target."""

    url: str = Field(description="its address, e.g. http://localhost:8000/v1")
    model: str | None = Field(
        None, description="the target's name there; default: as --target names it"
    )
    concurrency: int = Field(16, ge=1, description="requests under way at the same time")
    retries: int = Field(5, ge=0, description="further tries of a request that failed")
    timeout: float = Field(600, gt=0, description="seconds to wait for a reply")
    check_prompts: bool = Field(
        True,
        description="refuse a server that reads a prompt as another number of tokens than the "
        "target does",
    )
    extra: dict[str, Any] = Field({}, description="further fields of a request, as they are")


def _server(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class PrepareConfig(Config):
    """What `spectrain prepare` is told."""

    target: str = Field("smollm2-135m", description="name, folder or hub id of the target")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what the target computes in; auto: its own on a GPU, float32 on a CPU"
    )
    device: str = Field("auto", description="where the target runs: auto, cpu, cuda, cuda:1")
    prompts: Annotated[tuple[Source, ...], BeforeValidator(as_list)] = Field(
        (Source(path=str(SHIPPED_PROMPTS)),),
        min_length=1,
        description="files or datasets of prompts, conversations or plain texts, each a path or "
        "{path, split, weight, rows, …}; default: the shipped prompts",
    )
    store: Path = Field(Path("runs/store"), description="folder of the feature store")
    limit: int | None = Field(
        None,
        ge=1,
        description="use this many conversations, the first in order of content hash: every source "
        "is read to its end, unless it has `rows`",
    )
    template_date: TemplateDate = Field(
        None,
        description="YYYY-MM-DD, the date told by chat templates that tell one; default: "
        f"{TEMPLATE_DATE}, with a server today, since it tells its own",
    )
    max_length: int = Field(2048, ge=2, description="tokens at which a row is cut")
    heldout: float = Field(
        0.1, ge=0, le=1, description="fraction of the prompts kept for evaluation; 1: all"
    )
    regenerate: Regenerate = Field(
        "auto",
        description="true: the target answers every assistant turn anew, in order; last: only the "
        "last one; false: given replies only; auto: it answers the conversations that do not end "
        "with a reply",
    )
    temperature: Temperatures = Field(
        (0.7,), description="every train prompt is answered once at each"
    )
    heldout_temperatures: Temperatures = Field(
        (0.0, 1.0), description="every held-out prompt is answered once at each"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of the replies, 1: everything")
    max_new_tokens: int = Field(256, ge=1, description="longest reply in tokens")
    reply_batch: int = Field(64, ge=1, description="prompts answered together, saved together")
    server: Annotated[ServerConfig | None, BeforeValidator(_server)] = Field(
        None,
        description="let this server answer and not the target loaded here: its address, or "
        "{url, model, concurrency, …}",
    )
    length_stopped: Literal["keep", "drop"] = Field(
        "keep", description="what to do with replies that were cut off by their length"
    )
    loops: Literal["keep", "drop"] = Field(
        "keep", description="what to do with replies that go round in circles"
    )
    seed: int = Field(0, ge=0, description="of the sampled replies")
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "bfloat16",
        description="what the features are stored in; int8: with a scale for every 32 numbers, "
        "0.53 of the bytes of bfloat16",
    )
    family: str | None = Field(
        None, description="keep only what heads of this family read; default: what any of them does"
    )
    aux_layers: tuple[int, ...] | None = Field(
        None, description="layers whose outputs are kept, from 0; default: the target's three"
    )
    last_states: Literal["everywhere", "replies"] | None = Field(
        None,
        description="where the last state is kept: everywhere serves every family, replies is "
        "enough for EAGLE-3 and Medusa and takes less disk; default: as `family` needs it",
    )
    teacher_top: int = Field(
        0,
        ge=0,
        le=256,
        description="log-probabilities of the target that are kept at each predicting position, "
        "the likeliest; for distillation by another tool, no head of ours reads them",
    )
    features: Literal["stored", "none"] = Field(
        "stored",
        description="none: tokens and replies alone, a fraction of the disk; the target is then "
        "asked for its features while a head is trained or measured",
    )
    shard_tokens: int = Field(16384, ge=1, description="tokens of a shard; the unit of a rerun")
    batch_tokens: int = Field(4096, ge=1, description="padded tokens that the target reads at once")
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop", description="what to do at a line that is no conversation or text"
    )
    dry_run: bool = Field(
        False, description="only say what it would take: rows, tokens, bytes, time"
    )
    overwrite: bool = Field(False, description="replace a store that other settings made")

    @field_validator("temperature", "heldout_temperatures")
    @classmethod
    def _each_once(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("give one or more different temperatures")
        return value

    @field_validator("family")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None:
            kept_for(value)
        return value

    @property
    def day(self) -> date:
        """The date that chat templates tell."""
        if self.template_date is None and self.server is not None:
            return date.today()
        return date.fromisoformat(self.template_date or TEMPLATE_DATE)

    @property
    def keeps_aux(self) -> bool:
        """Whether outputs of further layers are kept."""
        if self.features == "none":
            return False
        return self.aux_layers is not None or self.family is None or kept_for(self.family)[0]

    @property
    def keeps_last_everywhere(self) -> bool:
        """Whether the last state is kept at every position."""
        if self.last_states is not None:
            return self.last_states == "everywhere"
        return self.family is None or kept_for(self.family)[1] == "everywhere"
