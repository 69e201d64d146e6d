"""Loaders: each gives a process's part of every batch from any step on, and fixed sets for scoring.

What a step holds depends on seed and step alone, never on the number of processes or of loader workers.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adatape.config import Augment, Images, Parity
from adatape.data.augment import centre, centre_one, finish, vary, vary_one
from adatape.data.batch import Batch, Part
from adatape.data.imageset import ImageSet, Tally, read_or_next
from adatape.data.mixing import Mixing, draw_mixing, mixed, targets
from adatape.data.parity import training_batch
from adatape.data.sampler import Order
from adatape.data.workers import items_of
from adatape.graph import captured
from adatape.keyed import key_of, keys_of

VARY, MODEL, MIX = range(3)  # what a key is for
PREFETCHED = 4  # batches that each worker is ahead
T = TypeVar("T")
Chunks = Callable[[int, int, Part], list[range]]  # of a set's size and a batch's, those of a process


class Labelled(NamedTuple):
    """Samples to be scored."""

    x: Tensor
    label: Tensor


class ParityLoader:
    """Fresh sequences for every step."""

    tally = None

    def __init__(self, data: Parity, batch: int, seed: int, part: Part, device: torch.device) -> None:
        self.data, self.batch, self.seed, self.part, self.device = data, batch, seed, part, device

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.part.bounds(self.batch)
        for step in itertools.count(first):
            symbols, label = training_batch(self.data.length, self.batch, self.seed, step)
            position = torch.arange(step * self.batch + start, step * self.batch + stop)
            key = keys_of(key_of(self.seed, MODEL), position)
            yield Batch(*(each.to(self.device) for each in (symbols[start:stop], label[start:stop], key)))

    def epoch(self, step: int) -> None:
        """None: no sequence is drawn twice."""


class ResidentLoader:
    """A set of small images that lies on the device, varied there."""

    tally = None

    def __init__(self, images: ImageSet, data: Images, order: Order, part: Part, device: torch.device) -> None:
        self.data, self.order, self.part, self.device = data, order, part, device
        self.classes = images.classes
        self.pixels, self.labels = on_device(images, device)
        self.make: Callable[..., tuple[Tensor, ...]] = captured(self._make) if device.type == "cuda" else self._make

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.part.bounds(self.order.batch)
        for step in itertools.count(first):
            ids, position = map(torch.from_numpy, self.order.slots(step, start, stop + neighbours(self.data.augment)))
            mixing = mixing_of(self.data, self.order.seed, step, self.device)
            where = (each.to(self.device, non_blocking=True) for each in (ids, position))
            yield Batch(*self.make(*where, *mixing))

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def _make(self, ids: Tensor, position: Tensor, share: Tensor, box: Tensor) -> Batch:
        keys = keys_of(key_of(self.order.seed, VARY), position)
        x = vary(self.pixels[ids], keys, self.data.augment, self.data.size)
        return assembled(x, self.labels[ids], position, self.order.seed, Mixing(share, box), self.data, self.classes)


class DecodingLoader:
    """Images of any size, decoded and varied by worker processes."""

    def __init__(
        self, images: ImageSet, data: Images, order: Order, part: Part, device: torch.device, workers: int
    ) -> None:
        self.images, self.data, self.order, self.part, self.device = images, data, order, part, device
        self.classes, self.workers = images.classes, workers
        self.tally = Tally(len(images), data.broken)

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.part.bounds(self.order.batch)
        with closing(self.decoded(first, start, stop + neighbours(self.data.augment))) as decoded:
            for step, (pixels, labels, position, broken, converted) in enumerate(decoded, first):
                self.tally.add(len(labels), broken, converted)
                x, labels, position = (each.to(self.device, non_blocking=True) for each in (pixels, labels, position))
                x = finish(x, keys_of(key_of(self.order.seed, VARY), position), self.data.augment)
                mixing = mixing_of(self.data, self.order.seed, step, self.device)
                yield assembled(x, labels, position, self.order.seed, mixing, self.data, self.classes)

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def decoded(self, first: int, start: int, stop: int) -> Generator[Any, None, None]:
        """What the workers give for slots start to stop of every batch."""
        plan = _Plan(self.order, first, start, stop)
        return loaded(_Varied(self.images, self.data, self.order.seed), self.workers, self.device, plan)


def told(call: Callable[..., T]) -> Callable[..., T | Exception]:
    """An error in a worker as a value: DataLoader would wrap it in a traceback of many lines."""

    @functools.wraps(call)
    def answer(*given: Any) -> T | Exception:
        try:
            return call(*given)
        except (ValueError, OSError) as error:
            return error

    return answer


def loaded(data: Dataset[Any], workers: int, device: torch.device, plan: Any = None) -> Generator[Any, None, None]:
    """What workers give, in the order of the plan, or turn by turn where they plan themselves.

    Close it: workers that an error's traceback keeps alive are waited for in vain later on.
    """
    given: dict[str, Any] = {"batch_size": None} if plan is None else {"batch_sampler": plan}
    if workers:
        given["prefetch_factor"] = PREFETCHED
    on_gpu = device.type == "cuda"
    given |= {"collate_fn": _as_it_is, "worker_init_fn": _obey_the_trainer_alone}
    with closing(items_of(DataLoader(data, num_workers=workers, pin_memory=on_gpu, **given))) as items:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item


def _obey_the_trainer_alone(_: int) -> None:
    """A terminal, torchrun or a scheduler signals all processes of a run, which needs batches until it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_at_its_word, daemon=True).start()


def _end_at_its_word() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Plan:
    """A batch sampler that begins at any step and has no end."""

    def __init__(self, order: Order, first: int, start: int, stop: int) -> None:
        self.order, self.first, self.start, self.stop = order, first, start, stop

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in itertools.count(self.first):
            slots = self.order.slots(step, self.start, self.stop)
            yield list(zip(slots.ids.tolist(), slots.position.tolist(), strict=True))


class _Varied(Dataset[Any]):
    """Reads and varies a whole batch in one worker, and says which images could not be read."""

    def __init__(self, images: ImageSet, data: Images, seed: int) -> None:
        self.images, self.data, self.key = images, data, key_of(seed, VARY)

    @told
    def __getitems__(self, slots: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, list[str], int]:
        position = torch.tensor([position for _, position in slots])
        pixels, labels, converted = [], [], 0
        broken: list[str] = []
        for (i, _), key in zip(slots, keys_of(self.key, position).tolist(), strict=True):
            read = read_or_next(self.images, i)
            pixels.append(vary_one(read.image, key, self.data.augment, self.data.size))
            labels.append(read.label)
            broken.extend(read.broken)
            converted += read.converted
        return torch.stack(pixels), torch.tensor(labels), position, broken, converted


class _Centred(Dataset[Any]):
    """Images as they are scored."""

    def __init__(self, images: ImageSet, size: int) -> None:
        self.images, self.size = images, size

    @told
    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor, list[str]]:
        reads = [read_or_next(self.images, i) for i in ids]
        pixels = torch.stack([centre_one(read.image, self.size) for read in reads])
        return pixels, torch.tensor([read.label for read in reads]), [note for read in reads for note in read.broken]


def even_chunks(total: int, batch: int, part: Part) -> list[range]:
    """A process's stretch of a set in pieces of at most `batch`; all have as many, since sharded weights need it."""
    if total < part.world:
        raise ValueError(f"the set has {total} samples; {part.world} processes need at least one each")
    pieces = -(-total // (part.world * batch))
    edges = [total * n // (part.world * pieces) for n in range(part.world * pieces + 1)]
    mine = edges[part.rank * pieces : (part.rank + 1) * pieces + 1]
    return [range(start, stop) for start, stop in itertools.pairwise(mine)]


def fixed_chunks(total: int, batch: int, part: Part) -> list[range]:
    """A process's share, perhaps none, of the pieces that one process has: products of the same size round alike."""
    pieces = even_chunks(total, batch, Part())
    return pieces[len(pieces) * part.rank // part.world : len(pieces) * (part.rank + 1) // part.world]


def labelled_images(
    images: ImageSet, size: int, chunks: list[range], device: torch.device, workers: int = 0, broken: float = 1.0
) -> Iterator[Labelled]:
    """These stretches of a set, unvaried; more than a share `broken` of unreadable images end it."""
    if images.pixels is None:
        yield from scored(loaded(_Centred(images, size), workers, device, chunks), device, Tally(len(images), broken))
        return
    for chunk in chunks:
        pixels = centre(_channels_first(images.pixels[chunk.start : chunk.stop]).to(device), size)
        yield Labelled(scaled(pixels), torch.from_numpy(images.labels[chunk.start : chunk.stop]).to(device))


def scored(decoded: Generator[Any, None, None], device: torch.device, tally: Tally) -> Iterator[Labelled]:
    with closing(decoded):
        for pixels, labels, broken in decoded:
            tally.add(len(labels), broken)
            yield Labelled(scaled(pixels.to(device, non_blocking=True)), labels.to(device))


def on_device(images: ImageSet, device: torch.device) -> tuple[Tensor, Tensor]:
    """All pixels, channels first, and all labels."""
    if images.pixels is None:
        raise ValueError(
            "resident is True; these images have different sizes and are decoded one by one, so leave it out"
        )
    return _channels_first(images.pixels).to(device), torch.from_numpy(images.labels).to(device)


def scaled(pixels: Tensor) -> Tensor:
    return finish(pixels, torch.zeros(pixels.shape[0], dtype=torch.int64), Augment())


def _channels_first(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def assembled(
    x: Tensor, labels: Tensor, position: Tensor, seed: int, mixing: Mixing, data: Images, classes: int, chains: int = 1
) -> Batch:
    """Rows as a batch; for mixing they are chains of equal length, each of which ends in its last one's neighbour."""
    augment, extra = data.augment, neighbours(data.augment)
    y = targets(labels, classes, augment.smoothing) if extra or augment.smoothing else labels
    if extra:
        x, y = (_unfolded(each, chains) for each in mixed(_folded(x, chains), _folded(y, chains), mixing))
        position = position.unflatten(0, (chains, -1))[:, :-1].flatten()
    return Batch(x, y, keys_of(key_of(seed, MODEL), position))


def mixing_of(data: Images, seed: int, step: int, device: torch.device) -> Mixing:
    """How all processes mix at a step."""
    mixing = draw_mixing(data.augment, data.size, key_of(seed, MIX, step))
    return Mixing(*(each.to(device, non_blocking=True) for each in mixing))


def _folded(rows: Tensor, chains: int) -> Tensor:
    """Chains side by side as channels, so that a row's neighbour is the next row in all of them."""
    return rows.unflatten(0, (chains, -1)).transpose(0, 1).flatten(1, 2)


def _unfolded(rows: Tensor, chains: int) -> Tensor:
    return rows.unflatten(1, (chains, -1)).transpose(0, 1).flatten(0, 1)


def neighbours(augment: Augment) -> int:
    """Rows that a chain needs beyond its own: mixing takes the next one's image."""
    return int(augment.mixup > 0 or augment.cutmix > 0)
