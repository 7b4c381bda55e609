"""The ViT/16 networks of the paper's tables, by timm's names but without timm, which takes seconds to import.

Shapes and data configs are timm's (`tests/nets/test_plain.py` compares them), so that weights which are here already
are loaded by torch alone. timm is needed to download them, and for any other network.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tpl.nets.plain import PatchEmbed, PlainViT

SIZE, PATCH, DEPTH = 224, 16, 12
HEAD = 64  # numbers in every attention head
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Patch16(NamedTuple):
    """A ViT/16 for 224 pixels: its width, mean and standard deviation of its pixels, and where timm downloads it."""

    dim: int
    pixels: tuple[tuple[float, ...], tuple[float, ...]]
    hub: str

    def create(self) -> PlainViT:
        """The network, without its weights."""
        return PlainViT(PatchEmbed(SIZE, PATCH, self.dim), (SIZE // PATCH) ** 2, self.dim, DEPTH, self.dim // HEAD)

    @property
    def data_config(self) -> dict[str, Any]:
        """timm's data config of the network."""
        return {
            "input_size": (3, SIZE, SIZE),
            "interpolation": "bicubic",
            "mean": self.pixels[0],
            "std": self.pixels[1],
            "crop_pct": 0.9,
            "crop_mode": "center",
        }


PATCH16: dict[str, Patch16] = {
    "vit_tiny_patch16_224": Patch16(192, HALF, "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
    "vit_small_patch16_224": Patch16(384, HALF, "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"),
    "deit_tiny_patch16_224": Patch16(192, IMAGENET, "timm/deit_tiny_patch16_224.fb_in1k"),
    "deit_small_patch16_224": Patch16(384, IMAGENET, "timm/deit_small_patch16_224.fb_in1k"),
    "vit_small_patch16_224.dino": Patch16(384, IMAGENET, "timm/vit_small_patch16_224.dino"),
    "vit_base_patch16_224.mae": Patch16(768, IMAGENET, "timm/vit_base_patch16_224.mae"),
}
