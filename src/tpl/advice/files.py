"""What is in a folder beside good images: files left out, equal pictures, names of classes that are nearly equal."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tpl.advice.features import groups_of
from tpl.stream.folders import open_tree, unread_files, without_wrappers

# What to do with files that are not read.
HINTS = {
    **dict.fromkeys((".heic", ".heif", ".avif"), "a photo that is not read: convert it to JPEG"),
    **dict.fromkeys((".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2"), "a raw photo: export it as JPEG"),
    **dict.fromkeys((".mov", ".mp4", ".avi", ".mkv", ".webm"), "a film: save frames of it as JPEG"),
    **dict.fromkeys((".svg", ".pdf", ".psd", ".eps", ".jp2", ".jxl"), "not read: convert it to PNG or JPEG"),
    **dict.fromkeys((".zip", ".tar", ".gz", ".7z", ".rar"), "an archive: unpack it"),
}
OTHER = "not a picture"
BITS = 48  # of 256 in which the hashes of one picture may differ, as saved in other sizes or qualities
LEVELS = 2.0  # of 256 grey levels, the mean difference of their thumbnails
BLOCK = 2048  # images compared with all others at a time


@dataclass(frozen=True)
class LeftOut:
    """Files of one kind that are not read."""

    suffix: str
    count: int
    example: str
    hint: str

    @property
    def shows(self) -> bool:
        """Whether such a file shows something that could be learned in another format."""
        return self.suffix in HINTS

    def __str__(self) -> str:
        return f"{self.count} x {self.suffix}, such as {self.example}: {self.hint}"


def files_left_out(place: Path) -> list[LeftOut]:
    """The files in a folder or zip that are not read, by kind, photos first; none for a list of files."""
    if place.is_file() and place.suffix.lower() != ".zip":
        return []
    return by_kind(unread_files(without_wrappers(open_tree(place))))


def by_kind(files: Sequence[str]) -> list[LeftOut]:
    """Files that are not read, given by their paths, in kinds, photos first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for file in files:
        kinds[Path(file).suffix.lower() or "no suffix"].append(file)
    found = [LeftOut(s, len(names), names[0], HINTS.get(s, OTHER)) for s, names in kinds.items()]
    return sorted(found, key=lambda kind: (not kind.shows, -kind.count))


def names_alike(names: Sequence[str], others: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Groups of class names that differ in case, spaces, separators, accents' encoding or a plural s alone.

    `others` are class names of a model: a group has at least one name of `names`.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys([*names, *others]):
        groups[_plain(name)].append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1 and set(group) & set(names)]


def _plain(name: str) -> str:
    words = re.sub(r"[\s_\-.]+", " ", unicodedata.normalize("NFKC", name)).strip().casefold()
    return words.removesuffix("s") if len(words) > 3 and not words.endswith("ss") else words


def equal_pictures(thumbnails: Tensor) -> list[list[int]]:
    """Groups of images that show the same picture, perhaps in another size, format or quality.

    A hash of 256 bits compares the brightness of neighbours in a thumbnail; thumbnails must be alike, too.
    """
    signs = torch.where(thumbnails[:, :, 1:] > thumbnails[:, :, :-1], 1.0, -1.0).flatten(1)
    flat = thumbnails.flatten(1)
    pairs = []
    for start in range(0, len(signs), BLOCK):
        different = (signs.shape[1] - signs[start : start + BLOCK] @ signs[start:].T) / 2
        for i, j in torch.nonzero(torch.triu(different <= BITS, diagonal=1)).tolist():
            if float((flat[start + i] - flat[start + j]).abs().mean()) <= LEVELS:
                pairs.append((start + i, start + j))
    return groups_of(pairs)
