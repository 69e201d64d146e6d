"""AdaTape: after its first block a ViT reads a tape from a bank, appends it, and runs the other blocks on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.ablation import FixedTokens, make_reader
from adatape.banks import Bank, NoBank
from adatape.config import Budget, ReaderName, Reading
from adatape.encoder import TapeBlock, TapeGate, tape_mlp
from adatape.graph import exporting, fixed
from adatape.layout import TapeRows, append, key_bias
from adatape.macs import Part, block_macs, embedding_cost, head_cost, input_tokens, linear_macs, parameter_count, total
from adatape.models.adaptive import Adaptive, BudgetRange, Visit, Walk, macs_by_count, no_visit
from adatape.models.execution import Joined, run_buckets, run_packed, run_padded
from adatape.models.join import TapeJoin, check_join, head_count, hidden_width
from adatape.ragged import hide_tail
from adatape.reader import TapeReader
from adatape.records import Output, Tape


class AdaTape(Adaptive):
    """A ViT with a bank and a reader; `reader` names the paper's reader or an ablation of it."""

    adapts: ClassVar[str | None] = "sequence"
    length_name: ClassVar[str] = "tape length"

    def __init__(
        self,
        vit: VisionTransformer,
        bank: Bank,
        reading: Reading | None = None,
        join: TapeJoin | None = None,
        *,
        reader: ReaderName = "adaptive",
    ) -> None:
        super().__init__(vit)
        self.join = join = join or TapeJoin()
        self.query = join.query or ("token" if vit.global_pool == "token" else "mean")
        check_join(vit, join, self.query)
        self.bank = NoBank() if reader == "fixed" else bank
        self.reader = make_reader(reader, vit.embed_dim, reading or Reading(), bank.size)
        if self.reader.scales_rows and "blocks" not in join.tape_ffn:
            raise ValueError(f"reader is {reader!r}; it scales rows in TapeBlocks, so tape_ffn must include 'blocks'")
        feeds = "append" in join.tape_ffn
        self.append_mlp = tape_mlp(vit.embed_dim, hidden_width(vit)) if feeds else nn.Identity()
        self.gate = TapeGate(len(vit.blocks) - join.layer, head_count(vit)) if join.gate else None
        self.pooled = not join.gate
        if not self.pooled and isinstance(vit.blocks[-1], TapeBlock):
            vit.blocks[-1].tape_mlp = nn.Identity()  # tape rows are not used after the last block
        self.packed, self.buckets = False, 0

    def walk(self, x: Tensor, visit: Visit, key: Tensor | None) -> Walk:
        tokens, depth = self.embed(x), len(self.vit.blocks)
        below = min(self.join.layer, depth) if self.reader.steps > 0 else depth
        for layer in range(below):
            tokens = self.run_block(self.vit.blocks[layer], tokens)
            visit(layer, tokens)
        if below == depth:
            return Walk(tokens, ponder=tokens.new_zeros(tokens.shape[0], dtype=torch.float32))
        query = tokens[:, 0] if self.query == "token" else tokens.mean(1)
        tape = self.reader(query, self.bank.open(x), key)
        rows, visible = append(tokens, self.append_mlp(tape.tokens), tape.mask)
        joined = Joined(rows, visible, tape.mask.shape[1], self.reader.row_scale(tape, tokens.shape[1]))
        rows = self._run_shared_blocks(joined, tape, visit)
        if not self.pooled:
            return Walk(rows[:, : tokens.shape[1]], tape.ponder, None, tape)
        return Walk(rows, tape.ponder, None if self._hides_nothing() else visible, tape)

    def _run_shared_blocks(self, joined: Joined, tape: Tape, visit: Visit) -> Tensor:
        """Runs input and tape rows through the blocks from `layer` on, padded, packed or in buckets."""
        first = self.join.layer
        shifted: Visit = visit if visit is no_visit else lambda n, tokens: visit(first + n, tokens)
        masks = self.attention_masks(joined, tape)
        leaves_out = self.packed and not (self.training or self._weighs_keys() or self._hides_nothing() or fixed())
        if not leaves_out:
            return run_padded(self._step, joined, masks, shifted)
        if self.buckets and visit is no_visit:
            return run_buckets(self._step, joined, len(masks), self.buckets)
        return run_packed(self._step, joined, len(masks), shifted)

    def _step(self, n: int, x: Tensor, mask: Any, tape: int | TapeRows, scale: Tensor | None) -> Tensor:
        block = self.vit.blocks[self.join.layer + n]
        arguments = {"tape": tape} if isinstance(block, TapeBlock) else {}
        return self.run_block(block, x, attn_mask=mask, **arguments, **({} if scale is None else {"scale": scale}))

    def attention_masks(self, joined: Joined, tape: Tape) -> Sequence[Any]:
        """One `attn_mask` per block from `layer` on: a mask of hidden rows, or a bias with each head's log-gate."""
        if self.gate is not None:
            gates = self.gate().to(joined.rows.dtype)
            return [key_bias(joined.visible, gate, tape.mask.shape[1]) for gate in gates]
        mask = None if self._hides_nothing() else hide_tail(joined.visible)
        return [mask] * (len(self.vit.blocks) - self.join.layer)

    def _weighs_keys(self) -> bool:
        """Whether attention masks are float biases, which packed rows do not support."""
        return self.gate is not None

    def _hides_nothing(self) -> bool:
        """Whether all tapes have full length, so that no mask is needed; an exported graph cuts tapes later."""
        return self.reader.always_full and not exporting()

    def set_packed(self, packed: bool = True, buckets: int = 0) -> None:
        """Sets whether inference drops hidden rows before the blocks instead of masking them; results are the same.

        Packing concatenates the visible tokens of a batch into one row. With `buckets`, samples are sorted by length
        into that many padded batches, which is faster on a CPU. Shapes then depend on the data: blocks may be compiled
        with dynamic=True; a model compiled as a whole, training and gated tapes stay padded.
        """
        self.packed, self.buckets = packed or buckets > 0, buckets

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:
        """Sets the budget of later calls: steps=0 is the plain ViT, bit for bit; without arguments, as built."""
        self.reader.set_budget(steps, threshold)

    def budget_range(self) -> BudgetRange:
        reading = self.reader.reading
        return BudgetRange(0, reading.steps, reading.threshold if self.reader.halts else None)

    def budget(self) -> Budget:
        reader = self.reader
        threshold = float(reader.threshold) if isinstance(reader, TapeReader) and reader.halts else None
        return Budget(reader.steps, threshold or None)  # without steps there is none to set

    def cost(self, tape: int | None = None) -> list[Part]:
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
            Part("bank", parameter_count(self.bank), self.bank.token_macs() if tape else 0),
            Part("reader", parameter_count(reader), reader.macs(self.bank.size, tape)),
            Part("blocks", parameter_count(vit.blocks, vit.norm, *gate) - parameter_count(*in_blocks), blocks),
            Part("tape feed-forwards", parameter_count(*own), tape * sum(linear_macs(ffn) for ffn in own)),
            head_cost(vit),
        ]

    def spent_macs(self, output: Output) -> Tensor:
        if output.tape is None:
            return super().spent_macs(output)
        return macs_by_count(output.tape.length, lambda tape: total(self.cost(tape)).macs)

    def never_halt(self) -> None:
        self.reader.never_halt()

    def tape_bank(self) -> Bank:
        return self.bank

    def tape_reader(self) -> TapeReader | FixedTokens:
        return self.reader

    def export_refusal(self) -> str | None:
        return self.reader.export_refusal()

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        super().set_input_size(img_size)
        self.bank.set_input_size(img_size)

    def no_weight_decay(self) -> set[str]:
        gates = set() if self.gate is None else {"gate.open"}
        return super().no_weight_decay() | gates | {f"bank.{name}" for name in self.bank.no_weight_decay()}
