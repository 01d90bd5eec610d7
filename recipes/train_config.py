"""Settings of a training run, and what they say of it: the head's options, the run's identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from spectrain.core.config import nearest
from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, sha256_file
from spectrain.data.store import FeatureStore
from spectrain.heads.io import WEIGHTS, find_head
from spectrain.heads.registry import family
from spectrain.trainer.checkpoint import require_same
from spectrain.trainer.settings import FREE_TO_CHANGE, TrainerSettings

REPORT = "report.json"


class TrainConfig(TrainerSettings):
    """Settings of `train-…`."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    store: Path = Field(Path("runs/store"), description="feature store that `prepare` wrote")
    online: bool | Literal["auto"] = Field(
        "auto",
        description="true: the target computes the features of every batch, whatever is stored; "
        "auto: where the store holds none",
    )
    out: Path = Field(Path("runs/train"), description="folder of the run; the head is out/head")
    family: str = Field("eagle3", description="head family, e.g. eagle3 or medusa")
    head: dict[str, Any] = Field({}, description="options of the family, e.g. head.steps")
    init: Path | None = Field(
        None,
        description="folder of a head (or of its run) to start from; its draft vocabulary is kept",
    )
    extend: bool = Field(
        False,
        description="let a run go on to more steps than it was started with; the schedule of the "
        "learning rate is then that of the new number",
    )
    put_back: Path | None = Field(
        None,
        description="new folder for a copy of the target with its native MTP layers as trained",
    )
    overwrite: bool = Field(False, description="throw away an earlier run in the same folder")


# Paths may differ between two parts of a run: what they lead to is compared by fingerprint. The
# others are compared by what follows from them.
_NOT_COMPARED = FREE_TO_CHANGE | {
    *("target", "store", "out", "init", "extend", "overwrite", "epochs", "steps"),
    *("family", "head", "put_back", "online"),
}


def check_options(config: TrainConfig) -> None:
    """Raise SpectrainError for an unknown family or options it does not have."""
    options_of(config)


def options_of(config: TrainConfig) -> BaseModel:
    """The family's options; every problem is told at once."""
    kind = family(config.family).Options
    if config.init is not None and config.head:
        raise SpectrainError(
            f"head options ({', '.join(config.head)}) cannot change the head given by init",
            fix="leave out one of them",
        )
    try:
        return kind.model_validate(config.head)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                known = list(kind.model_fields)
                problems.append(
                    f"unknown key head.{key}{nearest(key, known)} (known: {', '.join(known)})"
                )
            else:
                problems.append(f"head.{key}: {item['input']!r} refused, {item['msg']}")
        raise SpectrainError("; ".join(problems), where=f"{config.family} options") from None


def identity_of(settings: TrainConfig, options: BaseModel, store: FeatureStore) -> dict[str, Any]:
    """What must not change between the parts of one run."""
    init = settings.init and find_head(settings.init) / WEIGHTS
    if init and not init.is_file():
        raise SpectrainError(
            "no head to start from",
            where=str(settings.init),
            fix="give the folder of a head; a draft starts from a model folder with head.model",
        )
    return {
        "family": settings.family,
        "store": store.manifest["fingerprint"],
        # A store that did not round the features has the ones that are computed.
        "online": settings.online and (store.rounded or not store.features),
        "init": sha256_file(init)[:16] if init else None,
        "steps": settings.steps,
        "head": options.model_dump(mode="json"),
        **settings.model_dump(mode="json", exclude=set(_NOT_COMPARED)),
        # Their order counts, too.
        "lr_factors": [list(pair) for pair in settings.lr_factors.items()] or None,
    }


def finished_report(settings: TrainConfig, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a run that is complete; None when there is work to do."""
    path = settings.out / REPORT
    if not path.is_file():
        return None
    content = read_json(path)
    require_same(content["config"], identity, str(settings.out), settings.extend)
    return content["report"] if content["config"]["steps"] == settings.steps else None
