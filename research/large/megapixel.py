"""Megapixel MNIST with a tape: a cheap scan, a few windows at full resolution, and four questions about them.

python research/large/megapixel.py --mnist mnist.npz --out runs/megapixel --seeds 0
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import canvas
import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from windows import Convolutions, Scan, choose, cut, mixture_loss, noisy_or, presence_loss, value, waves

KEPT = 50_000  # digits of the training set that canvases are made of; the others make held-out canvases, for choices
SCALE = 2  # the scan sees canvases at half resolution
TASKS = ("majority", "maximum", "topmost")


class Reader(nn.Module):
    """AdaTape for canvases without input tokens: keys from a cheap scan, tokens from windows, blocks on the tape."""

    def __init__(
        self,
        width: int = 128,
        depth: int = 2,
        window: int = 48,
        side: int = 1500,
        widths: tuple[int, ...] = (32, 48, 48),
    ) -> None:
        super().__init__()
        self.window, self.side = window, side
        self.scan = Scan(1, fold=4, widths=widths, strides=(2, 1), classes=10)
        self.encoder = Convolutions(width)
        self.evidence = nn.Linear(width, 10)
        nn.init.constant_(self.evidence.bias, -4.0)
        self.leak = nn.Parameter(
            torch.full((10,), -1.0)
        )  # class priors, which empty windows would otherwise have to encode
        self.place = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width))
        self.ask = nn.Parameter(torch.randn(4, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, qkv_bias=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleList(nn.Linear(width, 10) for _ in range(4))

    def windows(self, images: Tensor, centres: Tensor, vary: bool) -> Tensor:
        """(b, k, s, s) in [0, 1]"""
        if not vary:
            return cut(images, centres, self.window).float() / 255
        found = cut(images, centres + torch.randint_like(centres, -4, 5), self.window).float() / 255
        b, k = found.shape[:2]
        n = b * k
        angle = (torch.rand(n, device=found.device) - 0.5) * 0.4
        scale = 1 + (torch.rand(n, device=found.device) - 0.5) * 0.24
        cos, sin, zero = angle.cos() * scale, angle.sin() * scale, torch.zeros_like(angle)
        turn = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
        grid = F.affine_grid(turn, [n, 1, self.window, self.window], align_corners=False)
        return F.grid_sample(found.view(n, 1, self.window, self.window), grid, align_corners=False).view_as(found)

    def read(self, images: Tensor, centres: Tensor, mask: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Answers (b, 10) to four questions, and the evidence (b, k, 10) of each window."""
        b, k = centres.shape[:2]
        seen = self.windows(images, centres, self.training)
        tokens = self.encoder(seen.view(b * k, 1, self.window, self.window)).view(b, k, -1)
        evidence = self.evidence(tokens)
        x = torch.cat([self.ask.expand(b, -1, -1), tokens + self.place(waves(centres / self.side))], 1)
        hidden = None
        if mask is not None:
            keys = F.pad(mask, (4, 0), value=True)
            hidden = torch.zeros(keys.shape, dtype=x.dtype, device=x.device).masked_fill(~keys, -1e4)[:, None, None]
            evidence = evidence.masked_fill(~mask[..., None], -30.0)
        for block in self.blocks:
            x = block(x, attn_mask=hidden)
        x = self.norm(x[:, :4])
        return [head(x[:, i]).float() for i, head in enumerate(self.heads)], evidence

    def macs(self, k: float) -> float:
        d, n = self.norm.normalized_shape[0], k + 4
        block = n * 12 * d * d + 2 * n * n * d
        place = k * (32 * d + d * d)
        own = self.encoder.macs(self.window) * k + place + len(self.blocks) * block + 40 * d
        return self.scan.macs(self.side // SCALE, self.side // SCALE) + own


def shrunk(images: Tensor) -> Tensor:
    """(b, side, side) uint8 -> (b, 1, h, w) in [0, 1] at half resolution, padded to whole cells"""
    half = F.avg_pool2d(images[:, None].to(torch.bfloat16) / 255, SCALE)
    beyond = -half.shape[-1] % 8
    return F.pad(half, (0, beyond, 0, beyond))


@torch.no_grad()
def set_level(model: Reader, data: canvas.Canvases, digits: int = 5) -> None:
    """Shifts all scores so that the fifth highest is 0 on average: a softmax leaves their level open."""
    model.eval()
    with torch.autocast(data.images.device.type, torch.bfloat16):
        top = choose(model.scan(shrunk(data.images[:200])), digits)[2]
    assert model.scan.score.bias is not None
    model.scan.score.bias -= top[:, -1].mean()


def centres_of(
    model: Reader, data: canvas.Canvases, at: Tensor, scores: Tensor, k: int, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Centres (b, k, 2), scores (b, k) and cells (b, k) of the windows to read.

    `where` other than "scan" is a control.
    """
    if where == "ink":
        scores = F.avg_pool2d(data.images[at][:, None].float(), 32, 16, 14, count_include_pad=False)[:, 0]
        scores = scores + torch.rand_like(scores) * 1e-3
    elif where in ("random", "told"):
        scores = torch.rand_like(scores)
    rows, columns, top = choose(scores, k)
    centres = torch.stack([model.scan.centre(rows), model.scan.centre(columns)], -1) * SCALE
    if where == "told":
        known = data.corners[at] + canvas.DIGIT // 2
        known = known[:, torch.randperm(known.shape[1], device=known.device)]
        centres = torch.cat([known + torch.randint_like(known, -8, 9), centres[:, known.shape[1] :]], 1)[:, :k]
    return centres, top, rows * scores.shape[2] + columns


def losses(model: Reader, data: canvas.Canvases, at: Tensor, args: Any, teach: bool) -> dict[str, Tensor]:
    """Of what was read; and, with `teach`, what the windows turned out to show teaches the scan its scores."""
    images, targets, where = data.images[at], data.present[at], args.where
    with torch.set_grad_enabled(teach):
        scores, guesses = model.scan.scores_and_guesses(shrunk(images))
    tried = scores.detach().clone()
    if args.explore:  # so many cells at random are read as well
        random = torch.randint(0, tried[0].numel(), (len(at), args.explore), device=tried.device)
        tried.flatten(1).scatter_(1, random, 1e4)
    centres, _, cells = centres_of(model, data, at, tried, args.reads, where)
    answers, evidence = model.read(images, centres)
    found = {"presence": presence_loss(noisy_or(evidence) + F.logsigmoid(-model.leak), targets)}
    if teach:
        shown = value(evidence).detach()
        found["scan"] = F.binary_cross_entropy_with_logits(scores.flatten(1).gather(1, cells), shown)
        found["mixture"] = mixture_loss(scores, guesses, targets)
    for task, answer in zip(TASKS, answers, strict=False):
        found[task] = F.cross_entropy(answer, getattr(data, task)[at])
    found["all"] = F.binary_cross_entropy_with_logits(answers[3], targets)
    return found


def begin(model: Reader, data: canvas.Canvases, args: Any, log: Any) -> None:
    """The scan alone, by the mixture over all of its cells."""
    n, device = len(data.images), data.images.device
    optimizer = torch.optim.AdamW(model.scan.parameters(), weight_decay=0.05, fused=device.type == "cuda")
    began, sofar = time.time(), torch.zeros((), device=device)
    for step in range(args.begin):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 200) * min(1.0, (1 - step / args.begin) / 0.5 + 0.1)
        at = torch.randint(0, n, (args.begin_batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            scores, guesses = model.scan.scores_and_guesses(shrunk(data.images[at]))
        loss = mixture_loss(scores, guesses, data.present[at])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.scan.parameters(), 1.0)
        optimizer.step()
        sofar += loss.detach()
        if (step + 1) % max(1, args.begin // 6) == 0:
            mean, sofar = float(sofar) / max(1, args.begin // 6), torch.zeros((), device=device)
            log({"begin": step + 1, "seconds": round(time.time() - began, 1), "loss_mixture": round(mean, 4)})


WEIGHTS = {"scan": 1.0, "mixture": 0.1, "presence": 4.0, "majority": 1.0, "maximum": 1.0, "topmost": 1.0, "all": 4.0}


def train(model: Reader, data: canvas.Canvases, held: canvas.Canvases, args: Any, seed: int, log: Any) -> None:
    """Reads where the scan says; after a part of the steps, the scan learns from what was read."""
    torch.manual_seed(seed)
    n, device = len(data.images), data.images.device
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
                                  lr=args.lr, fused=device.type == "cuda")  # fmt: skip
    began, steps, done, looked = time.time(), args.steps, 0, 0
    since: dict[str, Any] = {}
    while done < steps:
        for at in torch.randperm(n, device=device)[: n - n % args.batch].view(-1, args.batch):
            model.train()
            teach = args.where == "scan" and done >= args.teach_from * steps
            model.scan.train(teach)
            rate = args.lr * min(1, (done + 1) / 200) * min(1.0, (1 - done / steps) / 0.6)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device.type, torch.bfloat16):
                found = losses(model, data, at, args, teach)
            loss: Any = sum(WEIGHTS[name] * each for name, each in found.items())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done, looked = done + 1, looked + 1
            for name, each in found.items():
                since[name] = since.get(name, 0) + each.detach()
            if done % max(1, steps // args.looks) == 0 or done == steps:
                log({"seed": seed, "step": done, "seconds": round(time.time() - began, 1),
                     **{f"loss_{k}": round(float(v) / looked, 4) for k, v in since.items()},
                     **evaluate(model, held, 8, args.where)})  # fmt: skip
                since, looked = {}, 0
            if done >= steps:
                break


@torch.no_grad()
def evaluate(
    model: Reader, data: canvas.Canvases, k: int, where: str = "scan", floor: float | None = None
) -> dict[str, Any]:
    model.eval()
    right = dict.fromkeys((*TASKS, "all"), 0)
    on_digit, first, found_digits, lengths = 0, 0, 0, 0.0
    device = data.images.device
    for at in torch.arange(len(data.images), device=device).split(50):
        with torch.autocast(device.type, torch.bfloat16):
            scores = model.scan(shrunk(data.images[at]))
            centres, top, _ = centres_of(model, data, at, scores, k, where)
            mask = torch.ones_like(top, dtype=torch.bool) if floor is None else top > floor
            answers, _ = model.read(data.images[at], centres, mask)
        for task, answer in zip(TASKS, answers, strict=False):
            right[task] += int((answer.argmax(1) == getattr(data, task)[at]).sum())
        right["all"] += int(((answers[3] > 0) == (data.present[at] > 0)).all(1).sum())
        middle = data.corners[at] + canvas.DIGIT / 2
        near = ((centres[:, :, None] - middle[:, None]).abs().amax(-1) < 14) & mask[..., None]
        on_digit += int(near.any(2).sum())
        first += int(near[:, 0].any(1).sum())
        found_digits += int(near.any(1).sum())
        lengths += float(mask.sum())
    n = len(data.images)
    return {**{k_: round(100 * v / n, 2) for k_, v in right.items()}, "reads": k, "length": round(lengths / n, 2),
            "hits": round(on_digit / max(lengths, 1), 4), "first": round(first / n, 4),
            "digits_found": round(found_digits / n / data.digits.shape[1], 4),
            "gmac": round(model.macs(lengths / n) / 1e9, 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument(
        "--final", action="store_true", help="score the test canvases at the end, not the held-out ones"
    )
    parser.add_argument("--side", type=int, default=1500)
    parser.add_argument("--noise", type=int, default=50)
    parser.add_argument("--order", choices=("under", "over"), default="under")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--begin", type=int, default=12000, help="steps of the scan alone before reading")
    parser.add_argument("--begin-batch", type=int, default=16)
    parser.add_argument(
        "--teach-from", type=float, default=0.4, help="part of the steps after which the scan learns too"
    )
    parser.add_argument("--where", choices=("scan", "told", "ink", "random"), default="scan")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--reads", type=int, default=24, help="windows read in training")
    parser.add_argument(
        "--explore", type=int, default=4, help="of the reads, how many stand at random places in training"
    )
    parser.add_argument("--looks", type=int, default=12, help="evaluations on held-out canvases")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--name", default="megapixel")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def log(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        with (args.out / f"{args.name}.jsonl").open("a") as file:
            file.write(json.dumps({"name": args.name, **row}) + "\n")

    torch.backends.cudnn.benchmark = True
    z = np.load(args.mnist)
    shape = {"side": args.side, "noise": args.noise, "order": args.order, "device": args.device}
    began = time.time()
    data = canvas.make(z["x"][:KEPT], z["y"][:KEPT], args.count, split=0, **shape)
    held = canvas.make(z["x"][KEPT:], z["y"][KEPT:], args.test, split=2, **shape)
    test = canvas.make(z["xt"], z["yt"], args.test, split=1, **shape) if args.final else held
    log({"made": round(time.time() - began, 1)})
    for seed in args.seeds:
        torch.manual_seed(seed)
        model = Reader(side=args.side).to(args.device)
        if args.where == "scan":
            begin(model, data, args, log)
            set_level(model, data)
            log({"seed": seed, "begun": True, **evaluate(model, held, 16, args.where)})
        train(model, data, held, args, seed, log)
        for k in (1, 2, 4, 5, 6, 8, 12, 16, 24):
            log({"seed": seed, "final": True, "where": args.where, **evaluate(model, test, k, args.where)})
        for probability in (0.1, 0.2, 0.3, 0.5) if args.where == "scan" else ():
            floor = math.log(probability / (1 - probability))
            log({"seed": seed, "final": True, "floor": probability, **evaluate(model, test, 16, args.where, floor)})
        torch.save({k: v.half().cpu() for k, v in model.state_dict().items()}, args.out / f"{args.name}-{seed}.pt")


if __name__ == "__main__":
    main()
