"""AdaTape: a ViT that reads a tape after its first block and carries it through the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.ablation import ActReader, make_reader
from adatape.banks import Bank, InputBank, NoBank
from adatape.config import ReaderName, Reading, TapeFFN
from adatape.encoder import TapeBlock, TapeGate, listen, tape_mlp
from adatape.graph import exporting, fixed
from adatape.layout import (
    TapeRows,
    append,
    buckets,
    hide_beyond,
    in_doubt,
    key_bias,
    pack,
    packing,
    tape_rows,
    token_bias,
    unpack,
    weighted_mean,
)
from adatape.models.adaptive import Adaptive, Visit, Walk, no_visit
from adatape.ragged import Packed, hide_tail
from adatape.records import Tape

QueryName = Literal["mean", "token"]
FFN_PLACES: dict[TapeFFN, tuple[str, ...]] = {
    "none": (),
    "append": ("append",),
    "blocks": ("blocks",),
    "append+blocks": ("append", "blocks"),
}


class AdaTape(Adaptive):
    """Wraps a ViT with a bank and a reader; the tape joins before block index `layer`.

    With `leave` it is gone again before that block: the inputs have taken what they need, and go on alone for little.
    From block index `still` on its rows do not change any more, and inputs only look at them, for a sixth of the cost;
    a tape that is not pooled is always still in the last block that it takes part in, where nothing else would be seen.
    With `echo` features have, beside what is pooled, the normalised mean of such a tape's rows, each by its weight: for
    who learns from features. The model's own head does not see it, so it is trained the same with and without.

    `tape_ffn` says where tape tokens take a feed-forward of their own: once when appended (the paper's ImageNet
    models), in each block that follows, in both (its JFT models), or nowhere. `query` is the mean of the tokens or
    the class token; by default it is what the ViT pools. `reader` names an ablation of the reader. With `gate` the
    model starts as the ViT, whatever its budget: heads open to the tape as they learn to, and no tape row is pooled.

    A model that `doubts` guesses the answer before it reads, and of the tape that its reader offers takes as large a
    share as the guess leaves open, to the power of `haste`. The guess is learnt from the tokens as they are: no block
    is bent towards it, and it takes a loss on `Output.guess` as well (`train.loop.total_loss`). In training tapes are
    cut at random instead (`sample_budgets`).
    """

    def __init__(
        self,
        vit: VisionTransformer,
        bank: Bank,
        reading: Reading | None = None,
        *,
        reader: ReaderName = "adaptive",
        layer: int = 1,
        leave: int | None = None,
        still: int | None = None,
        tape_ffn: TapeFFN = "append",
        query: QueryName | None = None,
        gate: bool = False,
        echo: bool = False,
        doubts: bool = False,
        haste: float = 1.0,
    ) -> None:
        super().__init__(vit)
        reading = reading or Reading()
        if doubts and not reading.sample_budgets:
            raise ValueError("doubts is True and sample_budgets False; a model must be trained at all lengths to doubt")
        query = query or ("token" if vit.global_pool == "token" else "mean")
        leave = len(vit.blocks) if leave is None else leave
        _check_placement(vit, layer, leave, still, tape_ffn, query)
        self.layer, self.leave, self.tape_ffn, self.query = layer, leave, tape_ffn, query
        self.bank = NoBank() if reader == "fixed" else bank
        self.reader = make_reader(reader, vit.embed_dim, reading, bank.size)
        if self._scales_after_norm() and "blocks" not in tape_ffn:
            raise ValueError(f"reader is {reader!r}; it scales inside TapeBlocks, so tape_ffn must have blocks")
        self.append_mlp = (
            tape_mlp(vit.embed_dim, _hidden_width(vit)) if "append" in FFN_PLACES[tape_ffn] else nn.Identity()
        )
        self.gate = TapeGate(leave - layer, _heads(vit)) if gate else None
        if still is not None and self._scales_after_norm():
            raise ValueError(f"still is {still}; {reader!r} scales tape rows inside blocks, so leave it out")
        self.pooled = not (gate or self.reader.gates or leave < len(vit.blocks) or still is not None)
        if echo and self.pooled:
            raise ValueError(
                "echo is True; the tape goes to the end with the inputs, so give still, leave, gate or a gating reader"
            )
        self.echo = echo
        # In the last block that it takes part in a tape has only to be seen. An ablation's weights scale rows inside
        # blocks, which then have to compute all of them.
        whole = self.pooled or self._scales_after_norm()
        self.still = leave if whole else leave - 1 if still is None else still
        for block in vit.blocks[self.still :]:
            if isinstance(block, TapeBlock):
                block.tape_mlp = nn.Identity()  # no tape comes by to be fed
        self.listen: Callable[..., Tensor] = listen
        self.guess = _guessing(vit) if doubts and vit.num_classes > 0 else None
        self.packed, self.buckets, self.built_with_haste = False, 0, haste
        self.set_haste()

    def compile_blocks(self, **options: Any) -> None:
        super().compile_blocks(**options)
        self.listen = torch.compile(listen, **options)

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:
        """Turns the cost up or down, at any time: steps=0 is the plain ViT, bit for bit; no argument resets."""
        self.reader.set_budget(steps, threshold)

    @property
    def doubts(self) -> bool:
        return self.guess is not None

    def set_haste(self, haste: float | None = None) -> None:
        """The power of the share that a guess leaves open: 0 reads all, more reads less; no argument resets."""
        haste = self.built_with_haste if haste is None else haste
        if not haste >= 0:
            raise ValueError(f"haste is {haste}; it must be 0 (read all) or more")
        self.haste = haste

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        if self.guess is not None and num_classes > 0:  # features alone are read for as they were before
            self.guess = _guessing(self.vit).to(next(self.guess.parameters()))

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        super().set_input_size(img_size)
        if isinstance(self.bank, InputBank):
            self.bank.set_input_size(img_size)

    def set_packed(self, packed: bool = True, buckets: int = 0) -> None:
        """Whether inference leaves hidden rows out of the blocks instead of masking them; the results are the same.

        Packed, all tokens of a batch lie in one row. With `buckets`, samples share that many padded batches by their
        length, as suits a CPU. Shapes then follow the data: blocks may be compiled with dynamic=True, but a model that
        is compiled as a whole stays padded, as do training and gates.
        """
        self.packed, self.buckets = packed or buckets > 0, buckets

    def walk(self, x: Tensor, visit: Visit, key: Tensor | None) -> Walk:
        tokens, depth = self.embed(x), len(self.vit.blocks)
        below = min(self.layer, depth) if self.reader.steps > 0 else depth
        tokens = self._alone(tokens, range(below), visit)
        if below == depth:
            ponder = tokens.new_zeros(tokens.shape[0], dtype=torch.float32)
            if self.echo:
                tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], 1)
            return Walk(tokens, ponder)
        guess = None if self.guess is None else self.guess(self._query(tokens).detach())
        tape = self.reader(self._query(tokens), self.bank.open(x), key)
        if guess is not None and not self.training:
            least = self.reader.reading.least
            tape = hide_beyond(tape, in_doubt(guess, self.reader.steps, self.haste, least))
        joined, visible = append(tokens, self.append_mlp(tape.tokens), tape.mask)
        masks = self._masks(joined.dtype, visible, tape)
        joined = self._carry(joined, masks[: self.still - self.layer], tape, visible, visit)
        if self.pooled:
            return Walk(joined, tape.ponder, None if self._hides_nothing() else visible, tape, guess=guess)
        tokens = self._look_on(joined, tokens.shape[1], masks[self.still - self.layer :], visit)
        tokens = self._alone(tokens, range(self.leave, depth), visit)
        if self.echo:
            tokens = torch.cat([tokens, weighted_mean(joined[:, tokens.shape[1] :], tape.weight)], 1)
        return Walk(tokens, tape.ponder, None, tape, guess=guess)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """An echo is the last row of `forward_features`, and the second half of what is pooled."""
        if not (self.echo and self.vit.global_pool):
            return super().forward_head(x, pre_logits)
        pooled = super().forward_head(x[:, :-1], pre_logits=True)
        features = torch.cat([pooled, x[:, -1]], 1)
        return features if pre_logits else self.classify(features)

    def classify(self, features: Tensor) -> Tensor:
        if not (self.echo and self.vit.global_pool and self.num_classes):
            return super().classify(features)
        return super().classify(features.chunk(2, 1)[0])

    def _looked_at(self, walk: Walk) -> Walk:
        if not (self.echo and self.vit.global_pool == "token"):
            return super()._looked_at(walk)
        return Walk(torch.cat([walk.tokens[:, :1], walk.tokens[:, -1:]], 1), walk.ponder)

    def _settle(self, walk: Walk) -> Tensor:
        """An echo has its own norm, without scale and shift, so that silence stays silence."""
        if not self.echo:
            return super()._settle(walk)
        inputs, echo = walk.tokens[:, :-1], walk.tokens[:, -1:]
        return torch.cat([super()._settle(Walk(inputs, walk.ponder)), F.layer_norm(echo, echo.shape[-1:])], 1)

    @property
    def head_hidden_size(self) -> int:
        return super().head_hidden_size * (2 if self.echo and self.vit.global_pool else 1)

    def _look_on(self, joined: Tensor, inputs: int, masks: list[Any], visit: Visit) -> Tensor:
        """Inputs through the blocks in which the tape is still."""
        tokens, tape = joined[:, :inputs], joined[:, inputs:]
        for layer, mask in enumerate(masks, self.still):
            tokens = self.run_block(partial(self.listen, self.vit.blocks[layer]), tokens, tape=tape, attn_mask=mask)
            visit(layer, tokens)
        return tokens

    def _alone(self, tokens: Tensor, layers: Iterable[int], visit: Visit) -> Tensor:
        """Inputs through blocks in which they have no company."""
        for layer in layers:
            tokens = self.run_block(self.vit.blocks[layer], tokens)
            visit(layer, tokens)
        return tokens

    def _carry(self, tokens: Tensor, masks: list[Any], tape: Tape, visible: Tensor, visit: Visit) -> Tensor:
        """Inputs and tape through the blocks they share; what becomes of hidden rows depends on their layout."""
        length, scale = tape.mask.shape[1], self._scale(tape, tokens.shape[1])
        padded = self._biased() or self.training or self._hides_nothing() or fixed() or not self.packed
        if padded or not masks:
            return self._padded(tokens, masks, length, scale, visit)
        if self.buckets and visit is no_visit:
            return self._bucketed(tokens, visible, length, scale)
        return self._packed(tokens, visible, length, scale, visit)

    def _biased(self) -> bool:
        """Whether gates say how far attention looks at the tape."""
        return self.gate is not None or self.reader.gates

    def _masks(self, dtype: torch.dtype, visible: Tensor, tape: Tape) -> list[Any]:
        """One for each block in which the tape is seen: of the heads' gates, of the tokens' gates, or of both."""
        count = self.leave - self.layer
        if not self._biased():
            return [None if self._hides_nothing() else hide_tail(visible)] * count
        biases = [visible.new_zeros((), dtype=dtype)] * count
        if self.gate is not None:
            biases = [key_bias(visible, gate, tape.mask.shape[1]) for gate in self.gate().to(dtype)]
        if self.reader.gates:
            own = token_bias(visible, tape.weight.squeeze(-1)).to(dtype)
            biases = [bias + own for bias in biases]
        return biases

    def _padded(self, tokens: Tensor, masks: list[Any], tape: int, scale: Tensor | None, visit: Visit) -> Tensor:
        inputs = tokens.shape[1] - tape
        return self._climb(tokens, masks, tape, scale, lambda layer, x: visit(layer, x[:, :inputs]))

    def _bucketed(self, tokens: Tensor, visible: Tensor, tape: int, scale: Tensor | None) -> Tensor:
        inputs, out = tokens.shape[1] - tape, torch.zeros_like(tokens)
        for rows, shortest, longest in buckets(visible.sum(1), self.buckets):
            seen = (rows, slice(longest))
            mask = None if shortest == longest else hide_tail(visible[seen])
            own = None if scale is None else scale[seen]
            out[seen] = self._climb(tokens[seen], [mask] * self._shared, longest - inputs, own, no_visit).to(out.dtype)
        return out

    def _packed(self, tokens: Tensor, visible: Tensor, tape: int, scale: Tensor | None, visit: Visit) -> Tensor:
        shape, inputs, held = (visible.shape[0], visible.shape[1]), tokens.shape[1] - tape, packing(visible)
        mask = None if held.even else Packed(held)
        parted = visit is not no_visit or any(isinstance(block, TapeBlock) for block in self.vit.blocks)
        rows = tape_rows(held, shape, inputs) if parted else None

        def look(layer: int, x: Tensor) -> None:
            if rows is not None and visit is not no_visit:
                visit(layer, x.flatten(0, 1).index_select(0, rows.inputs).unflatten(0, (shape[0], inputs)))

        own = None if scale is None else pack(scale, held)
        return unpack(self._climb(pack(tokens, held), [mask] * self._shared, rows, own, look), held, shape)

    def _climb(
        self, x: Tensor, masks: Iterable[Any], tape: int | TapeRows | None, scale: Tensor | None, visit: Visit
    ) -> Tensor:
        """The blocks from `layer` until the tape is still, each with its attention mask."""
        for layer, mask in enumerate(masks, self.layer):
            block = self.vit.blocks[layer]
            arguments = {"tape": tape} if isinstance(block, TapeBlock) else {}
            x = self.run_block(block, x, attn_mask=mask, **arguments, **({} if scale is None else {"scale": scale}))
            visit(layer, x)
        return x

    @property
    def _shared(self) -> int:
        return self.still - self.layer

    def _hides_nothing(self) -> bool:
        """Whether every tape is as long as any, whatever was read; a graph to be exported cuts tapes by itself."""
        return self.reader.always_full and not self.doubts and not exporting()

    def _scale(self, tape: Tape, rows: int) -> Tensor | None:
        """For the one ablation that scales inside blocks: 1 for inputs, what a token weighs for the tape."""
        if not self._scales_after_norm():
            return None
        weight = tape.weight.sum(-1)
        return torch.cat([weight.new_ones(weight.shape[0], rows - weight.shape[1]), weight], 1)

    def _scales_after_norm(self) -> bool:
        return isinstance(self.reader, ActReader) and self.reader.after_norm

    def _query(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self.query == "token" else tokens.mean(1)

    def no_weight_decay(self) -> set[str]:
        places = {"bank.pos_embed"} if isinstance(self.bank, InputBank) else set()
        gates = set() if self.gate is None else {"gate.open"}
        return super().no_weight_decay() | places | gates


def _guessing(vit: VisionTransformer) -> nn.Sequential:
    """A norm and a head for tokens that have passed only a few blocks; it begins by knowing nothing."""
    head = nn.Linear(vit.embed_dim, vit.num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.LayerNorm(vit.embed_dim, eps=1e-6), head)


def _hidden_width(vit: VisionTransformer) -> int:
    """The width inside the ViT's own feed-forward, gated or not; four times its own where a block has none apart."""
    last = getattr(getattr(vit.blocks[0], "mlp", None), "fc2", None)
    return last.in_features if isinstance(last, nn.Linear) else 4 * vit.embed_dim


def _heads(vit: VisionTransformer) -> int:
    """Heads of the ViT's attention, wherever its kind of block keeps them."""
    return next(module.num_heads for module in vit.blocks.modules() if hasattr(module, "num_heads"))


def _check_placement(
    vit: VisionTransformer, layer: int, leave: int, still: int | None, tape_ffn: str, query: str
) -> None:
    if not 0 <= layer < len(vit.blocks):
        raise ValueError(f"layer is {layer}; the tape joins before a block index from 0 to {len(vit.blocks) - 1}")
    if not layer < leave <= len(vit.blocks):
        raise ValueError(f"leave is {leave}; the tape joins before block {layer}, so {layer + 1} to {len(vit.blocks)}")
    if still is not None and not layer <= still < leave:
        raise ValueError(f"still is {still}; the tape is seen in blocks {layer} to {leave - 1}, so one of these")
    if tape_ffn not in FFN_PLACES:
        raise ValueError(f"tape_ffn is {tape_ffn!r}; it must be one of {', '.join(FFN_PLACES)}")
    if query not in ("mean", "token"):
        raise ValueError(f"query is {query!r}; it must be mean or token")
    if query == "token" and vit.cls_token is None:
        raise ValueError("query is 'token'; the ViT has no class token, so use 'mean'")
    has_tape_blocks = all(isinstance(block, TapeBlock) for block in vit.blocks[layer:leave])
    if "blocks" in tape_ffn and not has_tape_blocks:
        raise ValueError(
            f"tape_ffn is {tape_ffn!r}; the ViT's blocks have no tape feed-forward: "
            f"build it with block_fn=TapeBlocksFrom({layer})"
        )
