"""Types of settings with limits, checked by `validation`; torch is not imported."""

from __future__ import annotations

import re
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, Predicate


def is_folder_name(text: str) -> bool:
    """at most 100 letters, digits, dots, hyphens and underscores, the first a letter or digit"""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None


# Limits of fields and options, checked by `validation`; NaN fails all of them. Upper limits catch typing errors before
# they exhaust the memory.
FolderName = Annotated[str, Predicate(is_folder_name)]
Count = Annotated[int, Ge(1), Le(10**12)]
CountOrZero = Annotated[int, Ge(0), Le(10**12)]
Quantity = Annotated[int, Ge(1), Le(1_000_000)]
QuantityOrZero = Annotated[int, Ge(0), Le(1_000_000)]
Pixels = Annotated[int, Ge(1), Le(16_384)]
Width = Annotated[int, Ge(1), Le(65_536)]
Depth = Annotated[int, Ge(1), Le(1_000)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Share = Annotated[float, Ge(0), Le(1)]
PartialShare = Annotated[float, Ge(0), Lt(1)]
InnerShare = Annotated[float, Gt(0), Lt(1)]
Positive = Annotated[float, Gt(0), Le(1e30)]
NotNegative = Annotated[float, Ge(0), Le(1e30)]  # below float32's largest value, 3.4e38, with a margin for products
Threshold = Annotated[float, Gt(0)]  # infinity is allowed: reading never halts


class Record:
    """Base class of settings; unknown field names are an error."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
