"""Training loaders, which yield a process's part of every batch from any step on, and evaluation loaders.

A step's batch depends on seed and step only, not on the number of processes or of loader workers.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adatape.counter_rng import key_of, keys_of
from adatape.cuda_graphs import cuda_graphed
from adatape.data.augment import augment_image, augment_images, center_crop, center_crop_image, scale_and_erase, scaled
from adatape.data.batch import Batch, Shard
from adatape.data.imageset import ImageSet, Tally, read_or_next
from adatape.data.mixing import Mixing, draw_mixing, mixed, targets
from adatape.data.parity import training_batch
from adatape.data.sampler import Order
from adatape.data.workers import items_of
from adatape.data_config import Augment, Images, Parity

AUGMENT, MODEL, MIX = range(3)  # purposes of a key
PREFETCHED = 4  # batches prefetched by each worker
T = TypeVar("T")
Chunks = Callable[[int, int, Shard], list[range]]  # (samples, batch, part) -> the chunks of a process


class Labelled(NamedTuple):
    """A batch for evaluation."""

    x: Tensor
    label: Tensor


class ParityLoader:
    """New random sequences at every step."""

    tally = None

    def __init__(self, data: Parity, batch: int, seed: int, shard: Shard, device: torch.device) -> None:
        self.data, self.batch, self.seed, self.shard, self.device = data, batch, seed, shard, device

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.shard.bounds(self.batch)
        for step in itertools.count(first):
            symbols, label = training_batch(self.data.length, self.batch, self.seed, step)
            position = torch.arange(step * self.batch + start, step * self.batch + stop)
            key = keys_of(key_of(self.seed, MODEL), position)
            yield Batch(*map(self._moved, (symbols[start:stop], label[start:stop], key)))

    def _moved(self, x: Tensor) -> Tensor:
        """On the device; from pinned memory, since a GPU copies other memory only once its earlier work is done."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def epoch(self, step: int) -> None:
        """None: there are no epochs."""


class ResidentLoader:
    """A set of small images that is kept and augmented on the device."""

    tally = None

    def __init__(self, images: ImageSet, data: Images, order: Order, shard: Shard, device: torch.device) -> None:
        self.data, self.order, self.shard, self.device = data, order, shard, device
        self.classes = images.classes
        self.pixels, self.labels = on_device(images, device)
        self.make: Callable[..., tuple[Tensor, ...]] = cuda_graphed(self._make) if device.type == "cuda" else self._make

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.shard.bounds(self.order.batch)
        for step in itertools.count(first):
            ids, position = map(torch.from_numpy, self.order.slots(step, start, stop + neighbours(self.data.augment)))
            mixing = mixing_of(self.data, self.order.seed, step, self.device)
            where = (each.to(self.device, non_blocking=True) for each in (ids, position))
            yield Batch(*self.make(*where, *mixing))

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def _make(self, ids: Tensor, position: Tensor, share: Tensor, box: Tensor) -> Batch:
        keys = keys_of(key_of(self.order.seed, AUGMENT), position)
        x = augment_images(self.pixels[ids], keys, self.data.augment, self.data.size)
        return make_batch(x, self.labels[ids], position, self.order.seed, Mixing(share, box), self.data, self.classes)


class DecodingLoader:
    """Images of any size, decoded and augmented by worker processes."""

    def __init__(
        self, images: ImageSet, data: Images, order: Order, shard: Shard, device: torch.device, workers: int
    ) -> None:
        self.images, self.data, self.order, self.shard, self.device = images, data, order, shard, device
        self.classes, self.workers = images.classes, workers
        self.tally = Tally(len(images), data.broken)

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.shard.bounds(self.order.batch)
        with closing(self.decoded(first, start, stop + neighbours(self.data.augment))) as decoded:
            for step, (pixels, labels, position, broken, converted) in enumerate(decoded, first):
                self.tally.add(len(labels), broken, converted)
                x, labels, position = (each.to(self.device, non_blocking=True) for each in (pixels, labels, position))
                x = scale_and_erase(x, keys_of(key_of(self.order.seed, AUGMENT), position), self.data.augment)
                mixing = mixing_of(self.data, self.order.seed, step, self.device)
                yield make_batch(x, labels, position, self.order.seed, mixing, self.data, self.classes)

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def decoded(self, first: int, start: int, stop: int) -> Generator[Any, None, None]:
        """The workers' results for slots start to stop of every batch."""
        plan = BatchSampler(self.order, first, start, stop)
        return from_workers(_AugmentedImages(self.images, self.data, self.order.seed), self.workers, self.device, plan)


def errors_as_values(call: Callable[..., T]) -> Callable[..., T | Exception]:
    """Returns a worker's exception as a value, since DataLoader would wrap it in a long traceback."""

    @functools.wraps(call)
    def answer(*given: Any) -> T | Exception:
        try:
            return call(*given)
        except (ValueError, OSError) as error:
            return error

    return answer


def from_workers(
    data: Dataset[Any], workers: int, device: torch.device, plan: Any = None
) -> Generator[Any, None, None]:
    """Yields a DataLoader's items, by the batch sampler `plan` or, without one, from an IterableDataset.

    It must be closed: workers kept alive by an exception's traceback would block the exit.
    """
    given: dict[str, Any] = {"batch_size": None} if plan is None else {"batch_sampler": plan}
    if workers:
        given["prefetch_factor"] = PREFETCHED
    on_gpu = device.type == "cuda"
    given |= {"collate_fn": _no_collate, "worker_init_fn": _ignore_outside_signals}
    with closing(items_of(DataLoader(data, num_workers=workers, pin_memory=on_gpu, **given))) as items:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item


def _ignore_outside_signals(_: int) -> None:
    """Ignores signals to the process group: the trainer needs batches until it has saved a checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS lacks it, so the sender is not known there
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parent_signal, daemon=True).start()


def _exit_on_parent_signal() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _no_collate(batch: Any) -> Any:
    return batch


class BatchSampler:
    """An endless batch sampler from step `first` on."""

    def __init__(self, order: Order, first: int, start: int, stop: int) -> None:
        self.order, self.first, self.start, self.stop = order, first, start, stop

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in itertools.count(self.first):
            slots = self.order.slots(step, self.start, self.stop)
            yield list(zip(slots.ids.tolist(), slots.position.tolist(), strict=True))


class _AugmentedImages(Dataset[Any]):
    """Reads and augments a whole batch in one worker, with a note for each unreadable image."""

    def __init__(self, images: ImageSet, data: Images, seed: int) -> None:
        self.images, self.data, self.key = images, data, key_of(seed, AUGMENT)

    @errors_as_values
    def __getitems__(self, slots: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, list[str], int]:
        position = torch.tensor([position for _, position in slots])
        pixels, labels, converted = [], [], 0
        broken: list[str] = []
        for (i, _), key in zip(slots, keys_of(self.key, position).tolist(), strict=True):
            read = read_or_next(self.images, i)
            pixels.append(augment_image(read.image, key, self.data.augment, self.data.size))
            labels.append(read.label)
            broken.extend(read.broken)
            converted += read.converted
        return torch.stack(pixels), torch.tensor(labels), position, broken, converted


class _CroppedImages(Dataset[Any]):
    """Centre crops, for evaluation."""

    def __init__(self, images: ImageSet, size: int) -> None:
        self.images, self.size = images, size

    @errors_as_values
    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor, list[str]]:
        return cropped((read_or_next(self.images, i) for i in ids), self.size)


def cropped(reads: Iterable[Any], size: int) -> tuple[Tensor, Tensor, list[str]]:
    """Centre crops and labels of images as they are read, and a note for each unreadable one."""
    rows = [(center_crop_image(read.image, size), read.label, read.broken) for read in reads]
    pixels, labels, broken = zip(*rows, strict=True)
    return torch.stack(pixels), torch.tensor(labels), [note for notes in broken for note in notes]


def even_chunks(total: int, batch: int, shard: Shard) -> list[range]:
    """A process's part of a set in chunks of at most `batch`; all processes have equally many, as FSDP2 needs."""
    if total < shard.world:
        raise ValueError(f"the set has {total} samples; it must have at least one for each of {shard.world} processes")
    pieces = -(-total // (shard.world * batch))
    edges = [total * n // (shard.world * pieces) for n in range(shard.world * pieces + 1)]
    mine = edges[shard.rank * pieces : (shard.rank + 1) * pieces + 1]
    return [range(start, stop) for start, stop in itertools.pairwise(mine)]


def fixed_chunks(total: int, batch: int, shard: Shard) -> list[range]:
    """A process's share, perhaps empty, of the chunks of a single process, so that rounding is always the same."""
    pieces = even_chunks(total, batch, Shard())
    return pieces[len(pieces) * shard.rank // shard.world : len(pieces) * (shard.rank + 1) // shard.world]


def labelled_images(
    images: ImageSet, size: int, chunks: list[range], device: torch.device, workers: int = 0, broken: float = 1.0
) -> Iterator[Labelled]:
    """Yields these chunks of a set without augmentation; raises above the fraction `broken` of unreadable images."""
    if images.pixels is None:
        yield from scored(
            from_workers(_CroppedImages(images, size), workers, device, chunks), device, Tally(len(images), broken)
        )
        return
    for chunk in chunks:
        pixels = center_crop(_channels_first(images.pixels[chunk.start : chunk.stop]).to(device), size)
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
            "resident is true, but these images differ in size and are decoded one by one; it must be false or null"
        )
    return _channels_first(images.pixels).to(device), torch.from_numpy(images.labels).to(device)


def _channels_first(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def make_batch(
    x: Tensor, labels: Tensor, position: Tensor, seed: int, mixing: Mixing, data: Images, classes: int, chains: int = 1
) -> Batch:
    """Makes a Batch of rows; for mixing they are `chains` of equal length, each with its last row's neighbour."""
    augment, extra = data.augment, neighbours(data.augment)
    y = targets(labels, classes, augment.smoothing) if extra or augment.smoothing else labels
    if extra:
        x, y = (_unfolded(each, chains) for each in mixed(_folded(x, chains), _folded(y, chains), mixing))
        position = position.unflatten(0, (chains, -1))[:, :-1].flatten()
    return Batch(x, y, keys_of(key_of(seed, MODEL), position))


def mixing_of(data: Images, seed: int, step: int, device: torch.device) -> Mixing:
    """The Mixing of a step, equal on all processes."""
    mixing = draw_mixing(data.augment, data.size, key_of(seed, MIX, step))
    return Mixing(*(each.to(device, non_blocking=True) for each in mixing))


def _folded(rows: Tensor, chains: int) -> Tensor:
    """Moves chains into the channel axis, so that a row's neighbour is the next row."""
    return rows.unflatten(0, (chains, -1)).transpose(0, 1).flatten(1, 2)


def _unfolded(rows: Tensor, chains: int) -> Tensor:
    return rows.unflatten(1, (chains, -1)).transpose(0, 1).flatten(0, 1)


def neighbours(augment: Augment) -> int:
    """Additional rows per chain: 1 with Mixup or CutMix, which mix a sample with the next one."""
    return int(augment.mixup > 0 or augment.cutmix > 0)
