"""Importing this package registers every model with timm."""

from adatape.models.adatape import AdaTape, wrap
from adatape.models.avit import AViT
from adatape.models.universal import Universal, UViT

__all__ = ["AViT", "AdaTape", "UViT", "Universal", "wrap"]
