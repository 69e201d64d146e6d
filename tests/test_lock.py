"""One process at a time writes into a run folder; a second is refused, with the first one's name."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from fleet import run_together
from small_runs import (
    LONG,
    Forks,
    at_step,
    children_of,
    command,
    contents,
    fingerprint,
    in_the_long_suite,
    no_watch,
    tiny,
    torchrun,
    wait_until,
)

from adatape import cli
from adatape.train import lock
from adatape.train.folder import prepare
from adatape.train.lock import LOCK, FolderInUse, write_lock
from adatape.train.logger import MetricsWriter
from adatape.train.run import run

pytestmark = pytest.mark.usefixtures("one_order_of_sums")
STEPS = 60  # `undisturbed` takes as many


def unheard(_: str) -> None:
    """A `say` that prints nothing."""


def in_a_fork(folder: Path) -> str:
    """The result of locking in a second process: free, or the error."""
    reading, writing_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            with write_lock(folder, unheard):
                found = "free"
        except Exception as error:
            found = str(error)
        os.write(writing_end, found.encode())
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("times", range(6 if LONG else 1))
def test_a_second_writer_is_refused_by_name_and_the_first_goes_on(
    forks: Forks, undisturbed: Path, tmp_path: Path, times: int
) -> None:
    out = tmp_path / "run"
    first = forks.start(command(out, STEPS))
    wait_until(at_step(out, 4 + 3 * times))
    resumed = forks.start(["train", str(out), "--device", "cpu"])
    queued = forks.start([*command(out, STEPS), "--resume"])
    for second in (resumed, queued):
        assert second.wait() == 2
        assert len(second.errors) == 1
        assert (
            f"adatape: {out} is being written by process {first.pid} on {socket.gethostname()} since "
            in (second.errors[0])
        )
    assert first.wait() == 0, first.errors
    assert first.errors == []
    assert fingerprint(out) == fingerprint(undisturbed)
    assert not (out / LOCK).exists()


def test_a_killed_trainer_leaves_no_lock_even_where_its_data_workers_live_on(forks: Forks, tmp_path: Path) -> None:
    child, out = forks.start_on_images(tmp_path)
    workers = children_of(child.pid)
    assert len(workers) >= 1
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        child.kill()
        child.wait()
        assert json.loads((out / LOCK).read_text())["pid"] == str(child.pid)
        assert in_a_fork(out) == "free"
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


@in_the_long_suite
def test_one_rank_locks_for_all_and_a_restart_by_torchrun_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # One restart for the kill below, one because a process of torch may abort while it exits ("terminate called without
    # an active exception", seen once in a dozen runs): it is started again, finds the result and ends.
    with torchrun(command(out, 40), restarts=2) as agent:
        wait_until(at_step(out, 5))
        assert "is being written by process" in in_a_fork(out)
        before = children_of(agent.pid)
        os.kill(before[1], signal.SIGKILL)
        _, said = agent.communicate(timeout=600)
    assert agent.returncode == 0, said
    assert (out / "result.json").is_file()
    assert not (out / LOCK).exists()


def test_several_processes_are_all_refused_and_none_waits(forks: Forks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    prepare(out, tiny("plainvit"), "cpu")
    with write_lock(out):
        before = contents(out)
        for child in forks.start_two(["train", str(out), "--device", "cpu"]):
            assert child.wait() == 2
            assert len([line for line in child.errors if "is being written by process" in line]) == 1
        assert contents(out) == before


def test_runs_side_by_side_lock_each_folder(tmp_path: Path) -> None:
    both = [tiny("plainvit", steps=2), tiny("adatape", steps=2)]
    seen: list[str] = []

    def look(_: Any) -> None:
        seen.extend(in_a_fork(tmp_path / name) for name in ("0", "1") if len(seen) < 2)

    run_together(both, [tmp_path / "0", tmp_path / "1"], "cpu", look)
    assert len(seen) == 2
    assert all("is being written by process" in each for each in seen)
    assert not list(tmp_path.rglob(LOCK))


def test_one_process_has_a_folder_once(tmp_path: Path) -> None:
    with (
        write_lock(tmp_path),
        pytest.raises(FolderInUse, match=f"{tmp_path} is being written by process {os.getpid()} "),
    ):
        run(tiny("plainvit", steps=1), tmp_path, "cpu", no_watch)
    assert not (tmp_path / LOCK).exists()


def test_an_error_releases_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), write_lock(tmp_path):
        _ = 1 / 0
    assert in_a_fork(tmp_path) == "free"


def test_verbs_that_write_into_a_run_are_refused_and_readers_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(tiny("adatape", steps=1), out, "cpu", no_watch)
    with write_lock(out):
        before = contents(out)
        for verb in (
            "budget --gflops 100 --device cpu --store",
            "figures --samples 20 --device cpu",
            "export --to torch",
        ):
            name, *options = verb.split()
            with pytest.raises(SystemExit) as stop:
                cli.main([name, str(out), *options])
            assert stop.value.code == 2
            assert "is being written by process" in capsys.readouterr().err
        assert contents(out) == before
        cli.main(["eval", str(out), "--device", "cpu"])
        cli.main(["report", str(out), "--out", str(tmp_path / "report.html")])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)
    monkeypatch.setattr(lock, "WATCHED", 0.5)
    monkeypatch.setattr(lock, "SETTLED", 0.05)


@pytest.fixture
def patient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """A long WATCHED, so that a slow machine does not miss a touch; tests never wait this long."""
    monkeypatch.setattr(lock, "WATCHED", 60.0)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock, "flock", lacking)


@pytest.mark.usefixtures("patient", "without_locks")
def test_without_locks_a_touched_file_is_used_instead(tmp_path: Path) -> None:
    said: list[str] = []
    with write_lock(tmp_path, said.append):
        assert f"is being written by process {os.getpid()} " in in_a_fork(tmp_path)
    assert "has no locks" in said[0]
    assert in_a_fork(tmp_path) == "free"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick", "without_locks")
def test_without_locks_a_killed_holder_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        with write_lock(tmp_path, unheard):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    looks, touched, said = [], lock._touched, []
    monkeypatch.setattr(lock, "_touched", lambda path: looks.append(path) or touched(path))
    with write_lock(tmp_path, said.append):
        assert len(looks) > 2
    assert f"was left by process {child}" in said[0]


def left_by(host: str, folder: Path) -> Path:
    path = folder / LOCK
    path.write_text(json.dumps({"host": host, "pid": "7", "since": "then", "command": "adatape train"}))
    return path


@pytest.mark.usefixtures("quick")
def test_locks_that_stay_on_one_machine_do_not_hide_a_writer_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, touched = left_by("elsewhere", tmp_path), lock._touched

    def touched_meanwhile(path: Path) -> tuple[int, int] | None:
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
        return touched(path)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lock, "_touched", touched_meanwhile)
        with pytest.raises(FolderInUse, match="process 7 on elsewhere since then"), write_lock(tmp_path, unheard):
            pass
    assert path.exists()
    with write_lock(tmp_path, unheard):
        pass
    assert not path.exists()


def test_a_lock_left_on_this_machine_is_taken_at_once(tmp_path: Path) -> None:
    left_by(socket.gethostname(), tmp_path)
    with write_lock(tmp_path, pytest.fail):
        pass


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", [b"\xff\x00", b"[1]", b"{}", b"null", b"[" * 4000, b'{"host": "\\u001b[2J"}'])
def test_an_unreadable_lock_file_is_watched_and_then_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    said: list[str] = []
    with write_lock(tmp_path, said.append):
        pass
    assert len(said) == 1
    assert said[0].isprintable()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    out, theirs = tmp_path / "run", tmp_path / "theirs"
    theirs.write_text("dear")
    out.mkdir()
    (out / LOCK).symlink_to(theirs)
    with pytest.raises(OSError, match=str(out / LOCK)), write_lock(out):
        pass
    assert theirs.read_text() == "dear"


def test_a_pipe_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(OSError, match="is not a regular file"), write_lock(tmp_path):
        pass


def test_a_link_in_place_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("dear")
    (tmp_path / "metrics.jsonl.partial").symlink_to(tmp_path / "dear")
    MetricsWriter(tmp_path).close()
    assert (tmp_path / "dear").read_text() == "dear"
