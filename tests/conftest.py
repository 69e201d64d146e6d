from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from small_runs import Forks

sys.path.append(str(Path(__file__).parents[1] / "research"))  # scripts that import the package and one another

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is first imported


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_order_of_sums() -> Iterator[None]:
    """Sums over one thread have one order; determinism is for the test alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Training processes at once: one that has imported torch, and its copies."""
    server = Forks(tmp_path_factory.mktemp("said"))
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    """Workers share two cores; more threads than cores only wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
