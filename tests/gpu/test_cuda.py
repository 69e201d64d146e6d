"""The same properties on a CUDA device; `docs/results.md` names the last machine that passed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from fleet import Fleet
from small_runs import FAMILIES, tiny

import adatape.models
from adatape.atr import as_float64, read_tape, scores
from adatape.config import Engine
from adatape.counter_rng import keys_of, normal, uniform
from adatape.data.augment import augment_images
from adatape.data_config import Augment
from adatape.recipes import parity_small
from adatape.recipes.digits import digits
from adatape.train.evaluate import score_run
from adatape.train.folder import load_run
from adatape.train.parallel import full_state_dict
from adatape.train.run import plain, run
from adatape.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(own: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    bank = torch.randn(*((16,) if own else ()), 300, 128, generator=draw)
    return torch.randn(16, 128, generator=draw).to(dtype), bank.to(dtype)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cuda_reads_what_the_cpu_reads(own: bool, dtype: torch.dtype) -> None:
    query, bank = inputs(own, dtype)
    here, there = read_tape(query, bank), read_tape(query.cuda(), bank.cuda())
    assert torch.equal(here.index, there.index.cpu())
    assert torch.equal(here.length, there.length.cpu())
    torch.testing.assert_close(there.tokens.cpu(), here.tokens)
    torch.testing.assert_close(there.ponder.cpu(), here.ponder, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_a_row_reads_the_same_alone_as_in_a_batch(own: bool) -> None:
    query, bank = (x.cuda() for x in inputs(own))
    together = read_tape(query, bank)
    for row in range(16):
        one = slice(row, row + 1)
        alone = read_tape(query[one], bank[one] if own else bank)
        assert torch.equal(alone.index, together.index[one])
        torch.testing.assert_close(alone.tokens, together.tokens[one])


def test_equal_keys_score_equally_wherever_they_stand() -> None:
    which = torch.randint(0, 3, (1003,), device="cuda")
    for shape in ((3, 64), (5, 3, 64)):
        d = scores(torch.randn(5, 64, device="cuda"), as_float64(torch.randn(shape, device="cuda")[..., which, :]))
        for symbol in range(3):
            same = d[:, which == symbol]
            assert (same == same[:, :1]).all()


def test_autocast_changes_nothing_in_the_reader() -> None:
    query, bank = (x.cuda() for x in inputs(True))
    with torch.autocast("cuda", torch.bfloat16):
        tape = read_tape(query, bank)
    assert torch.equal(tape.index, read_tape(query, bank).index)


def test_compiles_in_full() -> None:
    query, bank = (x.cuda() for x in inputs(False))
    tape, expected = (f(query, bank, 3, 1.5) for f in (torch.compile(read_tape, fullgraph=True), read_tape))
    assert torch.equal(tape.index, expected.index)
    torch.testing.assert_close(tape.tokens, expected.tokens)


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("tape_ffn", ["append", "append+blocks"])
def test_a_model_trains_in_bfloat16_autocast(bank: str, tape_ffn: str) -> None:
    model = timm.create_model("adatape_tiny_patch32_224", bank=bank, tape_ffn=tape_ffn, depth=3, bank_size=500).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        output = model(torch.randn(4, 3, 224, 224, device="cuda"), output=True)
        loss = output.logits.float().square().mean() + 0.01 * output.ponder.mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_budget_zero_is_the_wrapped_vit_bit_for_bit() -> None:
    model = adatape.models.wrap(timm.create_model("vit_tiny_patch16_224", depth=3)).cuda().eval()
    model.set_budget(steps=0)
    x = torch.randn(2, 3, 224, 224, device="cuda")
    assert torch.equal(model(x), model.vit(x))


def test_a_captured_step_is_the_eager_step() -> None:
    experiment = parity_small(length=8)
    small = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, depth=2))
    captured, eager = Trainer(small, "cuda"), Trainer(small, "cuda")
    eager.update = eager.take_step
    ours, theirs = (torch.stack([stats.loss for stats in trainer.train(12)]) for trainer in (captured, eager))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_noise_that_belongs_to_keys_compiles_and_is_the_cpus() -> None:
    keys = keys_of(3, torch.arange(64))
    ours = torch.compile(lambda k: (uniform(k, 50), normal(k, 50)), fullgraph=True)(keys.cuda())
    assert torch.equal(ours[0].cpu(), uniform(keys, 50))
    torch.testing.assert_close(ours[1].cpu(), normal(keys, 50), rtol=1e-4, atol=1e-5)


def test_a_batch_is_varied_on_the_gpu_as_on_the_cpu() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    augment = Augment(crop="inception", flip=True, randaug=2, magnitude=10.0, erase=0.25)
    keys = keys_of(3, torch.arange(64))
    theirs = augment_images(images, keys, augment, 32)
    difference = (augment_images(images.cuda(), keys.cuda(), augment, 32).cpu() - theirs).abs()
    assert (difference > 0.02).float().mean() < 0.01


def test_a_learnable_bank_trains_compiled_and_captured(tmp_path: Path) -> None:
    for split in ("train", "test"):
        np.save(
            tmp_path / f"{split}_images.npy", np.random.default_rng(0).integers(0, 256, (200, 8, 8), dtype=np.uint8)
        )
        np.save(tmp_path / f"{split}_labels.npy", np.arange(200) % 10)
    experiment = digits("adatape-learn", epochs=1)
    data = dataclasses.replace(experiment.data, source="arrays", path=str(tmp_path))
    engine = Engine(precision="bf16", compile=True)
    trainer = Trainer(dataclasses.replace(experiment, data=data, engine=engine), "cuda")
    losses = torch.stack([stats.loss for stats in trainer.train(12)])
    assert losses.isfinite().all()
    assert trainer.stepper.skipped == 0


def test_side_by_side_each_run_learns_what_it_learns_alone() -> None:
    experiment = dataclasses.replace(parity_small(length=8), stop_at=None)
    experiment = dataclasses.replace(experiment, optimizer=dataclasses.replace(experiment.optimizer, steps=12))
    shapes = [dataclasses.replace(experiment.model, depth=depth) for depth in (2, 3, 4)]
    runs = [dataclasses.replace(experiment, model=shape) for shape in shapes]
    together = torch.stack([torch.stack([each.loss for each in stats]) for stats in Fleet(runs, "cuda").train()], 1)
    for losses, alone in zip(together, runs, strict=True):
        theirs = torch.stack([stats.loss for stats in Trainer(alone, "cuda").train(12)])
        torch.testing.assert_close(losses, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ema", [0.9, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_was_scored(family: str, ema: float | None, precision: str, tmp_path: Path) -> None:
    """To the bit, although training uses TF32 or bfloat16, CUDA graphs and asynchronous saves."""
    engine = {"engine__deterministic": False, "engine__precision": precision}
    experiment = tiny(family, steps=8, optimizer__ema=ema, **engine)
    result = run(experiment, tmp_path, "cuda", lambda _: None)
    torch.cuda.synchronize()
    for _ in range(2):
        again = plain(score_run(*load_run(tmp_path), torch.device("cuda")))
        assert again == {name: result[name] for name in again}
    trainer = Trainer(experiment, "cuda")
    trainer.load(tmp_path / "checkpoints" / "step-00000008")
    with trainer.averaged():
        wanted = full_state_dict(trainer.model)
    assert all(torch.equal(value, wanted[name]) for name, value in load_run(tmp_path)[1].state_dict().items())
