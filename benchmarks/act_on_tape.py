"""Does a tape that ACT halts collapse to one token? Trains one on images and prints lengths and the first weight.

python benchmarks/act_on_tape.py FOLDER --seed 0        FOLDER holds train_images.npy and train_labels.npy, 32 px
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import timm
import torch

import adatape.models  # noqa: F401  registers the models
from adatape.train.loop import total_loss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("--reader", default="act-after-norm")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=1500)
chosen = parser.parse_args()

images = torch.from_numpy(np.load(chosen.folder / "train_images.npy")[:20_000]).permute(0, 3, 1, 2)
labels = torch.from_numpy(np.load(chosen.folder / "train_labels.npy")[:20_000]).long()
torch.manual_seed(chosen.seed)
model = timm.create_model(
    "adatape_tiny_patch16_224", reader=chosen.reader, img_size=32, patch_size=8, embed_dim=96, num_heads=3, depth=4,
    num_classes=int(labels.max()) + 1, bank_patch=4, steps=10, threshold=2.0, merge=5, query_width=32,
    tape_ffn="append+blocks",
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(chosen.steps + 1):
    batch = torch.randint(0, len(images), (64,))
    output = model(images[batch].float() / 127.5 - 1, output=True)
    loss = total_loss(output, labels[batch], ponder_weight=0.0)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 250 == 0:
        length, first = output.tape.length.float(), output.tape.weight.sum(-1)[:, 0].mean().item()
        print(f"step {step:5d}  length {length.mean():.2f} ± {length.std():.2f}  first {first:.3f}  {loss.item():.2f}")
