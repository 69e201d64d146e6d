from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from small_runs import Forks, command

from adatape.data.haystack import COUNTS
from adatape.data.images import haystack_of

for _folder in ("research", "docs"):  # their scripts import one another by name
    sys.path.append(str(Path(__file__).parents[1] / _folder))

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is first imported


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of a test, as its working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def few_canvases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A haystack of 200 canvases, since making all of them takes seconds."""
    for part in ("train", "test"):
        monkeypatch.setitem(COUNTS, part, 200)
    haystack_of.cache_clear()
    yield
    haystack_of.cache_clear()


@pytest.fixture
def one_order_of_sums() -> Iterator[None]:
    """One thread, so that sums have a fixed order; resets deterministic mode after the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts training processes as forks of one that has already imported torch."""
    server = Forks(tmp_path_factory.mktemp("said"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of as many steps as the test module's STEPS."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    forks.finish(command(out, request.module.STEPS))
    return out


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    """One torch thread per pytest-xdist worker and for each process that it starts, since workers share the cores."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
