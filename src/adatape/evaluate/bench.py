"""Models timed against their references, in turns and in one process."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

from adatape.config import Bench
from adatape.evaluate.catalogue import create
from adatape.evaluate.cost import NoCostFormula, cost, total
from adatape.evaluate.device import pick_device
from adatape.evaluate.progress import SILENT, Progress
from adatape.evaluate.speed import Outcome, compare, ratios, spread
from adatape.evaluate.timed_models import Mode, TimingSettings, build_timed, free_memory
from adatape.models.base import Adaptive
from adatape.validation import check, value_of

REFERENCE = "reference"
BANKS = (":bank=learn", ":bank=input")
SIZED = re.compile(r"_(tiny|small|base|large|huge)_(?:\w+_)?patch(\d+)_(?:\w+_)?(\d+)$")
SHAPE = ("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads")
KEY = ("model", "options", "reference", *TimingSettings._fields, "hardware")
GRAPHS_UP_TO = 8  # samples; launching costs more than running only in small batches
Row = dict[str, Any]


class Spec(NamedTuple):
    """A model as it is named on the command line: NAME, or NAME:option=value,option=value."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        given = ",".join(f"{key}={_written(value)}" for key, value in self.options.items())
        return f"{self.name}:{given}" if given else self.name


def _written(value: Any) -> str:
    """As `value_of` reads it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


class Group(NamedTuple):
    """Sides that are timed together: a reference and all that are compared with it."""

    timing: TimingSettings
    reference: Spec
    models: tuple[Spec, ...]


def measure_speed(models: Sequence[str], asked: Bench, progress: Progress = SILENT) -> Iterator[Row]:
    """Each model's time beside its reference's, row by row as they are measured."""
    check(asked)
    groups = groups_of(models, asked, pick_device(asked.device))
    gflops = {str(spec): _gflops(spec) for group in groups for spec in (group.reference, *group.models)}
    total_turns, done = sum(len(group.models) + 2 for group in groups), itertools.count(1)
    for group in groups if asked.rounds else []:
        outcomes = _outcomes(group, asked, lambda note: progress.update("bench", next(done), total_turns, note))
        for model in group.models:
            row = row_of(group, model, outcomes[REFERENCE], outcomes[str(model)], gflops)
            progress.message(_line(row))
            yield row


def groups_of(models: Sequence[str], asked: Bench, device: str) -> list[Group]:
    """Modes by batches, models first as they are built, then with full tapes, by references.

    On a GPU auto means bf16, compiled, and with full tapes small batches as graphs; else none of them.
    """
    on_gpu = torch.device(device).type == "cuda"
    if asked.graphs == "on" and not on_gpu:
        raise ValueError(f"graphs is 'on' and device {device!r}; CUDA graphs need a CUDA GPU")
    default = tuple(f"adatape_{'base' if on_gpu else 'tiny'}_patch16_224{bank}" for bank in BANKS)
    by_reference: dict[str, tuple[Spec, list[Spec]]] = {}
    for spec in dict.fromkeys(models or default):
        model = spec_of(spec)
        reference = reference_of(model, asked.against)
        by_reference.setdefault(str(reference), (reference, []))[1].append(model)
    sizes = asked.batch or ((1, 8, 64, 256) if on_gpu else (1, 16))
    groups = [
        Group(_timing(asked, device, mode, size, full), reference, tuple(m for m in compared if not full or halts(m)))
        for mode, size, full in itertools.product(asked.mode, sizes, (False, True) if asked.full_tape else (False,))
        for reference, compared in by_reference.values()
    ]
    return [group for group in groups if group.models]


def halts(model: Spec) -> bool:
    """Whether a model, as it is built, may stop early."""
    made: Any = create(model.name, **model.options)
    return isinstance(made, Adaptive) and made.adapts is not None


def _timing(asked: Bench, device: str, mode: Mode, batch: int, full: bool) -> TimingSettings:
    on_gpu = torch.device(device).type == "cuda"
    precision = ("bf16" if on_gpu else "fp32") if asked.precision == "auto" else asked.precision
    compiled = ("default" if on_gpu else "none") if asked.compile == "auto" else asked.compile
    small = full and on_gpu and mode == "inference" and batch <= GRAPHS_UP_TO
    graphs = small if asked.graphs == "auto" else asked.graphs == "on"
    return TimingSettings(mode, batch, device, precision, compiled, graphs, asked.data, full)


def spec_of(text: str) -> Spec:
    """Checked by building it without memory; values are JSON where they can be, else text."""
    name, _, given = text.partition(":")
    pairs = [part.partition("=") for part in given.split(",") if part]
    wrong = [key for key, equals, value in pairs if not (key and equals and value)]
    if wrong:
        raise ValueError(f"model is {text!r}; its options must read name:option=value,option=value")
    spec = Spec(name, {key: value_of(value) for key, _, value in pairs})
    create(spec.name, **spec.options)
    return spec


def reference_of(model: Spec, against: str | None) -> Spec:
    """The ViT of the same size and patch, as the name tells, with the same options of shape."""
    if against is not None:
        return spec_of(against)
    found = SIZED.search(model.name)
    name = f"vit_{found[1]}_patch{found[2]}_{found[3]}" if found else ""
    if not timm.is_model(name):
        raise ValueError(f"{model.name} does not tell which ViT is its like; name one with --against")
    return Spec(name, {key: value for key, value in model.options.items() if key in SHAPE})


def _gflops(spec: Spec) -> float | None:
    try:
        return total(cost(create(spec.name, **spec.options))).macs / 1e9
    except NoCostFormula:  # a model of timm's that is no ViT
        return None


def _outcomes(group: Group, asked: Bench, tell: Callable[[str], None]) -> Any:
    timing = group.timing
    named = {REFERENCE: group.reference} | {str(model): model for model in group.models}
    builders = {key: functools.partial(build_timed, *spec, timing) for key, spec in named.items()}

    free_memory()
    try:
        where = f"{timing.mode}, batch {timing.batch}"
        watch: Callable[[str], None] = lambda what: tell(f"{where}: {named.get(what, what)}")  # noqa: E731
        return compare(builders, asked.rounds, asked.seconds, timing.synchronize, watch)
    finally:
        free_memory()


def row_of(group: Group, model: Spec, reference: Outcome, ours: Outcome, gflops: dict[str, float | None]) -> Row:
    """Ratios of time and FLOPs are the reference's over ours, of memory ours over the reference's."""
    mine, theirs = gflops[str(model)], gflops[str(group.reference)]
    error = ours.error or (f"{group.reference}: {reference.error}" if reference.error else None)
    row: Row = {"model": model.name, "options": model.options, "reference": str(group.reference)}
    row |= {**group.timing._asdict(), **_times("ms", ours), **_times("reference_ms", reference)}
    row |= dict.fromkeys(("ratio", "ratio_min", "ratio_max"))
    if ours.seconds and reference.seconds:
        row |= _spread("ratio", ratios(reference.seconds, ours.seconds))
    memory = ours.peak_memory / reference.peak_memory if ours.peak_memory and reference.peak_memory else None
    return row | {
        "images_per_second": group.timing.batch / row["ms"] * 1e3 if row["ms"] else None,
        "gflops": mine,
        "flops_ratio": theirs / mine if theirs and mine else None,
        "peak_memory": ours.peak_memory,
        "reference_peak_memory": reference.peak_memory,
        "memory_ratio": memory,
        "rounds": len(ours.seconds),
        "error": error,
    }


def _times(name: str, outcome: Outcome) -> Row:
    if not outcome.seconds:
        return dict.fromkeys((name, f"{name}_min", f"{name}_max"))
    return _spread(name, spread([1e3 * each for each in outcome.seconds]))


def _spread(name: str, values: tuple[float, float, float]) -> Row:
    return dict(zip((name, f"{name}_min", f"{name}_max"), values, strict=True))


def read_rows(path: Path | None) -> list[Row]:
    """What a results file holds already; none where there is no file."""
    if path is None or not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())["rows"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} exists and is no results file of adatape bench; choose another --out") from error
    return [row for row in rows if isinstance(row, dict)]


def merged(before: Sequence[Row], now: Sequence[Row]) -> list[Row]:
    """Rows of the same model under the same conditions are replaced, where they stand; others are kept."""
    rows = {key_of(row): row for row in [*before, *now]}
    return list(rows.values())


def key_of(row: Row) -> str:
    return json.dumps([row.get(name) for name in KEY], sort_keys=True)


def _line(row: Row) -> str:
    where = f"{mode_of(row)}, batch {row['batch']}: {name_of(row)}"
    if row["ratio"] is None:
        return f"{where}  {row['error']}"
    return f"{where}  {row['ms']:.4g} ms, {row['ratio']:.3f} × {row['reference']}"


def name_of(row: Row) -> str:
    return str(Spec(row["model"], row["options"]))


def mode_of(row: Row) -> str:
    return str(row["mode"]) + " + data" * bool(row["data"]) + ", full tape" * bool(row.get("full_tape"))
