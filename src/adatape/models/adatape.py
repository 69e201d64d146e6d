"""AdaTape: after its first block a ViT reads a tape from a bank, appends it, and runs the other blocks on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adatape.ablation import FixedTokens, make_reader
from adatape.banks import Bank, NoBank
from adatape.config import Budget, ReaderConfig, ReaderName
from adatape.cuda_graphs import is_exporting, may_look_at
from adatape.encoder import TapeBlock, TapeGate, tape_mlp
from adatape.macs import (
    PartCost,
    block_macs,
    embedding_cost,
    head_cost,
    input_tokens,
    linear_macs,
    parameter_count,
    total,
)
from adatape.models.adapters import warn_of_adapters
from adatape.models.backbone import ViT, two_sides
from adatape.models.base import Adaptive, BlocksOutput, BudgetRange, OnBlock, Size, ignore_block, macs_by_count
from adatape.models.execution import BlocksInput, bucket_count, run_buckets, run_packed, run_padded
from adatape.models.join import TapeJoin, check_join, head_count, hidden_width
from adatape.models.rope import row_rope
from adatape.packing import TapeRows, append_tape, packs, pad_rows, without_hidden_steps
from adatape.ragged_attention import PaddingMask, gate_bias, padding_mask
from adatape.reader import TapeReader
from adatape.records import Output, Tape


class AdaTape(Adaptive):
    """A ViT with a bank and a reader; `reader` names the paper's reader or an ablation of it."""

    any_backbone: ClassVar[bool] = True
    adapts: ClassVar[str | None] = "sequence"
    length_name: ClassVar[str] = "tape length"

    def __init__(
        self,
        vit: ViT,
        bank: Bank,
        reading: ReaderConfig | None = None,
        join: TapeJoin | None = None,
        *,
        reader: ReaderName = "adaptive",
    ) -> None:
        super().__init__(vit)
        self.join = join = join or TapeJoin()
        self.query = join.query or ("token" if vit.global_pool == "token" else "mean")
        check_join(vit, join, self.query)
        self.bank = NoBank() if reader == "fixed" else bank
        self.reader = make_reader(reader, vit.embed_dim, reading or ReaderConfig(), bank.size)
        self.bank.check(vit.embed_dim, self.reader)
        if self.reader.scales_rows and "blocks" not in join.tape_ffn:
            raise ValueError(f"reader is {reader!r}; it scales rows in TapeBlocks, so tape_ffn must include 'blocks'")
        feeds = "append" in join.tape_ffn
        self.append_mlp = tape_mlp(vit.embed_dim, hidden_width(vit)) if feeds else nn.Identity()
        self.gate = TapeGate(len(vit.blocks) - join.layer, head_count(vit)) if join.gate else None
        self.pooled = not join.gate
        if not self.pooled and isinstance(vit.blocks[-1], TapeBlock):
            vit.blocks[-1].tape_mlp = nn.Identity()  # tape rows are not used after the last block
        self.set_packed(None)

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:
        (tokens, rope), depth = self.embed_with_rope(x), len(self.vit.blocks)
        below = min(self.join.layer, depth) if self.reader.steps > 0 else depth
        tokens = self.run_plain_blocks(tokens, rope, below, on_block)
        if below == depth:
            return BlocksOutput(tokens, ponder=tokens.new_zeros(tokens.shape[0], dtype=torch.float32))
        query = tokens[:, 0] if self.query == "token" else tokens.mean(1)
        tape = self.reader(query, self.bank.open(x, tokens, query), key)
        read = tape if self.training else without_hidden_steps(tape)
        rows, visible = append_tape(tokens, self.append_mlp(read.tokens), read.mask)
        scale = self.reader.row_scale(read, tokens.shape[1])
        rotated = row_rope(rope, read, self.bank, self.vit.num_prefix_tokens)
        blocks_input = BlocksInput(rows, visible, read.mask.shape[1], scale, rotated)
        rows = self._run_tape_blocks(blocks_input, read, on_block)
        if not self.pooled:
            return BlocksOutput(rows[:, : tokens.shape[1]], tape.ponder, None, tape)
        rows, visible = pad_rows(rows, visible, tape.mask.shape[1] - read.mask.shape[1])
        return BlocksOutput(rows, tape.ponder, None if self._all_visible(visible) else visible, tape)

    def _run_tape_blocks(self, blocks_input: BlocksInput, tape: Tape, on_block: OnBlock) -> Tensor:
        """Runs input and tape rows through the blocks from `layer` on, padded, packed or in buckets."""
        first = self.join.layer
        shifted: OnBlock = on_block if on_block is ignore_block else lambda n, tokens: on_block(first + n, tokens)
        masks = self.attention_masks(blocks_input, tape)
        ragged = isinstance(masks[0], PaddingMask)  # no bias, and a row may be hidden
        if not ragged or self.training or not packs(self.packed, blocks_input.rows, self.vit.blocks):
            return run_padded(self._step, blocks_input, masks, shifted)
        if self.buckets and on_block is ignore_block:
            return run_buckets(self._step, blocks_input, len(masks), self.buckets)
        return run_packed(self._step, blocks_input, len(masks), shifted)

    def _step(self, n: int, x: Tensor, mask: Any, tape: int | TapeRows, scale: Any, rope: Any) -> Tensor:
        layer = self.join.layer + n
        block, rotated = self.vit.blocks[layer], None if rope is None else rope.at(layer)
        rows = tape if isinstance(block, TapeBlock) else None
        return self.run_block(block, x, attn_mask=mask, tape=rows, scale=scale, rope=rotated)

    def attention_masks(self, blocks_input: BlocksInput, tape: Tape) -> Sequence[Any]:  # noqa: ARG002
        """One `attn_mask` per block from `layer` on: a mask of hidden rows, or a bias with each head's log-gate."""
        if self.gate is not None:
            return [gate_bias(*blocks_input[:3], gate) for gate in self.gate()]
        mask = None if self._all_visible(blocks_input.visible) else padding_mask(blocks_input.visible)
        return [mask] * (len(self.vit.blocks) - self.join.layer)

    def _all_visible(self, visible: Tensor) -> bool:
        """Whether no row is hidden, so that no mask is needed; an exported graph cuts tapes later."""
        if may_look_at(visible) and not self.training:
            return bool(visible.all())
        return self.reader.always_full and not is_exporting()

    def set_packed(self, packed: bool | None = True, buckets: int = 0) -> None:
        """Sets whether inference drops hidden rows before the blocks instead of masking them; results are the same.

        Packing concatenates the visible tokens of a batch into one row; `buckets` pads samples of like length together.
        Shapes then depend on the data: blocks may be compiled with dynamic=True; models compiled as a whole, training
        and gated tapes stay padded. None, as built, packs large samples in eager inference on a CPU without hooks.
        """
        self.packed, self.buckets = packed if buckets == 0 else True, bucket_count(buckets)

    def train(self, mode: bool = True) -> AdaTape:
        if mode:
            warn_of_adapters(self, self.gate)
        return super().train(mode)

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:
        """Sets the budget of later calls: steps=0 is the plain ViT, bit for bit; without arguments, as built."""
        self.reader.set_budget(steps, threshold, self.bank.size)

    def budget_range(self) -> BudgetRange:
        reading = self.reader.reading
        return BudgetRange(0, reading.steps, reading.threshold if self.reader.halts else None)

    def budget(self) -> Budget:
        reader = self.reader
        threshold = float(reader.threshold) if isinstance(reader, TapeReader) and reader.halts else None
        return Budget(reader.steps, threshold or None)  # without steps there is none to set

    def cost(self, tape: int | None = None) -> list[PartCost]:
        vit, reader, inputs = self.vit, self.reader, input_tokens(self.vit)
        most = max(reader.steps, reader.reading.steps)
        tape = reader.steps if tape is None else tape
        if not 0 <= tape <= most:
            raise ValueError(f"tape is {tape}; it must be between 0 and {most}, the model's maximum")
        layers = enumerate(vit.blocks)
        blocks = sum(block_macs(block, inputs, tape if layer >= self.join.layer else 0) for layer, block in layers)
        in_blocks = [block.tape_mlp for block in vit.blocks if isinstance(block, TapeBlock)]
        own, gate = [self.append_mlp, *in_blocks], [] if self.gate is None else [self.gate]
        return [
            embedding_cost(vit),
            PartCost("bank", parameter_count(self.bank), self.bank.token_macs() if tape else 0),
            PartCost("reader", parameter_count(reader), reader.macs(self.bank.scored_tokens(), tape)),
            PartCost("blocks", parameter_count(vit.blocks, vit.norm, *gate) - parameter_count(*in_blocks), blocks),
            PartCost("tape feed-forwards", parameter_count(*own), tape * sum(linear_macs(ffn) for ffn in own)),
            head_cost(vit),
        ]

    def actual_macs(self, output: Output) -> Tensor:
        if output.tape is None:
            return super().actual_macs(output)
        return macs_by_count(output.tape.length, lambda tape: total(self.cost(tape)).macs)

    def never_halt(self) -> None:
        self.reader.never_halt()

    def tape_bank(self) -> Bank:
        return self.bank

    def tape_reader(self) -> TapeReader | FixedTokens:
        return self.reader

    def export_refusal(self) -> str | None:
        return self.bank.export_refusal() or self.reader.export_refusal()

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        """As timm's ViT; the bank follows the image's size, and keeps its own patches."""
        image = self.image_size if img_size is None else two_sides("img_size", img_size)
        self.reader.check_bank(self.bank.size_at(image))
        super().set_input_size(image, patch_size)
        self.bank.set_input_size(image)

    def prune_intermediate_layers(self, indices: Any = 1, prune_norm: bool = False, prune_head: bool = True) -> Any:
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if self.gate is not None:
            self.gate.keep(max(0, len(self.vit.blocks) - self.join.layer))
        return taken

    def no_weight_decay(self) -> set[str]:
        gates = set() if self.gate is None else {"gate.open"}
        return super().no_weight_decay() | gates | {f"bank.{name}" for name in self.bank.no_weight_decay()}
