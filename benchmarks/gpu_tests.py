"""Runs tests/gpu on a GPU, and records the hashes of the kernels and the tests that failed.

    python benchmarks/gpu_tests.py results/gpu_tests.json

CI compares the hashes with the sources, so kernels that were not tested on a GPU do not pass. Hashes ignore comments
and docstrings. pytest's output goes to the file of the same name with `.txt`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = ["-m", "pytest", "tests/gpu", "--noconftest", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
PYTEST += ["-o", "addopts=", "-o", "pythonpath=research tests"]


def kernels() -> dict[str, str]:
    sources = sorted((ROOT / "src/adatape/kernels").glob("*.py"))
    return {path.name: compiled_hash(path.read_text()) for path in sources}


def compiled_hash(source: str) -> str:
    """SHA-256 of the syntax tree without docstrings, which is the same in every version of Python."""
    return hashlib.sha256(repr(_plain(ast.parse(source))).encode()).hexdigest()


def _plain(node: object) -> object:
    """Names and values without positions and empty fields, which differ between Python versions."""
    if isinstance(node, list):
        return [_plain(part) for part in node if not _is_docstring(part)]
    if isinstance(node, ast.AST):
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return (type(node).__name__, fields)
    return (type(node).__name__, repr(node))


def _is_docstring(node: object) -> bool:
    """Whether a statement is a string constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def summary(said: str) -> dict[str, object]:
    """The number of passed tests and the names of failed ones, from pytest's output."""
    passed = re.findall(r"(\d+) passed", said)
    return {
        "passed": int(passed[-1]) if passed else 0,
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE),
    }


def main(given: Sequence[str] | None = None) -> None:
    from adatape.train.folder import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(given)
    out: Path = arguments.out
    ran = kernels()
    with out.with_suffix(".txt").open("w") as said:
        subprocess.run([sys.executable, *PYTEST], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, check=False)
    # The log must not contain paths of this machine.
    told = out.with_suffix(".txt").read_text().replace(f"{ROOT}/", "")
    out.with_suffix(".txt").write_text(told)
    found = summary(told)
    out.write_text(json.dumps({**found, "kernels": ran, "environment": environment(arguments.device)}, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
