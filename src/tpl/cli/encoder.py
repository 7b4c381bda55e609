"""Which encoder a weight file fits: the names and shapes of its tensors say so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tpl.errors import TplError
from tpl.pretraining import COMPACT

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("vit_*", "deit_*")  # of timm, which adapters can be put into
WIDTHS = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}


def check_weights(name: str | None, weights: Path | None) -> None:
    """Refuse a weight file without the name of its network, and say which network it fits."""
    if name is None and weights is not None and (found := fitting_encoders(weights)) != [COMPACT]:  # the default
        raise TplError(_which_fits(weights, found))


def _which_fits(weights: Path, found: list[str]) -> str:
    if not found:
        return f"--weights needs --encoder, and {weights} fits no encoder that is known here."
    others = f" (or {', '.join(found[1:4])}: the same network, but images are scaled differently)" if found[1:] else ""
    return f"--weights needs --encoder: {weights} fits {found[0]}{others}."


def fitting_encoders(weights: Path) -> list[str]:
    """Encoders whose tensors have the names and shapes of those in a weight file; known ones first."""
    from tpl.nets import ENCODERS
    from tpl.nets.compact import create_compact
    from tpl.nets.weights import network_shapes, read_weights

    found = _trunk(read_weights(weights))
    if found == _trunk(create_compact().state_dict()):
        return [COMPACT]
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
