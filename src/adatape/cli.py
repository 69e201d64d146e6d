"""The command line: a verb is a function. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import contextlib
import functools
import io
import json as json_module
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from annotated_types import Ge, Le

from adatape.config import (
    Bench,
    Count,
    Experiment,
    NotNegative,
    Quantity,
    QuantityOrZero,
    Seed,
    TapeFFN,
    Width,
)
from adatape.extras import how_to_install
from adatape.recipes import RECIPES


@dataclass(frozen=True)
class Replay:
    """Run the experiment of a config.json again, into a new folder."""

    config: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest good checkpoint."""

    folder: tyro.conf.Positional[Path]


def _deferred(recipe: Callable[..., Experiment]) -> Callable[..., Callable[[], Experiment]]:
    """The recipe with its options, yet to be called: what it refuses is then our error to print, not the parser's."""

    @functools.wraps(recipe)
    def choose(*args: Any, **kwargs: Any) -> Callable[[], Experiment]:
        return functools.partial(recipe, *args, **kwargs)

    return choose


def _recipe_choice() -> Any:
    choice: Any = Replay | Resume
    for name, recipe in RECIPES.items():
        choice = choice | Annotated[Experiment, tyro.conf.subcommand(name, constructor=_deferred(recipe))]
    return choice


def demo(out: Path = Path("runs/demo"), seed: Seed = 0, json: bool = False) -> None:
    """Train AdaTape and a plain Transformer on parity side by side, and draw what happened.

    Args:
        out: folder for the picture and the numbers; written anew each time
        seed: seed of weights and data
        json: print one JSON object as the last line
    """
    from adatape.report.demo import show_demo

    _print_json(show_demo(out, seed), json)


def train(
    what: _recipe_choice(),  # type: ignore[valid-type]
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    out: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    trust: bool = False,
    json: bool = False,
) -> None:
    """Run a recipe, or the config.json of a run; a run folder goes on where it was stopped.

    Args:
        what: the recipe, a config.json, or a run folder
        set: field=value, as in optimizer.clip=2.0 or data.augment.mixup=0.5; give it once for each field
        out: run folder; default runs/RECIPE-N
        resume: go on if the run folder exists already, as a job that is queued again should
        device: cpu, cuda, or auto
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    from adatape.report.training import train_with_progress

    _print_json(train_with_progress(what, out, device, set, resume, trust), json)


def evaluate(
    run: tyro.conf.Positional[Path],
    length: Width | None = None,
    budgets: str | None = None,
    device: str = "auto",
    trust: bool = False,
    json: bool = False,
) -> None:
    """Score a finished run on the fixed test set; with budgets, at each of them, with a picture.

    Args:
        run: a run folder
        length: sequence length, if other than trained
        budgets: steps with commas, as in 0,1,2,4,8
        device: cpu, cuda, or auto
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    if budgets is not None:
        from adatape.report.budget import print_budgets

        if length is not None:
            raise ValueError(f"length is {length} and budgets {budgets}; give one of them")
        _print_json(print_budgets(run, _numbers("budgets", budgets, int), device, trust=trust), json)
        return
    from adatape.report.training import print_evaluation

    _print_json(print_evaluation(run, length, device, trust), json)


def budget(
    run: tyro.conf.Positional[Path],
    latency: str | None = None,
    gflops: NotNegative | None = None,
    accuracy: str | None = None,
    device: str = "auto",
    trust: bool = False,
    json: bool = False,
) -> None:
    """Find the cheapest setting that meets a target on held-out data, and store it in the run's config.

    Args:
        run: a run folder
        latency: most time for one image, as in 12ms
        gflops: most multiply-adds for one image on average, in billions
        accuracy: how far below the best it may fall, as in 0.5pt-of-best
        device: cpu, cuda, or auto
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    from adatape.report.budget import print_search

    _print_json(print_search(run, latency, gflops, accuracy, device, trust), json)


def export(
    run: tyro.conf.Positional[Path],
    to: Literal["onnx", "torch"] = "onnx",
    out: Path | None = None,
    trust: bool = False,
    json: bool = False,
) -> None:
    """Export a finished run's model with dynamic batch and tape length.

    Args:
        run: a run folder
        to: an ONNX file, or a program of torch.export
        out: the file; default in the run folder
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    from adatape.report.export import print_export

    _print_json(print_export(run, to, out, trust), json)


def serve(
    run: tyro.conf.Positional[Path | None] = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    allow_host: tuple[str, ...] = (),
    queue: Quantity = 256,
    batch: Quantity = 32,
    device: str = "auto",
    trust: bool = False,
) -> None:
    """Answer over HTTP, with the explorer at /; without a run, a small model of digits that comes along.

    Args:
        run: a run folder
        host: address to bind to; others than loopback need a token
        port: port to bind to
        token_file: file with the bearer token that requests must carry; without one, ADATAPE_TOKEN of the environment
        allow_host: further names by which clients may call the server, as in the Host header
        queue: images that may wait before more are refused; one client may have half of them
        batch: most images per forward pass
        device: cpu, cuda, or auto
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
    """
    from adatape.report.serve import read_token
    from adatape.report.serve import serve as start

    start(run, host, port, read_token(token_file), queue, batch, device, allow_host, trust)


def figures(
    run: tyro.conf.Positional[Path],
    samples: Count = 2000,
    device: str = "auto",
    trust: bool = False,
    json: bool = False,
) -> None:
    """Draw the paper's pictures from a run, into its folder.

    Args:
        run: a run folder
        samples: test samples to look at
        device: cpu, cuda, or auto
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    from adatape.report.figures import print_figures

    _print_json(print_figures(run, device, samples, trust), json)


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]], out: Path = Path("runs/report.html"), json: bool = False
) -> None:
    """Write one page, complete in itself, about some runs.

    Args:
        runs: run folders
        out: the page
        json: print one JSON object as the last line
    """
    from adatape.report.report import print_report

    _print_json(print_report(list(runs), out), json)


def fewshot(
    run: tyro.conf.Positional[Path],
    on: str,
    shots: str = "1,5,10,25",
    seeds: str = "0,1,2",
    l2: str = "1024",
    device: str = "auto",
    trust: bool = False,
    json: bool = False,
) -> None:
    """Few-shot accuracy of a run's frozen features on another set, by ridge regression in closed form.

    Args:
        run: a run folder
        on: digits, SOURCE:PATH as in pets:data/pets, or a folder of arrays or of classes
        shots: samples per class, with commas
        seeds: random supports, with commas
        l2: strengths of the ridge, with commas
        device: cpu, cuda, or auto
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    from adatape.report.transfer import print_fewshot

    whole = {"shots": _numbers("shots", shots, int), "seeds": _numbers("seeds", seeds, int)}
    _print_json(print_fewshot(run, on, **whole, l2=_numbers("l2", l2, float), device=device, trust=trust), json)


def release(run: tyro.conf.Positional[Path], to: Path, trust: bool = False, json: bool = False) -> None:
    """Write a finished run's weights, config and model card in timm's hub format.

    Args:
        run: a run folder
        to: an empty or new folder
        trust: the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder
        json: print one JSON object as the last line
    """
    from adatape.report.transfer import print_release

    _print_json(print_release(run, to, trust), json)


def cost(
    model: tyro.conf.Positional[str],
    bank: str | None = None,
    tape_ffn: TapeFFN | None = None,
    classes: Annotated[int, Ge(1), Le(10_000_000)] = 1000,
    tape: QuantityOrZero | None = None,
    json: bool = False,
) -> None:
    """Parameters and GFLOPs of a model, by part; one multiply-add counts as 1.

    Args:
        model: a name from `adatape models`, or any ViT of timm
        bank: input or learn
        tape_ffn: where tape tokens take a feed-forward of their own
        classes: outputs of the head
        tape: tape tokens read; default all that the budget allows
        json: print one JSON object as the last line
    """
    from adatape.report.catalogue import print_cost

    _print_json(print_cost(model, classes, tape, bank=bank, tape_ffn=tape_ffn), json)


def bench(
    how: Annotated[Bench, tyro.conf.arg(name="")],
    models: tyro.conf.Positional[tuple[str, ...]] = (),
    out: Path | None = None,
    plot: Path | None = None,
    json: bool = False,
) -> None:
    """Time models against their reference, in turns and in one process; FLOPs and memory beside.

    Args:
        how: what is timed, and how long
        models: names, with options as in adatape_base_patch16_224:bank=learn; default AdaTape with both banks
        out: JSON file of results, to which rows are added
        plot: PNG file, speed against FLOPs of all rows of the results
        json: print one JSON object as the last line
    """
    from adatape.report.bench import print_bench

    _print_json(print_bench(models, how, out, plot), json)


def sweep(
    what: _recipe_choice(),  # type: ignore[valid-type]
    over: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    out: Path | None = None,
    device: str = "auto",
    trust: bool = False,
    json: bool = False,
) -> None:
    """Run a recipe for every combination of some fields, and tabulate the results.

    Args:
        what: the recipe, or a config.json
        over: field=value,value, as in reader.norm_scale=0.3,1.0 or seed=0,1,2; give it once for each field
        out: folder of the runs; default runs/RECIPE-sweep-N
        device: cpu, cuda, or auto
        trust: the file is your own: it may download, open URLs and read weights elsewhere
        json: print one JSON object as the last line
    """
    from adatape.report.training import sweep_with_progress

    if not over:
        raise ValueError("over is empty; say what to sweep, as in --over seed=0,1,2")
    _print_json(sweep_with_progress(what, list(over), out, device, trust), json)


def models(paper: bool = False, typical: bool = False, json: bool = False) -> None:
    """List the models registered with timm: what adapts, parameters, GFLOPs.

    Args:
        paper: list the paper's systems instead, its figures beside ours
        typical: also measure what fresh models spend on noise images (takes minutes)
        json: print one JSON object as the last line
    """
    from adatape.report.catalogue import print_models

    _print_json(print_models(paper, typical), json)


def recipes(json: bool = False) -> None:
    """List the recipes that `adatape train` runs.

    Args:
        json: print one JSON object as the last line
    """
    from adatape.report.recipes import print_recipes

    _print_json(print_recipes(), json)


VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "sweep": sweep,
    "eval": evaluate,
    "budget": budget,
    "fewshot": fewshot,
    "figures": figures,
    "report": report,
    "export": export,
    "serve": serve,
    "release": release,
    "cost": cost,
    "bench": bench,
    "models": models,
    "recipes": recipes,
}


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        _parsed(list(sys.argv[1:] if arguments is None else arguments))()
    except BrokenPipeError as error:  # whoever reads has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from error
    except KeyboardInterrupt as error:
        _end("stopped", 130, error)
    except (ValueError, OSError) as error:
        _end(" ".join(str(error).split()), 2, error)
    except Exception as error:
        code = getattr(error, "code", None)  # a run that a signal stopped; its class lies behind torch
        if isinstance(code, int):
            _end(str(error), code, error)
        if _was_interrupted(error):
            _end("stopped", 130, error)
        missing = isinstance(error, ModuleNotFoundError) and how_to_install(error.name)
        if missing:
            _end(missing, 2, error)
        if _is_out_of_memory(error):
            reason = str(error).strip().partition("\n")[0]
            _end(f"the memory does not suffice: {reason}; smaller batches or a smaller model need less", 2, error)
        raise


def _end(text: str, code: int, error: BaseException) -> NoReturn:
    print(f"adatape: {text}", file=sys.stderr)
    raise SystemExit(code) from error


def _was_interrupted(error: BaseException | None) -> bool:
    """Libraries that are interrupted while they are imported may say that they cannot be."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for a GPU's memory only."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def _parsed(given: list[str]) -> Callable[[], None]:
    """The verb with its options, yet to be called; what the parser refuses is one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            chosen: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
                {name: _checked(verb) for name, verb in VERBS.items()},
                prog="adatape",
                description="Transformers whose computation adapts to each input.",
                args=_with_kind(given),
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.CascadeSubcommandArgs),
            )
    except SystemExit as stop:
        if stop.code:
            _end(_refusal(said.getvalue()), 2, stop)
        raise
    return chosen


def _checked(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The verb, to be called once its options are within their limits."""

    @functools.wraps(verb)
    def choose(*args: Any, **kwargs: Any) -> Callable[[], None]:
        from adatape.validation import call_checked

        return functools.partial(call_checked, verb, *args, **kwargs)

    return choose


def _refusal(box: str) -> str:
    """What the parser says in a box: the first section, and of the others an option that may have been meant."""
    sections: list[list[str]] = [[]]
    for line in box.strip().splitlines()[1:]:  # the first has the title
        text = line.strip("│╰╯─ ")
        if text.strip("-"):
            sections[-1].append(text)
        elif set(line) & set("─-") and sections[-1]:
            sections.append([])
    words = (" ".join(sections[0]) or " ".join(box.split())).partition(" Got errors:")[0].rstrip(".")
    near = next((text.split()[0] for section in sections[1:] for text in section if text.startswith("--")), None)
    return f"{words}{f'; perhaps {near} was meant' if near and near not in words else ''}; --help lists what there is"


def _with_kind(given: list[str]) -> list[str]:
    """A path needs no word that says what it is."""
    if given[:1] in (["train"], ["sweep"]) and len(given) > 1:
        if given[1].endswith(".json"):
            return [given[0], "replay", *given[1:]]
        if given[1] not in RECIPES and Path(given[1]).is_dir():
            return [given[0], "resume", *given[1:]]
    return given


def _numbers(name: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; it must be numbers with commas between") from error


def _print_json(values: dict[str, Any], wanted: bool) -> None:
    if wanted:
        from adatape.validation import finite

        print(json_module.dumps(finite(values), allow_nan=False))


if __name__ == "__main__":
    main()
