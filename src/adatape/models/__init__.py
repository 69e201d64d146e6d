"""Importing this package registers every model with timm."""

from adatape.models import (
    hub,  # noqa: F401  `adatape`, around any backbone
    vit,  # noqa: F401  PlainViT, ViT-3FFN and plain ViTs that timm lacks
)
from adatape.models.adapters import tape_modules
from adatape.models.adatape import AdaTape
from adatape.models.avit import AViT
from adatape.models.build import wrap
from adatape.models.ponder import PonderNet
from adatape.models.saving import hub_settings
from adatape.models.universal import Universal, UViT
from adatape.models.vit import Plain

__all__ = ["AViT", "AdaTape", "Plain", "PonderNet", "UViT", "Universal", "hub_settings", "tape_modules", "wrap"]
