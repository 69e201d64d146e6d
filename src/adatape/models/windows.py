"""WindowTape: a thin scan of a large image says where to look, and a ViT reads a few windows there at full resolution.

The bank holds a window for every cell of the scan. Keys are the scan's scores, and a token is made only for a window
that is read. Reading takes the highest scores, not two neighbours, and stops below a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.answers import ANSWERS, Labels
from adatape.config import Budget
from adatape.keyed import keys_of, uniform
from adatape.layout import append
from adatape.losses import LossName, class_loss
from adatape.macs import NoCostFormula, Part, block_macs, linear_macs, parameter_count, total
from adatape.models.adaptive import Adaptive, BudgetRange, Visit, Walk, macs_by_count, no_visit
from adatape.ragged import hide_tail
from adatape.records import Output, Places, Tape
from adatape.scan import Scan, Scanned, ScanShape, cut_windows, highest_apart
from adatape.window_encoders import WindowConvolutions, WindowHead

EncoderName = Literal["vit", "convolutions"]
RANDOM = 4  # windows at random places that training reads besides those that scores choose
EXPLORED = 4  # first of the words that keys of random places begin with


class Read(NamedTuple):
    """The tape, what each of its windows says, and the scan that chose them."""

    tape: Tape
    places: Places


class WindowTape(Adaptive):
    """A ViT that reads windows of a large image; `vit` encodes windows, sees the view, and joins both."""

    adapts: ClassVar[str | None] = "sequence"
    length_name: ClassVar[str] = "windows read"

    def __init__(
        self,
        vit: VisionTransformer,
        image: tuple[int, int],
        *,
        window: int = 64,
        view: int | tuple[int, int] | None = None,
        steps: int = 8,
        floor: float = 0.0,
        layer: int | None = None,
        labels: Labels = "one",
        encoder: EncoderName | nn.Module = "vit",
        scan: ScanShape | None = None,
        search: int = 0,
    ) -> None:
        super().__init__(vit)
        self.search = search
        self.image, self.window, self.most, self.steps, self.floor = image, window, steps, steps, floor
        self.view = (view, view) if isinstance(view, int) else view
        self.layer = len(vit.blocks) if layer is None else layer
        _check(self, scan or ScanShape())
        if self.view is not None and self.view != tuple(vit.patch_embed.img_size):
            vit.set_input_size(self.view)
        self.labels, self.answer = labels, ANSWERS[labels]
        self.scan = Scan(vit.in_chans, scan or ScanShape(), 0 if search else vit.num_classes)
        self.encoder = _make_encoder(encoder, vit)
        width = 2 * vit.embed_dim if self.encoder is None else self.encoder.num_features
        self.head = WindowHead(width, vit.num_classes)
        self.to_token = nn.Linear(width, vit.embed_dim)
        self.place = nn.Linear(2, vit.embed_dim)

    def forward(self, x: Tensor, output: bool = False, key: Tensor | None = None) -> Tensor | Output:
        if self.steps == 0:
            return super().forward(x, output, key)
        read = self.read(x, key)
        walk = self._walk(x, read.tape, no_visit)
        features = self.forward_head(self._settle(self._looked_at(walk)), pre_logits=True)
        places, mask = read.places, read.tape.mask
        logits = self.answer.combined(self.classify(features), places.gate, places.evidence, mask)
        return Output(logits, features, walk.ponder, read.tape, None, places) if output else logits

    def walk(self, x: Tensor, visit: Visit, key: Tensor | None) -> Walk:
        return self._walk(x, self.read(x, key).tape if self.steps else None, visit)

    def read(self, x: Tensor, key: Tensor | None = None) -> Read:
        """Scans the image, chooses windows, and encodes them."""
        scanned = self.scan(x)
        columns = scanned.scores.shape[2]
        index, top = self._choose(x, scanned, key)
        mask = (top > -torch.inf) & (top.sigmoid() > self.floor if not self.training else True)
        centres = self.scan.centres(index, columns)
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
        return Read(tape, Places(scores, gate, evidence, scanned.found, scanned.guesses))

    def _choose(self, x: Tensor, scanned: Scanned, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cells and scores; training also reads what it finds without the scan's scores, and random places."""
        if not self.training:
            return highest_apart(scanned.scores, self.steps)
        found = self._found(x, scanned, key)
        wanted = scanned.scores.detach().clamp(-30, 30).flatten(1)
        explored = self._random_cells(scanned.scores, RANDOM, key, 1)
        rank = torch.arange(found.shape[1], 0, -1, device=wanted.device, dtype=wanted.dtype).expand_as(found)
        wanted = wanted.scatter(1, found, 100 + rank).scatter(1, explored, 1000.0)
        return highest_apart(wanted.view_as(scanned.scores), 2 * self.most + RANDOM)

    def _found(self, x: Tensor, scanned: Scanned, key: Tensor | None) -> Tensor:
        """Cells (b, steps) where the mixture of guesses looks, or the best of `search` random windows by their gates."""
        if scanned.found is not None:
            return highest_apart(scanned.found.detach(), self.most)[0]
        cells = self._random_cells(scanned.scores, self.search, key, 2)
        centres = self.scan.centres(cells, scanned.scores.shape[2])
        with torch.no_grad():
            gate, _ = self.head(self.encode(cut_windows(x, centres, self.window).flatten(0, 1)).unflatten(0, cells.shape))
        return cells.gather(1, gate.topk(self.most, 1).indices)

    def _random_cells(self, scores: Tensor, count: int, key: Tensor | None, purpose: int) -> Tensor:
        cells = scores[0].numel()
        if key is None:
            return torch.randint(cells, (scores.shape[0], count), device=scores.device)
        return (uniform(keys_of(EXPLORED + purpose, key), count) * cells).long().clamp(max=cells - 1)

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

    def _walk(self, x: Tensor, tape: Tape | None, visit: Visit) -> Walk:
        tokens = self._view_tokens(x)
        below = len(self.vit.blocks) if tape is None else self.layer
        for n, block in enumerate(self.vit.blocks[:below] if self.view is not None else []):
            tokens = self.run_block(block, tokens)
            visit(n, tokens)
        ponder = tokens.new_zeros(tokens.shape[0], dtype=torch.float32)
        if tape is None or self.layer == len(self.vit.blocks):
            return Walk(tokens, ponder, None, tape)
        inputs = tokens.shape[1]
        rows, visible = append(tokens, tape.tokens, tape.mask)
        for n, block in enumerate(self.vit.blocks[self.layer :], self.layer):
            rows = self.run_block(block, rows, attn_mask=hide_tail(visible))
            visit(n, rows[:, :inputs])
        return Walk(rows, ponder, visible, tape)

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
        shown = self.answer.shown(places.gate, places.evidence, shares).detach()
        each = F.binary_cross_entropy_with_logits(places.scores, shown, reduction="none")
        loss = loss + (each * tape.mask).sum() / tape.mask.sum().clamp(min=1)
        if places.found is None or places.guesses is None:
            return loss
        return loss + self.answer.found(places.found.flatten(1), places.guesses.flatten(1, 2), shares)

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

    def cost(self, tape: int | None = None) -> list[Part]:
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
            Part("view", parameter_count(vit.patch_embed), view * vit.patch_embed.proj.weight.numel()),
            Part("scan", parameter_count(self.scan), scanned),
            Part("windows", parameter_count(*own, *encoder), tape * (self._window_macs() + rows)),
            Part("blocks", parameter_count(vit.blocks, vit.norm), below + above),
            Part("head", parameter_count(vit.head, vit.fc_norm), linear_macs(vit.head)),
        ]

    def _window_macs(self) -> int:
        if self.encoder is not None:
            macs: Callable[[int], int] | None = getattr(self.encoder, "macs", None)
            if macs is None:
                raise NoCostFormula(f"no cost formula for {type(self.encoder).__name__}; give it macs(size)")
            return macs(self.window)
        patches = (self.window // self.vit.patch_embed.patch_size[0]) ** 2
        rows = patches + self.vit.num_prefix_tokens
        blocks = sum(block_macs(block, rows) for block in self.vit.blocks[: self.layer])
        return patches * self.vit.patch_embed.proj.weight.numel() + blocks

    def spent_macs(self, output: Output) -> Tensor:
        if output.tape is None:
            return super().spent_macs(output)
        return macs_by_count(output.tape.length, lambda tape: total(self.cost(tape)).macs)

    def never_halt(self) -> None:
        self.floor = 0.0


def _make_encoder(encoder: EncoderName | nn.Module, vit: VisionTransformer) -> Any:
    if encoder == "vit":
        return None
    return WindowConvolutions(vit.in_chans, vit.embed_dim) if encoder == "convolutions" else encoder


def _check(model: WindowTape, scan: ScanShape) -> None:
    height, width = model.image
    if min(height, width) < model.window:
        raise ValueError(f"window is {model.window}; it must fit the image, {height} × {width}")
    if not 0 < model.layer <= len(model.vit.blocks):
        raise ValueError(f"layer is {model.layer}; windows join before a block index from 1 to {len(model.vit.blocks)}")
    if model.view is None and model.vit.cls_token is None:
        raise ValueError("view is None; the ViT has no class token to gather the tape, so give it a view")
    cells = -(-height // scan.cell) * -(-width // scan.cell)
    if cells < 4 * (2 * model.most + RANDOM):
        raise ValueError(f"steps is {model.most}; {cells} cells of {scan.cell} pixels are too few for it")
