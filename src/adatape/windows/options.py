"""WindowOptions: how a ViT reads windows of a large image."""

from __future__ import annotations

from dataclasses import dataclass

from adatape.windows.answers import Labels


@dataclass(frozen=True)
class WindowOptions:
    """How a ViT reads windows of a large image."""

    window: int = 64
    """side of a window in pixels"""
    view: int | tuple[int, int] | None = None
    """size that the whole image is shrunk to for the ViT to see besides; None shows it windows only"""
    steps: int = 8
    """most windows that are read (T)"""
    floor: float = 0.0
    """reading stops where the scan's probability falls below this; 0 stops at `steps` windows only"""
    layer: int | None = None
    """block before which windows join the view's rows, encoded by the blocks before it; None is after the last"""
    labels: Labels = "one"
    """whether an image has one label, or several (or none)"""
    encoder: str = "vit"
    """what encodes a window: `vit` is the ViT itself, `convolutions` three of them, else a model of timm by its name"""
    search: int = 0
    """how training finds first windows: 0 by a guess at every cell of the scan, learnt with it; else by encoding so
    many random windows of each image without gradient, as a pretrained ViT should"""
    training_steps: int | None = None
    """windows that training reads of each image, a quarter found without scores and an eighth at random places; None
    reads `steps` found ones, `steps` by score and 4 at random places"""
    cell: int = 16
    """distance between places in pixels; a multiple of scan_scale × scan_fold by a power of two"""
    scan_scale: int = 2
    """factor by which the image is shrunk for the scan"""
    scan_fold: int = 2
    """so many pixels squared enter the scan's first convolution as channels"""
    scan_width: int = 16
    """channels of the scan's first convolution"""

    @property
    def view_size(self) -> tuple[int, int] | None:
        """Height and width of the view."""
        if self.view is None:
            return None
        height, width = (self.view, self.view) if isinstance(self.view, int) else self.view
        return height, width
