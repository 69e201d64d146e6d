"""What a CUDA graph cannot hold, found on fake CUDA tensors where there is no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FromHost(TorchDispatchMode):
    """Notes what a CUDA graph cannot hold: copies between host and device, and looking at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (
            {each.device.type for each in tree_leaves(part) if isinstance(each, torch.Tensor)}
            for part in ((args, kwargs), out)
        )
        if func is torch.ops.aten._local_scalar_dense.default or {"cpu", "cuda"} <= given | made:
            self.found.append(str(func))
        return out
