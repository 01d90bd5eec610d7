"""Bytes that a feature store takes for each token, by head and type.

    python scripts/store_bytes.py [--target smollm2-135m | --hidden 4096] [--supervised 0.5]
    python scripts/store_bytes.py --store runs/store

The first form needs shapes alone: a store that keeps what one family reads (heads/registry.py,
`kept_for`), beside the usual 8·H, which is three auxiliary states and the last one of every token
in bfloat16. The second tells of a store that is there, from its files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from spectrain.core.environment import settle
from spectrain.core.failures import one_line_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", default="smollm2-135m", help="whose shapes; no weights are read"
    )
    parser.add_argument("--hidden", type=int, help="H, in place of a target")
    parser.add_argument("--layers", type=int, default=3, help="auxiliary layers that are kept")
    parser.add_argument(
        "--supervised", type=float, default=0.5, help="share of tokens that lie in a reply"
    )
    parser.add_argument("--store", type=Path, help="tell of this store instead")
    options = parser.parse_args()
    settle()
    with one_line_errors():
        if options.store is not None:
            print(of_store(options.store))
        else:
            hidden = options.hidden or hidden_size(options.target)
            print(of_shapes(hidden, options.layers, options.supervised))


def hidden_size(target: str) -> int:
    """H of a target, from its configuration."""
    from transformers import AutoConfig

    from spectrain.core import models

    source = models.resolve(target)
    with models.load_errors(target):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        return config.get_text_config(decoder=True).hidden_size


def of_shapes(hidden: int, layers: int, supervised: float) -> str:
    """The table of all families."""
    from spectrain.data.shard import DTYPES, state_bytes
    from spectrain.heads.registry import FAMILIES, kept_for

    usual = 8 * hidden
    types = ("float32", "bfloat16", "int8")
    lines = [
        f"bytes of features a token: H {hidden:,}, {layers} auxiliary layers, "
        f"{supervised:.0%} of the tokens in replies",
        f"{'head':<16}{'aux':<5}{'last':<12}" + "".join(f"{name:>17}" for name in types),
    ]
    for name in FAMILIES:
        aux, last = kept_for(name)
        states = layers * aux + (1 if last == "everywhere" else supervised)
        sizes = [states * state_bytes(hidden, DTYPES[dtype]) for dtype in types]
        told = "".join(f"{size:>10,.0f} {size / usual:>5.0%} " for size in sizes)
        lines.append(f"{name:<16}{'yes' if aux else 'no':<5}{last:<12}{told}")
    lines += [
        f"{'the usual 8·H':<33}" + " " * 17 + f"{usual:>10,} {1:>5.0%}",
        f"beside them: tokens, replies and the target's choices, {6 + 12 * supervised:.0f} bytes",
    ]
    return "\n".join(line.rstrip() for line in lines)


def of_store(path: Path) -> str:
    """What the files of a store hold, by tensor."""
    from spectrain.data.manifest import map_tensors
    from spectrain.data.store import FeatureStore

    store = FeatureStore.open(path)
    shards = store.manifest["shards"]
    sizes: dict[str, int] = {}
    for shard in shards:
        for name, tensor in map_tensors(path / shard["file"]).items():
            sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    sizes["facts of the rows"] = sum((path / shard["facts"]).stat().st_size for shard in shards)
    tokens = sum(store.manifest["counts"]["tokens"].values())
    settings = store.manifest["settings"]
    lines = [
        f"{path}: {tokens:,} tokens, {settings['dtype']}",
        f"{'':<20}{'MB':>10}{'bytes a token':>16}",
    ]
    for name, size in [*sizes.items(), ("all", sum(sizes.values()))]:
        lines.append(f"{name:<20}{size / 1e6:>10,.1f}{size / tokens:>16,.1f}")
    if store.features:
        usual = 8 * store.hidden_size
        lines.append(f"{'the usual 8·H':<20}{usual * tokens / 1e6:>10,.1f}{usual:>16,.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
