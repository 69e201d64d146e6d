"""Runs the experiments of docs/results.md's image tables, several at a time on one GPU; each becomes a row of a study.

    python research/study.py results/mine.jsonl --only plain systems --cifar100 data/cifar100
    python research/study.py results/mine.jsonl --only ablations --set epochs=6        keywords and fields for every run
    python research/study.py results/mine.jsonl --only plain --set validate_on=0.1     score on held-out images
    python research/study.py results/mine.jsonl --only plain --list                    which runs, with their commands
    python research/look.py results/mine.jsonl                                         few shots, budgets, lengths
    python research/tables.py results/mine.jsonl                                       tables of the results

Run folders and weights stay under `--runs`. Runs that have a result in the study are skipped, so a study can be
interrupted. Runs of equally many steps train together, since one small model does not fill a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from cells import cells, score_of
from fleet import fleets, run_together
from image_tables import accuracies
from rows import add_rows, read_rows, row_of
from words import experiment_of, parse_run

from adatape.config import Experiment
from adatape.recipes import RECIPES
from adatape.train.run import TrainStatus
from adatape.train.stop import Stopped

SEEDS = (0, 1, 2)
DEPTH = "model.options.depth"


class Run(NamedTuple):
    """One run: a recipe, a system with arguments and dotted fields as in `adatape train --set`, and a seed."""

    recipe: str
    name: str
    words: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.recipe}/{self.name}/seed-{self.seed}"

    @property
    def command(self) -> str:
        system, keywords, fields = parse_run(RECIPES[self.recipe], self.words)
        given = " ".join(_flag(name.replace("_", "-"), value) for name, value in keywords.items())
        sets = "".join(f" --set {word}" for word in self.words.split() if word.partition("=")[0] in fields)
        return f"adatape train {self.recipe} --system {system} {given} --seed {self.seed}{sets}".replace("  ", " ")


def _flag(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name} {value}"


# The same training for all, chosen on plain ViTs (docs/log.md): few epochs, so only crops, flips and Mixup.
SHORT = "epochs=24 batch=256 optimizer.warmup=500 data.augment.randaug=0 data.augment.magnitude=5 data.augment.cutmix=0"
# A norm on patches with Xavier weights adds three points to a plain ViT, so every system has both.
NORMED = "model.options.weight_init=moco model.options.pre_norm=true"
MEAN = "model.options.class_token=false model.options.global_pool=avg model.options.fc_norm=false"
FINER, LEARN = "adatape patch=8 bank_patch=4", "adatape-learn patch=8"
# Plain ViTs of four depths, the baselines, and the published tape on coarse input.
PLAIN = {
    **{f"plain-4-depth-{depth}": f"vit patch=4 {MEAN} {DEPTH}={depth}" for depth in (2, 3, 4, 6)},
    "adatape-paper": f"{FINER} {DEPTH}=6",
}
# The paper's systems at one patch size and about equal cost.
SYSTEMS = {
    **{name: f"{name} patch=4 {DEPTH}=4" for name in ("plainvit", "vit", "deit", "vit3ffn", "avit")},
    **{name: f"{name} patch=4 model.options.steps=5" for name in ("u2t", "ut", "ponder")},
    "uvit": f"uvit patch=4 {DEPTH}=3 model.options.steps=3",
    "adatape-input": f"adatape patch=4 bank_patch=2 {DEPTH}=4",
    "adatape-learn": f"adatape-learn patch=4 {DEPTH}=4",
}
# Why lengths collapse: effects of the shared norm's scale, trained or not, and of the length loss.
FIXED = "model.options.norm_learns=false"
LENGTH = {
    **{f"adatape-scale-{scale:g}": f"{FINER} model.options.norm_scale={scale:g}" for scale in (0.3, 1.0, 3.0)},
    **{f"adatape-fixed-{scale:g}": f"{FINER} model.options.norm_scale={scale:g} {FIXED}" for scale in (0.3, 1.0, 3.0)},
    **{f"adatape-lambda-{weight:g}": f"{FINER} ponder_weight={weight:g}" for weight in (0, 0.001, 0.1)},
    "adatape-fixed-lambda-0": f"{FINER} {FIXED} ponder_weight=0",
}
# Whether larger models vary their length more, as the paper says; `adatape-scale-1`, 96 × 4, is between these two.
SIZES = {
    f"adatape-{name}": f"{FINER} model.options.embed_dim={width} model.options.num_heads={width // 32} {DEPTH}={depth}"
    for name, width, depth in (("narrow", 64, 2), ("wide", 192, 6))
}
# Ablations of the published AdaTape, one change each: coarse input, a bank of 64 patches of 4 px or of trained vectors.
# The first has no tape.
ABLATIONS = {
    "plain-8": f"vit patch=8 {MEAN}",
    "adatape": FINER,
    "adatape-learn": LEARN,
    **{f"adatape-content-{choice}": f"{FINER} model.options.choose={choice}" for choice in ("random", "order")},
    "adatape-content-fixed": f"{FINER} model.options.reader=fixed",
    "adatape-parallel": f"{FINER} model.options.reader=parallel",
    **{f"adatape-steps-{steps}": f"{FINER} tape_steps={steps} threshold={steps / 5:g} merge=5" for steps in (2, 5, 12)},
    **{f"adatape-merge-{merge}": f"{FINER} merge={merge}" for merge in (1, 2)},
    **{f"adatape-bank-patch-{patch}": f"adatape patch=8 bank_patch={patch}" for patch in (2,)},
    **{f"adatape-ffn-{kind}": f"{FINER} model.options.tape_ffn={kind}" for kind in ("none", "blocks", "append+blocks")},
    **{f"adatape-query-{width}": f"{FINER} model.options.query_width={width}" for width in (16, 192)},
    **{f"adatape-at-{layer}": f"{FINER} model.options.layer={layer}" for layer in (0, 2)},
    "adatape-replace": f"{FINER} model.options.update=replace",
    **{f"adatape-learn-bank-{size}": f"{LEARN} model.options.bank_size={size}" for size in (100, 10_000)},
    "adatape-learn-no-noise": f"{LEARN} model.options.query_noise=0",
    "adatape-learn-no-hiding": f"{LEARN} model.options.bank_dropout=0",
}
# Ablations are many, so each is small: a third of the epochs, four blocks.
SHALLOW, SHORTER = f"{DEPTH}=4", SHORT.replace("epochs=24", "epochs=8").replace("warmup=500", "warmup=300")


def trained_alike(plan: dict[str, str], *more: str) -> dict[str, str]:
    return {name: " ".join([words, NORMED, *(more or [SHORT])]) for name, words in plan.items()}


# Parity without pairs, for all steps: without early stopping, runs of all lengths and seeds can train together.
PARITY = {
    f"{name}-{length}": f"{words} length={length} stop_at=null"
    for length in (16, 32, 64, 128)
    for name, words in {
        **{f"transformer-{rate}": f"transformer lr={rate}" for rate in ("3e-5", "1e-4", "3e-4")},
        **{name: name for name in ("ut", "singles", "random", "order")},
    }.items()
}
PLANS = {
    "parity": PARITY,
    "plain": trained_alike(PLAIN),
    "systems": trained_alike(SYSTEMS),
    "length": trained_alike(LENGTH, SHALLOW, SHORTER),
    "sizes": trained_alike(SIZES, SHORTER),
    "ablations": trained_alike(ABLATIONS, SHALLOW, SHORTER),
}


def planned(names: list[str], recipes: list[str], seeds: tuple[int, ...]) -> list[Run]:
    """Runs ordered by seed, so that an interrupted study lacks seeds, not systems; parity is a separate recipe."""
    return [
        Run(recipe, name, words, seed)
        for seed, plan in itertools.product(seeds, names)
        for recipe in (["parity"] if plan == "parity" else recipes)
        for name, words in PLANS[plan].items()
    ]


def experiment_for(given: Run, arguments: argparse.Namespace) -> Experiment:
    data = {} if given.recipe == "parity" else {"path": getattr(arguments, given.recipe)}
    return experiment_of(RECIPES[given.recipe], " ".join([given.words, *arguments.set]), seed=given.seed, **data)


def train(runs: list[Run], arguments: argparse.Namespace) -> None:
    """Trains runs together; each finished one becomes a row."""
    folders = [arguments.runs / given.folder for given in runs]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # an unfinished run; `work` skips finished ones
    results = run_together([experiment_for(given, arguments) for given in runs], folders, arguments.device, say)
    for given, folder, result in zip(runs, folders, results, strict=True):
        if "error" in result:
            print(f"{given.folder}: {result['error']}", flush=True)
            continue
        row = row_of(folder, given.folder)
        add_rows(arguments.out, [row])
        told = {name: round(score_of(row)[name], 4) for name in ("accuracy", "length_mean", "gflops_mean")}
        print(f"{given.folder} {told}", flush=True)


def say(status: TrainStatus) -> None:
    """Prints the progress of the first run of a fleet, at most ten times."""
    if status.step == status.steps or status.step % max(1, status.steps // 10) == 0:
        pace = f"{status.samples_per_second:,.0f}/s"
        print(f"step {status.step} of {status.steps}: loss {status.loss:.3f}, {pace}", flush=True)


def work(arguments: argparse.Namespace, runs: list[Run]) -> None:
    """Trains fleet after fleet until all are done or the time is up."""
    began = time.time()
    ended = [given.folder for given in runs if (arguments.runs / given.folder / "result.json").is_file()]
    add_rows(arguments.out, [row_of(arguments.runs / folder, folder) for folder in ended])
    done = {row["run"] for row in read_rows(arguments.out) if "result" in row}
    left = [given for given in runs if given.folder not in done]
    for places in fleets([experiment_for(given, arguments) for given in left], arguments.together):
        if time.time() - began > 60 * arguments.minutes:
            break
        started, crew = time.time(), [left[place] for place in places]
        try:
            train(crew, arguments)
        except Stopped:
            raise
        except Exception as error:
            print(f"{crew[0].folder} and {len(crew) - 1} more: {type(error).__name__}: {error}"[:500], flush=True)
        print(f"{len(crew)} runs in {time.time() - started:.0f} s", flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the study's JSONL file")
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=["plain", "systems"])
    parser.add_argument("--recipes", nargs="+", default=["cifar100"])
    parser.add_argument("--names", nargs="+", help="of cells or wildcards, where not all are wanted")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--cifar10", default="data/cifar10")
    parser.add_argument("--cifar100", default="data/cifar100")
    parser.add_argument("--set", nargs="*", default=[], help="keywords and fields for every run, as in epochs=60")
    parser.add_argument("--runs", type=Path, help="where run folders go; runs/STUDY unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--together", type=int, default=8, help="runs of equally many steps that train side by side")
    parser.add_argument("--minutes", type=float, default=60, help="after which no run begins")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args(given)
    arguments.runs = arguments.runs or Path("runs") / arguments.out.stem
    runs = planned(arguments.only, arguments.recipes, tuple(arguments.seeds))
    runs = [each for each in runs if not arguments.names or any(fnmatch(each.name, name) for name in arguments.names)]
    if arguments.list:
        print("\n".join(f"{each.folder:40} {each.command}" for each in runs))
    else:
        work(arguments, runs)
        print(accuracies(cells(read_rows(arguments.out))))


if __name__ == "__main__":
    main()
