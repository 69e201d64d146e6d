"""Tape banks: modules that compute or store the tokens a tape may be read from; `docs/banks.md` is their guide."""

from __future__ import annotations

from adatape.banks.base import Bank, BankView, NoBank, keys_of, normed
from adatape.banks.index import build_index
from adatape.banks.inputs import InputBank, PatchView, affine_keys
from adatape.banks.keyed import KeyedView
from adatape.banks.learned import FrozenBank, LearnedBank
from adatape.banks.retrieval import RetrievalBank

__all__ = [
    "Bank",
    "BankView",
    "FrozenBank",
    "InputBank",
    "KeyedView",
    "LearnedBank",
    "NoBank",
    "PatchView",
    "RetrievalBank",
    "affine_keys",
    "build_index",
    "keys_of",
    "normed",
]
