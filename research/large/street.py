"""Street scenes with a tape: which categories of traffic signs occur, from a cheap scan and a few windows.

    python research/large/street.py --data DIR --weights vit_tiny.safetensors --out runs/street --seeds 0

Stages, from image labels only: (1) features of all windows by the pretrained ViT, and several heads from different
initialisations, of which the one with the lowest training loss is kept; (2) fine-tuning the encoder on the windows that
it selects; (3) distilling the selection into a cheap scan.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scenes as street
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import Mlp
from torch import Tensor, nn
from windows import Scan, choose, cut, noisy_or, presence_loss, value, waves

from adatape.atr import read_tape

WINDOW, STRIDE = 64, 32
ROWS, COLUMNS = 24, 42
SCALE = 2  # the scan sees scenes at half resolution


def vit_for(weights: Path, **options: Any) -> Any:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, **options)
    state = {k: v.float() for k, v in load_file(weights).items() if not k.startswith("head.")}
    vit.load_state_dict(state)
    return vit


def vit_macs(tokens: int, width: int = 192, depth: int = 12, patch: int = 16) -> int:
    """Multiply-adds of ViT-Ti on so many patches, with a class token."""
    n = tokens + 1
    return tokens * 3 * patch * patch * width + depth * (12 * n * width * width + 2 * n * n * width)


class WindowHead(nn.Module):
    """A gate and the evidence of each category, from a window's feature."""

    def __init__(self, width: int = 384, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.hidden = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, 1 + len(street.CATEGORIES))
        nn.init.constant_(self.out.bias, 0.0)
        self.out.bias.data[0] = -3.0  # so that many closed windows add little evidence

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        out = self.out(F.gelu(self.hidden(self.norm(features)))).float()
        return out[..., 0], out[..., 1:]


class Model(nn.Module):
    """Window encoder, head, and the scan that selects windows."""

    def __init__(self, weights: Path, resized: int) -> None:
        super().__init__()
        self.vit, self.head, self.resized = vit_for(weights), WindowHead(), resized
        self.scan = Scan(3, fold=2)

    def features(self, windows: Tensor) -> Tensor:
        """(n, 3, s, s) normalised -> (n, 384): class token and mean of the patches"""
        if windows.shape[-1] != self.resized:
            windows = F.interpolate(windows, size=(self.resized,) * 2, mode="bilinear", antialias=True)
        x = self.vit.forward_features(windows)
        return torch.cat([x[:, 0], x[:, 1:].mean(1)], 1)

    def scores(self, images: Tensor) -> Tensor:
        """(b, 800, 1360, 3) uint8 -> (b, 50, 85)"""
        return self.scan(shrunk(images))

    def macs(self, k: float) -> float:
        window = vit_macs((self.resized // 16) ** 2) + 384 * 64 + 64 * 5
        return k * window + (self.scan.macs(400, 680) if k < ROWS * COLUMNS else 0)


def shrunk(images: Tensor) -> Tensor:
    """Half resolution, normalised, (b, 3, h, w)"""
    return F.avg_pool2d(normalised(images), SCALE)


def normalised(images: Tensor) -> Tensor:
    return images.movedim(-1, -3).float() / 127.5 - 1


def grid_centres(device: torch.device) -> Tensor:
    rows = torch.arange(ROWS, device=device) * STRIDE + WINDOW // 2
    columns = torch.arange(COLUMNS, device=device) * STRIDE + WINDOW // 2
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).view(-1, 2)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


@torch.no_grad()
def all_features(model: Model, images: Tensor, flip: bool = False) -> Tensor:
    """(n, windows, 384) of the grid of windows, in half precision"""
    model.eval()
    centres = grid_centres(images.device)[None]
    found = []
    for image in images:
        image = image.flip(1) if flip else image
        seen = normalised(cut(image[None], centres, WINDOW)[0])
        with autocast(images.device):
            found.append(model.features(seen).half())
    return torch.stack(found)


def colours(x: Tensor, strength: float) -> Tensor:
    """Brightness and contrast of (n, 3, h, w) in [-1, 1], each image its own."""
    n = len(x)
    gain = 1 + (torch.rand(n, 1, 1, 1, device=x.device) * 2 - 1) * strength
    tint = (torch.rand(n, 3, 1, 1, device=x.device) * 2 - 1) * strength * 0.3
    shift = (torch.rand(n, 1, 1, 1, device=x.device) * 2 - 1) * strength
    return (x * gain + tint + shift).clamp(-1, 1)


def schedule(optimizer: torch.optim.Optimizer, peaks: list[float], step: int, steps: int, warm: int = 50) -> None:
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * min(1, (step + 1) / warm) * 0.5 * (1 + np.cos(np.pi * step / steps))


# Stage 1: heads on frozen features


def many_heads(
    features: Tensor, labels: Tensor, starts: int, steps: int, keep: int, seed: int
) -> tuple[WindowHead, dict]:
    """Trains `starts` heads at once on (n, windows, d) and returns the one with the lowest training loss."""
    device, (n, windows, d) = features.device, features.shape
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    heads = [WindowHead(d).to(device) for _ in range(starts)]
    w1 = torch.stack([h.hidden.weight.T for h in heads]).detach().requires_grad_()
    b1 = torch.stack([h.hidden.bias for h in heads]).detach().requires_grad_()
    w2 = torch.stack([h.out.weight.T for h in heads]).detach().requires_grad_()
    b2 = torch.stack([h.out.bias for h in heads]).detach().requires_grad_()
    optimizer = torch.optim.AdamW(
        [{"params": [w1, w2], "weight_decay": 0.05}, {"params": [b1, b2], "weight_decay": 0.0}]
    )
    mean = torch.zeros(starts, device=device)
    for step in range(steps):
        schedule(optimizer, [2e-3, 2e-3], step, steps)
        at = torch.randint(0, n, (48,), device=device, generator=generator)
        x = F.dropout(F.layer_norm(features[at].float(), (d,)), 0.1).to(torch.bfloat16).view(1, -1, d)
        with autocast(device):
            hidden = F.gelu(torch.baddbmm(b1[:, None], x.expand(starts, -1, -1), w1))
            out = torch.baddbmm(b2[:, None], hidden, w2).float().view(starts, len(at), windows, -1)
        top = out[..., 0].topk(keep, -1).indices
        out = out.gather(2, top[..., None].expand(-1, -1, -1, out.shape[-1])).flatten(0, 1)
        none = noisy_or(out[..., 1:], out[..., 0]).view(starts, len(at), -1)
        some = torch.log(-torch.expm1(none.clamp(max=-1e-6)))
        y = labels[at][None]
        each = -(y * some + (1 - y) * none).mean((1, 2))
        optimizer.zero_grad(set_to_none=True)
        each.sum().backward()
        optimizer.step()
        if step >= steps - 200:
            mean += each.detach() / 200
    best = int(mean.argmin())
    head = heads[best]
    with torch.no_grad():
        head.hidden.weight.copy_(w1[best].T), head.hidden.bias.copy_(b1[best])
        head.out.weight.copy_(w2[best].T), head.out.bias.copy_(b2[best])
    return head, {
        "losses": sorted(round(float(v), 4) for v in mean),
        "stuck": float((mean > 2 * mean.min()).float().mean()),
    }


@torch.no_grad()
def read_all(head: WindowHead, features: Tensor, k: int) -> Tensor:
    """Log-probability of absence (n, 4) from the k windows with the highest scores of the head."""
    parts = zip(*(head(part.float()) for part in features.split(20)), strict=True)
    gate, evidence = (torch.cat(part) for part in parts)
    top = gate.topk(min(k, gate.shape[1]), 1).indices
    return noisy_or(evidence.gather(1, top[..., None].expand(-1, -1, evidence.shape[-1])), gate.gather(1, top))


# Stage 2: the encoder on chosen windows


def fine_tune(
    model: Model, data: street.Scenes, centres_for: Callable[[Tensor], Tensor], *, steps: int, batch: int, lr: float,
    refresh: Callable[[int], None] | None = None,
) -> float:  # fmt: skip
    """Encoder and head on windows at the centres that `centres_for` gives for scene indices."""
    device = data.images.device
    groups = [{"params": model.vit.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05, fused=device.type == "cuda")
    last = 0.0
    for step in range(steps):
        if refresh is not None:
            refresh(step)
        model.train()
        schedule(optimizer, [lr, 10 * lr], step, steps)
        at = torch.randint(0, len(data.images), (batch,), device=device)
        centres = centres_for(at)
        b, k = centres.shape[:2]
        centres = centres + torch.randint_like(centres, -12, 13)
        size = int(torch.randint(52, 81, ()))
        seen = normalised(cut(data.images[at], centres, size)).flatten(0, 1)
        if size != WINDOW:
            seen = F.interpolate(seen, size=(WINDOW, WINDOW), mode="bilinear", antialias=True)
        seen = colours(seen, 0.3)
        mirrored = torch.rand(b * k, 1, 1, 1, device=device) < 0.5
        seen = torch.where(mirrored, seen.flip(-1), seen)
        with autocast(device):
            gate, evidence = model.head(F.dropout(model.features(seen).view(b, k, -1), 0.1))
        loss = presence_loss(noisy_or(evidence, gate), data.labels[at])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            last = 0.8 * last + 0.2 * loss.item() if last else loss.item()
    return last


def best_of(scores: Tensor, centres: Tensor, k: int, others: int) -> Callable[[Tensor], Tensor]:
    """Centres of the k best windows of each scene by (n, windows) scores, and of `others` random ones."""
    top = scores.topk(k, 1).indices

    def chosen(at: Tensor) -> Tensor:
        random = torch.randint(0, scores.shape[1], (len(at), others), device=scores.device)
        return centres[torch.cat([top[at], random], 1)]

    return chosen


def told_centres(data: street.Scenes, k: int) -> Callable[[Tensor], Tensor]:
    """Centres of the signs from their boxes, then random ones: an upper bound that uses the labels."""
    device = data.images.device

    def chosen(at: Tensor) -> Tensor:
        centres = torch.stack([torch.randint(32, 768, (len(at), k), device=device),
                               torch.randint(32, 1328, (len(at), k), device=device)], -1)  # fmt: skip
        for row, i in enumerate(at.tolist()):
            boxes = data.boxes[i][:k]
            if len(boxes):
                middle = np.stack([(boxes[:, 1] + boxes[:, 3]) / 2, (boxes[:, 0] + boxes[:, 2]) / 2], 1)
                centres[row, : len(boxes)] = torch.from_numpy(middle).to(device).long()
        return centres

    return chosen


# Stage 3: window values, distilled into the scan


class ScanPlan(NamedTuple):
    """A scan and how it is trained, written as widths:steps:options, for instance 16,32,48,48:1500:zoom+classes."""

    widths: tuple[int, ...]
    steps: int
    zoom: bool  # scenes are resized and shifted at random
    classes: bool  # what each category's evidence is at every cell is learnt beside the score

    @classmethod
    def parse(cls, text: str) -> ScanPlan:
        widths, steps, options = text.split(":")
        return cls(tuple(map(int, widths.split(","))), int(steps), "zoom" in options, "classes" in options)

    def build(self) -> Scan:
        return Scan(3, fold=2, widths=self.widths, classes=len(street.CATEGORIES) if self.classes else 0)


def placed(batch: int, zoom: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor (b, 1, 1) and shift (b, 1, 1, 2) of x and y, in [-1, 1] coordinates, by which scenes are resampled."""
    if not zoom:
        return torch.ones(batch, 1, 1, device=device), torch.zeros(batch, 1, 1, 2, device=device)
    factor = torch.exp((torch.rand(batch, 1, 1, device=device) - 0.5) * 0.4)
    return factor, (torch.rand(batch, 1, 1, 2, device=device) - 0.5) * 0.1


def distil(model: Model, images: Tensor, shown: Tensor, plan: ScanPlan, *, batch: int, lr: float) -> float:
    """Teaches the scan what windows around its cells show, (n, windows, 1 + classes), as probabilities."""
    device = images.device
    optimizer = torch.optim.AdamW(model.scan.parameters(), weight_decay=0.05, fused=device.type == "cuda")
    target = shown.view(-1, ROWS, COLUMNS, shown.shape[-1]).movedim(-1, 1).float()
    height, width = images.shape[1:3]
    rows = model.scan.centre(torch.arange(50, device=device)) * SCALE / height * 2 - 1
    columns = model.scan.centre(torch.arange(85, device=device)) * SCALE / width * 2 - 1
    cells = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)[None]  # (1, 50, 85, 2): x, y
    first = torch.tensor([WINDOW / width - 1, WINDOW / height - 1], device=device)  # of the windows' centres
    span = torch.tensor([(COLUMNS - 1) * STRIDE * 2 / width, (ROWS - 1) * STRIDE * 2 / height], device=device)
    last = 0.0
    for step in range(plan.steps):
        model.scan.train()
        schedule(optimizer, [lr], step, plan.steps, 100)
        at = torch.randint(0, len(images), (batch,), device=device)
        with torch.no_grad():
            seen = colours(shrunk(images[at]), 0.3)
            factor, shift = placed(batch, plan.zoom, device)
            if plan.zoom:
                turn = torch.cat([torch.eye(2, device=device) * factor, shift.view(batch, 2, 1)], 2)
                grid = F.affine_grid(turn, list(seen.shape), align_corners=False)
                seen = F.grid_sample(seen, grid, align_corners=False, padding_mode="border")
            at_cells = ((cells * factor[..., None] + shift) - first) / span * 2 - 1
            wanted = F.grid_sample(target[at], at_cells, align_corners=True, padding_mode="border")
            if torch.rand(()) < 0.5:  # the grid of cells is not symmetric: mirrored cells lie off by a few pixels
                seen, wanted = seen.flip(-1), wanted.flip(-1)
            wanted = wanted.movedim(1, -1)
        with autocast(device):
            if plan.classes:
                scores, guesses = model.scan.scores_and_guesses(seen)
                found = torch.cat([scores[..., None], guesses], -1)
            else:
                found, wanted = model.scan(seen)[..., None], wanted[..., :1]
        each = F.binary_cross_entropy_with_logits(found, wanted, reduction="none")
        loss = ((each * (0.02 + wanted)).sum((0, 1, 2)) / (0.02 + wanted).sum((0, 1, 2))).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.scan.parameters(), 1.0)
        optimizer.step()
        last = loss.item() if step == plan.steps - 1 else last
    return last


@torch.no_grad()
def scan_centres(model: Model, images: Tensor, k: int) -> tuple[Tensor, Tensor]:
    model.eval()
    centres, tops = [], []
    for part in images.split(30):
        with autocast(images.device):
            scores = model.scores(part)
        rows, columns, top = choose(scores, k)
        centres.append(torch.stack([model.scan.centre(rows), model.scan.centre(columns)], -1) * SCALE)
        tops.append(top)
    return torch.cat(centres), torch.cat(tops)


@torch.no_grad()
def read_at(model: Model, images: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Gates (n, k) and evidence (n, k, 4) of windows at centres (n, k, 2)"""
    model.eval()
    gates, evidence = [], []
    for part, at in zip(images.split(20), centres.split(20), strict=True):
        b, k = at.shape[:2]
        with autocast(images.device):
            gate, each = model.head(model.features(normalised(cut(part, at, WINDOW)).flatten(0, 1)).view(b, k, -1))
        gates.append(gate)
        evidence.append(each)
    return torch.cat(gates), torch.cat(evidence)


def hits(centres: Tensor, data: street.Scenes) -> dict[str, float]:
    """Over scenes with a sign: fraction whose first window, and any window, contains a sign's centre."""
    first = some = scenes_with = 0
    for at, boxes in zip(centres.cpu().numpy(), data.boxes, strict=True):
        if not len(boxes):
            continue
        middle = np.stack([(boxes[:, 1] + boxes[:, 3]) / 2, (boxes[:, 0] + boxes[:, 2]) / 2], 1)
        on = (np.abs(at[:, None] - middle[None]).max(-1) < WINDOW / 2).any(1)
        first, some, scenes_with = first + on[0], some + on.any(), scenes_with + 1
    return {"first_on_sign": round(first / scenes_with, 4), "any_on_sign": round(some / scenes_with, 4)}


def score_row(none: Tensor, labels: Tensor) -> dict[str, Any]:
    each = street.average_precision(-none, labels)
    return {"map": round(float(np.mean(each)), 4), "ap": [round(v, 3) for v in each]}


class Kept:
    """Scores of every scene under a name, for the bootstrap over scenes; calling it also gives the row's figures."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels
        self.scores: dict[str, Any] = {"labels": labels.cpu().numpy().astype(np.uint8)}

    def __call__(self, name: str, reads: float, none: Tensor) -> dict[str, Any]:
        self.scores[f"{name} {reads}"] = (-none).float().cpu().numpy()
        return score_row(none, self.labels)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **self.scores)


# The plain ViT

# Patch grids of the scenes' shape, each with about as many patches as a square image of that side.
GRIDS = {224: (11, 18), 256: (12, 21), 320: (15, 26), 384: (18, 32), 512: (24, 43)}


class PlainViT(nn.Module):
    def __init__(self, weights: Path, pool: str) -> None:
        super().__init__()
        self.vit, self.pool, self.head = vit_for(weights), pool, nn.Linear(192, len(street.CATEGORIES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.vit.forward_features(x)
        return self.head(x[:, 0] if self.pool == "token" else x[:, 1:].mean(1)).float()


def fit(
    model: nn.Module, new: nn.Module, inputs: Callable[[Tensor], Tensor], labels: Tensor, lr: float, steps: int,
    batch: int = 16,
) -> float:  # fmt: skip
    """Trains on `inputs` of scene indices, what is new ten times as fast; the last loss."""
    device, added = labels.device, list(new.parameters())
    ids = set(map(id, added))
    groups = [{"params": [p for p in model.parameters() if id(p) not in ids]}, {"params": added}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05, fused=device.type == "cuda")
    loss = labels.new_zeros(())
    for step in range(steps):
        model.train()
        schedule(optimizer, [lr, 10 * lr], step, steps)
        at = torch.randint(0, len(labels), (batch,), device=device)
        x = inputs(at)
        with autocast(device):
            loss = F.binary_cross_entropy_with_logits(model(x), labels[at]) + getattr(model, "own_loss", 0.0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def plain(
    data: street.Scenes, held: street.Scenes, weights: Path, side: int, pool: str, lr: float, steps: int, batch: int,
    keep: Kept,
) -> dict:  # fmt: skip
    device = data.images.device
    size = tuple(16 * each for each in GRIDS[side])

    def small(images: Tensor) -> Tensor:
        return torch.cat(
            [F.interpolate(normalised(part), size=size, mode="bilinear", antialias=True) for part in images.split(20)]
        )

    model = PlainViT(weights, pool).to(device)
    with torch.no_grad():
        seen, seen_held = small(data.images).half(), small(held.images).half()

    def inputs(at: Tensor) -> Tensor:
        x = mirrored(colours(seen[at].float(), 0.3))
        zoom = 1 + 0.15 * (torch.rand(batch, 1, 1, device=device) - 0.5)
        turn = torch.cat([torch.eye(2, device=device) * zoom, (torch.rand(batch, 2, 1, device=device) - 0.5) * 0.1], 2)
        grid = F.affine_grid(turn, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False, padding_mode="border")

    loss = fit(model, model.head, inputs, data.labels, lr, steps, batch)
    model.eval()
    with torch.no_grad(), autocast(device):
        logits = torch.cat([model(part.float()) for part in seen_held.split(30)])
    tokens = GRIDS[side][0] * GRIDS[side][1]
    return {"plain": side, "pool": pool, "lr": lr, "loss": round(loss, 4), **keep("plain", side, -logits),
            "gmac": round(vit_macs(tokens) / 1e9, 3)}  # fmt: skip


def mirrored(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(-1), x)


# Algorithm 2 as published


class Algorithm2(nn.Module):
    """AdaTape as published: after its first block, a ViT on the shrunk scene reads linear tokens of all patches.

    The bank is the scene at full resolution in patches of 16 pixels, with the pretrained patch embedding to begin with.
    """

    def __init__(self, weights: Path, side: int = 224, steps: int = 10) -> None:
        super().__init__()
        self.vit, self.size, self.steps = vit_for(weights), tuple(16 * each for each in GRIDS[side]), steps
        self.new = nn.ModuleDict({"place": nn.Linear(32, 192), "norm": nn.LayerNorm(192), "mlp": Mlp(192, 768),
                                  "head": nn.Linear(192, len(street.CATEGORIES))})  # fmt: skip
        self.bank = vit_for(weights).patch_embed.proj
        self.own_loss = torch.zeros(())

    def forward(self, scenes: Tensor) -> Tensor:
        vit, new = self.vit, self.new
        small = F.interpolate(scenes.float(), size=self.size, mode="bilinear", antialias=True)
        x = vit.blocks[0](vit.norm_pre(vit._pos_embed(vit.patch_embed(small))))
        found = self.bank(scenes)
        tokens = found.flatten(2).transpose(1, 2) + new["place"](
            waves(places_of(found.shape[2], found.shape[3], scenes.device))
        )
        tape = read_tape(new["norm"](x[:, 0]), new["norm"](tokens), self.steps, 2.0, query_width=64, check=False)
        rows = (tape.tokens + new["mlp"](tape.tokens)) * tape.mask[..., None]
        x = torch.cat([x, rows.to(x.dtype)], 1)
        for block in vit.blocks[1:]:
            x = block(x)
        self.own_loss, self.index = 0.01 * tape.ponder.mean(), tape.index
        return new["head"](vit.norm(x)[:, 0]).float()

    def macs(self, patches: int) -> int:
        bank = patches * (768 + 32) * 192 + patches * 64 * self.steps
        return bank + vit_macs(self.size[0] * self.size[1] // 256 + self.steps)


def places_of(rows: int, columns: int, device: torch.device) -> Tensor:
    """(1, patches, 2): the middles of patches, in [0, 1]"""
    middles = [(torch.arange(count, device=device) + 0.5) / count for count in (rows, columns)]
    return torch.stack(torch.meshgrid(*middles, indexing="ij"), -1).view(1, -1, 2)


def algorithm2(
    data: street.Scenes, held: street.Scenes, weights: Path, lr: float, steps: int, batch: int, keep: Kept
) -> dict[str, Any]:
    model = Algorithm2(weights).to(data.images.device)
    loss = fit(model, model.new, lambda at: mirrored(colours(normalised(data.images[at]), 0.3)), data.labels, lr, steps,
               batch)  # fmt: skip
    model.eval()
    logits, spots = [], []
    for part in held.images.split(20):
        with torch.no_grad(), autocast(part.device):
            logits.append(model(normalised(part)))
        best = model.index.flatten(1)
        columns = part.shape[2] // 16
        spots.append(torch.stack([best // columns, best % columns], -1) * 16 + 8)
    patches = (held.images.shape[1] // 16) * (held.images.shape[2] // 16)
    row = keep("algorithm2", model.steps, -torch.cat(logits))
    return {"stage": "algorithm 2", "lr": lr, "loss": round(loss, 4), **row, **hits(torch.cat(spots), held),
            "gmac": round(model.macs(patches) / 1e9, 3)}  # fmt: skip


# The experiment


def experiment(
    data: street.Scenes, held: street.Scenes, args: Any, seed: int, log: Callable[[dict], None]
) -> tuple[Model, dict[str, dict[str, Tensor]]]:
    """The trained model, and the weights of each scan."""
    torch.manual_seed(seed)
    keep, scans = Kept(held.labels), {}
    device = data.images.device
    began = time.time()

    def say(**row: Any) -> None:
        log({"seed": seed, "seconds": round(time.time() - began, 1), "resized": args.resized, **row})

    model = Model(args.weights, args.resized).to(device)
    features, flipped, features_held = (all_features(model, data.images), all_features(model, data.images, flip=True),
                                        all_features(model, held.images))  # fmt: skip
    both, labels = torch.cat([features, flipped]), data.labels.repeat(2, 1)
    del flipped
    say(stage="features")
    head, facts = many_heads(both, labels, args.starts, args.head_steps, args.keep, seed)
    say(stage="heads", **facts)
    for k in (1, 2, 4, 8, 32):
        say(stage="heads", reads=k, **score_row(read_all(head, features_held, k), held.labels))
    del both
    model.head.load_state_dict(head.state_dict())

    centres = grid_centres(device)
    state: dict[str, Any] = {"gate": torch.cat([head(part.float())[0] for part in features.split(20)]).detach()}

    def refresh(step: int) -> None:
        if step and step % args.refresh == 0:
            found = all_features(model, data.images)
            with torch.no_grad():
                state["gate"] = torch.cat([model.head(part.float())[0] for part in found.split(20)])
            state["chosen"] = best_of(state["gate"], centres, 12, 12)

    state["chosen"] = best_of(state["gate"], centres, 12, 12)
    loss = fine_tune(
        model, data, lambda at: state["chosen"](at), steps=args.tune_steps, batch=16, lr=args.lr, refresh=refresh
    )
    features, features_held = all_features(model, data.images), all_features(model, held.images)
    for k in (1, 2, 4, 8, 32, ROWS * COLUMNS):
        row = keep("all", k, read_all(model.head, features_held, k))
        cost = round(model.macs(ROWS * COLUMNS) / 1e9, 2)
        say(stage="all windows", loss=round(loss, 4), reads=k, **row, gmac_all=cost)
    say(**random_row(model, held, 8, keep))

    shown = shown_by(model.head, features)
    for text in args.scans:
        plan = ScanPlan.parse(text)
        model.scan = plan.build().to(device)
        loss = distil(model, data.images, shown, plan, batch=32, lr=2e-3)
        say(stage="scan", plan=text, loss=round(loss, 4))
        spots, tops = scan_centres(model, held.images, 64)
        gate, evidence = read_at(model, held.images, spots)
        for k in (1, 2, 4, 8, 16, 32, 64):
            row = keep(text, k, noisy_or(evidence[:, :k], gate[:, :k]))
            say(stage="scan", plan=text, reads=k, **row, gmac=round(model.macs(k) / 1e9, 3), **hits(spots[:, :k], held))
        lengths(model, data, held, tops[:, :32], gate[:, :32], evidence[:, :32], partial(say, plan=text), keep, text)
        scans[text] = model.scan.state_dict()
    keep.save(args.out / f"street-scores-{seed}.npz")
    return model, scans


@torch.no_grad()
def shown_by(head: WindowHead, features: Tensor) -> Tensor:
    """(n, windows, 1 + classes): the probability that a window shows any category, and each."""
    parts = []
    for part in features.split(20):
        gate, evidence = head(part.float())
        each = evidence.float().sigmoid() * gate.float().sigmoid()[..., None]
        parts.append(torch.cat([value(evidence, gate)[..., None], each], -1))
    return torch.cat(parts)


def lengths(
    model: Model, data: street.Scenes, held: street.Scenes, tops: Tensor, gate: Tensor, evidence: Tensor,
    say: Callable[..., None], keep: Kept, name: str,
) -> None:  # fmt: skip
    """Stops reading below a floor on scores, chosen for a given mean length on training scenes."""
    _, seen = scan_centres(model, data.images, 32)
    signs = np.array([len(boxes) for boxes in held.boxes])
    for wanted in (1, 2, 4, 8):
        floor = float(seen.flatten().sort(descending=True).values[wanted * len(seen)])
        read = tops > floor
        shut = torch.where(read, gate, torch.full_like(gate, -30.0))
        length = read.sum(1).cpu().numpy()
        by_signs = {str(n): round(float(length[signs == n].mean()), 2) for n in range(4) if (signs == n).any()}
        mean = float(length.mean())
        say(stage="floor", target=wanted, floor=round(floor, 4), length=round(mean, 3), by_signs=by_signs,
            rho=round(spearman(length, signs), 3), gmac=round(model.macs(mean) / 1e9, 3),
            **keep(f"{name} floor", wanted, noisy_or(evidence, shut)))  # fmt: skip


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    def ranks(x: np.ndarray) -> np.ndarray:
        order = x.argsort(kind="stable").argsort(kind="stable").astype(float)
        return np.array([order[x == each].mean() for each in x])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


@torch.no_grad()
def random_row(model: Model, held: street.Scenes, k: int, keep: Kept) -> dict[str, Any]:
    """A control: k windows at random places."""
    device, n = held.images.device, len(held.images)
    spots = torch.stack(
        [torch.randint(32, 768, (n, k), device=device), torch.randint(32, 1328, (n, k), device=device)], -1
    )
    gate, evidence = read_at(model, held.images, spots)
    return {"stage": "random windows", "reads": k, **keep("random", k, noisy_or(evidence, gate)), **hits(spots, held)}


def told(data: street.Scenes, held: street.Scenes, args: Any, seed: int, log: Callable[[dict], None]) -> None:
    torch.manual_seed(seed)
    model = Model(args.weights, args.resized).to(data.images.device)
    loss = fine_tune(model, data, told_centres(data, 8), steps=args.tune_steps, batch=16, lr=args.lr)
    gate, evidence = read_at(model, held.images, told_centres(held, 8)(torch.arange(len(held.images))))
    log({"seed": seed, "stage": "told where", "resized": args.resized, "loss": round(loss, 4),
         **score_row(noisy_or(evidence, gate), held.labels)})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gtsdb_train.npz and gtsdb_classes.json")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--final", action="store_true", help="train on all 600 scenes and score the 300 test scenes")
    parser.add_argument("--scenes", type=int, default=0, help="use only so many scenes, to try it out")
    parser.add_argument("--resized", type=int, default=64, help="pixels that a window of 64 is resized to")
    parser.add_argument("--starts", type=int, default=16)
    parser.add_argument("--head-steps", type=int, default=2000)
    parser.add_argument("--keep", type=int, default=32)
    parser.add_argument("--tune-steps", type=int, default=1200)
    parser.add_argument("--refresh", type=int, default=300)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--plain", type=int, nargs="*", default=[])
    parser.add_argument("--plain-steps", type=int, default=1200)
    parser.add_argument("--only", choices=("all", "told", "tape", "plain", "algorithm2"), nargs="+", default=["all"])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4], help="learning rates of the plain ViTs")
    parser.add_argument(
        "--scans", nargs="+", default=["16,32,48,48:1500:"], help="scans to train, as ScanPlan reads them"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True

    def log(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        with (args.out / "street.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    began = time.time()
    data = street.load(args.data / "gtsdb_train.npz", args.data / "gtsdb_classes.json", args.device)
    if args.final:
        held = street.load(args.data / "gtsdb_test.npz", args.data / "gtsdb_classes.json", args.device)
    else:
        train, kept = street.held_out(len(data.images))
        data, held = data.at(train), data.at(kept)
    if args.scenes:
        data, held = (each.at(np.arange(args.scenes)) for each in (data, held))
    log({"loaded": round(time.time() - began, 1), "final": args.final, "scenes": [len(data.images), len(held.images)],
         "positives": held.labels.mean(0).tolist()})  # fmt: skip
    wanted = {"told", "tape", "plain", "algorithm2"} if "all" in args.only else set(args.only)
    for seed in args.seeds:
        if "told" in wanted:
            told(data, held, args, seed, log)
        if "tape" in wanted:
            model, scans = experiment(data, held, args, seed, log)
            parts = {"vit": model.vit.state_dict(), "head": model.head.state_dict(), **scans}
            halves = {name: {k: v.half().cpu() for k, v in part.items()} for name, part in parts.items()}
            torch.save(halves, args.out / f"street-{args.resized}-{seed}.pt")
        for lr in args.rates if "algorithm2" in wanted else ():
            torch.manual_seed(seed)
            keep = Kept(held.labels)
            log({"seed": seed, **algorithm2(data, held, args.weights, lr, args.plain_steps, 16, keep)})
            keep.save(args.out / f"street-scores-algorithm2-{seed}.npz")
        for side in args.plain if "plain" in wanted else ():
            for lr in args.rates:
                torch.manual_seed(seed)
                keep = Kept(held.labels)
                log({"seed": seed, **plain(data, held, args.weights, side, "token", lr, args.plain_steps, 16, keep)})
                keep.save(args.out / f"street-scores-plain-{side}-{seed}.npz")


if __name__ == "__main__":
    main()
