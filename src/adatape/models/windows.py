"""WindowTape: a thin scan of a large image says where to look, and a ViT reads a few windows there at full resolution.

The bank holds a window for every cell of the scan. Keys are the scan's scores, and a token is made only for a window
that is read. Reading takes the highest scores, not two neighbours, and stops below a floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.config import Budget
from adatape.counter_rng import check_keys
from adatape.cuda_graphs import is_compiling_or_capturing
from adatape.losses import LossName, class_loss
from adatape.macs import PartCost, block_macs, embedding_cost, linear_macs, parameter_count, total
from adatape.models.backbone import two_sides
from adatape.models.base import Adaptive, BlocksOutput, BudgetRange, OnBlock, Size, WindowGrid, ignore_block
from adatape.models.tracing import refuse_tracing
from adatape.packing import append_tape
from adatape.ragged_attention import padding_mask
from adatape.reader import as_number, warn_beyond, whole_steps
from adatape.records import Output, Places, Searched, Tape
from adatape.windows.answers import ANSWERS
from adatape.windows.checks import (
    check_batch,
    check_classes,
    check_floor,
    check_listed,
    check_options,
    check_pooling,
    check_size,
    most_apart,
)
from adatape.windows.choice import Chosen, padded_choice, random_cells, training_choice, uniform
from adatape.windows.encoders import WindowHead, window_encoder
from adatape.windows.options import WindowOptions
from adatape.windows.scan import Scan, Scanned, highest_apart, scan_shape
from adatape.windows.sources import Images, OpenedImage, Source, TiledImage
from adatape.windows.teaching import places_losses

Inputs = Tensor | Sequence[Tensor | OpenedImage]


class Read(NamedTuple):
    """The tape, what each of its windows says, and the scan that chose them."""

    tape: Tape
    places: Places


class WindowTape(Adaptive):
    """A ViT that reads windows of a large image; `vit` encodes windows, sees the view, and joins both."""

    adapts: ClassVar[str | None] = "sequence"
    length_name: ClassVar[str] = "windows read"
    stops_below_threshold: ClassVar[bool] = True

    def __init__(
        self,
        vit: VisionTransformer,
        image: tuple[int, int],
        options: WindowOptions | None = None,
        encoder: nn.Module | None = None,  # in place of what `options.encoder` names
    ) -> None:
        super().__init__(vit)
        self.options = options = options or WindowOptions()
        check_options(vit, image, options)
        self.image, self.window, self.most, self.search = image, options.window, options.steps, options.search
        self.steps, self.floor = options.steps, options.floor
        self.view = options.view_size
        self.layer = len(vit.blocks) if options.layer is None else options.layer
        wide = options.window > 2 * options.cell  # a score should see about what its window shows
        shape = scan_shape(options.cell, options.scan_scale, options.scan_fold, options.scan_width, wide)
        if self.view is not None and self.view != tuple(vit.patch_embed.img_size):
            vit.set_input_size(self.view)
        self.answer = ANSWERS[options.labels]
        self.scan = Scan(vit.in_chans, shape, 0 if self.search else vit.num_classes)
        made = options.encoder if encoder is None else encoder
        self.encoder = window_encoder(made, vit.in_chans, vit.embed_dim, options.window)
        width = 2 * vit.embed_dim if self.encoder is None else self.encoder.num_features
        self.head = WindowHead(width, vit.num_classes)
        self.to_token = nn.Linear(width, vit.embed_dim)
        self.place = nn.Linear(2, vit.embed_dim)
        if self.layer == len(vit.blocks):  # no block reads tokens, so nothing teaches what makes them
            self.to_token.requires_grad_(False)
            self.place.requires_grad_(False)

    def forward(self, x: Inputs, output: bool = False, key: Tensor | None = None) -> Tensor | Output:
        """Of images in one tensor, or of a list of images of several sizes: tensors (ch, h, w) and opened images."""
        refuse_tracing(x, adapts=True)
        check_keys(key, x)
        if self.steps == 0:
            return super().forward(x, output, key)  # type: ignore[arg-type]
        sources = self._sources(x)
        read = self.read(sources, key)
        blocks = self._run_blocks(sources, read.tape, ignore_block)
        features = self.forward_head(self._final_norm(self._pooled_rows(blocks)), pre_logits=True)
        places, logits = read.places, self.classify(features)
        if self.num_classes:  # else features, as timm's
            logits = self.answer.combined(logits, places.gate, places.evidence, read.tape.mask)
        return Output(logits, features, blocks.ponder, read.tape, None, places) if output else logits

    def forward_blocks(self, x: Inputs, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:
        sources = self._sources(x)
        return self._run_blocks(sources, self.read(sources, key).tape if self.steps else None, on_block)

    def _sources(self, x: Inputs) -> Sequence[Source]:
        scaled, like = super()._rescaled, self.place.weight
        if isinstance(x, Tensor):
            check_batch(x, self.vit.in_chans, self.options, self._reads())
            return [Images(scaled(x))]
        check_listed(x, self.vit.in_chans, self.options, self._reads())
        return [
            Images(scaled(each[None]), listed=True)
            if isinstance(each, Tensor)
            else TiledImage(each, like.device, self.view, scaled, like.dtype)
            for each in x
        ]

    def _rescaled(self, x: Tensor) -> Tensor:
        """As it is: `_sources` rescales, since tiles of an opened image are not read yet."""
        return x

    def read(self, sources: Sequence[Source], key: Tensor | None = None) -> Read:
        """Chooses windows image by image, and encodes those of all images together."""
        if len(sources) == 1:
            chosen = self._choose_from(sources[0], key)
        else:
            keys = [None] * len(sources) if key is None else key.split(1)
            chosen = padded_choice([self._choose_from(*each) for each in zip(sources, keys, strict=True)])
        index, mask, scores = chosen.index, chosen.mask, chosen.scores
        features = self._encode_visible(chosen.windows.flatten(0, 1), mask.flatten()).unflatten(0, index.shape)
        gate, evidence = self.head(features)
        tokens = self.to_token(features) + self.place(chosen.at.to(features.dtype))
        if self.layer == len(self.vit.blocks):  # no block reads them; DDP waits for gradients of all that outputs have
            tokens = tokens.detach()
        tape = Tape(
            tokens=tokens.masked_fill(~mask[..., None], 0),
            mask=mask,
            index=index.masked_fill(~mask, -1)[..., None],
            weight=scores.detach().sigmoid().masked_fill(~mask, 0)[..., None],
            length=mask.sum(1),
            ponder=scores.new_zeros(scores.shape[0]),
        )
        image = torch.tensor([source.shape[-2:] for source in sources])
        return Read(tape, Places(scores, gate, evidence, image, chosen.found, chosen.guesses, chosen.searched))

    def _choose_from(self, source: Source, key: Tensor | None) -> Chosen:
        """Scans images of one size, and cuts the windows to read."""
        scanned = source.scanned(self.scan)
        searched = self._searched(source, scanned, key) if self.training and self.search else None
        index, top = self._choose(scanned, searched, key)
        mask = (top > -torch.inf) & (top.sigmoid() > self.floor if not self.training else True)
        centres = self._centres(index, source, key)
        windows = source.windows(centres, self.window)
        # Not divided by a tensor of the size: a copy from the host cannot be part of a CUDA graph.
        height, width = source.shape[-2:]
        at = torch.stack([centres[..., 0] / height, centres[..., 1] / width], -1) * 2 - 1
        scores = scanned.scores.flatten(1).gather(1, index)
        return Chosen(index, mask, windows, at, scores, scanned.found, scanned.guesses, searched)

    def _centres(self, index: Tensor, source: Source, key: Tensor | None) -> Tensor:
        """Of the windows of cells; training moves them by up to half a cell where windows are wider than two cells."""
        cell = self.options.cell
        centres = self.scan.centres(index, self.scan.grid(*source.shape[-2:])[1])
        most = min(cell // 2, max(0, (self.window - 2 * cell) // 2))
        if not self.training or most == 0:
            return centres
        moved = uniform(index, 2 * index.shape[1], key, 3).unflatten(1, (-1, 2))
        return centres + (moved * (2 * most + 1)).long() - most

    def _choose(self, scanned: Scanned, searched: Searched | None, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cells and scores."""
        if not self.training:
            return highest_apart(scanned.scores, self.steps)
        return training_choice(scanned, searched, self.options, key)

    def _searched(self, source: Source, scanned: Scanned, key: Tensor | None) -> Searched:
        """Encodes random windows of each image without gradient."""
        index = random_cells(scanned.scores, self.search, key, 2)
        centres = self.scan.centres(index, scanned.scores.shape[2])
        with torch.no_grad():
            features = self.encode(source.windows(centres, self.window).flatten(0, 1))
            gate, evidence = self.head(features.unflatten(0, index.shape))
        return Searched(index, scanned.scores.flatten(1).gather(1, index), gate, evidence)

    def _encode_visible(self, windows: Tensor, mask: Tensor) -> Tensor:
        """In eager inference hidden windows are not encoded, where there may be many; their rows are 0."""
        few = self.floor == 0 and self.steps <= self.most
        if self.training or few or is_compiling_or_capturing():
            return self.encode(windows)
        rows = windows.new_zeros(len(windows), self.to_token.in_features)
        if mask.any():
            rows[mask] = self.encode(windows[mask]).to(rows.dtype)
        return rows

    def encode(self, windows: Tensor) -> Tensor:
        """(n, ch, window, window) -> (n, width)"""
        if self.encoder is not None:
            return self.encoder(windows)
        vit = self.vit
        x = vit.patch_embed.proj(windows)
        grid, prefix = (x.shape[2], x.shape[3]), vit.num_prefix_tokens
        x = vit.patch_embed.norm(x.flatten(2).transpose(1, 2))
        kept = 0 if vit.no_embed_class else prefix
        places: Tensor | int = 0
        if vit.pos_embed is not None:
            places = resample_abs_pos_embed(vit.pos_embed, grid, vit.patch_embed.grid_size, num_prefix_tokens=kept)
        front = [each.expand(x.shape[0], -1, -1) for each in (vit.cls_token, vit.reg_token) if each is not None]
        x = torch.cat([*front, x + places], 1) if vit.no_embed_class else torch.cat([*front, x], 1) + places
        x = vit.norm_pre(x)
        for block in vit.blocks[: self.layer]:
            x = self.run_block(block, x)
        x = vit.norm(x) if self.layer == len(vit.blocks) else x
        rows = x[:, prefix:].mean(1)
        return torch.cat([x[:, 0] if prefix else rows, rows], 1)

    def _run_blocks(self, sources: Sequence[Source], tape: Tape | None, on_block: OnBlock) -> BlocksOutput:
        tokens = self._view_tokens(sources)
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

    def _view_tokens(self, sources: Sequence[Source]) -> Tensor:
        if self.view is not None:
            views = [source.view(self.view) for source in sources]
            return self.embed(views[0] if len(views) == 1 else torch.cat(views))
        vit = self.vit
        token = vit.cls_token if vit.no_embed_class or vit.pos_embed is None else vit.cls_token + vit.pos_embed[:, :1]
        return token.expand(sum(source.shape[0] for source in sources), -1, -1)

    def main_loss(self, output: Output, target: Tensor, kind: LossName) -> Tensor:
        loss, places, tape = class_loss(output.logits, target, kind), output.places, output.tape
        if places is None or tape is None:
            return loss
        return sum(places_losses(self.answer, places, tape.mask, target, kind), loss)

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:
        """Most windows that are read, and the probability below which reading stops; None is as it was built."""
        steps = self.most if steps is None else whole_steps(steps)
        floor = self.options.floor if threshold is None else as_number("threshold", threshold)
        least, most = self.budget_range().least, most_apart(self.image, self.options.cell)
        if not least <= steps <= most:
            raise ValueError(f"steps is {steps}; of images of this size, this model reads {least} to {most} windows")
        check_floor("threshold", floor)
        warn_beyond("steps", steps, self.most, stacklevel=3)
        self.steps, self.floor = steps, floor

    def _reads(self) -> int:
        """Windows that an image must have room for, in training and at the budget."""
        return max(self.steps, self.most)

    def threshold_at(self, steps: int) -> float | None:
        return self.options.floor or None if steps else None

    def budget_range(self) -> BudgetRange:
        """Without a view, nothing is seen of an image at 0 windows, so that a budget begins with one."""
        return BudgetRange(0 if self.view else 1, self.most, None)

    def budget(self) -> Budget:
        return Budget(self.steps, self.floor or None if self.steps else None)

    def cost(self, tape: int | None = None, image: tuple[int, int] | None = None) -> list[PartCost]:
        """As of every model; of an image of another size with `image`, which is scanned in one piece."""
        tape = self.steps if tape is None else tape
        if not 0 <= tape <= self._reads():
            raise ValueError(f"tape is {tape}; it must be between 0 and {self._reads()}, the model's maximum")
        vit, view = self.vit, self.vit.patch_embed.num_patches if self.view is not None else 0
        inputs = self.input_tokens()
        joined = len(vit.blocks) if tape == 0 else self.layer
        below = sum(block_macs(block, inputs) for block in vit.blocks[:joined]) if view else 0
        above = sum(block_macs(block, inputs, tape) for block in vit.blocks[joined:])
        rows = linear_macs(self.head) + linear_macs(self.to_token) + linear_macs(self.place)
        own = [self.head, self.to_token, self.place]
        encoder = [] if self.encoder is None else [self.encoder]
        scanned = self.scan.macs(*(image or self.image)) if tape else 0
        return [
            PartCost("view", embedding_cost(vit).parameters, view * vit.patch_embed.proj.weight.numel()),
            PartCost("scan", parameter_count(self.scan), scanned),
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

    def input_tokens(self) -> int:
        """Those of the view; without one the class token alone."""
        return 1 if self.view is None else super().input_tokens()

    def actual_macs(self, output: Output) -> Tensor:
        if output.tape is None or output.places is None:
            return super().actual_macs(output)
        lengths = output.tape.length.tolist()
        sizes = output.places.image.expand(len(lengths), 2).tolist()
        kinds = [(tape, height, width) for tape, (height, width) in zip(lengths, sizes, strict=True)]
        table = {kind: self._macs_of(*kind) for kind in set(kinds)}
        return torch.tensor([table[kind] for kind in kinds], dtype=torch.int64)

    def _macs_of(self, tape: int, height: int, width: int) -> int:
        """Where no window was worth reading, the image is scanned, and a class token without a view goes on alone."""
        macs = total(self.cost(tape, (height, width))).macs
        if tape == 0:
            macs += self.scan.macs(height, width)
            macs += 0 if self.view else sum(block_macs(block, 1) for block in self.vit.blocks[self.layer :])
        return macs

    def never_halt(self) -> None:
        self.floor = 0.0

    def tape_boxes(self, index: Tensor, image: tuple[int, int]) -> Tensor:
        corners = self.scan.centres(index, self.scan.grid(*image)[1]) - self.window // 2
        return torch.cat([corners, torch.full_like(corners, self.window)], -1)

    @property
    def image_size(self) -> tuple[int, int]:
        return self.image

    def patch_grid(self, x: Inputs) -> tuple[int, int]:  # noqa: ARG002
        if self.view is None:
            raise ValueError("view is None; the ViT sees no patches of the image, so intermediate maps need a view")
        height, width = self.vit.patch_embed.grid_size
        return height, width

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        """Changes the size of images; the view stays as it is."""
        if patch_size is not None:
            raise ValueError(f"patch_size is {patch_size}; windows have the ViT's patches: set it before wrapping")
        height, width = self.image if img_size is None else two_sides("img_size", img_size)
        check_size((height, width), self.options, self._reads())
        self.image = height, width

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        check_classes(num_classes, self.options.labels)
        super().reset_classifier(num_classes, global_pool)
        check_pooling(self.vit, self.view is not None)
        self.head.reset_classes(num_classes)
        self.scan.reset_classes(0 if self.search else num_classes)

    def window_grid(self) -> WindowGrid:
        return WindowGrid(self.window, *self.scan.grid(*self.image))
