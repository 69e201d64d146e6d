"""Verbs that make runs, and verbs that take a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from adatape.cli.options import Device, Json, RunFolder, Trust, show, with_bars
from adatape.cli.parsing import numbers, source_of
from adatape.cli.recipe_options import recipe_choice
from adatape.limits import Count, CountOrZero, NotNegative, Quantity, Seed, Width


def demo(
    out: Path = Path("runs/demo"),
    seed: Seed = 0,
    only: Literal["parity", "haystack"] | None = None,
    json: Json = False,
) -> None:
    """Train AdaTape on parity beside a plain Transformer, and on small digits of a large canvas; draw what happened.

    Args:
        out: folder for the pictures and the numbers; written anew each time
        seed: seed of weights and data
        only: one of the two tasks; default both
    """
    from adatape.report.demo import write_demo
    from adatape.report.tables import demo_table

    show(with_bars(write_demo, out, seed, only), demo_table, json)


def train(
    what: recipe_choice(),  # type: ignore[valid-type]
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    out: Path | None = None,
    resume: bool = False,
    device: Device = "auto",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run a recipe, or the config.json of a run; a run folder is resumed from its newest checkpoint.

    Args:
        what: the recipe, a config.json, or a run folder
        set: field=value, as in optimizer.clip=2.0 or data.augment.mixup=0.5; give it once for each field
        out: run folder; default runs/RECIPE-N
        resume: resume if the run folder exists already, as a requeued job should
    """
    from adatape.report.tables import trained_table
    from adatape.train.launch import train_to_folder

    show(with_bars(train_to_folder, source_of(what), out, device, set, resume, trust), trained_table, json)


def sweep(
    what: recipe_choice(),  # type: ignore[valid-type]
    over: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    out: Path | None = None,
    device: Device = "auto",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run a recipe for every combination of some fields, and tabulate the results.

    Args:
        what: the recipe, or a config.json
        over: field=value,value, as in reader.norm_scale=0.3,1.0 or seed=0,1,2; give it once for each field
        out: folder of the runs; default runs/RECIPE-sweep-N
    """
    from adatape.report.tables import swept_table
    from adatape.train.launch import sweep_to_folder

    show(with_bars(sweep_to_folder, source_of(what), over, out, device, trust), swept_table, json)


def evaluate(
    run: RunFolder,
    length: Width | None = None,
    budgets: str | None = None,
    device: Device = "auto",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Score a finished run on the test set, at the budget stored in it, else as trained; or at several budgets.

    Args:
        length: sequence length, if other than trained
        budgets: numbers of tape tokens with commas, as in 0,1,2,4,8: scores and times each, and draws a picture
    """
    from adatape.report.tables import budgets_table, evaluated_table
    from adatape.train.launch import evaluate_run

    if budgets is None:
        show(evaluate_run(run, length, device, trust), evaluated_table, json)
        return
    if length is not None:
        raise ValueError(f"length is {length} and budgets {budgets}; give one of them")
    from adatape.report.budgets import write_budgets

    steps = numbers("budgets", budgets, int)
    show(with_bars(write_budgets, run, steps, device, trust=trust), budgets_table, json)


def budget(
    run: RunFolder,
    latency: str | None = None,
    gflops: NotNegative | None = None,
    accuracy: str | None = None,
    length: NotNegative | None = None,
    steps: CountOrZero | None = None,
    store: bool = False,
    reset: bool = False,
    device: Device = "auto",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Find the cheapest budget that meets a target on held-out data; with --store, keep it in the run.

    Args:
        latency: most time for one image, as in 12ms
        gflops: most multiply-adds for one image on average, in billions
        length: windows that are read of an image on average, which sets the floor; most tokens of other tapes
        accuracy: how far below the best accuracy (several labels: mean AP) may fall, as in 0.5pt-of-best
        steps: this many, without a search; beyond the trained number too, where the bank has so many tokens
        store: keep it in config.json: eval, fewshot, serve, export and release then use it, figures does not
        reset: remove the stored budget instead of looking for one; the run is then used as trained
    """
    from adatape.evaluate.budget import target_of
    from adatape.report.tables import found_budget_table, removed_budget_table
    from adatape.train.budgets import find_budget, reset_budget, store_budget

    if reset:
        if store or any(target is not None for target in (latency, gflops, accuracy, length, steps)):
            raise ValueError("reset is given with store or a target; it only removes what is stored, so give it alone")
        show(reset_budget(run, trust), removed_budget_table, json)
        return
    target = target_of(latency, gflops, accuracy, length, steps)
    show(with_bars(store_budget if store else find_budget, run, target, device, trust), found_budget_table, json)


def fewshot(
    run: RunFolder,
    on: str,
    shots: str = "1,5,10,25",
    seeds: str = "0,1,2",
    l2: str = "1024",
    device: Device = "auto",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Few-shot accuracy of a run's frozen features on another set, by ridge regression; at a stored budget if any.

    Args:
        on: digits, SOURCE:PATH as in pets:data/pets, or a folder of arrays or of classes
        shots: samples per class, with commas
        seeds: random supports, with commas
        l2: strengths of the ridge, with commas
    """
    from adatape.report.tables import fewshot_table
    from adatape.train.fewshot import fewshot_run

    whole = (numbers("shots", shots, int), numbers("seeds", seeds, int), numbers("l2", l2, float))
    show(fewshot_run(run, on, *whole, device, trust), fewshot_table, json)


def figures(
    run: RunFolder, samples: Count = 2000, device: Device = "auto", trust: Trust = False, json: Json = False
) -> None:
    """Draw the paper's pictures from a run, into its folder; always at the trained budget, whatever is stored.

    Args:
        samples: test samples to look at
    """
    from adatape.report.figures import write_figures
    from adatape.report.tables import figures_table

    show(with_bars(write_figures, run, device, samples, trust), figures_table, json)


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]], out: Path = Path("runs/report.html"), json: Json = False
) -> None:
    """Write one page, complete in itself, about some runs.

    Args:
        runs: run folders
        out: the page
    """
    from adatape.report.page import write_report
    from adatape.report.tables import report_table

    show(write_report(runs, out), report_table, json)


def export(
    run: RunFolder,
    to: Literal["onnx", "torch"] = "onnx",
    out: Path | None = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Export a finished run's model with dynamic batch and tape length; a stored budget goes into its metadata.

    Args:
        to: an ONNX file, or a program of torch.export
        out: the file; default in the run folder
    """
    from adatape.export import write_export
    from adatape.report.tables import export_table

    show(write_export(run, to, out, trust), export_table, json)


def release(run: RunFolder, to: Path, licence: str | None = None, trust: Trust = False, json: Json = False) -> None:
    """Write a finished run's weights, config and card in timm's hub format; the card's code sets a stored budget.

    Args:
        to: an empty or new folder
        licence: of the weights, as in cc-by-4.0; default that of the pretrained weights that the run began with
    """
    from adatape.report.tables import released_table
    from adatape.train.release import release_to_folder

    show(release_to_folder(run, to, trust, licence), released_table, json)


def serve(
    run: tyro.conf.Positional[Path | None] = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    allow_host: tuple[str, ...] = (),
    queue: Quantity = 256,
    batch: Quantity = 32,
    packaged: Literal["street", "digits"] = "street",
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Answer over HTTP, by default at the budget stored in the run, with the explorer at /; or serve a packaged model.

    Args:
        run: a run folder
        packaged: the model served without a run: traffic signs in street scenes, or digits
        host: address to bind to; others than loopback need a token
        port: port to bind to
        token_file: file with the bearer token that requests must carry; without one, ADATAPE_TOKEN of the environment
        allow_host: further names by which clients may call the server, as in the Host header
        queue: images that may wait before more are refused; one client may have half of them
        batch: most images per forward pass; fewer where they are large
    """
    from adatape.report.tables import started_table
    from adatape.report.terminal import print_table
    from adatape.serve.served import PACKAGED
    from adatape.serve.server import read_token, run_server

    run_server(
        run or PACKAGED[packaged],
        host,
        port,
        read_token(token_file),
        queue,
        batch,
        device,
        allow_host,
        trust,
        on_start=lambda started: print_table(started_table(started)),
    )
