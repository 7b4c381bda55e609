"""What encoders were pre-trained on, whether that includes a benchmark's data set, and which weights are known.

An encoder that was pre-trained on what a benchmark is made of is contaminated for it: its accuracy says little about
learning these classes. Such a run must be asked for by name, and carries a mark. Imports no torch.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

CIFAR10, CIFAR100 = "cifar10", "cifar100"
IMAGENET, IMAGENET611 = "imagenet", "imagenet-611"
TINY, IMAGENET380 = "tiny-imagenet", "imagenet380"

COMPACT, PHOTOS = "compact", "photos"  # their weights are in the package
PACKAGED = COMPACT, PHOTOS
DEIT_611, RESNET = "deit_small_611", "resnet18"

_PRETRAINED_ON: dict[str, tuple[str, ...]] = {
    COMPACT: (CIFAR100,),
    PHOTOS: (IMAGENET, TINY),  # a network of timm, which then saw Tiny-ImageNet's training images without labels
    DEIT_611: (IMAGENET611,),  # the ImageNet classes left after removing 389 that resemble CIFAR's or Tiny-ImageNet's
    RESNET: (),
}
# The data sets that another one contains or closely resembles.
_SHARED: dict[str, frozenset[str]] = {
    CIFAR100: frozenset({CIFAR100, CIFAR10}),  # collected together, with related classes
    IMAGENET: frozenset({IMAGENET, TINY, IMAGENET380}),  # both are subsets of ImageNet
    IMAGENET611: frozenset({IMAGENET}),
}

KNOWN, UNVERIFIED, RANDOM = "known", "unverified", "random"
# sha256 of downloaded weight files, and of the same tensors as timm loads them. None is published for the checkpoint of
# DEIT_611; the records of the package have those of its own weights.
_KNOWN_WEIGHTS: dict[str, tuple[str, ...]] = {
    "vit_tiny_patch16_224": (
        "a22e9b3685d1feca11a382fbed2db95defc965fe037c026069331b6c243268a6",
        "56af952eb9f8b2c10664ed14088f77dfad466e3dee63e5e397aec231c541d80f",
    ),
    "deit_tiny_patch16_224": (
        "a9f6cd5db5b367bcd318b5052971ed64b0c3bb13cb07d22ff68bcd00d0a99cf3",
        "18b3fe15c94cd0a5331ef8a329aa855c158fc8f87ec632211916f14345f1dc59",
    ),
}


def pretrained_on(encoder: str) -> tuple[str, ...]:
    """The data sets that an encoder was pre-trained on; ImageNet for every encoder of timm."""
    return _PRETRAINED_ON.get(encoder.partition(":")[0], (IMAGENET,))


def contamination(encoder: str, data_set: str) -> list[str]:
    """The data sets of an encoder's pre-training that contain or closely resemble `data_set`."""
    return [name for name in pretrained_on(encoder) if data_set in _SHARED.get(name, {name})]


def packaged_record(encoder: str) -> dict[str, Any]:
    """How the weights of an encoder in the package were made, with their sha256."""
    file = files("tpl") / "nets" / "pretrained" / f"{encoder}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def weights_status(encoder: str, sha256: str | None) -> str:
    """KNOWN for the weights of the committed results, RANDOM for a network without pre-training, else UNVERIFIED."""
    if not pretrained_on(encoder):
        return RANDOM
    return KNOWN if sha256 in known_weights(encoder) else UNVERIFIED


def known_weights(encoder: str) -> tuple[str, ...]:
    """The sha256 of an encoder's weights in the committed results; empty where none is known."""
    return (packaged_record(encoder)["sha256"],) if encoder in PACKAGED else _KNOWN_WEIGHTS.get(encoder, ())
