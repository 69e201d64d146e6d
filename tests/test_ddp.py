"""Two processes give the gradients of one: `output=True` goes through the same forward that DDP wraps."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import adatape.models  # noqa: F401  registers the models


def build(bank: str, tape_ffn: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "adatape_tiny_patch16_224", bank=bank, tape_ffn=tape_ffn, img_size=32, patch_size=8, depth=2, num_classes=5,
        bank_patch=4, bank_size=80, steps=4, threshold=1.5, merge=3, noise=0.0, hide=0.0,
    )  # fmt: skip


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def backward(model: torch.nn.Module, x: torch.Tensor) -> None:
    output = model(x, output=True)
    (output.logits.square().mean() + 0.1 * output.ponder.mean()).backward()


def one_rank(rank: int, port: int, folder: str, bank: str, tape_ffn: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(build(bank, tape_ffn))
    backward(model, images()[2 * rank : 2 * rank + 2])
    torch.save({name: p.grad for name, p in model.module.named_parameters()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("bank", "tape_ffn"), [("input", "append"), ("learn", "append+blocks")])
def test_two_processes_give_the_gradients_of_one(tmp_path: Path, bank: str, tape_ffn: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_rank, (port, str(tmp_path), bank, tape_ffn), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model = build(bank, tape_ffn)
    backward(model, images())
    for name, parameter in model.named_parameters():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], parameter.grad, rtol=1e-4, atol=1e-6)
