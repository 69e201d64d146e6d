"""Saves checkpoints, on a GPU in a thread while training continues."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adatape.config import Experiment
from adatape.train.checkpoint import prune, save
from adatape.train.parallel import on_rank_zero

State = dict[str, Tensor]


class Saver:
    """Saves and prunes checkpoints; `background`, in a thread, is for one process on a GPU, as it needs no
    collectives."""

    def __init__(self, folder: Path, experiment: Experiment, background: bool) -> None:
        self.folder, self.experiment, self.background = folder, experiment, background
        self.thread = ThreadPoolExecutor(1)
        self.work: Future[None] | None = None
        self.copied: State = {}

    def save(self, step: int, state: State, facts: dict[str, Any]) -> None:
        """Returns once the state may change again; raises the error of the previous save, if any."""
        self.wait()
        if not self.background:
            self._write(step, state, facts)
            return
        self._copy(state)
        self.work = self.thread.submit(self._write, step, self.copied, facts)

    def wait(self) -> None:
        """Waits until the last save is on the disk."""
        if self.work is not None:
            work, self.work = self.work, None
            work.result()

    def _write(self, step: int, state: State, facts: dict[str, Any]) -> None:
        save(self.folder, step, state, facts, self.experiment)
        on_rank_zero(lambda: prune(self.folder, upto=step))

    def _copy(self, state: State) -> None:
        """Copies into pinned memory, which is kept, since allocating it takes longer than filling it."""
        for name, value in state.items():
            if name not in self.copied:
                self.copied[name] = torch.empty_like(value, device="cpu", pin_memory=True)
            self.copied[name].copy_(value.detach(), non_blocking=True)
        torch.cuda.synchronize()
