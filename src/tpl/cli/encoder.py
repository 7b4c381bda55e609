"""Which encoder a command means: the one asked for, the one that a weight file fits, or the one that suits the images.

A new model of photos has the better of two: if there is a network, one that is fetched, else one in the package. The
command says which, and the model keeps the weights (`Learner.save`), so that it needs no network later.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpl.cli.app import err
from tpl.cli.text import warn
from tpl.errors import TplError, UnreadableImage
from tpl.pretraining import COMPACT, PACKAGED, PHOTOS

if TYPE_CHECKING:
    from torch import Tensor

    from tpl.stream import ImageSet

FAMILIES = ("vit_*", "deit_*")  # of timm, which adapters can be put into
WIDTHS = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
SMALL_SIDE = 48  # pixels of a shorter side up to which images count as small
LOOKED_AT = 50  # images whose sizes are read
OFFLINE = "TPL_OFFLINE"  # environment variable: with 1, or anything but 0, no encoder is fetched by default
LINE = 20e6 / 8  # bytes a second, of the connection that a download's time is told for


class EncoderChoice(NamedTuple):
    """The encoder of a new model, and why."""

    name: str
    reason: str
    side: int  # median of the images' shorter sides, in pixels
    offline: bool = False  # whether a better one was asked for and could not be had
    unasked: bool = False  # whether it is fetched by default: if that fails, the one in the package will do


class Better(NamedTuple):
    """A better encoder than some other one, and its price."""

    encoder: str
    pixels: int
    times_slower: int
    download_megabytes: int = 0
    licence: str = "Apache-2.0"


BETTER = {
    COMPACT: Better(PHOTOS, 128, 8),
    PHOTOS: Better("vit_tiny_patch16_224", 224, 3, 22),  # by the figures of docs/photos.md
}


FOR_PHOTOS = (PHOTOS, BETTER[PHOTOS].encoder)  # what `choose_encoder` takes for photos


def choose_encoder(
    asked: str | None, weights: Path | None, images: ImageSet, download: bool | None = False
) -> EncoderChoice:
    """The encoder asked for, or the one in the package that fits the weight file, or else the images.

    With `download`, photos are seen with a better one, if it can be had; with None, if it can be had at once.
    """
    side = shorter_side(images)
    if asked is not None:
        return EncoderChoice(asked, "asked for", side)
    if weights is not None:
        return EncoderChoice(packaged_fitting(weights), "the one that the weight file fits", side)
    reason = f"the images' shorter sides have {side} pixels (median)"
    if side <= SMALL_SIDE:
        return EncoderChoice(COMPACT, reason, side)
    better, price = BETTER[PHOTOS].encoder, BETTER[PHOTOS].times_slower
    if download:
        from tpl.nets.weights import can_be_had

        if can_be_had(better):
            return EncoderChoice(better, f"{reason}, and --download was given", side)
        warn(f"the weights of {better} cannot be had without a network: {PHOTOS}, which is in the package, is used.")
    elif download is None and os.environ.get(OFFLINE, "") in ("", "0"):
        from tpl.nets.weights import hub_answers

        if hub_answers():
            return EncoderChoice(
                better, f"{reason} (--no-download: {PHOTOS}, about {price} times faster)", side, unasked=True
            )
    return EncoderChoice(PHOTOS, reason, side, offline=bool(download))


def in_package(choice: EncoderChoice, error: TplError) -> EncoderChoice:
    """What to take if an encoder that nobody asked for cannot be fetched after all."""
    warn(f"{error} {PHOTOS}, which is in the package, is used.")
    return choice._replace(name=PHOTOS, reason=choice.reason.partition(" (--no-download")[0], unasked=False)


def shorter_side(images: ImageSet) -> int:
    """The median of the shorter sides of some images, in pixels; 0 if none can be read."""
    count = min(len(images), LOOKED_AT)
    sides = []
    for number in range(count):
        try:
            sides.append(min(images.size(number * len(images) // count)))
        except UnreadableImage:
            continue
    return sorted(sides)[len(sides) // 2] if sides else 0


def describe_encoder(choice: EncoderChoice | None, name: str, pixels: int) -> dict[str, Any]:
    """What a command uses, and what a better choice would be, as JSON; without a choice, a stored model's encoder.

    No other is better for images that are no larger than what this one sees.
    """
    better = BETTER.get(name) if choice is not None and choice.side > pixels and not choice.offline else None
    return {
        "name": name,
        "pixels": pixels,
        "reason": None if choice is None else choice.reason,
        "better": None if better is None else better._asdict(),
    }


def encoder_text(found: dict[str, Any]) -> str:
    """The same in a line."""
    text = f"Encoder: {found['name']} at {found['pixels']} pixels, {found['reason']}."
    better = found["better"]
    if better is None:
        return text
    size = better["download_megabytes"]
    price = f"a download of {size} MB, {better['licence']}, and " if size else ""
    return (
        f"{text} Better: --encoder {better['encoder']}, {better['pixels']} pixels ({price}about "
        f"{better['times_slower']} times slower)."
    )


def announce_download(name: str, weights: Path | None) -> None:
    """Say what a download of weights will cost before it begins."""
    if weights is not None or name in PACKAGED:
        return
    from tpl.nets.weights import download_of

    found = download_of(name)
    if found is not None:
        seconds = max(1, round(found.bytes / LINE))
        err.print(
            f"Downloading the weights of {name}: {found.bytes / 1e6:.0f} MB, licence {found.licence}, about "
            f"{seconds} s at 20 Mbit/s; kept for the next time.",
            highlight=False,
            soft_wrap=True,
        )


def packaged_fitting(weights: Path) -> str:
    """The encoder in the package that a weight file fits; any other must be named, and the error says which one."""
    found = fitting_encoders(weights)
    if found and found[0] in PACKAGED:
        return found[0]
    if not found:
        raise TplError(f"--weights needs --encoder, and {weights} fits no encoder that is known here.")
    others = f" (or {', '.join(found[1:4])}: the same network, but images are scaled differently)" if found[1:] else ""
    raise TplError(f"--weights needs --encoder: {weights} fits {found[0]}{others}.")


def fitting_encoders(weights: Path) -> list[str]:
    """Encoders whose tensors have the names and shapes of those in a weight file; known ones first."""
    from tpl.nets import ENCODERS
    from tpl.nets.weights import PACKAGED as NETWORKS
    from tpl.nets.weights import network_shapes, read_weights

    found = _trunk(read_weights(weights))
    for name, packaged in NETWORKS.items():
        if found == _trunk(packaged.create().state_dict()):
            return [name]
    candidates = _candidates(found)
    fitting = [
        name for name in candidates if (network := network_shapes(name)) and _trunk(network.state_dict()) == found
    ]
    return sorted(fitting, key=lambda name: (name not in ENCODERS, len(name), name))


def _trunk(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors but the classifier's, which encoders do without."""
    return {key: tuple(value.shape) for key, value in state.items() if not key.startswith(("head.", "head_dist."))}


def _candidates(found: dict[str, tuple[int, ...]]) -> list[str]:
    """Names in timm that agree with the width, patch and image size of some tensors: few enough to build each."""
    import timm

    patch, positions = found.get("patch_embed.proj.weight"), found.get("pos_embed")
    if patch is None or positions is None or len(patch) != 4 or len(positions) != 3:
        return []
    size = patch[-1] * int((positions[1] - 1) ** 0.5)
    names = [name for family in FAMILIES for name in timm.list_models(family)]
    width = WIDTHS.get(patch[0])
    wanted = rf"(?=.*patch{patch[-1]}(_|$))(?=.*_{size}$)" + (rf"(?=.*_{width}_)" if width else "")
    return [name for name in names if re.match(wanted, name)]
