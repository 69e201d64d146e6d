"""Runs the experiments behind docs/results.md's image tables, many at once on one GPU, and keeps their small files.

    python benchmarks/evidence.py results/evidence --only coarse --cifar10 data/cifar10 --cifar100 data/cifar100
    python benchmarks/evidence.py results/ablations --only ablations length      shorter runs, so a folder of their own
    python benchmarks/evidence.py results/long --only long                       longer ones, with images varied more
    python benchmarks/evidence.py results/held_out --only coarse --set validate_on=0.1 --short   to choose by
    python benchmarks/evidence.py results/evidence --only coarse --list          which runs, with their commands
    python benchmarks/evidence_tables.py results/evidence                        what has been found, as tables

A run's folder keeps config, environment, metrics and result, and what `evidence_look.py` sees in the trained model.
One that has a result is not run again, so the experiments can be spread over sessions. Small models leave a GPU idle,
so those of one seed train side by side; with `--weights` another process can look at them while the next ones train.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evidence_cells import cells, found_in
from evidence_look import CLOSER, look_closer
from evidence_tables import accuracies

from adatape.config import Experiment
from adatape.recipes import RECIPES
from adatape.train.fleet import fleets, run_together
from adatape.train.folder import WEIGHTS
from adatape.train.run import Moment
from adatape.train.stop import Stopped
from adatape.train.sweep import experiment_of, worded

KEPT = ("config.json", "env.json", "metrics.jsonl", "result.json")
SEEDS = (0, 1, 2)
SELECTIVE, DEPTH = "model.options.reader=selective", "model.options.depth"


class Run(NamedTuple):
    """One cell's share: a recipe, a system with keywords and dotted fields as in `adatape train --set`, a seed."""

    recipe: str
    name: str
    words: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.recipe}/{self.name}/seed-{self.seed}"

    @property
    def command(self) -> str:
        system, keywords, fields = worded(RECIPES[self.recipe], self.words)
        given = " ".join(_flag(name.replace("_", "-"), value) for name, value in keywords.items())
        sets = "".join(f" --set {word}" for word in self.words.split() if word.partition("=")[0] in fields)
        return f"adatape train {self.recipe} --system {system} {given} --seed {self.seed}{sets}".replace("  ", " ")


def _flag(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name} {value}"


# One way to train for all, chosen on plain ViTs (docs/log.md): few epochs, so only crops, flips and Mixup.
SHORT = "epochs=24 batch=256 optimizer.warmup=500 data.augment.randaug=0 data.augment.magnitude=5 data.augment.cutmix=0"
# And a longer one with images varied more: of the ways tried, what leaves plain ViTs the best features for few shots.
LONG = "epochs=64 batch=256 optimizer.warmup=1000 data.augment.randaug=2 data.augment.magnitude=5 data.augment.cutmix=1"
# A norm on patches with Xavier weights is worth three points to a plain ViT, so every system has both.
NORMED = "model.options.weight_init=moco model.options.pre_norm=true"
MEAN = "model.options.class_token=false model.options.global_pool=avg model.options.fc_norm=false"
FINER, LEARN = "adatape patch=8 bank_patch=4", "adatape-learn patch=8"
WHOLE_BANK = f"steps=64 {SELECTIVE} model.options.tape_ffn=none ponder_weight=0"


def placed(depth: int, layer: int, still: int) -> str:
    return f"{DEPTH}={depth} model.options.layer={layer} model.options.still={still}"


# Plain ViTs of four depths, and tapes beside them: as published; the whole bank, two blocks long and then still; nearly
# all of it for one block, for what A-ViT costs; the whole by a model that has also seen shorter ones, for smaller
# budgets; and as far as a model doubts after three blocks.
EVERY_GATE, CUT = "model.options.floor=0.000001", "sample_budgets=true model.options.least=16 model.options.uncut=0.5"
STILL = f"{FINER} {WHOLE_BANK} {EVERY_GATE}"
DOUBTS = "model.options.doubts=true model.options.haste=2 model.options.uncut=0.5"
PLAINS = {f"plain-4-depth-{depth}": f"vit patch=4 {MEAN} {DEPTH}={depth}" for depth in (2, 3, 4, 6)}
COARSE = {
    **PLAINS,
    "adatape-paper": f"{FINER} {DEPTH}=6",
    "adatape-still": f"{STILL} {placed(6, 0, 2)}",
    "adatape-light": f"{STILL} steps=60 {placed(4, 0, 1)}",
    "adatape-elastic": f"{STILL} {placed(7, 1, 3)} {CUT}",
    "adatape-doubting": f"{FINER} {WHOLE_BANK} {placed(9, 3, 5)} {DOUBTS}",
}
# Still tapes of two and of three blocks whose mean is among the features, and the plain ViTs beside them.
ECHO = "model.options.echo=true"
FEATURES = {
    **{f"plain-4-depth-{depth}": PLAINS[f"plain-4-depth-{depth}"] for depth in (4, 6)},
    "adatape-still": f"{COARSE['adatape-still']} {ECHO}",
    "adatape-still-3-of-5": f"{STILL} {placed(5, 0, 3)} {ECHO}",
}
# The paper's systems at one patch and about one cost.
SYSTEMS = {
    **{name: f"{name} patch=4 {DEPTH}=4" for name in ("plainvit", "vit", "deit", "vit3ffn", "avit")},
    **{name: f"{name} patch=4 model.options.steps=5" for name in ("u2t", "ut", "ponder")},
    "uvit": f"uvit patch=4 {DEPTH}=3 model.options.steps=3",
    "adatape-input": f"adatape patch=4 bank_patch=2 {DEPTH}=4",
    "adatape-learn": f"adatape-learn patch=4 {DEPTH}=4",
}
# Why lengths collapse: what the shared norm's scale does, trained or not, and what the length loss does.
FIXED = "model.options.norm_learns=false"
LENGTH = {
    **{f"adatape-scale-{scale:g}": f"{FINER} model.options.norm_scale={scale:g}" for scale in (0.3, 1.0, 3.0)},
    **{f"adatape-fixed-{scale:g}": f"{FINER} model.options.norm_scale={scale:g} {FIXED}" for scale in (0.3, 1.0, 3.0)},
    **{f"adatape-lambda-{weight:g}": f"{FINER} ponder_weight={weight:g}" for weight in (0, 0.001, 0.1)},
    "adatape-fixed-lambda-0": f"{FINER} {FIXED} ponder_weight=0",
}
# Whether larger models vary their length more, as the paper has it; `adatape-scale-1`, 96 × 4, is between these two.
SIZES = {
    f"adatape-{name}": f"{FINER} model.options.embed_dim={width} model.options.num_heads={width // 32} {DEPTH}={depth}"
    for name, width, depth in (("narrow", 64, 2), ("wide", 192, 6))
}
# One thing changed at a time in AdaTape as published: coarse input, a bank of 64 patches of 4 px or of trained vectors.
# The first has no tape at all.
ABLATIONS = {
    "plain-8": f"vit patch=8 {MEAN}",
    "adatape": FINER,
    "adatape-learn": LEARN,
    **{f"adatape-content-{choice}": f"{FINER} model.options.choose={choice}" for choice in ("random", "order")},
    "adatape-content-fixed": f"{FINER} model.options.reader=fixed",
    "adatape-parallel": f"{FINER} model.options.reader=parallel",
    **{f"adatape-steps-{steps}": f"{FINER} steps={steps} threshold={steps / 5:g} merge=5" for steps in (2, 5, 12)},
    **{f"adatape-merge-{merge}": f"{FINER} merge={merge}" for merge in (1, 2)},
    **{f"adatape-bank-patch-{patch}": f"adatape patch=8 bank_patch={patch}" for patch in (2,)},
    **{f"adatape-ffn-{kind}": f"{FINER} model.options.tape_ffn={kind}" for kind in ("none", "blocks", "append+blocks")},
    **{f"adatape-query-{width}": f"{FINER} model.options.query_width={width}" for width in (16, 192)},
    **{f"adatape-at-{layer}": f"{FINER} model.options.layer={layer}" for layer in (0, 2)},
    "adatape-replace": f"{FINER} model.options.update=replace",
    **{f"adatape-learn-bank-{size}": f"{LEARN} model.options.bank_size={size}" for size in (100, 10_000)},
    "adatape-learn-no-noise": f"{LEARN} model.options.noise=0",
    "adatape-learn-no-hiding": f"{LEARN} model.options.hide=0",
}
# And in the still tape: when it is still, what it reads and of what, a feed-forward of its own.
OURS = {
    **PLAINS,
    "adatape-still": COARSE["adatape-still"],
    **{f"adatape-still-from-{still}": f"{STILL} {placed(6, 0, still)}" for still in (1, 3)},
    "adatape-still-joins-at-1": f"{STILL} {placed(6, 1, 3)}",
    "adatape-still-half": f"{COARSE['adatape-still']} steps=32",
    "adatape-still-bank-patch-2": f"{COARSE['adatape-still']} bank_patch=2",
    "adatape-still-ffn-append": f"{COARSE['adatape-still']} model.options.tape_ffn=append",
}


# Ablations of the paper's tape are many, so each is small: a third of the epochs, four blocks.
SHALLOW, SHORTER = f"{DEPTH}=4", SHORT.replace("epochs=24", "epochs=8").replace("warmup=500", "warmup=300")


def trained_alike(plan: dict[str, str], *more: str) -> dict[str, str]:
    return {name: " ".join([words, NORMED, *(more or [SHORT])]) for name, words in plan.items()}


# What parity is like without pairs, at full length: nothing stops early, so all of one length and seed train together.
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
    "coarse": trained_alike(COARSE),
    "systems": trained_alike(SYSTEMS),
    "length": trained_alike(LENGTH, SHALLOW, SHORTER),
    "sizes": trained_alike(SIZES, SHORTER),
    "ablations": trained_alike(ABLATIONS, SHALLOW, SHORTER),
    "still": trained_alike(OURS),
    "long": trained_alike(FEATURES, LONG),
}


def planned(names: list[str], recipes: list[str], seeds: tuple[int, ...]) -> list[Run]:
    """Seed by seed, so that what is cut off lacks seeds and not systems; parity is a recipe of its own."""
    return [
        Run(recipe, name, words, seed)
        for seed, plan in itertools.product(seeds, names)
        for recipe in (["parity"] if plan == "parity" else recipes)
        for name, words in PLANS[plan].items()
    ]


def experiment_for(given: Run, arguments: argparse.Namespace) -> Experiment:
    data = {} if given.recipe == "parity" else {"path": getattr(arguments, given.recipe)}
    return experiment_of(RECIPES[given.recipe], " ".join([given.words, *arguments.set]), seed=given.seed, **data)


def carry_out(runs: list[Run], arguments: argparse.Namespace) -> None:
    """Trains side by side in a temporary folder and keeps the small files, then those of a closer look."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / str(place) for place in range(len(runs))]
        results = run_together([experiment_for(given, arguments) for given in runs], folders, arguments.device, say)
        trained: dict[Run, Path] = {}
        for given, folder, result in zip(runs, folders, results, strict=True):
            if "error" in result:
                print(f"{given.folder}: {result['error']}", flush=True)
            else:
                trained[given] = folder
        for given, folder in trained.items():  # the result last: whoever sees it finds the rest
            keep(folder, arguments.out / given.folder, (WEIGHTS, *KEPT) if arguments.weights else KEPT)
        for given, folder in trained.items():
            if not arguments.short and given.recipe != "parity":
                look_closer(folder, arguments.device, arguments.fewshot, speed=True)
                keep(folder, arguments.out / given.folder, ("result.json", *CLOSER))
            found = found_in(arguments.out / given.folder)
            told = {name: round(found[name], 4) for name in ("accuracy", "length_mean", "gflops_mean")}
            print(f"{given.folder} {told}", flush=True)


def keep(folder: Path, target: Path, names: Sequence[str | Path]) -> None:
    for name in names:
        if (folder / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, target / name)


def say(moment: Moment) -> None:
    """The first of a fleet, ten times at most; all are as quick."""
    if moment.step == moment.steps or moment.step % max(1, moment.steps // 10) == 0:
        pace = f"{moment.samples_per_second:,.0f}/s"
        print(f"step {moment.step} of {moment.steps}: loss {moment.loss:.3f}, {pace}", flush=True)


def work(arguments: argparse.Namespace, runs: list[Run]) -> None:
    """Fleet after fleet, until none is left or the time is up."""
    began = time.time()
    left = [given for given in runs if not (arguments.out / given.folder / "result.json").is_file()]
    for places in fleets([experiment_for(given, arguments) for given in left], arguments.together):
        if time.time() - began > 60 * arguments.minutes:
            break
        started, crew = time.time(), [left[place] for place in places]
        try:
            carry_out(crew, arguments)
        except Stopped:
            raise
        except Exception as error:
            print(f"{crew[0].folder} and {len(crew) - 1} more: {type(error).__name__}: {error}"[:500], flush=True)
        print(f"{len(crew)} runs in {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=["coarse", "systems"])
    parser.add_argument("--recipes", nargs="+", default=["cifar100"])
    parser.add_argument("--names", nargs="+", help="of cells, where not all are wanted")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--cifar10", default="data/cifar10")
    parser.add_argument("--cifar100", default="data/cifar100")
    parser.add_argument("--fewshot", nargs="*", default=[], help="folders of arrays to learn from few images of")
    parser.add_argument("--set", nargs="*", default=[], help="keywords and fields for every run, as in epochs=60")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--together", type=int, default=8, help="runs of a seed that train side by side")
    parser.add_argument("--minutes", type=float, default=60, help="after which no run begins")
    parser.add_argument("--short", action="store_true", help="keep what training gives, and look no closer")
    parser.add_argument("--weights", action="store_true", help="keep the trained weights too, to look closer later")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    runs = planned(arguments.only, arguments.recipes, tuple(arguments.seeds))
    runs = [given for given in runs if not arguments.names or given.name in arguments.names]
    if arguments.list:
        print("\n".join(f"{given.folder:40} {given.command}" for given in runs))
    else:
        work(arguments, runs)
        print(accuracies(cells(arguments.out)))


if __name__ == "__main__":
    main()
