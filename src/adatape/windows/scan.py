"""Scan: a thin convolutional network that looks at every place of a large image and scores it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from adatape.atr import highest, without_autocast
from adatape.cuda_graphs import is_exporting

FEW = 32  # windows up to which choosing them one by one takes less time than sorting all cells


class ScanShape(NamedTuple):
    """How an image becomes a grid of cells: shrunk by `scale`, `fold` × `fold` pixels as channels, then convolutions.

    The first convolution sees 2 × 2 folded pixels; one of 3 × 3 follows for each stride. A cell is
    scale × fold × the product of strides pixels wide.
    """

    scale: int
    fold: int
    widths: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def cell(self) -> int:
        return self.scale * self.fold * math.prod(self.strides)

    @property
    def halo(self) -> int:
        """Cells around a part of an image beyond which nothing changes the scores of that part.

        At a cut, zeros take the place of what lies beyond it: the first convolution sees one of them after the cut, and
        each of 3 × 3 one before it, and one after it where its stride is 1.
        """
        before, after = 0, 1
        for stride in self.strides:
            before, after = -(-(before + 1) // stride), (after + 1) // stride
        return max(before, after)


def scan_shape(cell: int = 16, scale: int = 2, fold: int = 2, width: int = 16, wide: bool = True) -> ScanShape:
    """Strides of 2 until a cell is `cell` pixels wide; a score then sees two cells, or four with one convolution more.

    Channels are 1, 2, 3, 3, … × `width`.
    """
    halvings = round(math.log2(cell / (scale * fold))) if min(cell, scale, fold) > 0 else -1
    if halvings < 0 or scale * fold * 2**halvings != cell:
        raise ValueError(f"cell is {cell}; it must be scan_scale × scan_fold = {scale * fold} times a power of two")
    strides = (2,) * halvings + (1,) * wide
    return ScanShape(scale, fold, tuple(width * min(n + 1, 3) for n in range(len(strides) + 1)), strides)


class Scanned(NamedTuple):
    """What a scan says of every cell, in float32."""

    scores: Float[Tensor, "b h w"]  # logit of: a window here shows what the label names
    found: Float[Tensor, "b h w"] | None  # weight of the cell's guess in the mixture of all guesses, as a logit
    guesses: Float[Tensor, "b h w classes"] | None  # the label, guessed from this cell alone


class Scan(nn.Module):
    """Scores for cells of an image; with `classes`, also a guess of the label at every cell (for training).

    Batch norms: a LayerNorm over 16 channels of millions of places takes longer than the convolutions.
    """

    def __init__(self, channels: int, shape: ScanShape, classes: int = 0) -> None:
        super().__init__()
        self.shape = shape
        layers = _convolution(channels * shape.fold**2, shape.widths[0], 2)
        for i, o, stride in zip(shape.widths[:-1], shape.widths[1:], shape.strides, strict=True):
            layers += _convolution(i, o, 3, stride, 1)
        self.layers = nn.Sequential(*layers)
        self.score = nn.Conv2d(shape.widths[-1], 1, 1)
        self.score.bias = nn.Parameter(torch.full((1,), -3.0))  # few places show anything
        self.guess = nn.Conv2d(shape.widths[-1], 1 + classes, 1) if classes else None

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Scanned:
        x = self.features(images)
        scores = _in_float32(self.score, x)[:, 0]
        if self.guess is None or not self.training:
            return Scanned(scores, None, None)
        found, guesses = _in_float32(self.guess, x).split([1, self.guess.out_channels - 1], 1)
        return Scanned(scores, found[:, 0], guesses.movedim(1, -1))

    def reset_classes(self, classes: int) -> None:
        """Other guesses; scores do not depend on the classes."""
        like = self.score.weight
        self.guess = nn.Conv2d(self.score.in_channels, 1 + classes, 1).to(like) if classes else None

    def features(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b c h w"]:
        scale, fold, cell = self.shape.scale, self.shape.fold, self.shape.cell
        x = images
        if scale > 1:
            # By less than `scale`: ONNX Runtime makes padding a part of the pooling, and takes no more there.
            x = F.avg_pool2d(_padded(x, scale), scale)
        x = F.pixel_unshuffle(_padded(x, cell // scale), fold).contiguous(memory_format=torch.channels_last)
        return self.layers(F.pad(x, (0, 1, 0, 1)))  # a cell's 2 × 2 begins at its own corner

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of cells."""
        return -(-height // self.shape.cell), -(-width // self.shape.cell)

    def centres(self, index: Int[Tensor, "*n"], columns: int) -> Int[Tensor, "*n 2"]:
        """Pixel (row, column) at the middle of what the scores of cells see; cells are numbered row by row.

        That is not a cell's own middle: its first convolution sees the 2 × 2 folded pixels at its corner.
        """
        at = torch.stack([index // columns, index % columns], -1)
        return at * self.shape.cell + self.shape.scale * self.shape.fold

    def macs(self, height: int, width: int) -> int:
        rows, columns = self.grid(height, width)
        unit = math.prod(self.shape.strides)
        h, w, total = rows * unit, columns * unit, 0
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                h, w = h // layer.stride[0], w // layer.stride[1]
                total += h * w * layer.weight.numel()
        return total + rows * columns * self.score.weight.numel()


def _padded(x: Tensor, multiple: int) -> Tensor:
    """With zeros at the right and at the bottom up to a multiple."""
    height, width = x.shape[-2:]
    whole = height % multiple == 0 and width % multiple == 0
    return x if whole else F.pad(x, (0, -width % multiple, 0, -height % multiple))  # which copies in any case


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.GELU()]


def _in_float32(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """In bfloat16 many cells would have the same score, and neighbours among them."""
    assert layer.bias is not None
    with without_autocast(x):
        if layer.weight.dtype == torch.float32:
            return layer(x.float())  # as a module, for the hooks that pruning and `weight_norm` add
        return F.conv2d(x.float(), layer.weight.float(), layer.bias.float())


def highest_apart(
    scores: Float[Tensor, "b h w"], count: int
) -> tuple[Int[Tensor, "b count"], Float[Tensor, "b count"]]:
    """The highest cells, highest first, and their scores: a cell beside a higher one is left out, with score -∞.

    Of equal cells the one with the lowest index counts as higher, so that no two neighbours are chosen.
    """
    width = scores.shape[2]
    around = F.pad(scores, (1, 1, 1, 1), value=-math.inf)
    left, above = around[:, 1:-1, :width], around[:, :-2]
    before = torch.maximum(left, F.max_pool2d(above[:, None], (1, 3), stride=1)[:, 0])
    highest_around = F.max_pool2d(around[:, None], 3, stride=1)[:, 0]
    left_out = torch.finfo(scores.dtype).min  # not -∞, which `highest` gives to what it has chosen
    peaks = scores.masked_fill((scores < highest_around) | (scores <= before), left_out).flatten(1)
    # Cells left out are equal, for which `highest` takes a pass for each of `count`; ONNX has no stable sort.
    by_passes = count <= FEW or is_exporting()
    index = highest(peaks, count) if by_passes else peaks.sort(descending=True, stable=True).indices[:, :count]
    top = peaks.gather(1, index)
    return index, top.masked_fill(top == left_out, -math.inf)


def cut_windows(
    images: Float[Tensor, "b ch height width"], centres: Int[Tensor, "b t 2"], size: int
) -> Float[Tensor, "b t ch size size"]:
    """Windows around centres; zero outside the image."""
    height, width = images.shape[-2:]
    rows, columns = _pixels_around(centres, size)
    batch = torch.arange(images.shape[0], device=images.device)[:, None, None, None]
    rows, columns = rows.clamp(0, height - 1)[..., :, None], columns.clamp(0, width - 1)[..., None, :]
    windows = images.movedim(1, -1)[batch, rows, columns]
    return (windows * within_image(centres, size, (height, width))[..., None]).movedim(-1, 2)


def within_image(centres: Int[Tensor, "b t 2"], size: int, image: tuple[int, int]) -> Bool[Tensor, "b t size size"]:
    """Which pixels of windows lie in an image of height and width `image`."""
    rows, columns = _pixels_around(centres, size)
    return ((rows >= 0) & (rows < image[0]))[..., :, None] & ((columns >= 0) & (columns < image[1]))[..., None, :]


def _pixels_around(centres: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of windows, (b, t, size) each."""
    offset = torch.arange(size, device=centres.device) - size // 2
    return centres[..., 0, None] + offset, centres[..., 1, None] + offset
