"""WindowTape: a thin scan of a large image says where to look, and a ViT reads a few windows there at full resolution.

The bank holds a window for every cell of the scan. Keys are the scan's scores, and a token is made only for a window
that is read. Reading takes the highest scores, not two neighbours, and stops below a floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.config import Budget
from adatape.counter_rng import keys_of, uniform
from adatape.losses import LossName, class_loss
from adatape.macs import PartCost, block_macs, embedding_cost, linear_macs, parameter_count, total
from adatape.models.base import Adaptive, BlocksOutput, BudgetRange, OnBlock, ignore_block, macs_by_count
from adatape.packing import append_tape
from adatape.ragged_attention import padding_mask
from adatape.records import Output, Places, Searched, Tape
from adatape.windows.answers import ANSWERS, Labels
from adatape.windows.encoders import WindowConvolutions, WindowHead
from adatape.windows.scan import Scan, Scanned, cut_windows, highest_apart, scan_shape

EncoderName = Literal["vit", "convolutions"]
RANDOM = 4  # windows at random places that training reads besides those that scores choose
PLACES = 40  # first of the words that keys of random places begin with


@dataclass(frozen=True)
class WindowOptions:
    """How a ViT reads windows of a large image."""

    window: int = 64
    """side of a window in pixels"""
    view: int | tuple[int, int] | None = None
    """size that the whole image is shrunk to for the ViT to see besides; None shows it windows only"""
    steps: int = 8
    """most windows that are read (T)"""
    floor: float = 0.0
    """reading stops where the scan's probability falls below this; 0 always reads `steps` windows"""
    layer: int | None = None
    """block before which windows join the view's rows, encoded by the blocks before it; None is after the last"""
    labels: Labels = "one"
    """whether an image has one label, or several (or none)"""
    encoder: EncoderName = "vit"
    """what encodes a window: the ViT itself, or three convolutions"""
    search: int = 0
    """how training finds first windows: 0 by a guess at every cell of the scan, learnt with it; else by encoding so
    many random windows of each image without gradient, as a pretrained ViT should"""
    cell: int = 16
    """distance between places in pixels; a multiple of scan_scale × scan_fold by a power of two"""
    scan_scale: int = 2
    """factor by which the image is shrunk for the scan"""
    scan_fold: int = 2
    """so many pixels squared enter the scan's first convolution as channels"""
    scan_width: int = 16
    """channels of the scan's first convolution"""


class Read(NamedTuple):
    """The tape, what each of its windows says, and the scan that chose them."""

    tape: Tape
    places: Places


class WindowTape(Adaptive):
    """A ViT that reads windows of a large image; `vit` encodes windows, sees the view, and joins both."""

    adapts: ClassVar[str | None] = "sequence"
    length_name: ClassVar[str] = "windows read"

    def __init__(self, vit: VisionTransformer, image: tuple[int, int], options: WindowOptions | None = None) -> None:
        super().__init__(vit)
        self.options = options = options or WindowOptions()
        self.image, self.window, self.most, self.search = image, options.window, options.steps, options.search
        self.steps, self.floor = options.steps, options.floor
        self.view = _size(options.view)
        self.layer = len(vit.blocks) if options.layer is None else options.layer
        wide = options.window > 2 * options.cell  # a score should see about what its window shows
        shape = scan_shape(options.cell, options.scan_scale, options.scan_fold, options.scan_width, wide)
        _check(self, shape.cell)
        if self.view is not None and self.view != tuple(vit.patch_embed.img_size):
            vit.set_input_size(self.view)
        self.answer = ANSWERS[options.labels]
        self.scan = Scan(vit.in_chans, shape, 0 if self.search else vit.num_classes)
        own = options.encoder == "vit"
        self.encoder = None if own else WindowConvolutions(vit.in_chans, vit.embed_dim)
        width = 2 * vit.embed_dim if self.encoder is None else self.encoder.num_features
        self.head = WindowHead(width, vit.num_classes)
        self.to_token = nn.Linear(width, vit.embed_dim)
        self.place = nn.Linear(2, vit.embed_dim)

    def forward(self, x: Tensor, output: bool = False, key: Tensor | None = None) -> Tensor | Output:
        if self.steps == 0:
            return super().forward(x, output, key)
        read = self.read(x, key)
        blocks = self._run_blocks(x, read.tape, ignore_block)
        features = self.forward_head(self._final_norm(self._pooled_rows(blocks)), pre_logits=True)
        places, mask = read.places, read.tape.mask
        logits = self.answer.combined(self.classify(features), places.gate, places.evidence, mask)
        return Output(logits, features, blocks.ponder, read.tape, None, places) if output else logits

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:
        return self._run_blocks(x, self.read(x, key).tape if self.steps else None, on_block)

    def read(self, x: Tensor, key: Tensor | None = None) -> Read:
        """Scans the image, chooses windows, and encodes them."""
        scanned = self.scan(x)
        searched = self._searched(x, scanned, key) if self.training and self.search else None
        index, top = self._choose(scanned, searched, key)
        mask = (top > -torch.inf) & (top.sigmoid() > self.floor if not self.training else True)
        centres = self._centres(index, x, key)
        features = self.encode(cut_windows(x, centres, self.window).flatten(0, 1)).unflatten(0, index.shape)
        gate, evidence = self.head(features)
        size = torch.tensor(x.shape[-2:], device=x.device)
        tokens = self.to_token(features) + self.place((centres / size * 2 - 1).to(features.dtype))
        scores = scanned.scores.flatten(1).gather(1, index)
        tape = Tape(
            tokens=tokens.masked_fill(~mask[..., None], 0),
            mask=mask,
            index=index.masked_fill(~mask, -1)[..., None],
            weight=scores.detach().sigmoid().masked_fill(~mask, 0)[..., None],
            length=mask.sum(1),
            ponder=scores.new_zeros(scores.shape[0]),
        )
        return Read(tape, Places(scores, gate, evidence, scanned.found, scanned.guesses, searched))

    def _centres(self, index: Tensor, x: Tensor, key: Tensor | None) -> Tensor:
        """Of the windows of cells; training moves them by up to half a cell where windows are wider than two cells."""
        cell = self.options.cell
        centres = self.scan.centres(index, self.scan.grid(*x.shape[-2:])[1])
        most = min(cell // 2, max(0, (self.window - 2 * cell) // 2))
        if not self.training or most == 0:
            return centres
        moved = _uniform(x, 2 * index.shape[1], key, 3).unflatten(1, (-1, 2))
        return centres + (moved * (2 * most + 1)).long() - most

    def _choose(self, scanned: Scanned, searched: Searched | None, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cells and scores; training also reads what it finds without the scan's scores, and random places."""
        if not self.training:
            return highest_apart(scanned.scores, self.steps)
        wanted = scanned.scores.detach().clamp(-30, 30).flatten(1)
        if searched is not None:
            found = searched.index.gather(1, searched.gate.topk(self.most, 1).indices)
        else:
            assert scanned.found is not None
            found = highest_apart(scanned.found.detach(), self.most)[0]
        explored = _random_cells(scanned.scores, RANDOM, key, 1)
        rank = torch.arange(self.most, 0, -1, device=wanted.device, dtype=wanted.dtype).expand_as(found)
        wanted = wanted.scatter(1, found, 100 + rank).scatter(1, explored, 1000.0)
        most = min(2 * self.most + RANDOM, wanted.shape[1] // 4)
        return highest_apart(wanted.view_as(scanned.scores), most)

    def _searched(self, x: Tensor, scanned: Scanned, key: Tensor | None) -> Searched:
        """Encodes random windows of each image without gradient."""
        index = _random_cells(scanned.scores, self.search, key, 2)
        centres = self.scan.centres(index, scanned.scores.shape[2])
        with torch.no_grad():
            features = self.encode(cut_windows(x, centres, self.window).flatten(0, 1))
            gate, evidence = self.head(features.unflatten(0, index.shape))
        return Searched(index, scanned.scores.flatten(1).gather(1, index), gate, evidence)

    def encode(self, windows: Tensor) -> Tensor:
        """(n, ch, window, window) -> (n, width)"""
        if self.encoder is not None:
            return self.encoder(windows)
        vit = self.vit
        x = vit.patch_embed.proj(windows)
        grid, prefix = (x.shape[2], x.shape[3]), vit.num_prefix_tokens
        x = vit.patch_embed.norm(x.flatten(2).transpose(1, 2))
        kept = 0 if vit.no_embed_class else prefix
        places = resample_abs_pos_embed(vit.pos_embed, grid, vit.patch_embed.grid_size, num_prefix_tokens=kept)
        front = [each.expand(x.shape[0], -1, -1) for each in (vit.cls_token, vit.reg_token) if each is not None]
        x = torch.cat([*front, x + places], 1) if vit.no_embed_class else torch.cat([*front, x], 1) + places
        x = vit.norm_pre(x)
        for block in vit.blocks[: self.layer]:
            x = self.run_block(block, x)
        x = vit.norm(x) if self.layer == len(vit.blocks) else x
        rows = x[:, prefix:].mean(1)
        return torch.cat([x[:, 0] if prefix else rows, rows], 1)

    def _run_blocks(self, x: Tensor, tape: Tape | None, on_block: OnBlock) -> BlocksOutput:
        tokens = self._view_tokens(x)
        below = len(self.vit.blocks) if tape is None else self.layer
        for n, block in enumerate(self.vit.blocks[:below] if self.view is not None else []):
            tokens = self.run_block(block, tokens)
            on_block(n, tokens)
        ponder = tokens.new_zeros(tokens.shape[0], dtype=torch.float32)
        if tape is None or self.layer == len(self.vit.blocks):
            return BlocksOutput(tokens, ponder, None, tape)
        inputs = tokens.shape[1]
        rows, visible = append_tape(tokens, tape.tokens, tape.mask)
        for n, block in enumerate(self.vit.blocks[self.layer :], self.layer):
            rows = self.run_block(block, rows, attn_mask=padding_mask(visible))
            on_block(n, rows[:, :inputs])
        return BlocksOutput(rows, ponder, visible, tape)

    def _view_tokens(self, x: Tensor) -> Tensor:
        if self.view is not None:
            seen = F.interpolate(x, self.view, mode="bilinear", antialias=True) if x.shape[-2:] != self.view else x
            return self.embed(seen)
        vit = self.vit
        token = vit.cls_token if vit.no_embed_class or vit.pos_embed is None else vit.cls_token + vit.pos_embed[:, :1]
        return token.expand(x.shape[0], -1, -1)

    def main_loss(self, output: Output, target: Tensor, kind: LossName) -> Tensor:
        """Of the answer, of the windows' answer alone, and of what teaches the scan where to look."""
        loss = class_loss(output.logits, target, kind)
        places, tape = output.places, output.tape
        if places is None or tape is None:
            return loss
        shares = F.one_hot(target, output.logits.shape[1]).float() if target.dim() == 1 else target
        alone = self.answer.combined(None, places.gate, places.evidence, tape.mask)
        loss = loss + class_loss(alone, target, kind)
        loss = loss + self._teaching(places.scores, places.gate, places.evidence, shares, tape.mask)
        if places.searched is not None:
            loss = loss + self._teaching(*places.searched[1:], shares)
        if places.found is None or places.guesses is None:
            return loss
        return loss + self.answer.found(places.found.flatten(1), places.guesses.flatten(1, 2), shares)

    def _teaching(
        self, scores: Tensor, gate: Tensor, evidence: Tensor, shares: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy of the scan's scores: their targets are how surely those windows show what the label names."""
        shown = self.answer.shown(gate, evidence, shares).detach()
        each = F.binary_cross_entropy_with_logits(scores, shown, reduction="none")
        return each.mean() if mask is None else (each * mask).sum() / mask.sum().clamp(min=1)

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:
        """Most windows that are read; no argument resets. `threshold` is the floor below which reading stops."""
        steps = self.most if steps is None else steps
        if not 0 <= steps <= self.most:
            raise ValueError(f"steps is {steps}; this model reads between 0 and {self.most} windows")
        self.steps, self.floor = steps, self.floor if threshold is None else threshold

    def budget_range(self) -> BudgetRange:
        return BudgetRange(0, self.most, None)

    def budget(self) -> Budget:
        return Budget(self.steps, None)

    def cost(self, tape: int | None = None) -> list[PartCost]:
        tape = self.steps if tape is None else tape
        if not 0 <= tape <= self.most:
            raise ValueError(f"tape is {tape}; this model reads between 0 and {self.most} windows")
        vit, view = self.vit, self.vit.patch_embed.num_patches if self.view is not None else 0
        inputs = view + vit.num_prefix_tokens if view else 1
        joined = len(vit.blocks) if tape == 0 else self.layer
        below = sum(block_macs(block, inputs) for block in vit.blocks[:joined]) if view else 0
        above = sum(block_macs(block, inputs, tape) for block in vit.blocks[joined:])
        rows = linear_macs(self.head) + linear_macs(self.to_token) + linear_macs(self.place)
        own = [self.head, self.to_token, self.place]
        encoder = [] if self.encoder is None else [self.encoder]
        scanned = self.scan.macs(*self.image) if tape else 0
        return [
            PartCost("view", embedding_cost(vit).parameters, view * vit.patch_embed.proj.weight.numel()),
            PartCost("scan", parameter_count(self.scan.layers, self.scan.score), scanned),
            PartCost("windows", parameter_count(*own, *encoder), tape * (self._window_macs() + rows)),
            PartCost("blocks", parameter_count(vit.blocks, vit.norm), below + above),
            PartCost("head", parameter_count(vit.head, vit.fc_norm), linear_macs(vit.head)),
        ]

    def _window_macs(self) -> int:
        if self.encoder is not None:
            return self.encoder.macs(self.window)
        patches = (self.window // self.vit.patch_embed.patch_size[0]) ** 2
        rows = patches + self.vit.num_prefix_tokens
        blocks = sum(block_macs(block, rows) for block in self.vit.blocks[: self.layer])
        return patches * self.vit.patch_embed.proj.weight.numel() + blocks

    def actual_macs(self, output: Output) -> Tensor:
        if output.tape is None:
            return super().actual_macs(output)
        return macs_by_count(output.tape.length, lambda tape: total(self.cost(tape)).macs)

    def never_halt(self) -> None:
        self.floor = 0.0

    def export_refusal(self) -> str | None:
        return "the model reads windows of a large image; export takes models that read one tape of tokens"


def _size(view: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if view is None:
        return None
    height, width = (view, view) if isinstance(view, int) else view
    return height, width


def _uniform(like: Tensor, count: int, key: Tensor | None, purpose: int) -> Tensor:
    """(b, count) in [0, 1), by each sample's key where it has one."""
    if key is None:
        return torch.rand(like.shape[0], count, device=like.device)
    return uniform(keys_of(PLACES + purpose, key), count)


def _random_cells(scores: Tensor, count: int, key: Tensor | None, purpose: int) -> Tensor:
    cells = scores[0].numel()
    return (_uniform(scores, count, key, purpose) * cells).long().clamp(max=cells - 1)


def _check(model: WindowTape, cell: int) -> None:
    height, width = model.image
    if min(height, width) < model.window:
        raise ValueError(f"window is {model.window}; it must fit the image, {height} × {width}")
    if not 0 < model.layer <= len(model.vit.blocks):
        raise ValueError(f"layer is {model.layer}; windows join before a block index from 1 to {len(model.vit.blocks)}")
    if model.view is None and model.vit.cls_token is None:
        raise ValueError("view is None; the ViT has no class token to gather the tape, so give it a view")
    cells = -(-height // cell) * -(-width // cell)
    if cells < 4 * model.most:  # neighbours of a window that is read are not read
        raise ValueError(
            f"steps is {model.most}; it needs {4 * model.most} cells of {cell} pixels, and the image has {cells}"
        )
    if model.options.labels not in ANSWERS or model.options.encoder not in get_args(EncoderName):
        raise ValueError(
            f"labels is {model.options.labels!r} and encoder {model.options.encoder!r}; they must be one of "
            f"{', '.join(ANSWERS)} and one of {', '.join(get_args(EncoderName))}"
        )
