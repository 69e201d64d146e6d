"""Every script of benchmarks/ and research/ starts; those with a small case of seconds run it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import ROOT, SCRIPTS, script
from small_runs import LONG

from adatape.models.adatape import AdaTape
from adatape.recipes import parity_small
from adatape.train.sweep import with_fields
from adatape.train.task import build_for

STARTED = [path for path in SCRIPTS if "__main__" in path.read_text()]
MODEL = str(ROOT / "src" / "adatape" / "serve" / "models" / "digits")
SMALL_VIT = '{"patch_size": 16, "embed_dim": 48, "num_heads": 3, "depth": 2}'
SMALLEST = {
    "packed": "--model vit_tiny_patch16_224 --shares 90 --batch 2 --rounds 1 --seconds 0.01 --warm-up 1 --device cpu",
    "by_length": "--size tiny --batch 1 2 --steps 4 --lengths 2 --budgets 2 --layouts default packed --bank-size 100 "
    "--rounds 1 --seconds 0.01 --device cpu",
    "loop": "--model plainvit_tiny_patch16_224 --size 32 --batch 8 --images 64 --steps 2 --rounds 1 --no-compile "
    f"--precision fp32 --device cpu --options '{SMALL_VIT}'",
    "reader": "--device cpu --batch 1 --width 96 --sizes 100",
    "large": "--device cpu --sides 160 --tile 64 --steps 2 --search 4 --rounds 1 --precision fp32 "
    f"--options '{SMALL_VIT}'",
    "large_speed": "--device cpu --image 160 192 --patches 2x3 --batches 1 2 --ways eager --threads 1 --rounds 1 "
    f"--seconds 0.01 --precision fp32 --options '{SMALL_VIT}'",
    "retrieval": "--rows 3000 --width 16 --centres 20 --cells 8 --probes 2 --kinds ivf --batch 2 --rounds 1 --recall 2",
    "loader": "--workers 0 --images 8 --batch 4 --batches 1 --rounds 1",
}


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_are_scripts_to_start() -> None:
    names = {str(path.relative_to(ROOT)) for path in STARTED}
    assert {"benchmarks/loop.py", "benchmarks/packed.py", "research/tables.py", "research/large/street.py"} <= names


@pytest.mark.parametrize("path", STARTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_says_how_it_is_called(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as left:
        script(path).main()
    assert left.value.code == 0
    assert f"usage: {path.name}" in capsys.readouterr().out


@pytest.mark.usefixtures("one_order_of_sums")
@pytest.mark.parametrize("name", list(SMALLEST))
def test_a_benchmark_adds_a_row_for_each_case_and_renews_its_own(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.jsonl"
    out.write_text('{"case": "another"}\n')
    script(f"benchmarks/{name}.py").main([str(out), *shlex.split(SMALLEST[name])])
    first, *rows = rows_in(out)
    assert first == {"case": "another"}
    assert len(rows) == len({row["case"] for row in rows}) > 0
    assert all({"date", "commit", "torch"} <= set(row["environment"]) for row in rows)
    record = script("benchmarks/record.py")
    record.add_rows(out, [{"case": rows[0]["case"], "again": True}], "cpu")
    assert [row["case"] for row in rows_in(out)] == ["another", *(row["case"] for row in rows)]
    assert rows_in(out)[1]["again"]


@pytest.mark.skipif(not LONG, reason="servers take a while to start; `make test-faults`")
@pytest.mark.parametrize(
    ("name", "given", "cases"),
    [
        ("serve", ["--adatape", MODEL, "--plain", MODEL, "--clients", "1", "--seconds", "0.2", "--rounds", "1"], 5),
        (
            "serve_hostile",
            ["--kinds", "silent", "--seconds", "0.5", "--connections", "3", "--clients", "2", "--rounds", "1"],
            3,
        ),
    ],
)
def test_servers_answer_their_load(name: str, given: list[str], cases: int, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.jsonl"
    script(f"benchmarks/{name}.py").main([str(out), *given])
    rows = rows_in(out)
    assert len(rows) == cases
    assert all(row["requests_per_second"] > 0 and row["errors"] == 0 for row in rows)


@pytest.mark.usefixtures("here")
def test_a_trained_run_is_timed_where_its_data_is_not_at_hand() -> None:
    how = Namespace(run=ROOT / "src" / "adatape" / "serve" / "models" / "street", image=[800, 1360])
    for steps, floored in ((2, False), (None, True)):
        model = script("benchmarks/large_speed.py").trained(how, steps).build()
        assert steps in (None, model.steps)
        assert (model.floor > 0) == floored


def test_a_model_cut_in_two_answers_as_a_whole() -> None:
    by_length = script("benchmarks/by_length.py")
    how = Namespace(size="tiny", bank_size=100, device="cpu", compile=False)
    model, images = by_length.build(how, 16), torch.randn(3, 3, 224, 224)
    by_length.set_lengths(model, torch.tensor([3, 1, 5]), 5)
    parts = by_length.Parts(model, lambda function: function)
    with torch.no_grad():
        torch.testing.assert_close(parts(images), model(images), atol=1e-5, rtol=1e-5)
    assert list(parts.blocks) == [6]


def test_packed_and_padded_sides_compute_the_same() -> None:
    packed = script("benchmarks/packed.py")
    how = Namespace(model="vit_tiny_patch16_224", batch=3, device="cpu", dtype="fp32", compile=False)
    for sides, tokens in (packed.tape_sides(how, 64, 12), packed.avit_sides(how)):
        assert 0 < tokens < 1
        with torch.no_grad():
            torch.testing.assert_close(sides["packed"](), sides["padded"](), atol=1e-4, rtol=1e-4)
            assert sides["unmasked"]().isfinite().all()
            if "waits" in sides:
                assert torch.equal(sides["packed"](), sides["waits"]())


def test_a_comparison_of_speed_is_one_case() -> None:
    case_of = script("benchmarks/speed_table.py").case_of
    rows = rows_in(ROOT / "results" / "speed.jsonl")
    assert [case_of(row) for row in rows] == [row["case"] for row in rows]


def test_what_pytest_says_on_a_gpu_is_summed_up() -> None:
    said = "FAILED tests/gpu/test_x.py::test_a - no\nERROR tests/gpu/test_y.py::test_b\n1 failed, 7 passed in 3 s\n"
    found = script("benchmarks/gpu_tests.py").summary(said)
    assert found == {"passed": 7, "failed": ["tests/gpu/test_x.py::test_a", "tests/gpu/test_y.py::test_b"]}


def test_a_grid_of_parity_is_multiplied_out_and_what_is_late_says_so(tmp_path: Path) -> None:
    parity = script("research/parity.py")
    assert parity.runs_of("--length 16,32 --seed 0") == [["--length", n, "--seed", "0"] for n in ("16", "32")]
    out = tmp_path / "parity.jsonl"
    parity.main([str(out), "--length 8,16 --seed 0", "--minutes", "-1"])
    assert [row["run"] for row in rows_in(out)] == ["--length 8 --seed 0", "--length 16 --seed 0"]
    assert all("not started" in row["unfinished"] for row in rows_in(out))


def test_a_grid_of_parity_trains_in_processes_and_keeps_result_curve_and_other_lengths(tmp_path: Path) -> None:
    out = tmp_path / "parity.jsonl"
    given = [str(out), "--length 8 --steps 20", "--small", "--also", "4", "--evaluate-every", "10", "--device", "cpu"]
    script("research/parity.py").main([*given, "--runs", str(tmp_path / "runs")])
    (row,) = rows_in(out)
    assert row["result"]["steps"] == 20
    assert [step for step, _ in row["curve"]] == [10, 20]
    assert row["elsewhere"][0][0] == 4


IN_SHELL = """
while [ "$1" != --out ]; do shift; done
if [ -f "$2/saved" ] && [ "$3" = --resume ]; then
    echo '{"accuracy": 1.0, "steps": 7, "seconds": 9}' > "$2/result.json"
    echo '{}' > "$2/env.json"
else
    mkdir -p "$2"
    trap 'touch "$2/saved"; kill $!; exit 143' TERM
    sleep 60 & wait
fi
"""


def test_a_run_of_a_grid_that_was_stopped_goes_on_and_a_finished_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parity, out = script("research/parity.py"), tmp_path / "parity.jsonl"
    monkeypatch.setattr(parity, "ADATAPE", ["sh", "-c", IN_SHELL, "adatape"])
    monkeypatch.setattr(parity, "GRACE", 1)
    given = [str(out), "--length 8", "--runs", str(tmp_path / "runs"), "--device", "cpu", "--minutes"]
    parity.main([*given, "0.001"])
    assert rows_in(out)[0]["unfinished"] == "stopped: the time was up"
    parity.main([*given, "1"])
    assert [row["result"]["steps"] for row in rows_in(out)] == [7]
    capsys.readouterr()
    parity.main([*given, "1"])
    assert capsys.readouterr().out == ""


def test_a_run_of_a_grid_that_is_killed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parity, out = script("research/parity.py"), tmp_path / "parity.jsonl"
    monkeypatch.setattr(parity, "ADATAPE", ["sh", "-c", "kill -9 $$"])
    parity.main([str(out), "--length 8", "--device", "cpu"])
    assert "SIGKILL" in rows_in(out)[0]["unfinished"]


def test_runs_of_a_grid_train_together_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parity, out = script("research/parity.py"), tmp_path / "parity.jsonl"
    small = {"data.held_out": 40, "optimizer.batch": 8}
    monkeypatch.setattr(parity, "parity_small", lambda **given: with_fields(parity_small(**given), small))
    given = [str(out), "--length 8 --system adatape,ut --steps 1", "--together", "2", "--runs", str(tmp_path / "runs")]
    given += ["--small"]
    parity.main([*given, "--evaluate-every", "1", "--device", "cpu"])
    told = capsys.readouterr().out
    assert "together:\n--length 8 --system adatape --steps 1\n--length 8 --system ut --steps 1" in told
    rows = rows_in(out)
    assert [row["run"] for row in rows] == [f"--length 8 --system {name} --steps 1" for name in ("adatape", "ut")]
    assert all(row["result"]["together"] == 2 and row["curve"][-1][0] == 1 for row in rows)
    parity.main([*given, "--device", "cpu"])
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_margins_of_parity_are_told_at_every_length() -> None:
    model = build_for(parity_small())
    assert isinstance(model, AdaTape)
    lines = list(script("research/parity.py").margins(model, 16, (16, 32), count=20))
    assert [line.split("accuracy")[0].split() for line in lines] == [["N", "16"], ["N", "32"]]


def test_speed_is_timed_by_the_command_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    table = script("benchmarks/speed_table.py")
    stored = rows_in(ROOT / "results" / "speed.jsonl")[0]
    measured = {name: value for name, value in stored.items() if name not in ("case", "environment")}

    def bench(command: list[str], **_: Any) -> None:
        assert command[1:4] == ["-m", "adatape", "bench"]
        row = {**measured, **{name: stored["environment"][name] for name in table.OF_ENVIRONMENT}}
        failed = row | {"model": "another", "error": "out of memory", "ratio": None}
        Path(command[command.index("--out") + 1]).write_text(json.dumps({"rows": [row, failed]}))

    monkeypatch.setattr(table.subprocess, "run", bench)
    assert table.timed(["adatape_base_patch16_224"]) == [{"case": stored["case"], **measured}]
    monkeypatch.setattr(table.subprocess, "run", lambda *_, **__: None)  # a bench that failed has left no file
    assert table.timed(["adatape_base_patch16_224"]) == []


def test_a_side_whose_compilation_is_killed_says_so_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = script("benchmarks/speed_table.py")
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(table.subprocess, "run", lambda *_, **__: killed)
    table.warm(("vit_tiny_patch16_224", "train", 1, False))
    assert capsys.readouterr().out.endswith("s: exit status -9\n")
