"""Parity: the paper's recipe, the Transformer baseline, and control experiments."""

from __future__ import annotations

from typing import Literal

from adatape.config import Choice, Experiment, Optimizer, ReaderConfig, ReaderName, SequenceModel, TapeFFN
from adatape.data_config import Parity
from adatape.limits import CountOrZero, NotNegative, Positive, QuantityOrZero, Seed, Width

System = Literal["adatape", "transformer", "ut", "singles", "random", "order"]
UT_STEPS, ACT_WEIGHT = 12, 0.01


def reading_for(system: System, length: int, query_width: int = 64, norm_scale: float = 0.3) -> ReaderConfig | None:
    """T = 2τ = N/2 and K = 2 read the sequence in pairs; the control `singles` reads one symbol per tape token."""
    if system in ("transformer", "ut"):
        return None
    if length < 4 or length % 2:
        raise ValueError(f"length is {length}; it must be even and at least 4, since symbols are read in pairs")
    if system == "singles":
        return ReaderConfig(length, float(length), merge=1, query_width=query_width, norm_scale=norm_scale)
    choose: Choice = {"adatape": "highest", "random": "random", "order": "order"}[system]  # type: ignore[assignment]
    return ReaderConfig(length // 2, length / 4, 2, query_width, norm_scale=norm_scale, choose=choose)


def weight_for(system: System) -> float:
    """The ponder weight: ACT needs one; ATR reads the whole sequence in any case."""
    return ACT_WEIGHT if system == "ut" else 0.0


def parity(
    length: Width = 32,
    system: System = "adatape",
    lr: NotNegative = 3e-5,
    steps: CountOrZero = 10_000,
    seed: Seed = 0,
    layer: QuantityOrZero = 1,
    tape_ffn: TapeFFN = "append",
    norm_scale: Positive = 0.3,
    reader: ReaderName = "adaptive",
    ponder_weight: NotNegative | None = None,
) -> Experiment:
    """Transformer-Tiny on sequences of any length, as in the paper: batch 128, 1,000 warm-up steps.

    adatape train parity --length 64 --seed 1 --device cuda
    One H200, torch 2.11, a process alone: 4.5 ms a step at N = 16. 100.00 % at N = 16, 32, 64, 128, seeds 0 to 2, after
    750 to 3,250 steps; controls and the plain Transformer: docs/results.md.
    """
    reading = reading_for(system, length, norm_scale=norm_scale)
    universal = UT_STEPS if system == "ut" else None
    return Experiment(
        recipe="parity",
        data=Parity(length),
        model=SequenceModel(reading=reading, reader=reader, universal=universal, layer=layer, tape_ffn=tape_ffn),
        optimizer=Optimizer(lr=lr, steps=steps),
        ponder_weight=weight_for(system) if ponder_weight is None else ponder_weight,
        seed=seed,
        stop_at=1.0,
    )


def parity_small(
    length: Width = 16,
    system: System = "adatape",
    lr: NotNegative = 3e-4,
    steps: CountOrZero = 400,
    seed: Seed = 0,
    tape_ffn: TapeFFN = "append",
    reader: ReaderName = "adaptive",
    ponder_weight: NotNegative | None = None,
) -> Experiment:
    """The demo: three layers of width 96, less than a minute on two CPU cores.

    adatape train parity-small --system adatape
    Two CPU cores, torch 2.15: 17 s. 100 % at N = 16 for 8 of 8 seeds; Transformer and UT at chance: docs/results.md.
    """
    return Experiment(
        recipe="parity-small",
        data=Parity(length, held_out=1000),
        model=SequenceModel(
            width=96,
            depth=3,
            reading=reading_for(system, length, query_width=32),
            reader=reader,
            universal=UT_STEPS if system == "ut" else None,
            tape_ffn=tape_ffn,
        ),
        optimizer=Optimizer(lr=lr, steps=steps, warmup=50),
        ponder_weight=weight_for(system) if ponder_weight is None else ponder_weight,
        seed=seed,
        evaluate_every=20,
    )
