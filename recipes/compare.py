"""`spectrain compare`: several heads, one store, one budget, one table.

    check every entry → train (or load) each in turn → α and τ on held-out rows → one race → table

A run that was interrupted goes on where it was: finished heads are not trained again. Heads that
are trained here see the same number of tokens (other settings are refused); what a head that is
loaded has seen is its own affair, and the table says so. τ is compared at one length of draft, the
longest that every head can.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import Field

from spectrain.core.config import Config, load_config
from spectrain.core.environment import describe
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_write, require_writable, write_json
from spectrain.core.packing import pack
from spectrain.core.target import Target
from spectrain.data.online import with_features
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore
from spectrain.evaluation.comparison import DEFINITIONS, draw, markdown, table
from spectrain.evaluation.measure import measure
from spectrain.evaluation.onpolicy import OnPolicy
from spectrain.evaluation.race import of_generator, race, speedup, stock, summary
from spectrain.evaluation.summary import summarise
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Clock, Generator
from spectrain.heads.base import DraftHead
from spectrain.recipes import train
from spectrain.recipes.given_head import given_head
from spectrain.trainer.quality import change, heldout_loss

REPORT, TABLE, PLOT = "compare.json", "compare.md", "compare.png"
# One entry for each family, with the options its paper trains with.
ENTRIES: dict[str, dict[str, Any]] = {
    "eagle3": {"family": "eagle3"},
    "eagle1": {"family": "eagle1"},
    "medusa": {"family": "medusa"},
    "mtp-parallel": {"family": "mtp-parallel"},
    "mtp-sequential": {"family": "mtp-sequential"},
    "draft": {"family": "draft"},
}


class CompareConfig(Config):
    """Settings of `compare`."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    store: Path = Field(Path("runs/store"), description="feature store that `prepare` wrote")
    heldout_store: Path | None = Field(
        None, description="store whose held-out rows are measured on; default: the same store"
    )
    out: Path = Field(Path("runs/compare"), description="folder for heads, table and plot")
    entries: dict[str, dict[str, Any]] = Field(
        ENTRIES,
        description="name → settings of `train`; or name → {load: folder} for a head that exists, "
        "with target: folder when it drafts for a tuned one",
    )
    common: dict[str, Any] = Field({}, description="settings of `train` for all entries")
    families: tuple[str, ...] | None = Field(
        None, description="only these entries; default: all of them"
    )
    draft_tokens: int = Field(5, ge=1, description="longest chain that α and τ are measured for")
    race_draft_tokens: int = Field(3, ge=1, description="tokens drafted per step in the race")
    prompts: int = Field(24, ge=1, description="held-out prompts in the race")
    max_new_tokens: int = Field(64, ge=1, description="longest reply in the race")
    seed: int = Field(0, ge=0, description="seed of training and bootstrap")


def run(config: CompareConfig) -> dict[str, Any]:
    """Train, measure and race; returns the report that is also in out/compare.json."""
    require_writable(config.out / REPORT)
    store = FeatureStore.open(config.store)
    trainings = _trainings(config, store)
    heldout = FeatureStore.open(config.heldout_store) if config.heldout_store else store
    rows = _greedy_rows(heldout)
    trained = {name: train.run(settings) for name, settings in trainings.items()}
    folders = {
        name: Path(entry["load"]) if "load" in entry else trainings[name].out / train.HEAD
        for name, entry in _chosen(config).items()
    }
    original = Target.load(config.target)
    for opened in (store, heldout):
        opened.require_target(original.fingerprint)
    prompts = [heldout.prompt(row) for row in rows]
    entries: dict[str, dict[str, Any]] = {}
    drafters = {
        name: _load(folder, original, _tuned(config.entries[name], trainings.get(name)))
        for name, folder in folders.items()
    }
    steps = min(config.draft_tokens, *(head.longest_draft for _, head in drafters.values()))
    for name, (target, head) in drafters.items():
        used, quality = rows, None
        if target is original:
            source = with_features(heldout, target, head.needs)
        else:
            source = OnPolicy(target, prompts, rows, head.needs)
            used = source.rows
            quality = change(
                *(heldout_loss(each, heldout, Accelerator()) for each in (original, target))
            )
        conversations = measure(target, head, source, {0.0: used}, steps)[0.0]
        own = trained.get(name, {})
        entries[name] = {
            "family": head.family,
            "target": target.name,
            "head": str(folders[name]),
            "parameters": sum(p.numel() for p in head.parameters()),
            "trained_parameters": own.get("trained_parameters"),
            "seconds": own.get("seconds"),
            "trained_tokens": own.get("supervised_tokens"),
            "bytes_per_token": store.bytes_per_token(
                head.needs.aux_layers, head.needs.last_everywhere
            ),
            "quality": quality,
            **summarise(conversations, steps, config.seed),
        }
    report = {
        "target": config.target,
        "store": str(config.store),
        "store_tokens": store.manifest["counts"].get("supervised_tokens", {}).get("train"),
        "heldout_conversations": len(rows),
        "draft_tokens": steps,
        "race_draft_tokens": config.race_draft_tokens,
        "entries": entries,
        "race": _race(config, original, drafters, prompts[: config.prompts]),
        "definitions": DEFINITIONS,
        "environment": describe(original.device),
        "table": str(config.out / TABLE),
        "plot": str(config.out / PLOT),
    }
    write_json(config.out / REPORT, report)
    atomic_write(config.out / TABLE, markdown(report))
    atomic_write(config.out / PLOT, draw(report))
    return report


def _greedy_rows(heldout: FeatureStore) -> list[RowInfo]:
    rows = [row for row in heldout.rows("heldout") if row.temperature == 0]
    if not rows:
        raise SpectrainError(
            "no held-out rows that were answered at temperature 0, nothing can be measured",
            where=str(heldout.path),
            fix="prepare a store with --heldout 0.1 and heldout_temperatures 0",
        )
    return rows


def _chosen(config: CompareConfig) -> dict[str, dict[str, Any]]:
    if config.families is None:
        return config.entries
    unknown = [name for name in config.families if name not in config.entries]
    if unknown:
        raise SpectrainError(
            f"no entry {', '.join(unknown)}",
            where="--families",
            fix=f"choose among {', '.join(config.entries)}",
        )
    return {name: config.entries[name] for name in config.families}


def _trainings(config: CompareConfig, store: FeatureStore) -> dict[str, train.TrainConfig]:
    """The settings of every training; all are checked before the first one starts."""
    found: dict[str, train.TrainConfig] = {}
    for name, entry in _chosen(config).items():
        if "load" in entry:
            continue
        flags = {
            "target": config.target,
            "store": str(config.store),
            "out": str(config.out / name),
            "seed": config.seed,
        }
        # Flat before they are merged, so that an entry's head options join the common ones.
        merged = {**_flat(config.common), **_flat(entry), **flags}
        settings = load_config(train.TrainConfig, "train", None, (), merged)
        train.check_options(settings)
        found[name] = settings
    rows = len(store.rows("train"))
    budgets = {name: (s.total_steps(rows), s.batch_size) for name, s in found.items()}
    if len(set(budgets.values())) > 1:
        told = ", ".join(f"{n}: {steps} steps of {size}" for n, (steps, size) in budgets.items())
        raise SpectrainError(
            f"the entries would be trained on different numbers of tokens ({told})",
            where="entries",
            fix="give steps or epochs and batch_size under common",
        )
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"head": {"steps": 3}} → {"head.steps": 3}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _tuned(entry: Mapping[str, Any], settings: train.TrainConfig | None) -> Path | None:
    """The target that was tuned with a head, if there is one."""
    if settings is not None:
        return train.tuned_target(settings.out)
    return Path(entry["target"]) if "target" in entry else None


def _load(folder: Path, original: Target, tuned: Path | None) -> tuple[Target, DraftHead]:
    """A head, bound to the target it drafts for."""
    target = Target.load(str(tuned)) if tuned else original
    head = given_head(folder, target.name)
    head.check_target(target, str(folder))
    head.bind(target.readout).to(target.device, target.dtype)
    return target, head


def _race(
    config: CompareConfig,
    original: Target,
    drafters: dict[str, tuple[Target, DraftHead]],
    prompts: list[torch.Tensor],
) -> dict[str, Any]:
    """Greedy decoding of the same prompts by every head and by two baselines, in turn."""
    clocks: dict[str, Clock] = {}
    methods, gammas = {}, {}
    for name, (target, head) in {**drafters, "spectrain-plain": (original, None)}.items():
        if head is not None:
            pack(head)
        gamma = head and min(config.race_draft_tokens, head.longest_draft)
        clocks[name], gammas[name] = Clock(), gamma
        generator = Generator(target, head, gamma)
        methods[name] = of_generator(generator, config.max_new_tokens, Sampling(), clocks[name])
    methods["transformers"] = stock(original, config.max_new_tokens)
    results = race(methods, prompts, clocks)
    report = {}
    for name, result in results.items():
        own = summary(result["done"], result["seconds"], clocks.get(name))
        for baseline in ("spectrain-plain", "transformers"):
            own[f"speedup over {baseline}"] = speedup(result, results[baseline], config.seed)
        own["draft_tokens"] = gammas.get(name)
        wanted = results["transformers"]["done"]
        if name in drafters and drafters[name][0] is not original:
            plain = Generator(drafters[name][0])  # a tuned target says other things
            wanted = [plain.generate([prompt], config.max_new_tokens)[0] for prompt in prompts]
        pairs = zip(result["done"], wanted, strict=True)
        own["identical"] = sum(a.tokens == b.tokens for a, b in pairs)
        report[name] = own
    return {"prompts": len(prompts), "methods": report}


def render(report: dict[str, Any]) -> Any:
    """The table, and what its columns mean."""
    return table(report)
