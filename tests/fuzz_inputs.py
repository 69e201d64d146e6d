"""Random wrong inputs: command lines, configs and run folders, each a function of its number."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, get_args

from adatape import cli, config, data_config
from adatape.recipes import RECIPES

LITERALS = (
    config.Update,
    config.Ponder,
    config.Choice,
    config.ReaderName,
    config.TapeFFN,
    data_config.Crop,
    data_config.Source,
)
PATIENCE = 120  # seconds for one case
ODD_NUMBERS = [-1, 0, 1, 3, -0.5, 0.5, 2.5, 10**15, -(10**15), 1e300, math.nan, math.inf, -math.inf, 10**400]
ODD_VALUES: list[Any] = [
    *(None, True, False, "", "x", "../../x", "a\nb", "\0", "é" * 300, "nan", "1"),
    *([], [1], [1, 2], [None, None], {}, {"x": 1}, [[]], {"steps": -1}),
]
LEFT_ALONE = {"download", "pretrained", "compile", "shard"}  # these reach for the network, or take long to be right
ODD_FILES = [b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", b'"x"', b"{}", b"[" * 5000, b'{"accuracy": null}']
ODD_OPTIONS = {
    "patch_size": [3, 0, -4, 100, [2, 2], [0, 1], "4", 1.5, None],
    "num_heads": [0, 3, -1, 5, True],
    "depth": [0, -1, 10**9, 1.5],
    "embed_dim": [0, 7, -8, 10**12, 1],
    "act_layer": ["foo", 3, ""],
    "norm_layer": ["foo", 3],
    "global_pool": ["foo", 3, "map", "max", ""],
    "class_token": [True, False, 3],
    "mlp_ratio": [0, -1, 1e9, "x", 0.01],
    "drop_rate": [2, -1, math.nan],
    "drop_path_rate": [2, -1, 1],
    "qk_norm": [True, "x"],
    "pos_embed": ["foo", "none", 3],
    "weight_init": ["foo", "moco", "jax"],
    "reg_tokens": [-1, 2, 10**9],
    "img_size": [0, 16, -1, [8, 8]],
    "in_chans": [0, 3, -1],
    "num_classes": [0, 3, -1],
    "bank": ["both", 3, None, "learn"],
    "bank_patch": [0, 3, -2, 8, 16],
    "bank_size": [0, -1, 10**12, 1],
    "steps": [0, -1, 100, 10**9, 2.5],
    "threshold": [0, -1, math.nan, math.inf],
    "merge": [0, -1, 100],
    "query_width": [0, -1, 10**6],
    "layer": [-1, 5, 10**9],
    "tape_ffn": ["foo", "blocks", 3],
    "reader": ["foo", "parallel", "fixed", "act", 3],
    "nonsense": [1],
}
# Verbs that read a run folder, with how often each is tried; drawing and exporting take their time.
VERBS: dict[str, tuple[int, Callable[[random.Random], list[str]]]] = {
    "eval": (8, lambda draw: draw.choice([[], [], ["--length", draw.choice(["0", "-2", "8", "16", "x"])]])),
    "train": (8, lambda _: []),
    "release": (5, lambda _: ["--to", "released"]),
    "report": (4, lambda _: ["--out", "report.html"]),
    "serve": (3, lambda draw: ["--port", draw.choice(["0", "0", "-1", "99999"])]),
    "fewshot": (
        2,
        lambda draw: ["--on", draw.choice(["digits", "nowhere", "cifar10"]), "--shots", "1", "--seeds", "0"],
    ),
    "budget": (2, lambda draw: draw.choice([["--gflops", "1"], ["--latency", "5"], ["--accuracy", "90%"], []])),
    "figures": (1, lambda draw: ["--samples", draw.choice(["20", "0", "-1"])]),
    "export": (1, lambda _: ["--to", "torch"]),
}


class Case(NamedTuple):
    """A command line and its damaged files."""

    number: int
    arguments: list[str]
    done: str  # to the files

    def __str__(self) -> str:
        return f"case {self.number}: adatape {' '.join(map(repr, self.arguments))} ({self.done})"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def fields_of(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items() if isinstance(values, dict) else ():
        if name not in LEFT_ALONE:
            yield (*path, name)
            yield from fields_of(value, (*path, name))


def mutated(config: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """A config with a field dropped, renamed or given another value."""
    config = copy.deepcopy(config)
    *path, last = draw.choice(list(fields_of(config)))
    place = config
    for name in path:
        place = place[name]
    dotted, how = ".".join([*path, last]), draw.random()
    if how < 0.08 and dotted != "optimizer.steps":  # by default they are many
        del place[last]
        return config, f"without {dotted}"
    if how < 0.12:
        place[f"{last}_"] = place.pop(last)
        return config, f"{dotted} renamed"
    if "options" in path or last == "options":
        options = config["model"]["options"]
        option = draw.choice([*ODD_OPTIONS, *options])
        options[option] = draw.choice(ODD_OPTIONS.get(option, ODD_NUMBERS))
        return config, f"model.options.{option} = {options[option]!r}"
    place[last] = odd_value(place[last], draw)
    return config, f"{dotted} = {place[last]!r}"[:100]


def odd_value(value: Any, draw: random.Random) -> Any:
    """A wrong value, mostly of the same type, so that types are not the only error."""
    if draw.random() < 0.3:
        return draw.choice([*ODD_NUMBERS, *ODD_VALUES])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([*(-1, 0, 1, 2, 3, 5, 7, 12), value + 1, value - 1, 10**15])
    if isinstance(value, list) and value:
        return [odd_value(each, draw) for each in value]
    words = [word for hint in LITERALS for word in get_args(hint) if value in get_args(hint)]
    return draw.choice(words) if words else draw.choice([*ODD_NUMBERS, *ODD_VALUES])


def damage(folder: Path, draw: random.Random) -> str:
    """Changes, empties or removes one file of a run folder."""
    files = ["config.json", "result.json", "metrics.jsonl", "env.json", "checkpoints/model.safetensors"]
    name = draw.choice(files[:2] * 3 + files[2:])
    path, how = folder / name, draw.choice(["flip", "flip", "cut", "replace", "replace", "remove", "folder"])
    data = bytearray(path.read_bytes())
    match how:
        case "flip":
            place = draw.randrange(len(data))
            data[place] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            return f"{name}: bit of byte {place} flipped"
        case "cut":
            path.write_bytes(data[: draw.randrange(len(data))])
        case "replace":
            content = draw.choice(ODD_FILES)
            path.write_bytes(content)
            return f"{name} is {content[:20]!r}"
        case "remove":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
    return f"{name}: {how}"


def odd_text(draw: random.Random) -> str:
    value = draw.choice([*ODD_NUMBERS, *ODD_VALUES, "1,2", "a=b", "--", "-"])
    return value if isinstance(value, str) else json.dumps(value)


def odd_setting(config: dict[str, Any], draw: random.Random) -> str:
    names = [".".join(path) for path in fields_of(config)]
    option = draw.choice(list(ODD_OPTIONS))
    chosen = draw.choice(
        [
            f"{draw.choice(names)}={odd_text(draw)}",
            f"{draw.choice(names)}={odd_text(draw)}",
            f"model.options.{option}={json.dumps(draw.choice(ODD_OPTIONS[option]))}",
            odd_text(draw),
            f"{odd_text(draw)}={odd_text(draw)}",
        ]
    )
    return chosen.replace("\0", "")


def odd_command(config: Path, draw: random.Random) -> list[str]:
    """A command that reads no run folder; none of them can train for long."""
    recipe = draw.choice(list(RECIPES))
    small = json.loads(config.read_text())
    replay = [*["train", str(config), "--out", "made", "--device", "cpu"], "--set", odd_setting(small, draw)]
    over = ["sweep", str(config), "--out", "made", "--device", "cpu", "--over", odd_setting(small, draw)]
    value = odd_text(draw).replace("\0", "")
    option = draw.choice(["--steps", "--epochs", "--batch", "--seed", "--lr", "--size", "--pixels", "--length", "--x"])
    # Without data, or with a device that is not there, a recipe ends before it trains.
    started = ["train", recipe, "--out", "made", "--device", "none", option, value]
    given = ["--path", "nowhere"] if recipe not in ("parity", "parity-small", "digits") else []
    cost = ["cost", draw.choice(["adatape_tiny_patch16_224", "vit_tiny_patch16_224", "resnet18", "vit", ""])]
    cost += [draw.choice(["--classes", "--tape", "--bank", "--tape-ffn"]), value]
    bench = [
        "bench",
        draw.choice(["vit_tiny_patch16_224", "adatape_tiny_patch16_224:steps=-1", "resnet18", ":", value]),
    ]
    bench += ["--device", "cpu", "--rounds", "0", draw.choice(["--batch", "--seconds", "--rounds", "--mode"]), value]
    verb = draw.choice([*cli.VERBS, "trian", "", "-", "--"])
    nonsense = [verb, *(draw.choice(["--x", "--json", value, "--out", "--help"]) for _ in range(draw.randrange(3)))]
    if verb in ("demo", "models", "recipes", "serve", "bench"):  # these have something to do without a word more
        nonsense = [verb, "--x", value]
    sweeping = ["sweep", str(config), "--out", "made", "--over", "seed=0,1"]
    demo = ["demo", "--out", "made", "--seed", draw.choice(["-1", "x", "1.5", str(10**30)])]
    missing = [draw.choice([*VERBS]), draw.choice(["nowhere", "", "/dev/null", str(config)])]
    kinds = [replay, replay, replay, over, [*started, *given], cost, bench, nonsense, sweeping, demo, missing]
    return draw.choice(kinds)


def make_case(number: int, runs: list[Path], place: Path) -> Case:
    """Makes the files of a case in an empty folder, and its command line."""
    draw = random.Random(number)
    run = shutil.copytree(draw.choice(runs), place / "run")
    config, kind = json.loads((run / "config.json").read_text()), draw.random()
    if kind < 0.35:
        (place / "small.json").write_text(json.dumps(config))
        return Case(number, odd_command(place / "small.json", draw), "a sound config")
    if kind < 0.6:
        config, done = mutated(config, draw)
        (place / "odd.json").write_text(json.dumps(config))
        return Case(number, ["train", "odd.json", "--out", "made", "--device", "cpu", "--json"], done)
    if kind < 0.8:
        config, done = mutated(config, draw)
        (run / "config.json").write_text(json.dumps(config))
    else:
        done = damage(run, draw)
    verb = draw.choices(list(VERBS), [weight for weight, _ in VERBS.values()])[0]
    where = [] if verb in ("release", "report", "export") else ["--device", "cpu"]
    shown = ["--json"] if verb != "serve" else []
    return Case(number, [verb, "run", *VERBS[verb][1](draw), *where, *shown], done)


def carried_out(arguments: list[str]) -> Ended:
    """Runs the command in this process; raises if it ends with anything but an exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _in_time():
        try:
            cli.main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    return Ended(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def give_up(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"not done after {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _words(case: Case) -> set[str]:
    """Files, fields and options that a message may name, and its words for missing ones."""
    left_out = {
        "Missing from",
        "Missing value",
        "is not a model",
        "Unrecognized",
        "Expected one of",
        "targets given",
        "no folder was given",
    }
    given = [case.done, *(argument.lstrip("-") for argument in case.arguments[1:])]
    return {word for text in given for word in re.findall(r"\w{2,}|[^\w\s]{2,}", text)} | left_out


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def wrong_with(case: Case, ended: Ended, before: set[str], place: Path) -> str | None:
    """Why a case fails: it must succeed, or end with one line and exit code 2 and leave no files."""
    made = {str(path.relative_to(place)) for path in place.rglob("*") if place / "run" not in path.parents} - before
    if ended.code == 0:
        if "--json" in case.arguments and "--help" not in case.arguments:
            json.loads(ended.out.strip().splitlines()[-1], parse_constant=_no_constant)
        return None
    if ended.code != 2:
        return f"exit code {ended.code}"
    lines = ended.err.splitlines()
    if len(lines) != 1 or not lines[0].startswith("adatape: ") or len(lines[0]) < 20:
        return f"{len(lines)} lines: {ended.err[:500]!r}"
    if not any(word in lines[0] for word in _words(case)):
        return f"names nothing of the case: {lines[0]}"
    if made and not any(path.startswith("made/") and path.endswith("metrics.jsonl") for path in made):
        return f"left behind: {sorted(made)[:5]}"
    return None
