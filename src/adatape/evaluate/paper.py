"""The figures that the paper prints for its systems, and the options under which ours are the same model."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One system of the paper."""

    label: str
    model: str
    options: dict[str, Any]
    parameters: float | None  # millions, truncated to one decimal as the paper does
    gflops: float | None
    note: str = ""


JFT = {"num_classes": 18291}
TAPE = {**JFT, "tape_ffn": "append+blocks"}
LEARN, INPUT = {**TAPE, "bank": "learn"}, {**TAPE, "bank": "input"}

ROWS = [
    Row("ViT-Ti/16", "vit_tiny_patch16_224", {}, 5.7, None),
    Row("PlainViT-Ti/16", "plainvit_tiny_patch16_224", {}, 5.7, None, "fixed positions: 5.679; learned: 5.717"),
    Row("U2T-Ti/16", "u2t_tiny_patch16_224", {}, 6.1, None),
    Row("A-ViT-Ti/16", "avit_tiny_patch16_224", {}, 5.7, None),
    Row("AdaTape-Ti/16", "adatape_tiny_patch16_224", {}, 6.3, None),
    Row("ViT-S/16", "vit_small_patch16_224", {}, 22.0, None),
    Row("PlainViT-S/16", "plainvit_small_patch16_224", {}, 22.0, None, "fixed positions: 21.975; learned: 22.050"),
    Row("U2T-S/16", "u2t_small_patch16_224", {}, 23.8, None),
    Row("A-ViT-S/16", "avit_small_patch16_224", {}, 22.0, None),
    Row("AdaTape-S/16", "adatape_small_patch16_224", {}, 24.3, None),
    Row(
        "PlainViT-B/16", "plainvit_base_patch16_224", {}, 87.1, None, "needs a d × d layer that S has not: departure 34"
    ),
    Row("AdaTape-B/16", "adatape_base_patch16_224", {}, 94.9, None),
    Row("ViT-B/32", "vit_base_patch32_224", JFT, None, 4.437),
    Row("U2T-B/32", "u2t_base_patch32_224", JFT, None, 5.513),
    Row("UViT-B/32", "uvit_base_patch32_224", JFT, None, 5.511),
    Row(
        "AdaTape-B/32-Learn", "adatape_base_patch32_224", LEARN, 185.6, 5.585, "below B/16's by no design: departure 34"
    ),
    Row("AdaTape-B/32-Input", "adatape_base_patch32_224", INPUT, None, 6.057),
    Row("ViT-B/16", "vit_base_patch16_224", JFT, None, 17.634),
    Row("U2T-B/16", "u2t_base_patch16_224", JFT, None, 22.016),
    Row("UViT-B/16", "uvit_base_patch16_224", JFT, None, 22.011),
    Row("AdaTape-B/16-Learn", "adatape_base_patch16_224", LEARN, 192.5, 18.837),
    Row("AdaTape-B/16-Input", "adatape_base_patch16_224", INPUT, None, 19.304),
    Row("ViT-L/32", "vit_large_patch32_224", JFT, None, 15.628, "misprint: departure 34"),
    Row("UViT-L/32", "uvit_large_patch32_224", JFT, None, 19.242),
    Row("AdaTape-L/32-Learn", "adatape_large_patch32_224", LEARN, None, 19.497),
    Row("AdaTape-L/32-Input", "adatape_large_patch32_224", INPUT, None, 20.141),
    Row("ViT-L/16", "vit_large_patch16_224", JFT, None, 61.724),
    Row("UViT-L/16", "uvit_large_patch16_224", JFT, None, 77.114),
    Row("AdaTape-L/16-Learn", "adatape_large_patch16_224", LEARN, None, 65.941),
    Row("AdaTape-L/16-Input", "adatape_large_patch16_224", INPUT, None, 66.570),
    Row("ViT-B/28", "vit_base_patch28_224", JFT, 100.9, 5.730),
    Row("ViT-B/28-3FFN", "vit3ffn_base_patch28_224", JFT, 200.1, 5.744, "literal reading: 214.3 M; departure 34"),
    Row("ViT-B/14", "vit_base_patch14_224", JFT, 99.7, 23.254),
    Row("ViT-B/14-3FFN", "vit3ffn_base_patch14_224", JFT, 198.9, 23.239, "literal reading: 213.1 M; departure 34"),
]
