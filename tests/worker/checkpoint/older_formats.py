"""Writes checkpoints of formats 1 to 3 as older versions did: a pickled state for each shard, and a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from worker.parallel.shard_spec import ShardSpec


def save_older(
    uri: str,
    states: Mapping[str, Mapping[str, Any]],
    *,
    step: int,
    number: int = 2,
    slices: Mapping[str, Mapping[str, ShardSpec]] | None = None,
) -> None:
    """The checkpoint of format `number` whose shards have these `states`; the first has all others with slices beside it."""
    folder = Path(uri)
    folder.mkdir(parents=True)
    names, sums = {}, {}
    for shard, state in states.items():
        path = folder / f"{shard}.pt"
        torch.save({"step": step, "shard": shard, "state": state}, path)
        sums[shard] = hashlib.sha256(path.read_bytes()).hexdigest()
        parts = ("parameters", "buffers", "optimizer")
        names[shard] = sorted({name for part in parts for name in state.get(part) or ()})
    manifest = {
        "format": number,
        "step": step,
        "shards": {shard: (folder / f"{shard}.pt").stat().st_size for shard in states},
        "notes": {},
        "names": names,
        "sha256": sums,
    }
    if slices:
        first, *others = states
        manifest["beside"] = {shard: others if shard == first else [] for shard in states}
        manifest["slices"] = {
            shard: {name: [s.dim, list(s.parts), s.worker, s.workers] for name, s in found.items()}
            for shard, found in slices.items()
        }
    (folder / "manifest.json").write_text(json.dumps(manifest))
