"""What people call a served model: its data set, input, patches and bank, whatever architecture it was made from."""

from __future__ import annotations

from pathlib import Path

from adatape.banks import InputBank, LearnedBank, NoBank
from adatape.config import Experiment, ImageModel
from adatape.data_config import Images, Megapixel, Parity, Scenes
from adatape.models.base import Adaptive
from adatape.models.sequence import SymbolEmbed

METHODS = {
    "Plain": "Transformer",
    "Universal": "Universal Transformer",
    "vit": "ViT",
    "plainvit": "PlainViT",
    "deit": "DeiT",
    "vit3ffn": "ViT-3FFN",
    "ut": "Universal Transformer",
    "u2t": "U2T",
    "uvit": "UViT",
    "avit": "A-ViT",
    "ponder": "PonderNet",
}
OWN_FILES = ("folder", "arrays", "shards", "scenes")  # sources that are named by where they lie


def display_name(experiment: Experiment, model: Adaptive) -> str:
    """As in "AdaTape for digits, 8 × 8 pixels: patches of 4, bank of 16 patches of 2"."""
    return f"{_method(experiment, model)} for {_data(experiment.data)}, {_input(experiment)}: {_tokens(model)}"


def architecture(experiment: Experiment, model: Adaptive) -> str:
    """The name that the run's config.json gives to timm; the class for sequences, which have none."""
    return experiment.model.name if isinstance(experiment.model, ImageModel) else type(model).__name__


def _method(experiment: Experiment, model: Adaptive) -> str:
    if model.tape_bank() is not None or model.window_grid() is not None:
        return "AdaTape"
    name = architecture(experiment, model).partition("_")[0]
    return METHODS.get(name, name)


def _data(data: Images | Parity | Scenes | Megapixel) -> str:
    path = getattr(data, "path", None)
    return (Path(path).name if path and data.source in OWN_FILES else "") or data.source


def _input(experiment: Experiment) -> str:
    size = experiment.data.image_size
    return f"{experiment.data.sequence_length} symbols" if size is None else f"{size[1]} × {size[0]} pixels"


def _tokens(model: Adaptive) -> str:
    bank, windows = model.tape_bank(), model.window_grid()
    patch = getattr(model.vit.patch_embed, "patch_size", None)
    read = f"patches of {patch[0]}, " if patch else ""
    if windows is not None:
        return f"{read}bank of {windows.rows * windows.columns} windows of {windows.window}"
    match bank:
        case InputBank():
            return f"{read}bank of {bank.size} patches of {bank.patch}"
        case LearnedBank():
            return f"{read}bank of {bank.size} learned tokens"
        case SymbolEmbed():
            return f"{read}bank of the symbols"
        case None | NoBank():
            return f"{read}no bank"
    return f"{read}bank of {bank.size} tokens"
