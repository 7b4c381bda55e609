"""What a program gives a learner, as tasks: folders, archives, lists of pictures with class names."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tpl.errors import TplError
from tpl.methods.bank import ENOUGH_TO_HOLD_OUT
from tpl.stream import FileImages, ImageSet, Task, UnreadableImage, image_folder, to_rgb
from tpl.stream.images import relabelled

Images = ImageSet | Iterable[Image.Image | Path | str | NDArray[np.uint8]]


class LooseImages(ImageSet):
    """Images as a program holds them: paths, Pillow images or arrays, without labels."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.images = images

    @property
    def labels(self) -> NDArray[np.int64]:
        """Unknown: all 0."""
        return np.zeros(len(self.images), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> Image.Image:
        """The image as RGB."""
        image = self.images[index]
        if isinstance(image, (str, Path)):
            return FileImages([Path(image)]).load(0)
        if isinstance(image, Image.Image):
            return to_rgb(image)
        array = np.asarray(image)
        try:
            return to_rgb(Image.fromarray(array))
        except (TypeError, ValueError) as error:
            raise UnreadableImage(
                f"{self.name(index)} is no picture ({array.dtype} of shape {list(array.shape)}); "
                "give a path, a Pillow image, or a uint8 array of shape [h, w], [h, w, 3] or [h, w, 4]."
            ) from error

    def name(self, index: int) -> str:
        """Its path, or its place in the list."""
        image = self.images[index]
        return str(image) if isinstance(image, (str, Path)) else f"image {index}"

    def identity(self, index: int) -> bytes:
        """Its pixels."""
        return self.load(index).tobytes()


def as_image_set(images: Images) -> ImageSet:
    """Any images, by index."""
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, (str, Path)):
        raise TplError(f"Give a list of images, not a single path: [{str(images)!r}].")
    return LooseImages(list(images))


def as_task(images: Task | Path | str | Images, labels: Sequence[str] | None, name: str) -> Task:
    """What is to be learned: a task, class folders or a zip of them, or images with a class name each.

    `name` is for those that have none of their own.
    """
    if isinstance(images, (Task, str, Path)):
        if labels is not None:
            raise TplError("Class names come with a task or with class folders; labels are for a list of images.")
        if isinstance(images, Task):
            return images
        source = image_folder(images)
        return Task(name, source.class_names, source.train, source.test)
    if labels is None:
        raise TplError("Images need labels, the name of a class for each: learn(images, labels).")
    given = as_image_set(images)
    names = [str(label) for label in labels]
    if len(names) != len(given):
        raise TplError(f"There are {len(given)} images, but {len(names)} labels; each image needs one.")
    if not all(n.strip() for n in names):
        raise TplError("A label is empty; every image needs the name of a class.")
    classes = sorted(set(names))
    numbers = {c: i for i, c in enumerate(classes)}
    return Task(name, tuple(classes), relabelled(given, np.arange(len(given)), np.array([numbers[n] for n in names])))


def hold_out(task: Task, share: float, seed: Sequence[int]) -> tuple[ImageSet, ImageSet]:
    """The images to train on, and a share of every class to judge by; small classes keep all of theirs.

    Which images these are depends on the seed and on the class's name and number of images.
    """
    if not 0 <= share < 1:
        raise TplError(f"The share to hold out must be at least 0 and below 1; got {share}.")
    labels = task.train.labels
    held = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(task.classes):
        members = np.flatnonzero(labels == label)
        if share > 0 and len(members) >= ENOUGH_TO_HOLD_OUT:
            rng = np.random.default_rng([*seed, zlib.crc32(name.encode())])
            take = min(max(round(share * len(members)), 1), len(members) - 1)
            held[rng.choice(members, size=take, replace=False)] = True
    return task.train.select(~held), task.train.select(held)


def per_class(images: ImageSet, classes: Sequence[str]) -> tuple[int, ...]:
    """How many images each class has."""
    return tuple(np.bincount(np.asarray(images.labels), minlength=len(classes)).tolist())
