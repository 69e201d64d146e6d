"""Under which licence a run's weights are: that of the pretrained weights it began with."""

from __future__ import annotations

from typing import NamedTuple

import timm

from adatape.config import ImageModel

OWN, UNKNOWN = "apache-2.0", "unknown"


class Licence(NamedTuple):
    """An identifier as model hubs have it, and where it comes from."""

    name: str
    reason: str

    def __str__(self) -> str:
        limit = " It forbids commercial use." if _is_noncommercial(self.name) else ""
        return f"{self.name}: {self.reason}.{limit}"


def licence_of(model: ImageModel, given: str | None = None) -> Licence:
    """The licence of weights that were trained as `model` says; `given` takes its place.

    timm's settings name the licence of the weights that they point to; a file of weights names none.
    """
    if given:
        return Licence(given, "as given by those who release it")
    if model.pretrained is None:
        return Licence(OWN, "that of adatape, since the model was trained from scratch; its data may ask for another")
    if model.pretrained != "hub":
        return Licence(UNKNOWN, "the model was trained from a file of weights; ask those who made them")
    known = timm.get_pretrained_cfg(model.name)
    if known is None or not known.license:
        return Licence(UNKNOWN, f"timm names none for {model.name}, whose weights the model was trained from")
    return Licence(known.license, f"that of {model.name}, whose weights the model was trained from")


def _is_noncommercial(name: str) -> bool:
    return "-nc" in name.lower() or "noncommercial" in name.lower().replace("-", "")
