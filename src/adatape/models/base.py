"""Adaptive, the base class of all models: holds a timm ViT under the prefix `vit.` and offers timm's model API.

A method implements `forward_blocks` and overrides budget, cost and loss where they differ from a plain ViT's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from timm.layers import Format
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from adatape.ablation import FixedTokens
from adatape.banks import Bank
from adatape.config import Budget
from adatape.counter_rng import check_keys
from adatape.losses import LossName, class_loss
from adatape.macs import PartCost, input_tokens, total, vit_cost
from adatape.models.backbone import ViT, check_backbone, embed, pooled_prefix, two_sides
from adatape.models.prefix import wrapped_settings
from adatape.models.rescale import Rescale
from adatape.models.rope import GridRope
from adatape.models.tracing import refuse_tracing
from adatape.packing import fill_hidden
from adatape.reader import TapeReader
from adatape.records import Output, Steps, Tape


class BlocksOutput(NamedTuple):
    """The result of `Adaptive.forward_blocks`."""

    tokens: Tensor  # (b, m, d), before the final norm
    ponder: Tensor  # (b,)
    visible: Tensor | None = None  # (b, m) bool; None if all rows are visible
    tape: Tape | None = None
    steps: Steps | None = None


class BudgetRange(NamedTuple):
    """The values that `set_budget` accepts."""

    least: int  # steps: tape tokens, or repetitions of a block
    most: int
    threshold: float | None  # at `most` steps; None where the threshold cannot be set


class WindowGrid(NamedTuple):
    """Windows of an image that a model can read, numbered row by row."""

    window: int  # side in pixels
    rows: int
    columns: int


OnBlock = Callable[[int, Tensor], None]
Size = int | tuple[int, int]  # of a square, or height and width


def ignore_block(layer: int, tokens: Tensor) -> None:
    """The `on_block` of a plain forward: does nothing."""


def _of_vit(name: str) -> Any:
    return property(lambda self: getattr(self.vit, name))


class Adaptive(nn.Module, ABC):
    """A timm model that wraps a ViT as `vit`; the ViT's state-dict keys are timm's under that prefix."""

    any_backbone: ClassVar[bool] = False  # whether it also takes Eva, distilled ViTs and attention pooling
    adapts: ClassVar[str | None] = None  # what adapts to each sample: sequence, depth or tokens
    length_name: ClassVar[str] = "steps taken"  # what `length_taken` counts
    stops_below_threshold: ClassVar[bool] = False  # whether reading ends at the first weight below the threshold
    no_budget: ClassVar[str] = "every sample costs the same"  # reason given where no budget can be set

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        check_backbone(vit, any_backbone=self.any_backbone)
        self.vit = vit
        self.rescale: Rescale | None = None  # where images are to be scaled otherwise than they are given

    @abstractmethod
    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:
        """Runs embedding and blocks; calls `on_block` with the input tokens after each block."""

    def forward(self, x: Tensor, output: bool = False, key: Tensor | None = None) -> Tensor | Output:
        refuse_tracing(x, self.adapts is not None)
        check_keys(key, x)
        result = self.forward_blocks(self._rescaled(x), ignore_block, key)
        rows = self._final_norm(self._pooled_rows(result))
        features = self.forward_head(rows, pre_logits=True)
        two_heads = isinstance(self.vit, VisionTransformerDistilled)
        logits = self.forward_head(rows) if two_heads else self.classify(features)
        return Output(logits, features, result.ponder, result.tape, result.steps) if output else logits

    def budget_range(self) -> BudgetRange | None:
        """The budgets that can be set; None if the cost is fixed."""
        return None

    def threshold_at(self, steps: int) -> float | None:
        """The threshold that goes with so many steps; None where there is none."""
        known = self.budget_range()
        return None if known is None or known.threshold is None else known.threshold * steps / known.most

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:  # noqa: ARG002
        """Sets the budget of later calls; without arguments, the one it was built with."""
        kinds = "AdaTape, UT, U2T, UViT and PonderNet"
        name = type(self).__name__
        raise ValueError(f"this model, {name}, has no budget: {self.no_budget}; {kinds} have one")

    def budget(self) -> Budget | None:
        """The current budget; None if the cost is fixed."""
        return None

    def cost(self, tape: int | None = None) -> list[PartCost]:
        """Parameters and multiply-adds by part for one sample with `tape` tape tokens; None means the full budget."""
        self.refuse_tape(tape)
        return vit_cost(self.vit)

    def input_tokens(self) -> int:
        """Tokens of a sample besides its tape: class token, patches, and so on."""
        return input_tokens(self.vit)

    def actual_macs(self, output: Output) -> Tensor:
        """Multiply-adds of each sample, (b,) int64: `cost` at the tape length, depth or tokens that it used."""
        return torch.full((output.logits.shape[0],), total(self.cost()).macs)

    def length_taken(self, output: Output) -> Tensor:
        """Tape tokens of each sample, or steps until it halted, (b,) int64."""
        if output.tape is not None:
            return output.tape.length
        if output.steps is None:
            return torch.zeros_like(output.logits[:, 0], dtype=torch.int64)
        taken = (output.steps.weight > 0).sum(1)  # where tokens halt separately, the sample takes the maximum
        return taken.flatten(1).amax(1) if taken.dim() > 1 else taken

    def loss(self, output: Output, target: Tensor, ponder_weight: float = 0.0, kind: LossName = "softmax") -> Tensor:
        """l = l_main + λ l_ponder; targets are class indices or probabilities."""
        if isinstance(output.logits, tuple):
            raise TypeError(
                "the ViT is in distilled training and has logits of two heads, so compute a loss of each, or call "
                "set_distilled_training(False)"
            )
        loss = self.main_loss(output, target, kind)
        return loss + ponder_weight * output.ponder.mean() if ponder_weight else loss

    def main_loss(self, output: Output, target: Tensor, kind: LossName) -> Tensor:
        return class_loss(output.logits, target, kind)

    def never_halt(self) -> None:
        """Disables halting: every sample then uses its full budget, the upper bound that `cost` counts."""

    def tape_bank(self) -> Bank | None:
        """The bank of the tape; None without a tape."""
        return None

    def tape_boxes(self, index: Tensor, image: tuple[int, int]) -> Tensor | None:
        """Where on an image of that height and width each bank token of `Tape.index` lies; None if nowhere.

        (*index.shape, 4): top, left, height and width in pixels.
        """
        bank = self.tape_bank()
        return None if bank is None else bank.boxes(index, image)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that the model takes."""
        height, width = self.vit.patch_embed.img_size
        return height, width

    def window_grid(self) -> WindowGrid | None:
        """The windows that the model can read of an image; None if it reads none."""
        return None

    def tape_reader(self) -> TapeReader | FixedTokens | None:
        return None

    def export_refusal(self) -> str | None:
        """Why the model cannot be exported with dynamic batch and tape length; None if it can."""
        return None

    def refuse_tape(self, tape: int | None) -> None:
        if tape is not None:
            raise ValueError(f"tape is {tape}; {type(self).__name__} has no tape, so it must be None")

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised tokens: prefix, patches, then tape; `forward_head` of them equals `forward`."""
        return self._final_norm(self.forward_blocks(self._rescaled(x), ignore_block, None))

    def _rescaled(self, x: Tensor) -> Tensor:
        return x if self.rescale is None else self.rescale(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.vit.forward_head(x, pre_logits=pre_logits)

    def classify(self, features: Tensor) -> Tensor:
        return self.vit.head(features)

    def embed(self, x: Tensor) -> Tensor:
        return self.embed_with_rope(x)[0]

    def embed_with_rope(self, x: Tensor) -> tuple[Tensor, GridRope | None]:
        """Tokens, and their rotary positions where the ViT has any."""
        return embed(self.vit, x)

    def patch_grid(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the ViT's patches of these images."""
        height, width = self.vit.patch_embed.dynamic_feat_size(x.shape[-2:])
        return height, width

    def run_plain_blocks(self, tokens: Tensor, rope: GridRope | None, count: int, on_block: OnBlock) -> Tensor:
        """Runs the first `count` blocks on input tokens alone, as timm does."""
        for layer in range(count):
            tokens = self.run_block(self.vit.blocks[layer], tokens, rope=None if rope is None else rope.at(layer))
            on_block(layer, tokens)
        return tokens

    def run_block(self, block: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
        """Runs one block; options that are None are left out, since not every kind of block takes them."""
        kwargs = {name: value for name, value in options.items() if value is not None}
        if self.vit.grad_checkpointing and self.training:
            return checkpoint(partial(block, **kwargs), x)  # under torch.compile, checkpoint accepts only tensors
        return block(x, **kwargs)

    def compile_blocks(self, **options: Any) -> None:
        """Applies torch.compile to each block in place; equal blocks, also of other models, compile once."""
        blocks = [module for module in self.modules() if isinstance(module, Block | EvaBlock | EvaBlockPostNorm)]
        if not blocks:
            raise TypeError(f"the blocks are {type(self.vit.blocks[0]).__name__}s; compile_blocks needs timm's Block")
        for block in blocks:
            block.compile(**options)

    def _pooled_rows(self, result: BlocksOutput) -> BlocksOutput:
        """Only the rows that the head sees, so that the final norm skips the others."""
        seen = pooled_prefix(self.vit)
        return result if seen is None else BlocksOutput(result.tokens[:, :seen], result.ponder)

    def _final_norm(self, result: BlocksOutput) -> Tensor:
        x = self.vit.norm(result.tokens)
        if result.visible is None:
            return x
        with_prefix = getattr(self.vit, "pool_include_prefix", False)
        return fill_hidden(x, result.visible, 0 if with_prefix else self.vit.num_prefix_tokens)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,  # noqa: ARG002  ignored, since `forward_blocks` runs all blocks; timm's callers pass it
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """As timm's: the patch grid after the chosen blocks, without tape tokens."""
        take, _ = feature_take_indices(len(self.vit.blocks), indices)
        grid = self.patch_grid(x)
        seen: dict[int, Tensor] = {}
        last = -1  # the latest block's tokens, which stay the same once all samples have halted

        def on_block(layer: int, tokens: Tensor) -> None:
            seen[last] = tokens
            if layer in take:
                seen[layer] = tokens

        result = self.forward_blocks(self._rescaled(x), on_block, None)
        prefix = self.vit.num_prefix_tokens
        states = [seen.get(layer, seen[last]) for layer in take]
        states = [self.vit.norm(state) for state in states] if norm else states
        maps = [state[:, prefix:] for state in states]
        if Format(output_fmt) == Format.NCHW:
            maps = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in maps]
        prefixes = [state[:, :prefix] for state in states] if return_prefix_tokens and prefix else []
        if output_dict:
            found = {"image_intermediates": maps, "image_intermediates_prefix": prefixes}
            features = {} if intermediates_only else {"image_features": self._final_norm(result)}
            return {name: value for name, value in found.items() if value} | features
        given = list(zip(maps, prefixes, strict=True)) if prefixes else maps
        return given if intermediates_only else (self._final_norm(result), given)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """As DINO's and timm's: `forward_intermediates` as rows, or as a grid with `reshape`."""
        return self.forward_intermediates(
            x, n, return_prefix_tokens, norm, output_fmt="NCHW" if reshape else "NLC", intermediates_only=True
        )

    def prune_intermediate_layers(self, indices: Any = 1, prune_norm: bool = False, prune_head: bool = True) -> Any:
        return self.vit.prune_intermediate_layers(indices, prune_norm=prune_norm, prune_head=prune_head)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.vit.reset_classifier(num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        return self.vit.get_classifier()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.vit.set_grad_checkpointing(enable)

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        """Changes the size of images or of the ViT's patches, as timm's ViT does."""
        image = None if img_size is None else two_sides("img_size", img_size)
        patch = None if patch_size is None else two_sides("patch_size", patch_size)
        self.vit.set_input_size(img_size=image, patch_size=patch)

    def no_weight_decay(self) -> set[str]:
        return {f"vit.{name}" for name in self.vit.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """timm's layer groups for the ViT; parameters outside `vit.` match none and get the full rate."""
        return {
            "stem": r"^vit\.(?:cls_token|dist_token|reg_token|pos_embed|patch_embed)",
            "blocks": [(r"^vit\.blocks\.(\d+)", None), (r"^vit\.norm", (99999,))],
        }

    # The ViT's own; the keys of its parts in the state dict begin with `vit.`.
    num_classes: int = _of_vit("num_classes")
    num_features: int = _of_vit("num_features")
    head_hidden_size: int = _of_vit("head_hidden_size")
    embed_dim: int = _of_vit("embed_dim")
    num_prefix_tokens: int = _of_vit("num_prefix_tokens")
    blocks: nn.ModuleList | nn.Sequential = _of_vit("blocks")
    patch_embed: nn.Module = _of_vit("patch_embed")
    global_pool: str = _of_vit("global_pool")

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """timm's settings of the model if timm created it, else those of the ViT with a wrapper's names."""
        given = self.__dict__.get("_pretrained_cfg")
        known = wrapped_settings(self.vit, self.image_size) if given is None else given
        # Of weights of other channels timm would convert the first layer as if it had 3, or draw it anew.
        return known if self.vit.in_chans == 3 else {**known, "first_conv": None}

    @pretrained_cfg.setter
    def pretrained_cfg(self, settings: dict[str, Any]) -> None:
        self._pretrained_cfg = settings

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [{**info, "module": f"vit.{info['module']}"} for info in self.vit.feature_info]


def macs_by_count(counts: Tensor, macs: Callable[[int], int]) -> Tensor:
    """`macs(count)` for every element; the formula is evaluated once per distinct count."""
    table = {count: macs(count) for count in counts.unique().tolist()}
    return torch.tensor([table[count] for count in counts.tolist()], dtype=torch.int64)  # of no samples too
