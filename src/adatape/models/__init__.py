"""Importing this package registers every model with timm."""

from adatape.models.adatape import AdaTape, wrap

__all__ = ["AdaTape", "wrap"]
