"""Speed tables of docs/performance.md, docs/budgets.md (server) and the training loop, from rows of benchmarks/."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cells import rounded, table
from rows import RESULTS, Row, read_rows

LEARNT, OF_INPUT = {"bank": "learn"}, dict[str, str]()
BANKS = (LEARNT, OF_INPUT)
SIZES = {
    "B/16, learnable bank of 10,000": ("adatape_base_patch16_224", LEARNT, 0.94, 0.94),
    "B/16, input bank of 784": ("adatape_base_patch16_224", OF_INPUT, 0.94, 0.94),
    "B/32, learnable": ("adatape_base_patch32_224", LEARNT, 0.82, 0.82),
    "B/32, input": ("adatape_base_patch32_224", OF_INPUT, 0.80, 0.80),
    "L/16, learnable": ("adatape_large_patch16_224", LEARNT, 0.95, 0.95),
    "L/16, input": ("adatape_large_patch16_224", OF_INPUT, 0.95, 0.95),
}
GRAPHED, NOT_GRAPHED = "ᵃ", "ᵇ"
B16 = "adatape_base_patch16_224"
PACKED_MOST = 1.03
WITHIN = 1.1  # goal on a CPU: time ratio over FLOP ratio


def rows_of(name: str) -> list[Row]:
    return read_rows(RESULTS / f"{name}.jsonl")


def only(rows: Sequence[Row], **wanted: Any) -> Row:
    """The only row with these values."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}; there must be exactly one")
    return found[0]


def on_gpu(**wanted: Any) -> Row:
    return only(rows_of("speed"), **{"device": "cuda", "batch": 256, "data": False, "full_tape": True, **wanted})


def as_built() -> str:
    """Models as they are built, tapes may halt, without CUDA graphs; images per second where times were kept."""
    named = {name: SIZES[name][:2] for name in SIZES if name.startswith("B/")}
    named["PlainViT-B/16 of ours"] = ("plainvit_base_patch16_224", {})
    places: list[tuple[str, str, list[Row], dict[str, Any]]] = [
        ("GPU, 256", name, rows_of("speed_defaults"), {"model": model, "options": options, "batch": 256})
        for name, (model, options) in named.items()
    ]
    cpu = [row for row in rows_of("speed") if row["device"] == "cpu" and not row["full_tape"]]
    for batch in (1, 16):
        for size, letter in (("tiny", "Ti"), ("small", "S")):
            for bank, options in (("learnable", LEARNT), ("input", OF_INPUT)):
                model = f"adatape_{size}_patch16_224"
                wanted = {"model": model, "options": options, "batch": batch, "compile": "none"}
                places.append((f"CPU, {batch}", f"{letter}/16, {bank}", cpu, wanted))
    found = []
    for place, name, every, wanted in places:
        read, step = (only(every, mode=mode, **wanted) for mode in ("inference", "train"))
        found.append([place, name, _with_pace(read), _with_pace(step), f"{read['flops_ratio']:.2f}"])
    return table(["device, batch", "model", "inference", "training", "FLOPs ratio"], found)


def _with_pace(row: Row) -> str:
    pace = row.get("images_per_second")
    return f"**{row['ratio']:.2f}**" + (f" ({pace:.0f}/s)" if pace else "")


def against_timm() -> str:
    head = ["model", "FLOPs ratio", "inference: goal", f"measured {GRAPHED}", "images/s"]
    head += ["training: goal", "measured", "images/s"]
    found = []
    for name, (model, options, inference, training) in SIZES.items():
        graphs = "large" not in model  # three large models with CUDA graphs do not fit in memory
        read = on_gpu(model=model, options=options, mode="inference", graphs=True)
        step = on_gpu(model=model, options=options, mode="train", graphs=graphs)
        mark = GRAPHED if graphs else NOT_GRAPHED
        cells = [f"{read['flops_ratio']:.3f}", f"{inference:.2f}", _ratio(read), f"{read['images_per_second']:,.0f}"]
        cells += [f"{training:.2f}", f"{_ratio(step)} {mark}", f"{step['images_per_second']:,.0f}"]
        found.append([name, *cells, f"{step['memory_ratio']:.3f} ×"])
    return table([*head, "peak memory, training"], found)


def _ratio(row: Row) -> str:
    return f"**{row['ratio']:.3f}** ({row['ratio_min']:.3f}–{row['ratio_max']:.3f})"


def by_batch() -> str:
    def pair(mode: str, **how: Any) -> str:
        rows = (on_gpu(model=B16, options=bank, mode=mode, **how) for bank in BANKS)
        return ", ".join(f"{row['ratio']:.3f}" for row in rows)

    inference = [pair("inference", batch=batch) for batch in (1, 8, 64, 256)]
    training = [pair("train", batch=batch) for batch in (8, 64, 256)]
    rows = [
        ["inference", *inference, pair("inference", data=True)],
        ["training", "", *training, pair("train", data=True)],
    ]
    head = ["B/16, ratio: learnable, input", "batch 1", "8", "64", "256", "256, bytes from the host ᶜ"]
    return table(head, rows)


def on_cpu() -> str:
    head = ["", "FLOPs ratio", "inference, batch 1", "16", "training, batch 1", "16"]
    rows, every = [], [row for row in rows_of("speed") if row["device"] == "cpu" and row["full_tape"]]
    for size, letter in (("tiny", "Ti"), ("small", "S")):
        for bank, options in (("learnable", LEARNT), ("input", OF_INPUT)):
            model = f"adatape_{size}_patch16_224"
            found = [
                only(every, model=model, options=options, mode=mode, compile=compiled, batch=batch)
                for mode, compiled in (("inference", "none"), ("train", "none"), ("inference", "default"))
                for batch in (1, 16)
            ]
            flops = found[0]["flops_ratio"]
            enough = [f"**{row['ratio']:.2f}**" if row["ratio"] >= flops / WITHIN else f"{row['ratio']:.2f}"
                      for row in found]  # fmt: skip
            rows.append([f"{letter}/16, {bank}", f"{flops:.3f} ({flops / WITHIN:.2f})", *enough])
    return table([*head, "inference compiled, batch 1", "16"], rows)


def reading_and_packing() -> str:
    """Time of reading alone, batch 1, memory, and packed execution."""
    vit, ours = (on_gpu(model=B16, options=LEARNT, mode="inference")[name] for name in ("reference_ms", "ms"))
    took = {row["bank"]: row["microseconds"] / 1e3 for row in rows_of("reader") if row["batch"] == 256}
    small, large, image = (took[name] for name in ("learnable, 10,000", "learnable, 100,000", "input, 784"))
    one = [on_gpu(model=B16, options=bank, mode="inference", batch=1) for bank in BANKS]
    plain = on_gpu(model="plainvit_base_patch16_224", mode="inference", batch=1)["ms"]
    slower = "**, **".join(f"{1 / row['ratio']:.3f} ×" for row in one).replace("×**, **", "×** learnable, **")
    against = f"({one[0]['ms']:.3f} and {one[1]['ms']:.3f} against {one[0]['reference_ms']:.3f} ms)"
    alike = " and ".join(f"{row['ms'] / plain:.2f} ×" for row in one)
    law = {row["case"]: row["law_to_padded"] for row in rows_of("packed")}
    share = f"≤ {PACKED_MOST}"
    deep = f"**{large:.3f} ms: {large / small:.1f} ×, {100 * large / vit:.1f} %** (of ViT's {vit:.1f} ms; "
    rows = [
        [
            "reading alone, compiled: batch 256, bank of 10,000, 10 steps, merge 5, width 768",
            "under 2 % of the B/16 forward",
            f"**{small:.3f} ms, {100 * small / vit:.1f} %**",
        ],
        [
            "… bank of 100,000",
            "at most 10 × that, under 10 %",
            f"{deep}{100 * large / ours:.1f} % of AdaTape's {ours:.1f})",
        ],
        ["… input bank of 784", "", f"{image:.3f} ms, {100 * image / vit:.1f} %"],
        [
            "batch 1, CUDA graphs, against ViT",
            "within 1.10 ×",
            f"**{slower}** input {against}. Like for like it is **{alike}**: our PlainViT, which has the patch product "
            f"too, takes {plain:.3f} ms (another process of the same day, no class token)",
        ],
        ["peak training memory", "within 1.08 ×", _memory()],
        [
            "packed ÷ padded time over tokens, eager blocks, tape of 5 % of the sequence",
            share,
            f"**{law['tape, 5 %, eager']:.3f}** (batch 256)",
        ],
        ["… 50 %", share, f"**{law['tape, 50 %, eager']:.3f}**"],
        ["… 90 %", share, f"**{law['tape, 90 %, eager']:.3f}**"],
        [
            "… A-ViT's removed tokens",
            share,
            f"**{law['A-ViT, eager']:.3f}**: missed (1.054 before packing was changed)",
        ],
    ]
    return table(["", "goal", "measured"], rows)


def _memory() -> str:
    def ratios(model: str, batch: int, **how: Any) -> list[float]:
        rows = (on_gpu(model=model, options=bank, mode="train", batch=batch, **how) for bank in BANKS)
        return sorted(row["memory_ratio"] for row in rows)

    large = "adatape_large_patch16_224"
    at_256 = sorted(ratios(B16, 256, graphs=True) + ratios(large, 256, graphs=False))
    at_64 = sorted(ratios(B16, 64) + ratios(large, 64))
    at_8, patch_32 = ratios(B16, 8), ratios("adatape_base_patch32_224", 256)
    return (
        f"**{at_256[0]:.2f} to {at_256[-1]:.2f} ×** at B/16 and L/16, batch 256 ({at_64[0]:.2f} to {at_64[-1]:.2f} at "
        f"64; {at_8[0]:.2f} and **{at_8[1]:.2f}** at 8, where the bank and its moments weigh); B/32, where the tape is "
        f"a fifth of the tokens: {patch_32[0]:.2f} and {patch_32[1]:.2f} ×"
    )


SIDES = ("vit", "learn before", "learn after", "input before", "input after")
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "inference": {
        "matrix products": ("matrix products",),
        "norms, residuals": ("norms and residuals",),
        "GELU": ("GELU",),
        "patch convolutions and their layouts": ("patch convolution",),
        "attention": ("attention",),
        "reading": ("reading",),
        "casts and other": ("casts", "other"),
    },
    "train": {
        "matrix products": ("matrix products",),
        "attention": ("attention",),
        "GELU": ("GELU",),
        "norms, residuals": ("norms and residuals",),
        "patch convolutions and their layouts": ("patch convolution",),
        "casts, optimizer": ("casts", "optimizer"),
        "reading and other": ("reading and other", "other"),
    },
}


def by_part(mode: str, title: str, digits: int) -> str:
    """GPU kernel times of one call, summed by purpose."""
    told = {row["case"]: row["result"] for row in rows_of("speed_parts")}
    sides = [told["kernels by part, ms"][mode][side] for side in SIDES]
    rows = []
    for name, parts in PARTS[mode].items():
        sums = [sum(side.get(part, 0.0) for part in parts) for side in sides]
        rows.append([name, *(rounded(value, digits) if value else "" for value in sums)])
    rows.append(["kernels in all", *(rounded(sum(side.values()), 1) for side in sides)])
    clock = told["torch.compile, bf16 autocast, batch 256, ms, medians in turns"]
    before, after = clock["before"][mode], clock["after, no row can halt"][mode]
    vit = statistics.fmean(each["vit_base_patch16_224"] for each in (before, after))
    took = [vit, *(each[bank] for bank in ("learn", "input") for each in (before, after))]
    rows.append(["on the clock, no graphs", *(rounded(value, 1) for value in took)])
    return table([title, "ViT", "learnable, before", "after", "input, before", "after"], rows)


def parts() -> str:
    return f"{by_part('inference', 'inference', 2)}\n\n{by_part('train', 'training step', 1)}"


LOADS = {
    "plain ViT of the same size": "plain",
    "AdaTape, steps 0": "adatape, steps 0",
    "AdaTape, steps 1": "adatape, steps 1",
    "AdaTape, as trained (4)": "adatape",
    "AdaTape, budgets mixed": "adatape, mixed",
}


def served() -> str:
    every, clients = rows_of("serve"), (1, 16, 64)
    rows = []
    for name, load in LOADS.items():
        found = [only(every, load=load, clients=count) for count in clients]
        digits = [1 if row["clients"] == 1 else 0 for row in found]
        rows.append([name, *(f"{row['requests_per_second']:.0f} ({row['p50_ms']:.{n}f}, {row['p99_ms']:.{n}f})"
                             for row, n in zip(found, digits, strict=True))])  # fmt: skip
    return table(["requests/s (p50, p99 in ms)", "1 client", "16", "64"], rows)


def served_beside_hostile_clients() -> str:
    every = {row["case"]: row for row in rows_of("serve_hostile")}
    controls = {name: every[f"control: {name}"] for name in every if f"control: {name}" in every}
    rows = []
    for name in (*controls, "afterwards"):
        row, control = every[name], controls.get(name)
        beside = [f"{control['p99_ms']:.0f}", f"{row['over_control']:.1f}"] if control else ["–", "–"]
        rows.append([name, f"{row['p50_ms']:.0f}", f"{row['p99_ms']:.0f}", f"{row['ratio']:.1f}", *beside])
    quiet = f"over the quiet p99 ({every['quiet']['p99_ms']:.0f} ms)"
    return table(["200 connections", "p50, ms", "p99, ms", quiet, "control's p99, ms", "over the control"], rows)


def loop_and_loader() -> str:
    cases = ("vit_base_patch16_224, 224 px, batch 256", "plainvit_tiny_patch16_224, 32 px, batch 512")
    whole, small = (only(rows_of("loop"), case=case) for case in cases)
    loader = only(rows_of("loader"), case="2 workers")
    bare = [only(rows_of("loader"), case=case) for case in ("2 workers, RandAugment 0", "0 workers")]
    rate, plain = loader["images_per_second"], bare[0]["images_per_second"]

    def over(row: Row) -> str:
        return f"{row['ms']['whole']:.2f} ÷ {row['ms']['bare']:.2f} ms = "

    rows = [
        [
            "whole loop ÷ bare step, ViT-B/16, batch 256, CIFAR-sized data on the GPU, paper's augmentation",
            f"{over(whole)}{whole['whole_over_bare']}; with a checkpoint every 1,000 steps at the first save's "
            f"{whole['save_seconds']:.2f} s: {whole['with_checkpoints']:.3f}",
            "`python benchmarks/loop.py results/loop.jsonl`",
        ],
        [
            "the same, PlainViT-Ti/4 at 32 pixels, batch 512",
            f"{over(small)}{small['whole_over_bare']:.3f} "
            f"(the augmentation is {rounded(small['ms']['loader'], 2)} ms of it)",
            "`… --model plainvit_tiny_patch16_224 --options '{\"patch_size\": 4}' --size 32 --batch 512`",
        ],
        [
            "CPU loader ÷ torchvision's pipeline, JPEGs of 500 × 375, 2 workers on 2 cores",
            f"{rate['adatape']:.1f} ÷ {rate['torchvision']:.1f} images/s = {loader['ratio']:.2f}",
            "`python benchmarks/loader.py results/loader.jsonl`",
        ],
        [
            "CPU loader ÷ as many bare processes that decode and resize, crop and flip only",
            f"{plain['adatape']:.1f} ÷ {plain['bare']:.1f} images/s = {bare[0]['ratio_to_bare']:.2f}; "
            f"with RandAugment(2) {bare[1]['ratio_to_bare']:.2f} (processor time)",
            "`… --images 600 --randaug 0`; `… --workers 0`",
        ],
    ]
    return table(["what", "figure", "command"], rows)
