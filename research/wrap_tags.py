"""Which pretrained ViTs of timm `adatape.wrap` takes, by kind: builds every tag on the meta device and wraps it.

python research/wrap_tags.py            the table, and the reason for each refusal
python research/wrap_tags.py --deep     builds all blocks instead of the first two
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import timm
import torch
from timm.models import get_pretrained_cfg, is_model_in_modules, split_model_name_tag

import adatape

# Modules of timm whose models are VisionTransformer, its subclasses, or Eva.
MODULES = ["vision_transformer", "vision_transformer_hybrid", "deit", "eva", "vitamin"]
KINDS = {  # the first pattern found in a tag names its kind
    "ViTamin": r"^vitamin",
    "DINOv3": r"dinov3",
    "DINOv2": r"dinov2",
    "DINO": r"\.dino$",
    "EVA-02": r"^eva02",
    "EVA": r"^eva_",
    "Perception Encoder": r"_pe_",
    "SigLIP 2": r"siglip.*\.v2_webli|siglip2",
    "SigLIP": r"siglip",
    "CLIP": r"clip|laion|openai|dfn|metaclip",
    "I-JEPA": r"ijepa",
    "MAE": r"mae",
    "RoPE": r"rope",
    "Sapiens 2": r"sapiens",
    "DeiT, distilled": r"deit.*distilled",
    "DeiT, DeiT-3": r"^deit",
    "AugReg, SAM": r"\.augreg|\.sam|\.orig|goog",
    "FlexiViT": r"^flexivit",
    "registers, searched baselines": r"sbb|_reg\d|little|betwixt|mediumd|dwee|pwee",
    "others": r"",
}


def kind_of(tag: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, tag))


def tags() -> list[str]:
    return [tag for tag in timm.list_pretrained() if is_model_in_modules(split_model_name_tag(tag)[0], MODULES)]


@cache
def refusal(name: str, image: tuple[int, ...], deep: bool) -> str | None:
    """Why the architecture at this image size cannot be wrapped; None if it can."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        vit = _built(name, image, deep)
        try:
            adatape.wrap(vit)
        except (TypeError, ValueError) as error:
            return str(error)
    return None


def _built(name: str, image: tuple[int, ...], deep: bool) -> torch.nn.Module:
    size = {"img_size": image[1:], "in_chans": image[0]}
    if deep:
        return timm.create_model(name, **size)
    try:
        return timm.create_model(name, depth=2, **size)
    except (AssertionError, TypeError):  # depth is given by other options too
        return timm.create_model(name, **size)


def verdicts(deep: bool = False) -> Iterator[tuple[str, str, str | None]]:
    """Tag, kind and refusal of every pretrained tag."""
    for tag in tags():
        cfg = get_pretrained_cfg(tag)
        assert cfg is not None
        yield tag, kind_of(tag), refusal(split_model_name_tag(tag)[0], tuple(cfg.input_size), deep)


def table(found: list[tuple[str, str, str | None]]) -> str:
    counts: dict[str, list[bool]] = defaultdict(list)
    for _, kind, why in found:
        counts[kind].append(why is None)
    rows = [f"| {kind} | {sum(counts[kind])} of {len(counts[kind])} |" for kind in KINDS if kind in counts]
    total = f"| all | {sum(why is None for *_, why in found)} of {len(found)} |"
    return "\n".join(["| kind | wrapped |", "|---|---|", *rows, total])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", action="store_true", help="build all blocks instead of the first two")
    found = list(verdicts(parser.parse_args().deep))
    print(table(found))
    for tag, _, why in found:
        if why is not None:
            print(f"{tag}: {why}")


if __name__ == "__main__":
    main()
