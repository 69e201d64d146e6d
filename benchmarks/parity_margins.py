"""How a small AdaTape, trained on parity at N = 16, fares on longer sequences: accuracy, and mean logit margins.

OMP_NUM_THREADS=1 python benchmarks/parity_margins.py
"""

from __future__ import annotations

import warnings

import torch

from adatape.data.parity import held_out_set
from adatape.recipes import parity_small
from adatape.train.loop import Trainer

warnings.simplefilter("ignore", UserWarning)  # reading further than trained is the point
for seed in range(3):
    trainer = Trainer(parity_small(seed=seed))
    for _ in trainer.train(400):
        pass
    model, reading = trainer.model.eval(), trainer.model.reader.reading
    for length in (16, 32, 64, 128, 256):
        model.set_budget(reading.steps * length // 16, reading.threshold * length / 16)
        data = held_out_set(length, 1000)
        with torch.no_grad():
            logits = model(data.symbols)
        margin, right = logits[:, 1] - logits[:, 0], (logits.argmax(-1) == data.label).float().mean()
        odd, even = (margin[data.label == label].mean() for label in (1, 0))
        print(f"seed {seed}  N {length:4d}  accuracy {right:.3f}  margin odd {odd:6.2f}  even {even:6.2f}", flush=True)
