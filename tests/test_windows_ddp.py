"""Two processes train a model of windows on scenes: by DDP and by FSDP2, with parts that nothing teaches."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_ddp import trace
from test_scenes import small, write_scenes

from adatape.config import Engine, Experiment, ImageModel

# Windows join after all blocks, so that no block reads their tokens; before the second block; and are convolved.
WAYS: dict[str, dict[str, Any]] = {
    "no block reads tokens": {},
    "blocks read tokens": {"search": 0, "view": 32, "layer": 1},
    "convolutions": {"search": 0, "encoder": "convolutions", "view": 32},
}


def experiment(folder: str, way: str, shard: bool) -> Experiment:
    found = small(Path(folder), engine=Engine(workers=0, shard=shard))
    assert isinstance(found.model, ImageModel)
    wrap = {**(found.model.wrap or {}), **WAYS[way]}
    return dataclasses.replace(found, model=dataclasses.replace(found.model, wrap=wrap))


def one_rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {(way, shard): trace(experiment(folder, way, shard)) for way in WAYS for shard in (False, True)}
    kept = {key: {name: each[name] for name in ("losses", "weights")} for key, each in found.items()}
    torch.save(kept, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, 24)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_rank, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def taught(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights without the one bias that changes no loss, a constant under a softmax, which AdamW moves by rounding."""
    name = "scan.guess.bias"
    return {**weights, name: weights[name][1:]} if name in weights else weights


@pytest.mark.parametrize("way", WAYS)
def test_processes_hold_the_same_weights_copied_or_cut_up(traces: list[Any], way: str) -> None:
    first, second = traces
    copied = first[way, False]
    for shard in (False, True):
        found, weights = first[way, shard], first[way, shard]["weights"]
        assert all(torch.equal(each, second[way, shard]["weights"][name]) for name, each in weights.items())
        torch.testing.assert_close(taught(weights), taught(copied["weights"]), rtol=1e-4, atol=1e-6)
        assert found["losses"] == pytest.approx(copied["losses"], rel=1e-4)
