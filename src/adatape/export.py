"""Exports a trained model to ONNX or torch.export, with dynamic batch size and tape length.

A tape token does not depend on later ones, so the graph reads the full tape and cuts it to the number of slots given as
an input. The blocks after it run on that many tape tokens.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

import adatape
from adatape.config import Experiment, ImageModel, to_dict
from adatape.data.sets import open_set
from adatape.evaluate.result import Result
from adatape.extras import how_to_install
from adatape.models.base import Adaptive
from adatape.reader import TapeReader
from adatape.records import Tape
from adatape.train.files import atomic_write
from adatape.train.folder import load_run
from adatape.train.lock import write_lock
from adatape.validation import one_line

M = TypeVar("M", bound=Adaptive)
Format = Literal["onnx", "torch"]
SUFFIX: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
AXES = {"images": "batch", "symbols": "batch", "slots": "length"}
# torch.export specialises sizes 0 and 1 and ties equal sizes together, so these differ and are above 1.
TRACED_BATCH, TRACED_SLOTS = 3, 2
COMPARED_BATCHES = (1, 2, 4, 5, 8)


class Exported(NamedTuple):
    """The outputs of an exported file."""

    logits: Float[Tensor, "b classes"]
    length: Int[Tensor, " b"] | None = None  # tape tokens used; None without a tape


def frozen(model: M) -> M:
    """A copy without gradients: a mask that requires grad takes another attention path, which ONNX exports wrongly."""
    return copy.deepcopy(model).eval().requires_grad_(False)


class Answer(nn.Module):
    """A model without a tape: logits only."""

    def __init__(self, model: Adaptive) -> None:
        super().__init__()
        self.model = frozen(model)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.model(images),)


class Elastic(nn.Module):
    """A model with a tape whose budget is an input: `slots.shape[0]` tape tokens, halted at `threshold`."""

    def __init__(self, model: Adaptive) -> None:
        super().__init__()
        self.model = frozen(model)
        self.model.set_budget()
        reader = self.model.tape_reader()
        if isinstance(reader, TapeReader) and reader.halts:
            reader.threshold = math.inf  # set directly: set_budget warns beyond the trained threshold

    def forward(self, images: Tensor, slots: Int[Tensor, " n"], threshold: Tensor | None = None) -> tuple[Tensor, ...]:
        reader = self.model.tape_reader()
        assert reader is not None
        hook = reader.register_forward_hook(lambda _, __, tape: cut(tape, slots, threshold))
        try:
            output = self.model(images, output=True)
        finally:
            hook.remove()
        return output.logits, output.tape.length


def cut(tape: Tape, slots: Int[Tensor, " n"], threshold: Float[Tensor, ""] | None) -> Tape:
    """The first n tokens of a full tape, visible until the threshold is reached, if one is given."""
    visible = tape.mask if threshold is None else until(tape.weight, threshold)
    mask = visible.index_select(1, slots)
    return Tape(
        tokens=tape.tokens.index_select(1, slots) * mask[..., None],
        mask=mask,
        index=tape.index.index_select(1, slots).masked_fill(~mask[..., None], -1),
        weight=tape.weight.index_select(1, slots) * mask[..., None],
        # ONNX Runtime 1.31 returns the wrong shape for a sum over an empty axis, so this sums the full tape.
        length=visible.sum(1).clamp(max=slots.shape[0]),
        ponder=tape.ponder,
    )


def until(weight: Float[Tensor, "b t k"], threshold: Float[Tensor, ""]) -> Bool[Tensor, "b t"]:
    """Where Algorithm 2 is still running, summed in its order: `cumsum` may round differently."""
    halting, running = weight.new_zeros(weight.shape[0]), []
    for p in weight.amax(-1).unbind(1):
        running.append(halting < threshold)
        halting = halting + p
    return torch.stack(running, 1)


def export_run(folder: Path, to: Format, out: Path | None = None, trust: bool = False) -> Path:
    """Exports a finished run's model to `out`, by default its folder; existing files are not overwritten."""
    path = export_path(folder, to, out)
    experiment, model = load_run(folder, trust=trust)
    with write_lock(folder) if out is None else nullcontext():
        export_model(model, example_for(experiment, model), to, path, facts(experiment, model))
    return path


def export_path(folder: Path, to: str, out: Path | None) -> Path:
    """The path to export to; raises if it exists."""
    if to not in get_args(Format):
        raise ValueError(f"to is {to!r}; it must be one of {', '.join(get_args(Format))}")
    path = out or folder / f"model{SUFFIX[to]}"
    if path.suffix != SUFFIX[to]:
        raise ValueError(f"out is {path}; for {to} it must end in {SUFFIX[to]}")
    for each in (path, path.with_suffix(".json")) if to == "torch" else (path,):
        if each.exists():
            raise FileExistsError(f"{each} exists; choose another --out or remove it")
    return path


def export_model(model: Adaptive, example: Tensor, to: Format, path: Path, about: dict[str, Any]) -> None:
    """Traces a model on the example's shape and writes it; `about` is stored in the ONNX file, or as a JSON file."""
    refusal = model.export_refusal()
    if refusal is not None:
        raise ValueError(refusal)
    if to == "onnx":
        _need("onnx", "onnxscript")
    inputs = arguments(model, example[:1].expand(TRACED_BATCH, *example.shape[1:]), TRACED_SLOTS, 1.0)
    about = {**about, "inputs": list(inputs), "outputs": ["logits", "length"][: 2 if "slots" in inputs else 1]}
    try:
        program = trace(model, inputs)
        write = _write_onnx if to == "onnx" else _write_torch
        path.parent.mkdir(parents=True, exist_ok=True)
        write(program, path, about)
    except RuntimeError as error:
        reason = one_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise ValueError(f"{about.get('model', type(model).__name__)} cannot be exported to {to}: {reason}") from error


def arguments(model: Adaptive, x: Tensor, length: int, threshold: float) -> dict[str, Tensor]:
    """The inputs of a model's exported graph, by name and in order."""
    inputs = {"images" if x.is_floating_point() else "symbols": x}
    reader = model.tape_reader()
    if reader is not None:
        inputs["slots"] = torch.arange(length)
        if reader.halts:
            inputs["threshold"] = torch.tensor(threshold)
    return inputs


def trace(model: Adaptive, inputs: dict[str, Tensor]) -> ExportedProgram:
    reader = model.tape_reader()
    module = (Answer(model) if reader is None else Elastic(model)).eval()
    most = TRACED_SLOTS if reader is None else max(TRACED_SLOTS, reader.reading.steps)
    sizes = {"batch": Dim("batch", min=1), "length": Dim("length", min=0, max=most)}
    free = tuple({0: sizes[AXES[name]]} if name in AXES else None for name in inputs)
    program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=free, strict=False)
    _forget_sources(program)
    return program


def _forget_sources(program: ExportedProgram) -> None:
    """Removes stack traces, which hold paths of this machine, from all graphs; autocast regions are subgraphs."""
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            node.meta.pop("stack_trace", None)


def _write_onnx(program: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    names = {"input_names": about["inputs"], "output_names": about["outputs"]}
    free = {name: {0: AXES[name]} if name in AXES else None for name in about["inputs"]}
    with quiet("onnxscript"):
        made = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes=free, **names)
    assert made is not None
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    made.model.metadata_props.update(texts)
    with atomic_write(path) as partial:
        made.save(partial, external_data=False)


def _write_torch(program: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    with atomic_write(path) as partial, partial.open("wb") as file:
        torch.export.save(program, file)
    with atomic_write(path.with_suffix(".json")) as partial:
        partial.write_text(json.dumps(about, indent=2) + "\n")


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Hides a library's warnings."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _need(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX needs {', '.join(missing)}: {how_to_install(missing[0])}")


def example_for(experiment: Experiment, model: Adaptive, count: int = 1, seed: int = 0) -> Tensor:
    """Random inputs of a run's shape: pixels from -1 to 1, or symbols -1, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    size, length = experiment.data.image_size, experiment.data.sequence_length
    if size is not None:
        return 2 * torch.rand((count, model.vit.in_chans, *size), generator=generator) - 1
    assert length is not None
    return torch.randint(-1, 2, (count, length), generator=generator)


def facts(experiment: Experiment, model: Adaptive) -> dict[str, Any]:
    """The facts about a model that a user of its export needs."""
    settings = experiment.model
    known: dict[str, Any] = {
        "model": settings.name if isinstance(settings, ImageModel) else experiment.recipe,
        "adatape": adatape.__version__,
        "classes": model.num_classes,
        **_shown(experiment, model),
    }
    reader = model.tape_reader()
    if reader is not None:
        known["steps"] = reader.reading.steps
        known["slots"] = f"0, 1, …, n - 1 for at most n tape tokens, n from 0 to {known['steps']}"
        known |= {"threshold": reader.reading.threshold} if reader.halts else {}
    budget = settings.budget if reader is not None else model.budget()  # without slots, what the graph always has
    if budget is not None:
        known["budget"] = to_dict(budget)
    return known


def _shown(experiment: Experiment, model: Adaptive) -> dict[str, Any]:
    data = experiment.data
    shape, channels = data.image_size, model.vit.in_chans
    if shape is None:
        return {"input_size": [data.sequence_length]}
    size = {"input_size": [channels, *shape], "mean": [0.5] * channels, "std": [0.5] * channels}
    return {**size, "exif_orientation": data.exif_orientation, "labels": open_set(data, "test").names}


def open_export(path: Path) -> Callable[[dict[str, Tensor]], Exported]:
    """Loads an exported file as a function on the CPU."""
    if path.suffix == SUFFIX["onnx"]:
        return _open_onnx(path)
    module = torch.export.load(path).module()
    return torch.no_grad()(lambda inputs: Exported(*module(*inputs.values())))


def _open_onnx(path: Path) -> Callable[[dict[str, Tensor]], Exported]:
    _need("onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def answer(inputs: dict[str, Tensor]) -> Exported:
        found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return Exported(*map(torch.from_numpy, found))

    return answer


class Difference(NamedTuple):
    """The largest difference of a logit between an exported file and the model that it came from."""

    batch: int
    length: int | None  # tape tokens that may be read; None without a tape
    difference: float


@dataclass(frozen=True)
class ExportResult(Result):
    out: Path
    to: Format
    bytes: int
    seconds: float
    checks: list[Difference]
    """empty without onnxruntime, which ONNX files need to be compared"""
    largest_difference: float | None


def write_export(folder: Path, to: Format = "onnx", out: Path | None = None, trust: bool = False) -> ExportResult:
    """Writes a run's model for other programs, and compares it with the model at sizes that it was not traced at."""
    began = time.perf_counter()
    path = export_run(folder, to, out, trust)
    seconds = time.perf_counter() - began
    checks = [] if to == "onnx" and find_spec("onnxruntime") is None else _checked(path, *load_run(folder, trust=trust))
    largest = max((each.difference for each in checks), default=None)
    return ExportResult(path, to, path.stat().st_size, seconds, checks, largest)


def _checked(path: Path, experiment: Experiment, model: Adaptive) -> list[Difference]:
    """`compare`, which removes a file that cannot be run."""
    try:
        return compare(path, experiment, model)
    except Exception as error:  # runtimes have errors of their own
        for each in (path, path.with_suffix(".json")) if path.suffix == SUFFIX["torch"] else (path,):
            each.unlink(missing_ok=True)
        raise ValueError(f"{path} was written but cannot be run, so it was removed: {one_line(error)}") from error


def compare(path: Path, experiment: Experiment, model: Adaptive) -> list[Difference]:
    """Both at several sizes of batch and tape, at the trained threshold."""
    answer, model = open_export(path), model.eval()
    found = []
    for n, batch in enumerate(COMPARED_BATCHES):
        x, length, threshold = example_for(experiment, model, batch, seed=n), None, 1.0
        reader = model.tape_reader()
        if reader is not None:
            reading = reader.reading
            length, threshold = round(n * reading.steps / (len(COMPARED_BATCHES) - 1)), reading.threshold
            model.set_budget(length, threshold)
        with torch.no_grad():
            logits = model(x)
        away = answer(arguments(model, x, length or 0, threshold)).logits - logits
        found.append(Difference(batch, length, float(away.abs().max())))
    return found
