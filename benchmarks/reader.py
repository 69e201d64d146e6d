"""Time of reading alone: 10 tokens of 5 merged bank tokens each, for several bank sizes and batches.

python benchmarks/reader.py results/reader.jsonl                        on a GPU, compiled, replayed as CUDA graphs
python benchmarks/reader.py /tmp/reader.jsonl --device cpu --batch 1 --width 192        anywhere
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from record import add_rows, parser_of
from torch import Tensor

from adatape.banks import Bank, InputBank, LearnedBank
from adatape.config import ReaderConfig
from adatape.cuda_graphs import WARM_UP_CALLS, cuda_graphed
from adatape.evaluate.speed import repeats_within, seconds_per_call
from adatape.reader import TapeReader

ROUNDS, SECONDS = 9, 0.05


def microseconds(bank: Bank, width: int, batch: int, device: str) -> float:
    """Median over rounds; every row reads all its tokens."""
    bank, on_gpu = bank.to(device), device == "cuda"
    reader = TapeReader(width, ReaderConfig(steps=10, merge=5, threshold=10.0), bank.size).to(device).eval()
    query, images = torch.randn(batch, width, device=device), torch.randn(batch, 3, 224, 224, device=device)

    def tokens(query: Tensor, images: Tensor) -> Tensor:
        return reader(query, bank.open(images, query[:, None], query)).tokens

    compiled = torch.compile(tokens, dynamic=False) if on_gpu else tokens  # as inside a compiled model

    def read() -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            return (compiled(query, images),)

    call = cuda_graphed(read) if on_gpu else read
    for _ in range(WARM_UP_CALLS + 1):
        call()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    repeats = repeats_within(call, SECONDS, wait)
    return 1e6 * statistics.median(seconds_per_call(call, repeats, wait) for _ in range(ROUNDS))


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000], help="of learnable banks")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(given)
    width = arguments.width
    banks = {f"learnable, {size:,}": LearnedBank(size, width) for size in arguments.sizes}
    for name, bank in {**banks, "input, 784": InputBank(width)}.items():
        for batch in arguments.batch:
            took = microseconds(bank, width, batch, arguments.device)
            row = {"bank": name, "width": width, "batch": batch, "microseconds": round(took, 1)}
            add_rows(arguments.out, [{"case": f"{name}, batch {batch}", **row}], arguments.device)
            print(f"{name:20} batch {batch:4} {took:10.1f} µs", flush=True)


if __name__ == "__main__":
    main()
