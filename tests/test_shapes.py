"""Runs models with jaxtyping and beartype checking the shapes in signatures."""

from __future__ import annotations

import subprocess
import sys

HOOK = """
from jaxtyping import install_import_hook, TypeCheckError
with install_import_hook("adatape", "beartype.beartype"):
    import torch, timm, adatape.models
    from adatape.atr import read_tape, scores
    from adatape.packing import key_mask
    from adatape.recipes import parity
    from adatape.models.sequence import build_sequence_model
    from adatape.data.parity import held_out_set
"""
EVERYTHING = """
for bank in ("input", "learn"):
    model = timm.create_model("adatape_tiny_patch32_224", depth=2, bank=bank, bank_size=200, tape_ffn="append+blocks")
    for training in (True, False):
        model.train(training)(torch.randn(2, 3, 224, 224), output=True)
    model.forward_intermediates(torch.randn(2, 3, 224, 224))
for system in ("adatape", "transformer", "singles", "random", "order"):
    build_sequence_model(parity(8, system).model, 8)(held_out_set(8, 3).symbols)
read_tape(torch.randn(3, 64), torch.randn(3, 60, 64), taken=torch.zeros(3, 60, dtype=torch.bool))
"""
WRONG = """
for call in (lambda: scores(torch.randn(3, 8), torch.randn(20, 9)), lambda: key_mask(torch.ones(3))):
    try:
        call()
    except TypeCheckError:
        continue
    raise SystemExit("a wrong shape passed")
"""


def test_every_room_keeps_the_shapes_it_promises() -> None:
    subprocess.run([sys.executable, "-c", HOOK + EVERYTHING], check=True)


def test_a_wrong_shape_is_caught() -> None:
    subprocess.run([sys.executable, "-c", HOOK + WRONG], check=True)
