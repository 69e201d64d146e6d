"""Checkpoints are atomic, damage is reported, and loading executes no code."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from small_runs import Hostile
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from adatape.train import checkpoint
from adatape.train.checkpoint import checkpoints, load, newest_good, prune, save, verify
from adatape.train.checkpoint_storage import DamagedCheckpoint

KILLS = int(os.environ.get("ADATAPE_KILLS", "2"))


def state_of(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.vit.qkv.weight": nn.Parameter(torch.randn(6, 4, generator=draw)),
        "model.bias": torch.randn(6, generator=draw),
        "optimizer.exp_avg": torch.randn(6, 4, generator=draw).bfloat16(),
        "step": torch.tensor(7 + seed),
        "rate": torch.tensor(0.1 + seed, dtype=torch.float64),
        "done": torch.tensor(bool(seed % 2)),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def reseal(path: Path) -> None:
    """Rewrites the manifest to match changed files, as an attacker could."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": checkpoint._digest(file)}
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    manifest = {**json.loads((path / "manifest.json").read_text()), "files": files}
    (path / "manifest.json").write_text(checkpoint._rendered(manifest))


def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path: Path) -> None:
    saved, state = state_of(1), state_of(2)
    weight = state["model.vit.qkv.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save(tmp_path, 100, saved, {"accuracy": 0.5})
        facts = load(path, state)
    assert path == tmp_path / "step-00000100"
    assert facts == {"accuracy": 0.5, "step": 100}
    assert same(saved, state)
    assert state["model.vit.qkv.weight"] is weight
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000100"]


def test_saving_a_step_again_changes_nothing_unless_it_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(1), {})
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    save(tmp_path, 1, state_of(2), {})
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    (path / ".metadata").unlink()
    save(tmp_path, 1, state_of(2), {})
    load(path, state := state_of(1))
    assert same(state, state_of(2))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1 << random.Random(1).randrange(8)
    file.write_bytes(data)


def add(file: Path) -> None:
    file.with_name(file.name + ".more").write_bytes(b"more")


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink, add])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json"])
def test_any_damage_is_named_and_the_one_before_is_taken(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    good, bad = (save(tmp_path, step, state_of(step), {"accuracy": 0.5}) for step in (1, 2))
    harm(bad / name)
    with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
        verify(bad)
    with pytest.raises(DamagedCheckpoint):
        load(bad, state := state_of(9))
    assert same(state, state_of(9))
    skipped: list[tuple[Path, str]] = []
    assert newest_good(tmp_path, lambda path, why: skipped.append((path, why))) == good
    assert [path for path, _ in skipped] == [bad]
    assert name in skipped[0][1]


def test_every_flipped_bit_of_a_manifest_shows(tmp_path: Path) -> None:
    file = save(tmp_path, 1, state_of(), {"accuracy": 0.5, "note": "é"}) / "manifest.json"
    data = file.read_bytes()
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        with pytest.raises(DamagedCheckpoint):
            verify(file.parent)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"files": 3}', '{"files": {"../x": {}}}', "\ud800"])
def test_a_manifest_of_anything_else_is_named(tmp_path: Path, text: str) -> None:
    file = save(tmp_path, 1, state_of(), {}) / "manifest.json"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DamagedCheckpoint, match="manifest"):
        verify(file.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(9)}, r"has model.bias of shape \(6,\); the model has \(9,\)"),
        ({"bias": torch.zeros(6).half()}, "has model.bias of torch.float32; the model has torch.float16"),
        ({"bias": torch.tensor(1.0)}, r"has model.bias of shape \(6,\); the model has \(\)"),
        ({"more": torch.zeros(1)}, "checkpoint lacks model.more"),
        (
            {"bias": None, "bias.weight": torch.zeros(6)},
            "lacks model.bias.weight; checkpoint has model.bias, which the model lacks",
        ),
        (
            {str(n): torch.tensor(n) for n in range(5)},
            "lacks model.0; checkpoint lacks model.1; checkpoint lacks model.2; and 2 more",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    path, before = save(tmp_path, 1, state_of(1), {}), state_of(2)
    changed = {**before, **{f"model.{name}": value for name, value in change.items()}}
    state = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load(path, state)
    assert same(before, state_of(2))


def test_facts_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be JSON values"):
        save(tmp_path, 1, state_of(), {"accuracy": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


def names(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def test_a_hostile_pickle_in_the_metadata_runs_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(), {})
    for data in (
        pickle.dumps(Hostile(tmp_path / "mark")),
        pickle.dumps({"x": [Hostile(tmp_path / "mark")]}, protocol=0),
        names("builtins", "eval") + b'(S\'open("mark", "w")\'\ntR.',
        names("torch", "serialization.os.system") + b"(S'true'\ntR.",
        names("torch.serialization", "load") + b"(S'x'\ntR.",
        b"\x80\x04garbage",
        b"",
    ):
        (path / ".metadata").write_bytes(data)
        reseal(path)
        with pytest.raises(DamagedCheckpoint, match=r"\.metadata is not the metadata of a checkpoint"):
            load(path, state_of())
    assert not (tmp_path / "mark").exists()
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "mark")))
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(path).read_metadata()
    assert (tmp_path / "mark").exists(), "DCP's own reader has become safe, so ours may go"


def test_metadata_cannot_change_a_class(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(), {})
    metadata = names("torch.distributed.checkpoint.metadata", "Metadata")
    (path / ".metadata").write_bytes(metadata + b"(N}S'version'\nS'9'\nstb.")
    reseal(path)
    with pytest.raises(DamagedCheckpoint, match="would modify a class"):
        load(path, state_of())
    assert dcp.Metadata.version is None


def test_metadata_that_points_outside_or_at_pickles_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(), {})
    metadata = dcp.FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../outside"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(DamagedCheckpoint, match=r"refers to \['\.\./outside'\]"):
        load(path, state_of())
    metadata.state_dict_metadata["step"] = dcp.metadata.BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(DamagedCheckpoint, match="BytesStorageMetadata"):
        load(path, state_of())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["pickle", "torch", "zeros", "short"])
def test_a_hostile_data_file_runs_nothing_and_is_named(tmp_path: Path, form: str) -> None:
    path, mark = save(tmp_path, 1, {"a": torch.zeros(3)}, {}), tmp_path / "mark"
    data = io.BytesIO()
    torch.save(Hostile(mark), data)
    data = {"pickle": pickle.dumps(Hostile(mark)), "torch": data.getvalue(), "zeros": bytes(2000), "short": b""}[form]
    metadata = dcp.FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.length = len(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "__0_0.distcp").write_bytes(data)
    reseal(path)
    with pytest.raises(ValueError, match=r"__0_0\.distcp cannot be read as tensors"):
        load(path, {"a": torch.zeros(3)})
    assert not mark.exists()


@pytest.mark.parametrize("moment", ["data", "manifest", "sync", "rename", "folder"])
def test_a_full_disk_leaves_what_was_there_and_says_so(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, state_of(1), {})

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = {
        "data": (torch, "save"),
        "manifest": (Path, "write_text"),
        "sync": (checkpoint, "_sync"),
        "rename": (Path, "rename"),
        "folder": (Path, "mkdir"),
    }[moment]
    with monkeypatch.context() as patched:
        patched.setattr(*place, full)
        with pytest.raises(OSError, match=r"step-00000002 could not be written: No space left on device") as error:
            save(tmp_path, 2, state_of(2), {})
    assert error.value.errno == errno.ENOSPC
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    verify(tmp_path / "step-00000001")
    load(save(tmp_path, 2, state_of(2), {}), state_of())


def in_another_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    code = "import sys, torch; from pathlib import Path; from adatape.train.checkpoint import *\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_disk_that_really_refuses_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, state_of(1), {})
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: save(Path(sys.argv[1]), 2, {'a': torch.randn(100, 100)}, {})\n"
        "except OSError as error: print(error)"
    )
    printed, _ = in_another_process(code, tmp_path).communicate()
    assert printed == f"[Errno 27] {tmp_path}/step-00000002 could not be written: File too large\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def dies_before(act: int, folder: Path) -> bool:
    """A fork that saves and prunes, and exits before its n-th file-system call."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    seen = iter(range(act))

    def watch(event: str, _: Any) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and next(seen, None) is None:
            os._exit(9)

    sys.addaudithook(watch)
    save(folder, 3, state_of(3), {})
    prune(folder, keep=2)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_process_gone_before_any_act_on_the_disk_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    for act in range(1000):
        folder = tmp_path / str(act)
        for step in (1, 2):
            save(folder, step, state_of(step), {})
        died = dies_before(act, folder)
        left = [path for path in folder.iterdir() if path.name.startswith("step-")]
        assert len(left) >= 2
        assert all(verify(path) for path in left)
        if not died:
            break
    assert act > 20
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000003"]


def test_a_process_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    code = (
        "folder, first = Path(sys.argv[1]), int(sys.argv[2])\n"
        "for step in range(first, first + 100_000):\n"
        "    save(folder, step, {'a': torch.full((300, 300), step)}, {'accuracy': step % 7})\n"
        "    prune(folder)\n"
        "    print(step, flush=True)\n"
    )
    for kill in range(KILLS):
        process = in_another_process(code, tmp_path, 1 + 100_000 * kill)
        assert process.stdout
        said = [process.stdout.readline()]
        time.sleep(random.Random(kill).uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        said += process.communicate()[0].splitlines()
        skipped: list[str] = []
        found = newest_good(tmp_path, lambda _, why, skipped=skipped: skipped.append(why))
        assert not skipped
        assert found
        for path in checkpoints(tmp_path):
            state = {"a": torch.zeros(300, 300, dtype=torch.int64)}
            step = load(path, state)["step"]
            assert step == state["a"].unique().item()
        assert step >= int(said[-1].split()[0])
        assert all(entry.suffix in ("", ".partial", ".removed") for entry in tmp_path.iterdir())
    prune(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_the_newest_and_the_best_are_kept_and_what_a_crash_left_is_not(tmp_path: Path) -> None:
    for step, accuracy in enumerate([0.1, 0.9, 0.3, float("nan"), 0.4], 1):
        save(tmp_path, step, state_of(), {"accuracy": accuracy})
    for left in (".step-00000009.partial", ".step-00000008.removed"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "x").write_text("x")
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 4, 5)]
    with pytest.raises(ValueError, match="keep is 0; it must be at least 1"):
        prune(tmp_path, keep=0)


def test_a_truncated_checkpoint_displaces_no_good_one(tmp_path: Path) -> None:
    paths = [save(tmp_path, step, state_of(), {"accuracy": step}) for step in (1, 2, 3)]
    truncate(paths[2] / ".metadata")
    prune(tmp_path, keep=1)
    assert checkpoints(tmp_path) == [paths[1]]
    truncate(paths[1] / ".metadata")
    prune(tmp_path, keep=1)
    assert checkpoints(tmp_path) == [paths[1]]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none") == []
    assert newest_good(tmp_path / "none", lambda *_: None) is None


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def one_rank(rank: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    alone = folder / "alone" / "step-00000001"
    copied, sharded = net(2), net(3)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    for model in (copied, sharded):
        state = {**model.state_dict(), "step": torch.tensor(0)}
        assert load(alone, state)["accuracy"] == 0.5
        assert state["step"] == 9
    save(folder / "copied", 1, {**copied.state_dict(), "step": torch.tensor(4)}, {"rank": rank})
    save(folder / "sharded", 1, {**sharded.state_dict(), "step": torch.tensor(5)}, {"rank": rank})
    skipped: list[Path] = []
    (folder / "sharded" / "step-00000002").mkdir(exist_ok=True)
    dist.barrier()
    assert newest_good(folder / "sharded", lambda path, _: skipped.append(path)) == folder / "sharded" / "step-00000001"
    assert len(skipped) == (rank == 0)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000002/manifest\.json is missing"):
        load(folder / "sharded" / "step-00000002", copied.state_dict())
    if rank == 1:
        torch.save = _full
    with pytest.raises(OSError, match="step-00000003 could not be written: No space left"):
        save(folder / "copied", 3, copied.state_dict(), {})
    dist.barrier()
    prune(folder / "copied")
    dist.destroy_process_group()


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_two_processes_and_one_read_what_the_other_wrote(tmp_path: Path) -> None:
    saved = net(1)
    save(tmp_path / "alone", 1, {**saved.state_dict(), "step": torch.tensor(9)}, {"accuracy": 0.5})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_rank, (port, tmp_path), nprocs=2)
    for folder, step in (("copied", 4), ("sharded", 5)):
        state = {**net(4).state_dict(), "step": torch.tensor(0)}
        assert load(tmp_path / folder / "step-00000001", state) == {"rank": 0, "step": 1}
        assert same(state, {**saved.state_dict(), "step": torch.tensor(step)})
    assert len(list((tmp_path / "sharded" / "step-00000001").glob("*.distcp"))) == 2
    assert [path.name for path in (tmp_path / "copied").iterdir()] == ["step-00000001"]
