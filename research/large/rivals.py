"""Rivals on Megapixel MNIST: the canvases, questions and losses of megapixel.py, other ways to look at a canvas.

python research/large/rivals.py --mnist mnist.npz --out runs/rivals --system ips

plain-view    a ViT on the canvas shrunk to 224²
plain-patch   a ViT on the whole canvas in patches of 50 pixels
algorithm2    the ViT on the shrunk canvas, with a tape read by Algorithm 2 as published from all patches of 50 pixels
ips           patches encoded without gradient, the 100 with the highest attention encoded again and pooled, as IPS does
all           all 900 patches encoded and pooled

Patches that show nothing are alike, so that inference and IPS's scan encode few of them; costs count all patches.
`ips` is also scored with all patches pooled.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import canvas
import numpy as np
import torch
import torch.nn.functional as F
from megapixel import KEPT, TASKS, WEIGHTS
from timm.layers import Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from windows import Convolutions, waves

from adatape.atr import read_tape

SIDE, PATCH = 1500, 50
GRID = SIDE // PATCH
SHAPES = 512  # patches that are encoded together are a multiple of this
Answers = tuple[Tensor, Tensor]  # (b, 4, 10), and a loss of its own


def patches_of(images: Tensor) -> Tensor:
    """(b, side, side) uint8 -> (b, patches, 1, 50, 50) in [0, 1]"""
    cut = images.unflatten(1, (GRID, PATCH)).unflatten(3, (GRID, PATCH)).transpose(2, 3)
    return cut.flatten(1, 2)[:, :, None].float() / 255


def patch_centres(device: torch.device) -> Tensor:
    """(patches, 2) in [0, 1]"""
    middle = (torch.arange(GRID, device=device) + 0.5) / GRID
    return torch.stack(torch.meshgrid(middle, middle, indexing="ij"), -1).view(-1, 2)


def shrunk(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images[:, None].float() / 255, (side, side), mode="area")


def vit_macs(tokens: int, width: int, depth: int, pixels: int) -> int:
    return tokens * pixels * width + depth * (12 * tokens * width**2 + 2 * tokens**2 * width)


class PlainViT(nn.Module):
    """Sees the whole canvas: shrunk to `side`, or as it is."""

    def __init__(self, side: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.side, self.shape = side, (patch, width, depth)
        self.vit = VisionTransformer(side, patch, 1, 40, "avg", width, depth, width // 64, class_token=False)

    def forward(self, images: Tensor) -> Answers:
        x = images[:, None].float() / 255 if self.side == SIDE else shrunk(images, self.side)
        return self.vit(x).view(-1, 4, 10).float(), x.new_zeros(())

    def macs(self) -> int:
        patch, width, depth = self.shape
        return vit_macs((self.side // patch) ** 2, width, depth, patch * patch)


class Algorithm2(nn.Module):
    """AdaTape as published: a linear token for every patch of the canvas, read by Algorithm 2 after the first block."""

    def __init__(self, steps: int = 10, width: int = 192, depth: int = 12) -> None:
        super().__init__()
        self.steps = steps
        self.vit = VisionTransformer(224, 16, 1, 40, "avg", width, depth, width // 64, class_token=False)
        self.embed, self.place = nn.Linear(PATCH * PATCH, width), nn.Linear(32, width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width, 4 * width)

    def forward(self, images: Tensor) -> Answers:
        vit = self.vit
        x = vit.blocks[0](vit.patch_embed(shrunk(images, 224)) + vit.pos_embed)
        bank = self.embed(patches_of(images).flatten(2)) + self.place(waves(patch_centres(images.device)[None]))
        tape = read_tape(self.norm(x.mean(1)), self.norm(bank), self.steps, 2.0, query_width=64, check=False)
        tokens = tape.tokens + self.mlp(tape.tokens)
        x = torch.cat([x, tokens * tape.mask[..., None]], 1)
        for block in vit.blocks[1:]:
            x = block(x)
        return vit.forward_head(vit.norm(x)).view(-1, 4, 10).float(), 0.01 * tape.ponder.mean()

    def macs(self) -> int:
        width, depth = self.vit.embed_dim, len(self.vit.blocks)
        bank = GRID**2 * (PATCH**2 + 32) * width + GRID**2 * 64 * self.steps
        return bank + vit_macs((224 // 16) ** 2 + self.steps, width, depth, 256)


class Pooled(nn.Module):
    """Patches pooled by the attention of four queries; only the `kept` with the highest attention have a gradient."""

    def __init__(self, kept: int, width: int = 128, heads: int = 8) -> None:
        super().__init__()
        self.kept, self.encoder = kept, Convolutions(width)
        self.place = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width))
        self.ask = nn.Parameter(torch.randn(4, width) * 0.02)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(width), nn.LayerNorm(width), Mlp(width, 4 * width)
        self.heads = nn.ModuleList(nn.Linear(width, 10) for _ in range(4))

    def tokens(self, patches: Tensor, places: Tensor) -> Tensor:
        encode = self.encoder if self.training else self.encode_shown
        return encode(patches.flatten(0, 1)).unflatten(0, patches.shape[:2]) + self.place(waves(places))

    def encode_shown(self, patches: Tensor) -> Tensor:
        """What the encoder makes of patches in inference, of which those that are empty are alike."""
        shown = patches.flatten(1).any(1).nonzero()[:, 0]
        empty = SHAPES - len(shown) % SHAPES  # at least one; of every other count cuDNN would choose its kernels anew
        found = self.encoder(torch.cat([patches.new_zeros(empty, *patches.shape[1:]), patches[shown]]))
        row = torch.zeros(len(patches), dtype=torch.int64, device=patches.device)
        row[shown] = torch.arange(empty, len(found), device=patches.device)
        return found[row]

    def pooled(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Answers (b, 4, width), and the attention (b, n) that each token has from all queries."""
        ask = self.ask.expand(len(tokens), -1, -1)
        found, weights = self.attention(ask, tokens, tokens)
        x = self.norm1(ask + found)
        return self.norm2(x + self.mlp(x)), weights.mean(1)

    def forward(self, images: Tensor) -> Answers:
        patches, places = patches_of(images), patch_centres(images.device).expand(len(images), -1, -1)
        if self.kept < patches.shape[1]:
            at = self.highest(patches, places)
            patches = patches.gather(1, at[..., None, None, None].expand(-1, -1, *patches.shape[2:]))
            places = places.gather(1, at[..., None].expand(-1, -1, 2))
        x, _ = self.pooled(self.tokens(patches, places))
        return torch.stack([head(x[:, i]) for i, head in enumerate(self.heads)], 1).float(), x.new_zeros(())

    @torch.no_grad()
    def highest(self, patches: Tensor, places: Tensor) -> Tensor:
        training = self.training
        self.eval()
        chosen = self.pooled(self.tokens(patches, places))[1].topk(self.kept, 1).indices
        self.train(training)
        return chosen

    def macs(self) -> int:
        d, n = self.ask.shape[1], GRID**2
        each = self.encoder.macs(PATCH) + 32 * d + d * d + 2 * d * d + 2 * 4 * d
        return n * each + 4 * (2 * d * d + 8 * d * d) + 40 * d


SYSTEMS: dict[str, Any] = {
    "plain-view": lambda: PlainViT(224, 16, 192, 12),
    "plain-patch": lambda: PlainViT(SIDE, PATCH, 128, 3),
    "algorithm2": Algorithm2,
    "ips": lambda: Pooled(100),
    "all": lambda: Pooled(GRID**2),
}


def loss_of(answers: Tensor, data: canvas.Canvases, at: Tensor) -> Tensor:
    loss = sum(WEIGHTS[task] * F.cross_entropy(answers[:, i], getattr(data, task)[at]) for i, task in enumerate(TASKS))
    return loss + WEIGHTS["all"] * F.binary_cross_entropy_with_logits(answers[:, 3], data.present[at])


@torch.no_grad()
def evaluate(model: nn.Module, data: canvas.Canvases) -> dict[str, float]:
    model.eval()
    right = dict.fromkeys((*TASKS, "all"), 0)
    for at in torch.arange(len(data.images), device=data.images.device).split(25):
        with torch.autocast(at.device.type, torch.bfloat16):
            answers = model(data.images[at])[0]
        for i, task in enumerate(TASKS):
            right[task] += int((answers[:, i].argmax(1) == getattr(data, task)[at]).sum())
        right["all"] += int(((answers[:, 3] > 0) == (data.present[at] > 0)).all(1).sum())
    return {task: round(100 * count / len(data.images), 2) for task, count in right.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--system", choices=tuple(SYSTEMS), required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--looks", type=int, default=4, help="evaluations on held-out canvases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final", action="store_true", help="score the test canvases at the end, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    z, device = np.load(args.mnist), torch.device(args.device)
    data = canvas.make(z["x"][:KEPT], z["y"][:KEPT], args.count, split=0, device=args.device)
    held = canvas.make(z["x"][KEPT:], z["y"][KEPT:], args.test, split=2, device=args.device)
    model = SYSTEMS[args.system]().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, fused=device.type == "cuda")
    began, so_far, looks = time.time(), torch.zeros((), device=device), max(1, args.steps // args.looks)

    def log(**row: Any) -> None:
        row = {"name": args.system, "seed": args.seed, "seconds": round(time.time() - began, 1), **row}
        print(json.dumps(row), flush=True)
        with (args.out / f"rivals-{args.system}-{args.seed}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    for step in range(args.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 200) * 0.5 * (1 + np.cos(np.pi * step / args.steps))
        at = torch.randint(0, args.count, (args.batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            answers, own = model(data.images[at])
        loss = loss_of(answers, data, at) + own
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        so_far += loss.detach()
        if (step + 1) % looks == 0:
            log(step=step + 1, loss=round(float(so_far) / looks, 4), **evaluate(model, held))
            so_far.zero_()
    if args.final:
        del data
        test = canvas.make(z["xt"], z["yt"], args.test, split=1, device=args.device)
        row = {"final": True, "test": True, "step": args.steps, "batch": args.batch, "lr": args.lr}
        log(**row, gmac=round(model.macs() / 1e9, 3), **evaluate(model, test))
        if args.system == "ips":
            model.kept = GRID**2
            log(**row | {"name": "ips, all patches pooled"}, gmac=round(model.macs() / 1e9, 3), **evaluate(model, test))


if __name__ == "__main__":
    main()
