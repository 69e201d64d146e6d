"""Tiny experiments, and training processes that can be killed, for tests of resuming and faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from adatape.config import Experiment
from adatape.recipes.digits import digits
from adatape.recipes.parity import parity_small
from adatape.recipes.systems import System
from adatape.train.checkpoint import newest_good
from adatape.train.logger import read_metrics
from adatape.train.sweep import with_fields
from adatape.train.weights import digest

LONG = os.environ.get("ADATAPE_FAULTS") == "long"
in_the_long_suite = pytest.mark.skipif(not LONG, reason="takes long; `make test-long` runs it")
SYSTEMS = get_args(System)
FAMILIES = [*SYSTEMS, "parity adatape", "parity transformer", "parity ut"]
ENGINE = {
    "engine.workers": 0,
    "engine.deterministic": True,
    "engine.log_every": 1,
    "engine.checkpoint_every": 3,
    "optimizer.batch": 16,
    "optimizer.warmup": 4,
    "optimizer.lr": 0.003,
    "optimizer.ema": 0.9,
    "evaluate_every": 10,
}
SMALL = {"model.options.embed_dim": 32, "model.options.num_heads": 2}
EVERY = ENGINE["engine.checkpoint_every"]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def why_not_interpreted() -> str | None:
    """Why Triton's interpreter does not run kernels here; None where it does."""
    if find_spec("triton") is None or torch.cuda.is_available():
        return "Triton interprets where there is no GPU; tests/gpu has the kernels themselves"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):  # torch 2.11 has triton 3.6
        return "triton 3.6 interprets with numpy before 2.4, which made int() of an array of one element an error"
    return None


def tiny(family: str = "adatape", steps: int = 12, **fields: Any) -> Experiment:
    """A system at width 32 and depth 2, with all random parts of training; dots in field names are written __."""
    chosen = {**ENGINE, "optimizer.steps": steps, **{name.replace("__", "."): value for name, value in fields.items()}}
    if family.startswith("parity "):
        shape = {"model.width": 48, "model.depth": 2, "data.held_out": 64}
        steps_of_ut = {"model.universal": 3} if family.endswith("ut") else {}
        return with_fields(parity_small(8, family.split()[1]), {**shape, **steps_of_ut, **chosen})  # type: ignore[arg-type]
    return with_fields(digits(family), {**SMALL, **_depth(family), "data.augment.mixup": 0.4, **chosen})  # type: ignore[arg-type]


def _depth(family: str) -> dict[str, Any]:
    if family in ("ut", "ponder", "u2t"):
        return {"model.options.steps": 2}
    noise = {"model.options.query_noise": 0.1, "model.options.bank_dropout": 0.2} if family == "adatape-learn" else {}
    return {"model.options.depth": 2, **noise}


def command(out: Path, steps: int, **fields: Any) -> list[str]:
    """The command line of `adatape train digits` with the same settings."""
    named = {name.replace("__", "."): value for name, value in fields.items()}
    chosen = {**SMALL, "model.options.depth": 2, **ENGINE, "optimizer.steps": steps, **named}
    settings = [word for name, value in chosen.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    return ["train", "digits", *settings, "--out", str(out), "--device", "cpu"]


def write_folder(folder: Path, count: int, size: int = 24) -> Path:
    """A class folder of two classes; the colour of an image is a function of its number."""
    for split in ("train", "val"):
        for n in range(count):
            path = folder / split / ("even" if n % 2 == 0 else "odd") / f"{n:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (size, size), (n * 5, 255 - n * 5, n)).save(path)
    return folder


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / "model.safetensors")


def fingerprint(out: Path) -> str:
    """SHA-256 of a finished run's weights."""
    return digest(weights_of(out))


def logged(out: Path) -> int:
    """The last step in metrics.jsonl."""
    return max((line["step"] for line in read_metrics(out / "metrics.jsonl").lines), default=0)


def history(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    clock = ("seconds", "samples_per_second")
    lines = read_metrics(out / "metrics.jsonl").lines
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def newest_step(out: Path) -> int:
    """The step of the newest checkpoint, or 0; no checkpoint may be damaged."""
    damaged: list[str] = []
    found = newest_good(out / "checkpoints", lambda _, why: damaged.append(why))
    assert not damaged
    return int(found.name.removeprefix("step-")) if found else 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Unplugged(Exception):  # noqa: N818
    """Simulates a crash of the machine."""


def unplugged(*_: Any, **__: Any) -> None:
    raise Unplugged


def unplug_at(step: int) -> Callable[[Any], None]:
    """An observer of a run that crashes it."""

    def watch(status: Any) -> None:
        if status.step >= step:
            unplugged()

    return watch


class Hostile:
    """Creates the file `mark` if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def wait_until(true: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"still waiting after {seconds} s"
        time.sleep(0.01)


def at_step(out: Path, step: int) -> Callable[[], bool]:
    return lambda: logged(out) >= step


def no_watch(_: Any) -> None:
    """A `watch` for `run` that does nothing."""


def children_of(pid: int) -> list[int]:
    """Process ids of the children, sorted."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = re.search(r"^PPid:\s+(\d+)$", status.read_text(), re.MULTILINE)
        except OSError:  # gone meanwhile
            continue
        if parent and int(parent[1]) == pid:
            found.append(int(status.parent.name))
    return sorted(found)


SERVER = """
import json, os, resource, sys, traceback
import adatape.cli, adatape.report.tables, adatape.report.terminal, adatape.train.launch, sklearn.datasets
try:
    import torch.utils.tensorboard
except ImportError:
    pass
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    os.setsid()
    for number, path in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(order["environment"])
    if order["largest"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest"], order["largest"]))
    code = 0
    try:
        adatape.cli.main(order["arguments"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code or 0)
"""


class Child:
    """A training process that leads its own process group, as if started by a shell or torchrun."""

    def __init__(self, server: Forks, pid: int, said: Path) -> None:
        self.server, self.pid, self.said = server, pid, said

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def wait(self) -> int:
        return int(self.server.ask({"wait": self.pid}))

    @property
    def output(self) -> str:
        return self.said.with_suffix(".out").read_text()

    @property
    def errors(self) -> list[str]:
        return self.said.with_suffix(".err").read_text().splitlines()


class Forks:
    """Forks of a process that has already imported torch, so that training processes start in milliseconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        program = [sys.executable, "-c", SERVER]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=QUIET)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, order: dict[str, Any]) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def start(self, arguments: list[str], largest: int = 0, **environment: str) -> Child:
        """Runs the command line; `largest` limits the size of files that it writes."""
        self.count += 1
        said = self.folder / f"child-{self.count}"
        places = {"stdout": str(said.with_suffix(".out")), "stderr": str(said.with_suffix(".err"))}
        order = {"arguments": arguments, "largest": largest, "environment": environment, **places}
        return Child(self, int(self.ask(order)), said)

    def start_two(self, arguments: list[str]) -> list[Child]:
        """Two processes that train together, as torchrun would start them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [self.start(arguments, RANK=rank, LOCAL_RANK=rank, **group) for rank in ("0", "1")]

    def finish(self, arguments: list[str]) -> Child:
        child = self.start(arguments)
        assert child.wait() == 0, child.errors
        return child

    def start_on_images(self, folder: Path) -> tuple[Child, Path]:
        """A run of 400 steps on a class folder with two data workers, once it has logged 5 steps; and its folder."""
        images, out = write_folder(folder / "images", 40), folder / "run"
        data = {"data__source": "folder", "data__path": str(images), "data__size": 16, "engine__workers": 2}
        child = self.start(command(out, 400, **data))
        wait_until(at_step(out, 5))
        return child, out

    def finish_two(self, arguments: list[str]) -> None:
        for child in self.start_two(arguments):
            assert child.wait() == 0, child.errors

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def torchrun(arguments: list[str], restarts: int) -> Iterator[subprocess.Popen[str]]:
    """Two processes under torchrun, which restarts them when one dies."""
    options = ["--nproc-per-node", "2", "--max-restarts", str(restarts), "--rdzv-backend", "c10d"]
    program = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-endpoint", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*program, "--monitor-interval", "0.1", "-m", "adatape", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=QUIET,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def noise_arrays(folder: Path) -> Path:
    """Twenty training and twenty test images of noise, in four classes."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        np.save(folder / f"{split}_images.npy", draw.integers(0, 256, (20, 64, 64, 3), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(20) % 4)
    return folder
