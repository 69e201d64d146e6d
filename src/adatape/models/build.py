"""Builds an AdaTape around an existing ViT (`wrap`) or from scratch (`build`), and registers the latter with timm."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.banks import Bank, FrozenBank, InputBank, LearnedBank, NoBank
from adatape.config import SIZES, Choice, Ponder, ReaderConfig, ReaderName, TapeFFN, Update
from adatape.dropped import refuse_renamed
from adatape.encoder import TapeBlocksFrom
from adatape.models.adatape import AdaTape
from adatape.models.backbone import ViT, check_backbone, default_bank_patch, timm_name
from adatape.models.join import QueryName, TapeJoin
from adatape.models.leak import warn_of_leak
from adatape.models.registry import register, split
from adatape.models.windows import WindowTape
from adatape.windows.answers import Labels
from adatape.windows.options import WindowOptions

BankName = Literal["input", "learn"]
WINDOW_FIELDS = [field.name for field in dataclasses.fields(WindowOptions)]
READER_FIELDS = [field.name for field in dataclasses.fields(ReaderConfig)]
JOIN_FIELDS = [field.name for field in dataclasses.fields(TapeJoin)]


class WrapOptions(TypedDict, total=False):
    """`reader` and the fields of `TapeJoin` and `ReaderConfig`, for type checkers; a test compares them."""

    reader: ReaderName
    layer: int
    tape_ffn: TapeFFN
    query: QueryName | None
    gate: bool
    steps: int
    threshold: float
    merge: int | None
    query_width: int
    update: Update
    ponder: Ponder
    ponder_at_halt: bool
    norm_scale: float
    norm_learns: bool
    query_noise: float
    bank_dropout: float
    choose: Choice
    temperature: float | None
    norm: bool
    sample_budgets: bool


class WrapWindowsOptions(TypedDict, total=False):
    """The fields of `WindowOptions`, for type checkers; a test holds that they are the same."""

    window: int
    view: int | tuple[int, int] | None
    steps: int
    floor: float
    layer: int | None
    labels: Labels
    encoder: str | nn.Module
    search: int
    training_steps: int | None
    cell: int
    scan_scale: int
    scan_fold: int
    scan_width: int


@overload
def wrap(
    vit: ViT,
    bank: BankName | Bank | Tensor = "input",
    *,
    patch: int | None = None,
    bank_size: int = 10_000,
    reading: ReaderConfig | None = None,
    **options: Unpack[WrapOptions],
) -> AdaTape: ...


@overload
def wrap(
    vit: ViT,
    bank: Literal["windows"],
    *,
    image: tuple[int, int],
    **options: Unpack[WrapWindowsOptions],
) -> WindowTape: ...


def wrap(
    vit: ViT,
    bank: BankName | Literal["windows"] | Bank | Tensor = "input",
    *,
    image: tuple[int, int] | None = None,
    patch: int | None = None,
    bank_size: int = 10_000,
    reading: ReaderConfig | None = None,
    **options: Any,
) -> AdaTape | WindowTape:
    """Adds a tape to an existing ViT; before training the output is the ViT's (but for bank="windows").

    With bank="windows" it reads windows of images of size `image` (height, width), and `options` are the fields of
    `WindowOptions`; `encoder` may also be a module, as timm.create_model(name, pretrained=True, num_classes=0).
    Otherwise they are `reader` and the fields of `TapeJoin` and `ReaderConfig`, and the bank is
    initialised from the ViT's patch embedding; its `patch` is 8 where that divides the image, else half the ViT's.
    A bank may also be a `Bank` or a tensor (c, d), which is stored and not trained.
    `gate` is True by default; with `gate=False` every head attends to the tape at once.
    The ViT keeps its blocks: tape_ffn with "blocks" needs a ViT built with `block_fn=TapeBlocksFrom(layer)`.
    """
    if isinstance(bank, str) and bank == "windows":
        check_backbone(vit, any_backbone=False)
        return _wrap_windows(vit, image, options)
    check_backbone(vit, any_backbone=True)
    if image is not None:
        raise ValueError(f"image is {image}; only bank='windows' takes it, other banks see what the ViT sees")
    fields, join, rest = split_options(dict(options))
    source = make_bank(bank, vit, patch, bank_size)
    if source is not bank:
        source.init_from_vit(vit)
    like, reading = next(vit.parameters()), dataclasses.replace(reading or default_reader_config(bank), **fields)
    model = AdaTape(vit, source, reading, TapeJoin(**{"gate": True, **join}), **rest)
    if model.gate is not None:
        warn_of_leak(vit, model.join.layer)
    return model.to(like.device, like.dtype).train(vit.training)


def _wrap_windows(vit: ViT, image: tuple[int, int] | None, options: dict[str, Any]) -> WindowTape:
    if image is None:
        raise ValueError("image is None; bank='windows' needs the size of the images, as in image=(800, 1360)")
    strange = sorted(options.keys() - set(WINDOW_FIELDS))
    if strange:
        raise TypeError(f"{strange[0]} is not an option of bank='windows', which are {', '.join(WINDOW_FIELDS)}")
    height, width = image
    like, encoder = next(vit.parameters()), options.get("encoder")
    module = encoder if isinstance(encoder, nn.Module) else None
    named = {} if module is None else {"encoder": timm_name(module)}
    model = WindowTape(vit, (height, width), WindowOptions(**options | named), module)
    return model.to(like.device, like.dtype).train(vit.training)


def image_size_options(
    wrapping: Mapping[str, Any] | None, size: int | tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the ViT and of `wrap` that state the images' size: a reader of windows takes it, else the ViT."""
    height, width = (size, size) if isinstance(size, int) else size
    if wrapping is not None and wrapping.get("bank") == "windows":
        return {}, {"image": (height, width)}
    return {"img_size": height if height == width else (height, width)}, {}


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Splits options into fields of `ReaderConfig`, fields of `TapeJoin`, and the others."""
    refuse_renamed(options)
    fields, options = split(options, READER_FIELDS)
    return fields, *split(options, JOIN_FIELDS)


def make_bank(bank: BankName | Bank | Tensor, vit: ViT, patch: int | None, bank_size: int) -> Bank:
    if isinstance(bank, Bank):
        return bank
    if isinstance(bank, Tensor):
        return FrozenBank(bank)
    if isinstance(bank, str) and bank == "learn":
        return LearnedBank(bank_size, vit.embed_dim)
    if isinstance(bank, str) and bank == "input":
        patch = default_bank_patch(vit) if patch is None else patch
        return InputBank(vit.embed_dim, patch=patch, image=vit.patch_embed.img_size, channels=vit.in_chans)
    given = repr(bank) if isinstance(bank, str) else f"a {type(bank).__name__}"
    raise ValueError(f"bank is {given}; it must be 'input', 'learn', 'windows', a tensor or an adatape.Bank")


def default_reader_config(bank: BankName | Bank | Tensor, large: bool = False) -> ReaderConfig:
    """The paper's hyper-parameters: noise and hidden tokens for a learned bank, τ = 1 for large with an input bank."""
    if isinstance(bank, Bank):
        return bank.default_reading()
    if isinstance(bank, str) and bank == "learn":
        return ReaderConfig(query_noise=0.01, bank_dropout=0.1)
    return ReaderConfig(threshold=1.0) if large else ReaderConfig()


def build(
    *,
    bank: BankName = "input",
    bank_patch: int = 8,
    bank_size: int = 10_000,
    reader: ReaderName = "adaptive",
    **options: Any,
) -> AdaTape:
    """An AdaTape from scratch; `options` are fields of `TapeJoin` and `ReaderConfig`, and arguments of timm's ViT."""
    if bank not in ("input", "learn"):
        raise ValueError(f"bank is {bank!r}; it must be 'input' or 'learn' ('windows' is an option of adatape.wrap)")
    fields, join_fields, shape = split_options(options)
    reading = dataclasses.replace(default_reader_config(bank, large=shape.get("depth", 12) > 12), **fields)
    join = TapeJoin(**join_fields)
    pooling: dict[str, Any] = {} if bank == "learn" else {"class_token": False, "global_pool": "avg", "fc_norm": False}
    blocks: dict[str, Any] = {"block_fn": TapeBlocksFrom(join.layer)} if "blocks" in join.tape_ffn else {}
    vit = VisionTransformer(**{**pooling, **blocks, **shape})
    source = NoBank() if reader == "fixed" else make_bank(bank, vit, bank_patch, bank_size)
    return AdaTape(vit, source, reading, join, reader=reader)


for _size, _shape in SIZES.items():
    for _patch in (16, 32):
        register(f"adatape_{_size}_patch{_patch}_224", build, patch_size=_patch, **_shape)
