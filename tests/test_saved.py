"""Saved weights give `result.json` when loaded and evaluated again, to the bit on the same device."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet import run_together
from PIL import Image
from small_runs import FAMILIES, LONG, tiny, weights_of
from torch import Tensor, nn

from adatape.cli import main
from adatape.config import Budget, Experiment, ImageModel, to_dict
from adatape.data.batch import Shard
from adatape.data.images import open_images
from adatape.data.loaders import fixed_chunks
from adatape.recipes.haystack import haystack
from adatape.train import evaluate
from adatape.train.evaluate import score_run
from adatape.train.folder import load_config, load_run, prepare, with_budget, write
from adatape.train.parallel import full_state_dict
from adatape.train.run import finalize, plain
from adatape.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_order_of_sums")
CPU = torch.device("cpu")
STEPS = 3
AVERAGED = [0.9, None] if LONG else [0.9]


def trained(experiment: Experiment, out: Path) -> tuple[Trainer, dict[str, Any]]:
    prepare(out, experiment, "cpu")
    trainer = Trainer(experiment)
    assert len(list(trainer.train(STEPS))) == STEPS
    return trainer, finalize(trainer, out, 1.0)


@torch.no_grad()
def logits_of(model: nn.Module, experiment: Experiment) -> Tensor:
    model.eval()
    return torch.cat([model(x) for x, _ in evaluate.test_batches(experiment, None, CPU)])


def scored_again(out: Path) -> dict[str, Any]:
    return plain(score_run(*load_run(out), CPU))


@pytest.mark.parametrize(("family", "ema"), [*itertools.product(FAMILIES, AVERAGED), ("adatape", None)])
def test_what_is_saved_is_what_was_scored(family: str, ema: float | None, tmp_path: Path) -> None:
    experiment = tiny(family, steps=STEPS, optimizer__ema=ema)
    trainer, result = trained(experiment, tmp_path)
    scored, raw = trainer.evaluate("test"), logits_of(trainer.model, experiment)
    with trainer.averaged():
        wanted = logits_of(trainer.model, experiment)
    loaded = logits_of(load_run(tmp_path)[1], experiment)
    assert torch.equal(loaded, wanted)
    assert torch.equal(raw, wanted) == (ema is None)
    assert (result["accuracy"], result["lengths"]) == (scored.accuracy, scored.lengths)
    assert result["loss"] == pytest.approx(scored.loss, rel=1e-6)
    again = scored_again(tmp_path)
    assert again == {name: result[name] for name in again}
    assert len(again["logits_sha256"]) == 64


def test_whole_state_shares_no_memory_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = full_state_dict(model)
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(1)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_runs_side_by_side_save_their_own_averages(tmp_path: Path) -> None:
    experiments = [tiny("plainvit", steps=STEPS, optimizer__ema=ema) for ema in (0.5, 0.99)]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, result in zip(folders, run_together(experiments, folders, "cpu"), strict=True):
        again = scored_again(folder)
        assert again == {name: result[name] for name in again}
    assert not torch.equal(*(weights_of(folder)["vit.head.weight"] for folder in folders))


def test_the_command_eval_says_what_training_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for training in bf16: results are evaluated in float32."""
    out = tmp_path / "run"
    prepare(tmp_path / "config", tiny("adatape", steps=STEPS, engine__precision="bf16"), "cpu")
    main(["train", str(tmp_path / "config" / "config.json"), "--out", str(out), "--device", "cpu"])
    main(["eval", str(out), "--device", "cpu", "--json"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    result = json.loads((out / "result.json").read_text())
    assert said == {name: result[name] for name in said}


def test_the_logits_of_every_sample_show_in_their_hash(tmp_path: Path) -> None:
    trained(tiny("plainvit", steps=STEPS), tmp_path)
    experiment, model = load_run(tmp_path)
    before = score_run(experiment, model, CPU).logits_sha256
    with torch.no_grad():
        model.vit.head.bias[-1] += 1e-6
    assert score_run(experiment, model, CPU).logits_sha256 != before


@pytest.mark.parametrize(("total", "world"), [(360, 2), (360, 5), (1001, 3), (5, 8)])
def test_processes_share_out_the_batches_of_one(total: int, world: int) -> None:
    alone = fixed_chunks(total, 100, Shard())
    assert [n for chunk in alone for n in chunk] == list(range(total))
    shared = [fixed_chunks(total, 100, Shard(rank, world)) for rank in range(world)]
    assert list(itertools.chain.from_iterable(shared)) == alone
    assert max(map(len, shared)) - min(map(len, shared)) <= 1


def released(run: Path, to: Path, image: Image.Image) -> dict[str, Any]:
    """The names that the card's code defines."""
    main(["release", str(run), "--to", str(to)])
    code = (to / "README.md").read_text().split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {"image": image}
    exec(code, found)
    return found


def by_the_card(found: dict[str, Any], pictures: list[Image.Image]) -> Tensor:
    with torch.no_grad():
        return found["model"](torch.stack([found["transform"](picture) for picture in pictures]))


def retrofitted() -> Experiment:
    """A wrapped ViT that scales pixels as its weights ask for, on grey images."""
    vit = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 4}
    wrap = {"bank": "input", "patch": 2, "steps": 2, "merge": 2, "query_width": 16}
    model = ImageModel("vit_tiny_patch16_224", vit, wrap=wrap, scaling="backbone")
    return dataclasses.replace(tiny("plainvit", steps=STEPS, optimizer__lr=0.01), model=model)


RELEASED: dict[str, Callable[[], Experiment]] = {
    "adatape": lambda: tiny("adatape", steps=STEPS, optimizer__lr=0.01),
    "wrapped": retrofitted,
    "windows": lambda: haystack(steps=STEPS, lr=0.01),
}


@pytest.mark.usefixtures("few_canvases")
@pytest.mark.parametrize(
    ("kind", "budget"), [("adatape", None), ("adatape", Budget(1, 0.25)), ("wrapped", None), ("windows", Budget(2))]
)
def test_the_cards_code_gives_what_eval_gave(
    kind: str,
    budget: Budget | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    trained(RELEASED[kind](), run)
    write(run / "config.json", to_dict(with_budget(load_config(run / "config.json"), budget)))
    main(["eval", str(run), "--device", "cpu", "--json"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    monkeypatch.chdir(tmp_path)
    experiment, model = load_run(run)
    test = open_images(experiment.data, "test")  # type: ignore[arg-type]
    found = released(run, Path("released"), test.read(5))
    state, saved = found["model"].state_dict(), weights_of(run)
    assert all(torch.equal(state[name], value) for name, value in saved.items() if not name.startswith("rescale."))
    logits = by_the_card(found, [test.read(i) for i in range(len(test))])
    torch.testing.assert_close(logits, logits_of(model, experiment), rtol=1e-5, atol=1e-5)
    assert float((logits.argmax(1) == torch.from_numpy(test.labels)).double().mean()) == said["accuracy"]
    assert found["answer"] == int(logits[5].argmax())
    assert found["name"] == test.names[found["answer"]]


@pytest.mark.parametrize(("source", "side"), [("arrays", 48), ("folder", 48), ("folder", 24)])
def test_the_cards_transform_shows_the_centre_that_was_scored(
    source: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger images are resized as for evaluation: 32 × 256 / 224 is 37, not 36. Small ones are shown whole."""
    smooth = np.linspace(0, 255, side, dtype=np.uint8)[None, :, None, None] * np.ones((8, side, side, 3), np.uint8)
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", smooth)
        np.save(tmp_path / f"{split}_labels.npy", np.arange(8) % 2)
        for n, pixels in enumerate(smooth):
            path = tmp_path / split / str(n % 2) / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    data = {"data__source": source, "data__path": str(tmp_path), "data__size": 32, "data__augment__crop": "none"}
    trained(tiny("plainvit", steps=STEPS, optimizer__batch=4, **data), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    found = released(tmp_path / "run", Path("released"), Image.fromarray(smooth[0]))
    scored = next(iter(evaluate.test_batches(load_config(tmp_path / "run" / "config.json"), None, CPU))).x[0]
    shown = found["transform"](Image.fromarray(smooth[0]))
    torch.testing.assert_close(shown, scored, rtol=0, atol=2.5 / 127.5)
