"""Runs models with jaxtyping and beartype checking the shapes in signatures."""

from __future__ import annotations

import subprocess
import sys

HOOK = """
from jaxtyping import install_import_hook, TypeCheckError
with install_import_hook("adatape", "beartype.beartype"):
    import tempfile, numpy as np, torch, timm, adatape.models, adatape.data.large
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
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5)
model = adatape.wrap(vit, bank="windows", image=(96, 128), window=16, cell=8, steps=3, view=32)
opened = adatape.open_image(np.zeros((100, 130, 3), np.uint8), tile=40)
for training in (True, False):
    for images in (torch.randn(2, 3, 96, 128), [torch.randn(3, 64, 200), opened]):
        model.train(training)(images, output=True)
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5)
with tempfile.TemporaryDirectory() as folder:
    np.save(f"{folder}/values.npy", np.random.default_rng(0).integers(-1, 2, (600, 192)).astype("float16"))
    for kind in ("exact", "ivf"):
        adatape.build_index(f"{folder}/values.npy", f"{folder}/{kind}", kind=kind, cells=4, probes=2)
        for bank in (torch.randn(60, 192), adatape.RetrievalBank(f"{folder}/{kind}", f"{folder}/{kind}")):
            adatape.wrap(vit, bank=bank)(torch.randn(2, 3, 32, 32), output=True)
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
