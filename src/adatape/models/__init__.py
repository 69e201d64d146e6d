"""Importing this package registers every model with timm."""

from adatape.models.adatape import AdaTape, wrap
from adatape.models.universal import Universal, UViT

__all__ = ["AdaTape", "UViT", "Universal", "wrap"]
