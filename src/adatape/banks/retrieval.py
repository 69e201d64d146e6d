"""RetrievalBank: tokens in memory-mapped arrays, found by searching an index of their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from adatape.banks.base import Bank, BankView
from adatape.banks.index import IndexFolder, as_tensor, norm_hash, norm_on_cpu
from adatape.banks.search import BankSearch, IndexPart
from adatape.banks.served import ServedIndex
from adatape.config import ReaderConfig
from adatape.cuda_graphs import is_exporting
from adatape.kernels.select import ReadParams, Selection

NOT_COMPILED = "a RetrievalBank is searched by FAISS, outside the graph"


class RetrievalBank(Bank):
    """Values of one or more indices made by `build_index`, the same for every sample; they are not trained.

    A part is the folder of an index, or the address of a server of one, as in "http://127.0.0.1:8700". `probes` cells
    are searched, by default as many as each index says. At each step `fetch` unread candidates are scored again, by
    default 16 more than are read, or 33 times as many where keys are compressed.
    """

    def __init__(self, *parts: str | Path, probes: int | None = None, fetch: int | None = None) -> None:
        super().__init__()
        if not parts:
            raise ValueError("a RetrievalBank needs the folder or address of at least one index")
        self.opened = OpenedParts(tuple(str(part) for part in parts), probes, fetch)
        self.size, self.width = self.opened.search.size, self.opened.search.facts.width

    def forward(self, inputs: Tensor) -> Float[Tensor, "c d"]:
        """All values, for banks that fit in memory; reading does not call it."""
        rows = torch.arange(self.size).numpy()
        return as_tensor(self.opened.search.take(rows)).to(inputs.device)

    def open(self, inputs: Tensor, tokens: Float[Tensor, "b n d"], query: Float[Tensor, "b d"]) -> BankView:  # noqa: ARG002
        return RetrievalView(self, inputs, query.device)

    def default_reading(self) -> ReaderConfig:
        """As the index was built: its query width, and a norm that stays as it was."""
        facts = self.opened.search.facts
        return ReaderConfig(query_width=facts.query_width, norm=facts.norm != "none", norm_learns=False)

    def check(self, width: int, reader: Any) -> None:
        super().check(width, reader)
        reading, facts = reader.reading, self.opened.search.facts
        if reader.use_kernels is False or reading.choose != "highest":
            raise ValueError(
                "a RetrievalBank scores only what its index finds; reader must be 'adaptive' and choose 'highest'"
            )
        if reading.bank_dropout > 0:
            raise ValueError(
                f"bank_dropout is {reading.bank_dropout}; a RetrievalBank hides no tokens, so it must be 0"
            )
        if reading.query_width != facts.query_width:
            raise ValueError(f"query_width is {reading.query_width}; the index has keys of width {facts.query_width}")
        if reading.norm and reading.norm_learns:
            raise ValueError("norm_learns is True; the keys of an index do not follow a norm, so it must be False")
        self.check_norm(reader.norm)

    def check_norm(self, norm: nn.Module | None) -> None:
        facts = self.opened.search.facts
        if any(parameter.is_meta for parameter in (norm or nn.Identity()).parameters()):
            return  # without values there is nothing to compare
        if norm_hash(norm) != facts.norm:
            raise ValueError(
                "the reader's norm is not the one that the index was built with, so its keys are others; build it "
                f"again from {Path(facts.values).name}: adatape.build_index(values, folder, norm=model.reader.norm, "
                f"query_width={facts.query_width})"
            )

    def export_refusal(self) -> str:
        return "the bank is a RetrievalBank; FAISS searches it outside the graph, so it cannot be exported"

    def scored_tokens(self) -> int:
        """Keys and centres of cells that a search compares on average."""
        search = self.opened.search
        found = 0
        for facts in (part.facts for part in search.parts):
            probes = min(search.probes or facts.probes, facts.cells)
            centres = 0 if facts.kind == "exact" else facts.cells
            found += centres + -(-facts.rows * probes // facts.cells)
        return found

    def token_macs(self) -> int:
        return 0

    def extra_repr(self) -> str:
        return f"{', '.join(self.opened.names)}, size={self.size}, width={self.width}"


class OpenedParts:
    """The opened indices of a bank: copies of a model share them, and other processes open them again."""

    def __init__(self, names: tuple[str, ...], probes: int | None, fetch: int | None) -> None:
        self.names = names
        self.search = BankSearch([_open(name) for name in names], probes, fetch)

    def __deepcopy__(self, memo: Any) -> OpenedParts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenedParts, (self.names, self.search.probes, self.search.fetch)


class RetrievalView(BankView):
    """An opened RetrievalBank."""

    searches = True

    def __init__(self, bank: RetrievalBank, inputs: Tensor, device: torch.device) -> None:
        self.bank, self.inputs, self.device, self.size = bank, inputs, device, bank.size

    def all(self) -> Float[Tensor, "c d"]:
        if is_exporting():
            raise ValueError(self.bank.export_refusal())
        return self.bank(self.inputs)

    @torch.compiler.disable(reason=NOT_COMPILED)
    def take(self, index: Int[Tensor, "b t k"]) -> Float[Tensor, "b t k d"]:
        if index.is_meta:
            return torch.empty(*index.shape, self.bank.width, device="meta")  # type: ignore[arg-type]
        values = self.bank.opened.search.take(index.flatten().cpu().numpy())
        return as_tensor(values).unflatten(0, index.shape).to(self.device)

    def keys(self, norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "c width"]:
        return BankView(self.all()).keys(norm, width)

    @torch.compiler.disable(reason=NOT_COMPILED)
    def select(
        self,
        query: Float[Tensor, "b h"],
        norm: nn.LayerNorm | None,
        taken: Bool[Tensor, "b c"] | None,
        params: ReadParams,
    ) -> Selection:
        assert taken is None, "bank_dropout is refused when a model is built"
        if query.is_meta:
            return no_selection(query, params)
        self.bank.check_norm(norm)
        with torch.autocast("cpu", enabled=False):
            found = self.bank.opened.search.select(query, None if norm is None else norm_on_cpu(norm), params)
        return Selection(*(each.to(self.device) for each in found))


def no_selection(query: Float[Tensor, "b h"], params: ReadParams) -> Selection:
    """The shapes of a selection, on the query's device."""
    shape = (query.shape[0], params.steps, params.merge)
    index = torch.full(shape, -1, device=query.device)
    return Selection(index, torch.zeros(shape, device=query.device), index[..., 0] >= 0)


def _open(name: str) -> IndexPart:
    return ServedIndex(name) if "://" in name else IndexFolder(name)
