"""A RetrievalBank with an exact index reads what `read_tape` reads on the whole bank, index for index."""

from __future__ import annotations

import copy
import http.client
import json
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import adatape
from adatape import retrieval
from adatape.banks import FrozenBank, RetrievalBank, build_index
from adatape.banks.index import FACTS, INDEX, norm_hash
from adatape.banks.search import SPARE
from adatape.banks.served import BIGGEST, index_server
from adatape.config import ReaderConfig
from adatape.models import AdaTape
from adatape.reader import TapeReader

WIDTH, H = 32, 16
READING = ReaderConfig(steps=4, threshold=1.5, merge=3, query_width=H, norm_learns=False)
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "num_heads": 2, "depth": 3, "num_classes": 5}
CASES: dict[str, dict[str, Any]] = {
    "random": {},
    "merge 1": {"merge": 1},
    "replace": {"update": "replace"},
    "never halts": {"threshold": 100.0},
    "temperature": {"temperature": 0.5},
    "collect": {"ponder": "collect", "ponder_at_halt": False},
    "no norm": {"norm": False},
}


def stored(folder: Path, tokens: Tensor, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "values.npy", tokens.numpy())
    build_index(folder / "values.npy", folder, **{"query_width": H, **options})
    return folder


def read(reader: TapeReader, bank: RetrievalBank, query: Tensor) -> adatape.Tape:
    return reader(query, bank.open(query, query[:, None], query))


def tokens_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_same_tape(mine: adatape.Tape, theirs: adatape.Tape) -> None:
    assert torch.equal(mine.index, theirs.index)
    assert torch.equal(mine.mask, theirs.mask)
    for name in ("weight", "tokens", "ponder"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with index_server(folder, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_an_exact_index_reads_what_the_whole_bank_gives(case: str, tied: bool, tmp_path: Path) -> None:
    reading = ReaderConfig(**{**vars(READING), **CASES[case]})
    tokens = tokens_of(300)
    if tied:
        tokens = tokens[torch.randint(7, (300,))]  # seven tokens, each about 43 times, more than is fetched
    folder = stored(tmp_path, tokens, norm=None if reading.norm else nn.Identity())
    reader, query = TapeReader(WIDTH, reading, 300).eval(), 2 * torch.randn(9, WIDTH)
    assert_same_tape(read(reader, RetrievalBank(folder), query), reader(query, tokens))


@given(
    seed=st.integers(0, 10_000), count=st.integers(12, 120), steps=st.integers(1, 4), merge=st.integers(1, 3),
    levels=st.integers(1, 4), nudge=st.sampled_from([0.0, 1e-7, 1e-6]), parts=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=40)
def test_ties_and_scores_that_float32_cannot_order_are_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, steps: int, merge: int, levels: int, nudge: float,
    parts: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    folder = tmp_path_factory.mktemp("bank")
    tokens = torch.randint(-levels, levels + 1, (count, WIDTH)) + nudge * torch.randn(count, WIDTH)
    tokens = tokens[torch.randint(count, (count,))]
    np.save(folder / "values.npy", tokens.numpy())
    edges = np.linspace(0, count, parts + 1).astype(int).tolist()
    for n in range(parts):
        build_index(folder / "values.npy", folder / str(n), query_width=H, rows=(edges[n], edges[n + 1]))
    reader = TapeReader(WIDTH, ReaderConfig(steps, 1.5, merge, H, norm_learns=False), count).eval()
    query, bank = torch.randn(3, WIDTH), RetrievalBank(*(folder / str(n) for n in range(parts)), fetch=1)
    assert torch.equal(read(reader, bank, query).index, reader(query, tokens).index)


def test_half_precision_values_are_those_of_the_whole_bank_in_float32(tmp_path: Path) -> None:
    tokens = tokens_of(200).half()
    reader, query = TapeReader(WIDTH, READING, 200).eval(), torch.randn(5, WIDTH)
    assert_same_tape(read(reader, RetrievalBank(stored(tmp_path, tokens)), query), reader(query, tokens.float()))


@pytest.mark.parametrize("kind", ["ivf", "ivf-pq"])
def test_searching_all_cells_and_scoring_all_candidates_again_is_exact(kind: str, tmp_path: Path) -> None:
    tokens = tokens_of(600)
    folder = stored(tmp_path, tokens, kind=kind, cells=8, probes=2, code_bytes=4)
    reader, query = TapeReader(WIDTH, READING, 600).eval(), torch.randn(5, WIDTH)
    exact, every = reader(query, tokens), RetrievalBank(folder, probes=8, fetch=600)
    assert_same_tape(read(reader, every, query), exact)
    few = read(reader, RetrievalBank(folder, probes=1), query)
    assert not torch.equal(few.index, exact.index), "one cell of eight shows little"
    shared = (few.index[:, :1].flatten(1)[:, :, None] == exact.index.flatten(1)[:, None]).any(-1)
    assert shared.any(), "an approximate tape still finds some of the exact one"


def test_cells_with_too_few_tokens_are_not_the_only_ones_searched(tmp_path: Path) -> None:
    tokens = tokens_of(300)
    bank = RetrievalBank(stored(tmp_path, tokens, kind="ivf", cells=150), probes=1)
    tape = read(TapeReader(WIDTH, READING, 300).eval(), bank, torch.randn(6, WIDTH))
    assert tape.index[tape.mask].min() >= 0
    for row in tape.index.flatten(1):
        kept = row[row >= 0]
        assert len(set(kept.tolist())) == len(kept), "no token is read twice"


@pytest.mark.parametrize("kind", ["exact", "ivf", "ivf-pq"])
def test_a_row_reads_the_same_alone_as_in_a_batch(kind: str, tmp_path: Path) -> None:
    bank = RetrievalBank(stored(tmp_path, tokens_of(600), kind=kind, cells=8, probes=2, code_bytes=4))
    reader, query = TapeReader(WIDTH, READING, 600).eval(), torch.randn(45, WIDTH)
    whole = read(reader, bank, query)
    for row in (0, 20, 44):
        alone = read(reader, bank, query[row : row + 1])
        assert torch.equal(alone.index[0], whole.index[row])
        assert torch.equal(alone.tokens[0], whole.tokens[row])


def test_parts_in_folders_and_on_servers_are_one_bank(tmp_path: Path) -> None:
    tokens = tokens_of(300)
    np.save(tmp_path / "values.npy", tokens.numpy())
    for name, rows in (("a", (0, 100)), ("b", (100, 250)), ("c", (250, 300))):
        build_index(tmp_path / "values.npy", tmp_path / name, query_width=H, rows=rows)
    reader, query = TapeReader(WIDTH, READING, 300).eval(), torch.randn(5, WIDTH)
    with serving(tmp_path / "b") as address:
        bank = RetrievalBank(tmp_path / "a", address, tmp_path / "c")
        assert (bank.size, bank.width) == (300, WIDTH)
        assert torch.equal(bank(query), tokens)
        assert_same_tape(read(reader, bank, query), reader(query, tokens))
    with pytest.raises(ConnectionError, match=f"the index server {address} does not answer"):
        read(reader, bank, query)


def test_a_server_finds_ties_too(tmp_path: Path) -> None:
    tokens = tokens_of(3)[torch.randint(3, (120,))]
    reader, query = TapeReader(WIDTH, READING, 120).eval(), torch.randn(5, WIDTH)
    with serving(stored(tmp_path, tokens)) as address:
        assert_same_tape(read(reader, RetrievalBank(address), query), reader(query, tokens))


def test_another_process_serves_an_index_by_one_command(tmp_path: Path) -> None:
    tokens = tokens_of(100)
    folder = stored(tmp_path, tokens)
    command = [sys.executable, "-m", "adatape.retrieval", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            reader, query = TapeReader(WIDTH, READING, 100).eval(), torch.randn(5, WIDTH)
            assert_same_tape(read(reader, RetrievalBank(address), query), reader(query, tokens))
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/take", np.array([0, 100]), 400, b"rows must be int64 from 0 to 99"),
        ("/take", np.array([[0]]), 400, b"rows must be int64"),
        ("/search?count=5&least=6&probes=0", np.zeros((1, H), np.float32), 400, b"count is 5 and least is 6"),
        ("/search?count=5&least=1&probes=0", np.zeros((1, 3), np.float32), 400, b"float32 of width 16"),
        ("/search?count=many&least=1&probes=0", np.zeros((1, H), np.float32), 400, b"invalid literal"),
        ("/search", np.zeros((1, H), np.float32), 400, b"count"),
        ("/elsewhere", np.zeros((1, H), np.float32), 400, b"there is no /elsewhere"),
        ("/take", b"no array", 400, b""),
        ("/take", np.array([{}], object), 400, b"allow_pickle=False"),
    ],
)
def test_a_server_refuses_what_it_cannot_answer(path: str, body: Any, status: int, said: bytes, tmp_path: Path) -> None:
    if not isinstance(body, bytes):
        np.save(tmp_path / "body.npy", body)
        body = (tmp_path / "body.npy").read_bytes()
    with serving(stored(tmp_path / "bank", tokens_of(100))) as address:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        assert answer.status == status
        assert said in answer.read()
        connection.close()
        connection.putrequest("POST", "/take")
        connection.putheader("Content-Length", str(BIGGEST + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def wrapped(bank: adatape.Bank | Tensor, **options: Any) -> AdaTape:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", **VIT)
    reads = {"steps": 4, "threshold": 2.0, "merge": 3, "query_width": H, "norm_learns": False, "gate": False}
    return adatape.wrap(vit, bank, **{**reads, **options})


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def test_a_model_reads_and_learns_as_with_the_same_tokens_in_memory(tmp_path: Path) -> None:
    tokens = tokens_of(300)
    found, plain = wrapped(RetrievalBank(stored(tmp_path, tokens))), wrapped(tokens)
    outputs = [model(images(), output=True) for model in (found, plain)]
    assert torch.equal(outputs[0].tape.index, outputs[1].tape.index)
    for output in outputs:
        output.logits.square().sum().backward()
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-4, atol=1e-4)
    for (name, mine), theirs in zip(found.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert mine.grad is not None, name
            assert mine.grad.isfinite().all(), name
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4 * float(theirs.grad.abs().max()))
    assert found.vit.patch_embed.proj.weight.grad.abs().max() > 0  # type: ignore[union-attr, operator]


def test_the_query_gets_its_gradient_through_the_weights(tmp_path: Path) -> None:
    tokens = tokens_of(200)
    reader, bank = TapeReader(WIDTH, READING, 200), RetrievalBank(stored(tmp_path, tokens))
    grads = []
    for source in (lambda q: bank.open(q, q[:, None], q), lambda _: tokens):
        query = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        tape = reader(query, source(query))
        (tape.tokens.square().sum() + tape.ponder.sum()).backward()
        grads.append(query.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-4)


def test_training_steps_leave_the_index_valid(tmp_path: Path) -> None:
    model = wrapped(RetrievalBank(stored(tmp_path, tokens_of(300)))).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        output = model(images(), output=True)
        loss = model.loss(output, torch.tensor([0, 1, 2, 3]), ponder_weight=0.01)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@torch.no_grad()
def test_budgets_and_trimming_hold(tmp_path: Path) -> None:
    model = wrapped(RetrievalBank(stored(tmp_path, tokens_of(300)))).eval()
    full = model(images(), output=True)
    assert full.tape.length.max() <= 4
    model.set_budget(2)
    assert model(images(), output=True).tape.length.max() <= 2
    model.set_budget(0)
    assert torch.equal(model(images()), model.vit(images()))
    with pytest.raises(ValueError, match="steps is 101; it needs 303 bank tokens, and the bank has 300"):
        model.set_budget(101)
    model.set_budget()
    shortest = int(full.tape.length.argmin())
    cut = int(full.tape.length[shortest])
    model.set_budget(cut, threshold=model.reader.reading.threshold)
    trimmed = model(images()[shortest : shortest + 1])
    torch.testing.assert_close(trimmed[0], full.logits[shortest], rtol=1e-5, atol=1e-5)


def test_copies_share_the_index_pickles_open_it_again_and_weights_do_not_hold_it(tmp_path: Path) -> None:
    model = wrapped(RetrievalBank(stored(tmp_path, tokens_of(300)), fetch=9)).eval()
    expected = model(images())
    copied = copy.deepcopy(model)
    assert copied.bank.opened is model.bank.opened  # type: ignore[union-attr]
    again = pickle.loads(pickle.dumps(model))
    assert again.bank.opened.search.fetch == 9
    for each in (copied, again):
        assert torch.equal(each(images()), expected)
    assert not any(name.startswith("bank.") for name in model.state_dict())


@torch.no_grad()
def test_a_compiled_model_searches_outside_the_graph(tmp_path: Path) -> None:
    model = wrapped(RetrievalBank(stored(tmp_path, tokens_of(300)))).eval()
    expected = model(images())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(images()), expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="searched by FAISS, outside the graph"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(images())


def test_exports_are_refused_with_the_reason(tmp_path: Path) -> None:
    from adatape.export import export_model

    model = wrapped(RetrievalBank(stored(tmp_path, tokens_of(300)))).eval()
    for attempt in (
        lambda: export_model(model, images(), "torch", tmp_path / "m.pt2", {}),
        lambda: torch.export.export(model, (images(),), strict=False),
    ):
        with pytest.raises(ValueError, match="the bank is a RetrievalBank; FAISS searches it outside the graph"):
            attempt()


def test_cost_counts_what_a_search_compares(tmp_path: Path) -> None:
    exact = wrapped(RetrievalBank(stored(tmp_path / "exact", tokens_of(300))))
    ivf = RetrievalBank(stored(tmp_path / "ivf", tokens_of(300), kind="ivf", cells=10, probes=2))
    assert {part.name: part.macs for part in exact.cost()}["reader"] == 4 * 300 * H
    assert ivf.scored_tokens() == 10 + 60
    assert (ivf.token_macs(), sum(1 for _ in ivf.parameters())) == (0, 0)


def test_without_options_a_model_takes_the_settings_of_the_index(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = adatape.wrap(
        timm.create_model("vit_tiny_patch16_224", **VIT), RetrievalBank(stored(tmp_path, tokens_of(300)))
    )
    assert (model.reader.reading.query_width, model.reader.reading.norm_learns) == (H, False)
    assert model(images(), output=True).tape.length.min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reader": "parallel"}, "scores only what its index finds; reader must be 'adaptive'"),
        ({"reader": "act"}, "reader must be 'adaptive'"),
        ({"choose": "random"}, "choose 'highest'"),
        ({"bank_dropout": 0.1}, "bank_dropout is 0.1; a RetrievalBank hides no tokens"),
        ({"query_width": 8}, "query_width is 8; the index has keys of width 16"),
        ({"norm_learns": True}, "norm_learns is True; .* it must be False"),
        ({"norm_scale": 0.5}, r"the reader's norm is not the one .* from values.npy: adatape.build_index\(values, "),
        ({"norm": False}, "the reader's norm is not the one"),
        ({"steps": 200}, "bank has 300 tokens; steps × merge needs 600"),
    ],
)
def test_a_reader_that_cannot_read_the_index_is_refused_when_built(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped(RetrievalBank(stored(tmp_path, tokens_of(300))), **options)


def test_a_changed_norm_is_refused_until_the_index_is_built_again(tmp_path: Path) -> None:
    tokens = tokens_of(300)
    model = wrapped(RetrievalBank(stored(tmp_path, tokens))).eval()
    other = wrapped(tokens).state_dict() | {"reader.norm.weight": torch.full((WIDTH,), 0.5)}
    model.load_state_dict({name: value for name, value in other.items() if name != "bank.tokens"})
    with pytest.raises(ValueError, match="the reader's norm is not the one that the index was built with"):
        model(images())
    build_index(tmp_path / "values.npy", tmp_path / "again", norm=model.reader.norm, query_width=H)
    model.bank = RetrievalBank(tmp_path / "again")
    plain = wrapped(tokens).eval()
    plain.load_state_dict(other)
    assert torch.equal(model(images(), output=True).tape.index, plain(images(), output=True).tape.index)


def test_the_hash_of_a_norm_is_of_its_numbers() -> None:
    norm = nn.LayerNorm(8, eps=1e-6)
    assert norm_hash(norm) == norm_hash(copy.deepcopy(norm).bfloat16())
    hashes = {norm_hash(each) for each in (norm, nn.LayerNorm(8, eps=1e-5), nn.LayerNorm(9, eps=1e-6), None)}
    with torch.no_grad():
        norm.bias[3] = 1e-7
    assert len(hashes | {norm_hash(norm)}) == 5


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.zeros((30, 8), np.float32), {"query_width": 9}, "query_width is 9; .* values' width 8"),
        (np.zeros((30, 8), np.int32), {}, r"shape \(30, 8\) and int32; values must be"),
        (np.zeros(30, np.float32), {}, r"shape \(30,\) and float32"),
        (np.zeros((0, 8), np.float32), {}, r"shape \(0, 8\)"),
        (np.array([[1.0, 2.0], [3.0, np.nan], [np.inf, 0.0]]), {"query_width": 1}, "row 1 of .* non-finite values"),
        (np.zeros((30, 8), np.float32), {"kind": "hnsw"}, "kind is 'hnsw'; it must be one of exact, ivf, ivf-pq"),
        (np.zeros((30, 8), np.float32), {"kind": "ivf", "cells": 31}, "cells is 31; .* the number of keys, 30"),
        (np.zeros((30, 8), np.float32), {"kind": "ivf-pq", "code_bytes": 3}, "code_bytes is 3 and there are 30 keys"),
        (np.zeros((30, 8), np.float32), {"rows": (10, 31)}, r"rows is \(10, 31\); .* within the 30 rows"),
        (np.zeros((30, 8), np.float32), {"norm": nn.LayerNorm(7)}, "norm is LayerNorm.* values' width 8"),
        (np.zeros((30, 8), np.float32), {"norm": nn.LayerNorm(8, bias=False)}, "norm is LayerNorm.* scale and shift"),
        (np.zeros((30, 8), np.float32), {"query_width": 7.5}, "query_width is 7.5; it must be a whole number"),
        (np.zeros((30, 8), np.float32), {"kind": "ivf", "probes": 0}, "probes is 0; it must be .* at least 1"),
        (np.zeros((30, 8), np.float32), {"kind": "ivf-pq", "code_bytes": 0}, "code_bytes is 0; it must be"),
        (np.zeros((30, 8), np.float32), {"chunk": 0}, "chunk is 0; it must be"),
    ],
)
def test_values_that_make_no_index_are_refused(
    values: np.ndarray, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "values.npy", values)
    with pytest.raises(ValueError, match=message):
        build_index(tmp_path / "values.npy", tmp_path / "index", **{"query_width": 8, **options})
    assert not (tmp_path / "index").exists()


def damaged(folder: Path, how: str) -> None:
    facts = folder / FACTS
    if how == "no folder":
        shutil.rmtree(folder)
    elif how == "no facts":
        facts.unlink()
    elif how == "no index":
        (folder / INDEX).unlink()
    elif how == "no values":
        (folder / "values.npy").unlink()
    elif how == "half an index":
        (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:-999])
    elif how == "other values":
        np.save(folder / "values.npy", tokens_of(300, seed=1).numpy())
    elif how == "another index":
        (folder / INDEX).write_bytes((stored(folder.parent / "b", tokens_of(300, seed=1)) / INDEX).read_bytes())
    elif how == "other facts":
        facts.write_text("[1, 2]")
    elif how == "bytes":
        facts.write_bytes(b"\xff\xfe\x00")
    elif how == "another format":
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "format": 2}))
    elif how == "other rows":
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "rows": 299}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", "index.json is missing; adatape.build_index"),
        ("no facts", "index.json is missing"),
        ("no index", "keys.faiss is missing"),
        ("no values", "values.npy is missing"),
        ("half an index", "keys.faiss is not the file that .*index.json describes"),
        ("other values", "values.npy is not the file that .*index.json describes"),
        ("another index", "keys.faiss is not the file"),
        ("other facts", "is not a description of an index"),
        ("bytes", "is not text"),
        ("another format", "has format 2"),
        ("other rows", "has 300 keys of width 16; .*index.json says otherwise"),
    ],
)
def test_a_missing_or_foreign_index_is_refused_when_opened(how: str, message: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "a", tokens_of(300))
    damaged(folder, how)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        RetrievalBank(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": "a"}, "index.json: rows is 'a'; it must be a whole number"),
        ({"width": 33}, "values.npy has 300 rows of width 32; .*index.json says otherwise"),
        ({"first_row": 1}, "values.npy has 300 rows of width 32; .*index.json says otherwise"),
        ({"first_row": -1}, "index.json: first_row is -1; it must be at least 0"),
        ({"kind": "ivf"}, "keys.faiss is a FAISS IndexFlatIP of 1 cells; .*index.json says ivf and 1"),
        ({"kind": "hnsw"}, "index.json: kind is 'hnsw'; it must be one of exact, ivf, ivf-pq"),
        ({"largest_key": None}, "index.json: largest_key is null; it must be a number"),
        ({"cells": 0}, "index.json: cells is 0; it must be at least 1"),
        ({"cells": 4}, "keys.faiss is a FAISS IndexFlatIP of 1 cells; .*index.json says exact and 4"),
        ({"values": 3}, "index.json: values is 3; it must be text"),
    ],
)
def test_facts_that_do_not_fit_their_files_are_refused_when_opened(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    facts = stored(tmp_path, tokens_of(300)) / FACTS
    facts.write_text(json.dumps({**json.loads(facts.read_text()), **changed}))
    with pytest.raises(ValueError, match=message):
        RetrievalBank(facts.parent)


def test_on_the_meta_device_a_model_that_searches_gives_shapes(tmp_path: Path) -> None:
    bank = RetrievalBank(stored(tmp_path, tokens_of(300)))
    with torch.device("meta"):
        made = wrapped(bank)
    for model in (made, wrapped(bank).to("meta")):
        output = model(images().to("meta"), output=True)
        steps, width = model.reader.steps, bank.width
        assert output.tape.tokens.shape == (len(images()), steps, width)
        assert output.logits.is_meta


def test_other_misuse_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = stored(tmp_path / "a", tokens_of(300))
    narrow = stored(tmp_path / "b", tokens_of(300), query_width=8)
    (tmp_path / "empty.npy").touch()
    for attempt, message in (
        (lambda: RetrievalBank(), "at least one index"),
        (lambda: RetrievalBank(folder, narrow), "has query_width 16 and .* 8; they must be equal"),
        (lambda: RetrievalBank(folder, probes=0), "probes is 0; it must be at least 1"),
        (lambda: RetrievalBank(folder, probes=1.5), "probes is 1.5; it must be .* a whole number"),
        (lambda: RetrievalBank(folder, fetch=0), "fetch is 0"),
        (lambda: RetrievalBank("https://127.0.0.1:8700"), "it must be like http://127.0.0.1:8700"),
        (lambda: RetrievalBank("http://127.0.0.1:87000"), "address is 'http://127.0.0.1:87000'; .* Port out of range"),
        (lambda: RetrievalBank("http://127.0.0.1:8700/index"), "it must be like http://127.0.0.1:8700"),
        (lambda: build_index(folder / "values.npy", folder), "exists; choose another folder"),
        (lambda: build_index(tmp_path / "none.npy", tmp_path / "c"), "none.npy is missing"),
        (lambda: build_index(tmp_path / "empty.npy", tmp_path / "c"), "empty.npy is no .npy file"),
        (lambda: wrapped(FrozenBank(torch.zeros(300, 8))), "tokens have width 8 and the ViT's 32; they must be equal"),
    ):
        with pytest.raises((ValueError, FileExistsError, FileNotFoundError), match=message):
            attempt()


def test_without_faiss_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(tmp_path, tokens_of(300))
    monkeypatch.setitem(sys.modules, "faiss", None)
    for attempt in (lambda: RetrievalBank(folder), lambda: build_index(folder / "values.npy", tmp_path / "b")):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'adatape\[retrieval\]'"):
            attempt()


def test_a_query_that_is_not_finite_has_weights_that_are_not_finite(tmp_path: Path) -> None:
    bank = RetrievalBank(stored(tmp_path, tokens_of(300)))
    query = torch.randn(3, WIDTH)
    expected = read(TapeReader(WIDTH, READING, 300).eval(), bank, query)
    query[1, 2] = torch.nan
    tape = read(TapeReader(WIDTH, READING, 300).eval(), bank, query)
    assert tape.weight[1].isnan().any()
    assert torch.equal(tape.index[[0, 2]], expected.index[[0, 2]])


def test_an_index_is_built_in_chunks_and_says_how_far_it_is(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    stored(tmp_path, tokens_of(300), chunk=128, on_progress=lambda *each: said.append(each))
    assert said == [("indexing keys", done, 300) for done in (128, 256, 300)]
    said.clear()
    stored(tmp_path / "b", tokens_of(300), kind="ivf", on_progress=lambda *each: said.append(each))
    assert [task for task, *_ in said] == ["sampling keys", "indexing keys"]


def test_the_command_builds_what_the_function_builds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path, tokens_of(300))
    given = f"build {folder / 'values.npy'} {tmp_path / 'b'} --query-width {H} --rows 0 300".split()
    retrieval.main(given)
    assert "300 keys of width 16, exact" in capsys.readouterr().out
    assert (tmp_path / "b" / INDEX).read_bytes() == (folder / INDEX).read_bytes()
    with pytest.raises(SystemExit) as left:
        retrieval.main(given)
    assert left.value.code == 2
    assert "exists; choose another folder" in capsys.readouterr().err


def test_few_candidates_are_fetched_beyond_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K beyond what was read, and a few to spare; more only where scores are too close to tell apart."""
    bank = RetrievalBank(stored(tmp_path, tokens_of(300)))
    part, asked = bank.opened.search.parts[0], []
    original = part.search
    monkeypatch.setattr(part, "search", lambda q, count, *rest: asked.append(count) or original(q, count, *rest))
    monkeypatch.setattr(part, "search_above", lambda *_: pytest.fail("random scores are far enough apart"))
    reading = ReaderConfig(**{**vars(READING), "threshold": 100.0})
    read(TapeReader(WIDTH, reading, 300).eval(), bank, torch.randn(5, WIDTH))
    assert asked == [3 * step + 3 + SPARE for step in range(4)]
