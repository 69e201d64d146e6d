"""Processes that train together: joined by torchrun's variables, or one alone."""

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

from adatape.data.batch import Part

T = TypeVar("T")


@contextmanager
def joined(device: torch.device) -> Iterator[Part]:
    """This process's part in the group that torchrun started; leaves the group at the end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        yield part()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **_meeting())
    try:
        yield part()
    finally:
        dist.destroy_process_group()


def _meeting() -> dict[str, Any]:
    """Where the processes meet: after a restart torchrun's store still has the addresses of those that died.

    Nodes count their restarts apart, so that of several each would wait elsewhere; there torch's own way is left.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return {}
    store, rank, world = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"attempt-{attempt}", store), "rank": rank, "world_size": world}


def part() -> Part:
    return Part(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Part()


def local_device(asked: str) -> torch.device:
    """The GPU of this process, where torchrun started one for each."""
    device = torch.device(asked)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    return device


def restarted() -> bool:
    """Whether torchrun has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def spread(model: nn.Module, shard: bool, accumulate: int = 1) -> nn.Module:
    """The model with its gradients averaged over all processes: copied to each (DDP), or cut up (FSDP2, in place)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    if not shard:
        # Some parameters take no gradient, as tape rows after the last attention where a class token answers. A static
        # graph finds them once, but fails where the first pieces of a batch are not averaged.
        static = accumulate == 1
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=static, find_unused_parameters=not static
        )
    for block in model.vit.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)  # type: ignore[return-value]  # the same module, its class extended


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights on the CPU, gathered where they are sharded; every process must call.

    What torch gives may be the model's own tensors, which training and averaging change later.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}


def summed(values: Tensor) -> Tensor:
    """Over all processes."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gathered(values: Tensor) -> Tensor:
    """All processes' rows, whose number may differ, one process after the other."""
    if not dist.is_initialized():
        return values
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, values.cpu())
    return torch.cat(every)


def agreed(flag: bool, device: torch.device) -> bool:
    """Whether any process says so: all then do the same."""
    if not dist.is_initialized():
        return flag
    return bool(summed(torch.tensor(float(flag), device=device)) > 0)


def grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    return not grouped() or dist.get_rank() == 0


def on_first(work: Callable[[], T]) -> T:
    """What the first process made of it, or its error, on every process: none waits for ever."""
    if not grouped():
        return work()
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
