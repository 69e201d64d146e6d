"""Process groups: set-up from torchrun's variables, DDP or FSDP2, and small collectives; one process works too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from adatape.data.batch import Shard

T = TypeVar("T")


@contextmanager
def process_group(device: torch.device) -> Iterator[Shard]:
    """Joins torchrun's process group, if there is one, and leaves it at the end; yields this process's Shard."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        yield this_shard()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **_rendezvous())
    try:
        yield this_shard()
    finally:
        dist.destroy_process_group()


def _rendezvous() -> dict[str, Any]:
    """Arguments of init_process_group: a store prefix per restart, as torchrun's store keeps addresses of dead ranks.

    Nodes count restarts separately, so with several nodes torch's default is used.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return {}
    store, rank, world = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"attempt-{attempt}", store), "rank": rank, "world_size": world}


def this_shard() -> Shard:
    return Shard(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Shard()


def local_device(asked: str) -> torch.device:
    """The device of this process: under torchrun, the GPU of its local rank."""
    device = torch.device(asked)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    return device


def restarted() -> bool:
    """Whether torchrun has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def wrap_parallel(model: nn.Module, shard: bool, accumulate: int = 1) -> nn.Module:
    """Wraps the model in DDP, or shards it in place by FSDP2; unchanged with one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    if not shard:
        # Some parameters get no gradient, such as the last feed-forward of tape rows where a class token is classified.
        # static_graph finds them once, but does not work with no_sync, which gradient accumulation uses.
        static = accumulate == 1
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=static, find_unused_parameters=not static
        )
    for block in model.vit.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)  # type: ignore[return-value]  # the same module, its class extended


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights on the CPU, gathered if sharded; every process must call it.

    Copies, because torch may return the model's own tensors, which training and averaging change later.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}


def all_reduce(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def all_gather_rows(values: Tensor) -> Tensor:
    """The rows of all processes, concatenated by rank; their number may differ."""
    if not dist.is_initialized():
        return values
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, values.cpu())
    return torch.cat(every)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any process."""
    if not dist.is_initialized():
        return flag
    return bool(all_reduce(torch.tensor(float(flag), device=device)) > 0)


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_rank_zero() -> bool:
    return not is_distributed() or dist.get_rank() == 0


def on_rank_zero(work: Callable[[], T]) -> T:
    """Runs `work` on the first process and returns its result, or raises its error, on every process."""
    if not is_distributed():
        return work()
    outcome: list[Any] = [None, None]
    if is_rank_zero():
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
