"""Images per second of a model of windows on street scenes, beside plain ViTs that see the scene shrunk.

    python benchmarks/large_speed.py results/large/speed.jsonl                 on a GPU; most of the time is compiling
    python benchmarks/large_speed.py results/large/speed.jsonl --ways eager
    python benchmarks/large_speed.py results/large/speed.jsonl --run src/adatape/serve/models/street --files FOLDER

Sides of a batch that run in the same way (eager, compiled, or compiled and replayed as CUDA graphs) are timed in turns;
their rows are printed and written before the next way begins. `model` starts from the model's own input, `pixels` from
the full scene in uint8 on the device, which is scaled there and, for the plain ViTs, shrunk; `decoding` from JPEG
bytes, which threads decode by Pillow and which are copied to the device. In batches, the next batch is decoded
meanwhile; a single image is decoded when it is asked for. Files of `--files` become JPEGs first, so that all sides
decode the same format.

Budgets are those of one model with a view, not compiled; with `--run` those of a trained one, compiled too, and the
floor that is stored in it, not compiled, since a compiled model encodes the windows below it as well. `--files` decodes
images of a folder in turns, which a floor needs.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from record import Row, add_rows, parser_of, settings_of
from torch import Tensor

import adatape
from adatape.cuda_graphs import WARM_UP_CALLS, cuda_graphed, raised_recompile_limit
from adatape.data.letterbox import letterboxed_pixels
from adatape.evaluate.cost import cost
from adatape.evaluate.speed import Call, Outcome, TimedModel, compare, spread
from adatape.evaluate.timed_models import MODELS_COMPILED, free_memory
from adatape.macs import total
from adatape.train.folder import load_without_data

NAME, PATCH, CLASSES = "vit_tiny_patch16_224", 16, 4
BUDGETS = (0, 1, 2, 4, 8)
Way = Literal["eager", "compiled", "graphs"]  # graphs: compiled, and replayed as one CUDA graph
WAYS: tuple[Way, ...] = ("eager", "compiled", "graphs")
IMAGES = (".jpg", ".jpeg", ".png", ".webp")


class Side(NamedTuple):
    """A model on images of a size, at a budget."""

    name: str
    build: Callable[[], torch.nn.Module]
    size: tuple[int, int]
    compiles: bool = True  # timed compiled, too


def plain(how: argparse.Namespace, rows: int, columns: int) -> Side:
    size = rows * PATCH, columns * PATCH
    build = partial(timm.create_model, NAME, img_size=size, num_classes=CLASSES, **json.loads(how.options))
    return Side(f"ViT, {rows} × {columns} patches", build, size)


def windows(how: argparse.Namespace, name: str, budget: int | None = None, **options: Any) -> Side:
    image = (how.image[0], how.image[1])

    def build() -> torch.nn.Module:
        vit = timm.create_model(NAME, num_classes=CLASSES, **json.loads(how.options))
        model = adatape.wrap(vit, bank="windows", image=image, window=64, labels="several", search=64, **options)
        if budget is not None:
            model.set_budget(budget)
        return model

    return Side(name, build, image, compiles=budget is None)


def trained(how: argparse.Namespace, steps: int | None) -> Side:
    """A trained run at so many windows without its floor; None is as it is stored."""

    def build() -> torch.nn.Module:
        model: Any = load_without_data(how.run)[1]
        if steps is not None:
            model.set_budget(steps, 0.0)
        return model

    name = "run, stored floor" if steps is None else f"run, {steps} windows"
    return Side(name, build, tuple(how.image), compiles=steps is not None)


def sides_of(how: argparse.Namespace) -> list[Side]:
    plains = [plain(how, *map(int, each.split("x"))) for each in how.patches]
    if how.run is not None:
        return plains + [trained(how, steps) for steps in (*how.budgets, None)]
    models = [windows(how, f"8 windows, scan_width {width}", scan_width=width) for width in (16, 32)]
    budgets = [windows(how, f"view and {n} windows", n, view=plains[0].size) for n in BUDGETS]
    return plains + models + budgets


class Scenes:
    """Scenes on the device, decoded from JPEG bytes by threads into memory that stays."""

    def __init__(self, how: argparse.Namespace, batch: int) -> None:
        folder, count = how.files, min(batch, 16)
        found = [jpeg(how.image[0], how.image[1], seed) for seed in range(count)] if folder is None else []
        self.files = found or [as_jpeg(Image.open(each)) for each in sorted(folder.iterdir()) if each.suffix in IMAGES]
        self.next = 0
        self.batch, self.device, self.ahead = batch, how.device, batch > 1
        shape, pin = (batch, *how.image, 3), torch.device(how.device).type == "cuda"
        self.buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.pool, self.turn = ThreadPoolExecutor(how.threads), 0
        self.pending: list[Future[None]] = []

    def __call__(self) -> Tensor:
        if not self.pending:
            self._start()
        for each in self.pending:
            each.result()
        pixels = self.buffers[self.turn].to(self.device)
        self.turn, self.pending = 1 - self.turn, []
        if self.ahead:
            self._start()
        return pixels

    def _start(self) -> None:
        buffer, first = self.buffers[self.turn].numpy(), self.next
        self.next = (first + self.batch) % len(self.files)
        self.pending = [self.pool.submit(self._decode, n, first + n, buffer) for n in range(self.batch)]

    def _decode(self, row: int, n: int, buffer: np.ndarray) -> None:
        image = Image.open(io.BytesIO(self.files[n % len(self.files)]))
        buffer[row] = letterboxed_pixels(image, buffer.shape[1:3])


def jpeg(height: int, width: int, seed: int) -> bytes:
    """Smooth colours with some noise, about as large as a photo of the same size."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int64)
    noisy = (smooth + rng.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
    return as_jpeg(Image.fromarray(noisy))


def as_jpeg(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.convert("RGB").save(content, "JPEG", quality=90)
    return content.getvalue()


def prepared(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    x = pixels.movedim(-1, 1).float() / 127.5 - 1
    return x if x.shape[-2:] == size else F.interpolate(x, size, mode="bilinear", antialias=True)


Answer = Callable[[Tensor], tuple[Tensor, ...]]


class Answers:
    """A model's answers to its own input and to pixels, in one of the ways to run it; built when first needed."""

    def __init__(self, how: argparse.Namespace, side: Side, way: Way) -> None:
        self.how, self.side, self.way = how, side, way

    @cached_property
    def model(self) -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        eager = self.side.build().to(self.how.device).eval()
        return eager if self.way == "eager" else torch.compile(eager, dynamic=False)

    @cached_property
    def to_input(self) -> Answer:
        return self._replayed(self._to_input)

    @cached_property
    def to_pixels(self) -> Answer:
        return self._replayed(lambda pixels: self._to_input(prepared(pixels, self.side.size)))

    def _replayed(self, answer: Answer) -> Answer:
        return cuda_graphed(answer) if self.way == "graphs" else answer

    @torch.no_grad()
    def _to_input(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(torch.device(self.how.device).type, torch.bfloat16, enabled=self.how.precision == "bf16"):
            return (self.model(x),)


def timed_sides(
    how: argparse.Namespace, side: Side, way: Way, scenes: Scenes, pixels: Tensor
) -> dict[str, Callable[[], TimedModel]]:
    """The model on its input, from pixels, and with decoding; all use the same model."""
    answers, x = Answers(how, side, way), prepared(pixels, side.size)

    def ready(call: Call) -> TimedModel:
        for _ in range(WARM_UP_CALLS + 1 if way == "graphs" else 1):
            call()
        return TimedModel(call)

    name = f"{side.name}, {way}"
    return {
        f"{name}, model": lambda: ready(lambda: answers.to_input(x)),
        f"{name}, pixels": lambda: ready(lambda: answers.to_pixels(pixels)),
        f"{name}, decoding": lambda: ready(lambda: answers.to_pixels(scenes())),
    }


def row_of(how: argparse.Namespace, name: str, batch: int, outcome: Outcome, gmac: float | None) -> Row:
    case = f"{name}, batch {batch}, {torch.device(how.device).type}"
    row: Row = {"case": case, "batch": batch, "settings": settings_of(how)}
    if outcome.error is not None:
        return row | {"error": outcome.error}
    each = spread([batch / took for took in outcome.seconds])
    return row | {"images_per_second": each.median, "low": each.low, "high": each.high, "gmac": gmac}


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['case']:<66}  {row['error']}"
    gmac = "–" if row["gmac"] is None else f"{row['gmac']:.2f}"
    spent = f"{row['low']:.0f} … {row['high']:.0f}"
    return f"{row['case']:<66}{row['images_per_second']:>10.1f}{spent:>20}{gmac:>8}"


def rows_of(how: argparse.Namespace, batch: int, way: Way, scenes: Scenes, pixels: Tensor) -> list[Row]:
    builders: dict[str, Callable[[], TimedModel]] = {"decoding alone": lambda: TimedModel(scenes)}
    gmacs: dict[str, float] = {}
    for side in sides_of(how):
        if side.compiles or way == "eager":
            found = timed_sides(how, side, way, scenes, pixels)
            builders |= found
            gmacs |= dict.fromkeys(found, total(cost(side.build())).macs / 1e9)
    synchronize = torch.cuda.synchronize if torch.device(how.device).type == "cuda" else lambda: None
    with raised_recompile_limit(MODELS_COMPILED):
        outcomes = compare(builders, how.rounds, how.seconds, synchronize, lambda name: print(name, flush=True))
    return [row_of(how, name, batch, outcome, gmacs.get(name)) for name, outcome in outcomes.items()]


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--image", type=int, nargs=2, default=[800, 1360])
    parser.add_argument("--run", type=Path, help="a run folder, timed at each budget beside the plain ViTs")
    parser.add_argument("--files", type=Path, help="a folder of images to decode; else JPEGs are made")
    parser.add_argument(
        "--patches", nargs="+", default=["11x18", "18x32", "24x43"], help="rows x columns of plain ViTs"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS[1:], help="numbers of windows of --run")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="all unless given; graphs need a GPU")
    parser.add_argument("--threads", type=int, default=16, help="that decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each side in a round")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--options", default="{}", help="of the ViT, as JSON")
    how = parser.parse_args(given)
    how.ways = how.ways or WAYS[: 3 if torch.device(how.device).type == "cuda" else 2]
    for batch in how.batches:
        scenes = Scenes(how, batch)
        pixels = scenes()
        for way in how.ways:
            free_memory()  # and what earlier models have compiled
            rows = rows_of(how, batch, way, scenes, pixels)
            add_rows(how.out, rows, how.device)
            head = f"{'':<66}{'images/s':>10}{'low … high':>20}{'GFLOPs':>8}"
            print("\n".join([head, *map(line, rows)]), flush=True)


if __name__ == "__main__":
    main()
