"""How an AdaTape is made: around a ViT that exists, or from scratch under a name of timm's registry."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from timm.models.vision_transformer import VisionTransformer

from adatape.banks import Bank, InputBank, LearnedBank, NoBank
from adatape.config import ReaderName, Reading, TapeFFN
from adatape.encoder import TapeBlocksFrom
from adatape.models.adaptive import check_backbone
from adatape.models.adatape import AdaTape, QueryName
from adatape.models.registry import SIZES, register, split

BankName = Literal["input", "learn"]
READING_FIELDS = [field.name for field in dataclasses.fields(Reading)]
ALL_GATES = 1e-6  # a floor that next to none is below


def wrap(
    vit: VisionTransformer,
    bank: BankName | Bank = "input",
    *,
    patch: int = 8,
    bank_size: int = 10_000,
    reading: Reading | None = None,
    gate: bool = True,
    **options: Any,
) -> AdaTape:
    """AdaTape around a ViT that exists already, and computes what the ViT does until it is trained.

    `options` are AdaTape's own (layer, leave, still, tape_ffn, query, reader, echo, doubts, haste) and fields of
    `Reading`. The bank starts from the ViT's patch embedding. `gate=False` lets every head look at the tape at once.
    The ViT keeps its blocks: tape_ffn with "blocks" needs one that was built with `block_fn=TapeBlocksFrom(layer)`.
    """
    check_backbone(vit)
    fields, own = split(options, READING_FIELDS)
    reading = dataclasses.replace(
        reading or default_reading(bank), **_settled(fields, own.get("reader"), own.get("doubts", False))
    )
    source = make_bank(bank, vit, patch, bank_size)
    if source is not bank:
        source.start_from(vit)
    like = next(vit.parameters())
    return AdaTape(vit, source, reading, gate=gate, **own).to(like.device, like.dtype).train(vit.training)


def make_bank(bank: BankName | Bank, vit: VisionTransformer, patch: int, bank_size: int) -> Bank:
    if isinstance(bank, Bank):
        return bank
    if bank == "learn":
        return LearnedBank(bank_size, vit.embed_dim)
    if bank == "input":
        return InputBank(vit.embed_dim, patch=patch, image=vit.patch_embed.img_size, channels=vit.in_chans)
    raise ValueError(f"bank is {bank!r}; it must be 'input', 'learn' or an adatape.banks.Bank")


def _settled(fields: dict[str, Any], reader: str | None, doubts: bool) -> dict[str, Any]:
    """What goes with a choice, unless it is given.

    Gates are at most 1: a selective reader's threshold of `steps` never ends a tape. Where doubt ends tapes, gates
    leave that to it, and training has to see all lengths.
    """
    settled: dict[str, Any] = {"sample_budgets": True} if doubts else {}
    if reader == "selective":
        settled |= {"threshold": float(fields.get("steps", Reading.steps)), "merge": 1}
        settled |= {"floor": ALL_GATES} if doubts else {}
    return {**settled, **fields}


def default_reading(bank: BankName | Bank, large: bool = False) -> Reading:
    """The paper's hyper-parameter table: the two training tricks go with a learnable bank, τ = 1 with large + input."""
    if bank == "learn":
        return Reading(noise=0.01, hide=0.1)
    return Reading(threshold=1.0) if large else Reading()


def build(
    *,
    bank: BankName = "input",
    bank_patch: int = 8,
    bank_size: int = 10_000,
    tape_ffn: TapeFFN = "append",
    reader: ReaderName = "adaptive",
    layer: int = 1,
    leave: int | None = None,
    still: int | None = None,
    query: QueryName | None = None,
    gate: bool = False,
    echo: bool = False,
    doubts: bool = False,
    haste: float = 1.0,
    **options: Any,
) -> AdaTape:
    """An AdaTape from scratch; `options` are fields of `Reading` and arguments of timm's VisionTransformer."""
    if bank not in ("input", "learn"):
        raise ValueError(f"bank is {bank!r}; it must be 'input' or 'learn'")
    fields, options = split(options, READING_FIELDS)
    reading = default_reading(bank, large=options.get("depth", 12) > 12)
    reading = dataclasses.replace(reading, **_settled(fields, reader, doubts))
    pooling: dict[str, Any] = {} if bank == "learn" else {"class_token": False, "global_pool": "avg", "fc_norm": False}
    blocks: dict[str, Any] = {"block_fn": TapeBlocksFrom(layer)} if "blocks" in tape_ffn else {}
    vit = VisionTransformer(**{**pooling, **blocks, **options})
    source = NoBank() if reader == "fixed" else make_bank(bank, vit, bank_patch, bank_size)
    own: dict[str, Any] = {"reader": reader, "tape_ffn": tape_ffn, "query": query, "gate": gate}
    own |= {"layer": layer, "leave": leave, "still": still, "echo": echo, "doubts": doubts, "haste": haste}
    return AdaTape(vit, source, reading, **own)


for _size, _shape in SIZES.items():
    for _patch in (16, 32):
        register(f"adatape_{_size}_patch{_patch}_224", build, patch_size=_patch, **_shape)
