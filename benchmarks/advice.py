"""How good the advice of `tpl check` and `tpl suggest` is, on any class folders.

    python benchmarks/advice.py photos/ --encoder vit_tiny_patch16_224

Features are computed once. Then, many times over, classes and images are drawn: some labels are made wrong and must be
found; the accuracy with twice the images is predicted and measured; images are chosen to be labelled and must help more
than images drawn at random. Prints three tables in Markdown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tpl.advice.curve import outlook
from tpl.advice.features import FeatureReader, centred
from tpl.advice.labels import extended, leave_one_out, ridge_weights
from tpl.advice.suggest import most_useful, uncertainty
from tpl.engine import choose_compute
from tpl.nets import create_encoder
from tpl.stream import batches_of, labelled_images

WRONG = 0.05  # share of labels that are made wrong
RIDGE, TEMPERATURE = 0.1, 0.1  # of the model that asks for labels


class Photos:
    """Features of all images, and draws of some classes and images from them."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels
        self.fewest = int(labels.bincount().min())

    def draw(self, classes: int, each: int, seed: int) -> tuple[list[Tensor], np.random.Generator]:
        """`each` rows of each of `classes` classes, in random order."""
        rng = np.random.default_rng([classes, each, seed])
        chosen = rng.choice(int(self.labels.max()) + 1, classes, replace=False)
        rows = [rng.permutation(np.flatnonzero(self.labels.numpy() == c))[:each] for c in chosen]
        return [torch.from_numpy(own) for own in rows], rng


def labels_of(rows: list[Tensor]) -> Tensor:
    """Class numbers of rows that are given class by class."""
    return torch.arange(len(rows)).repeat_interleave(torch.tensor([len(own) for own in rows]))


def wrong_labels(photos: Photos, classes: int, each: int, draws: int) -> list[int]:
    """Labels made wrong, those of them found, all that were suspected, and suspected among right labels alone."""
    totals = np.zeros(4, dtype=int)
    for seed in range(draws):
        rows, rng = photos.draw(classes, each, seed)
        z, right = centred(photos.features[torch.cat(rows)]), labels_of(rows)
        bad = rng.choice(len(right), max(1, round(WRONG * len(right))), replace=False)
        given = right.clone()
        given[bad] = (right[bad] + torch.from_numpy(rng.integers(1, classes, len(bad)))) % classes
        found = {row for row, _, _ in leave_one_out(z, given, classes).suspects()}
        clean = leave_one_out(z, right, classes).suspects()
        totals += [len(bad), len(found & set(bad.tolist())), len(found), len(clean)]
    return [int(total) for total in totals]


def twice_the_images(photos: Photos, classes: int, each: int, draws: int) -> list[float]:
    """Accuracy now, predicted and measured with twice the images; and how often that lay in the interval."""
    found = []
    for seed in range(draws):
        rows, _ = photos.draw(classes, 2 * each, seed)
        half = [own[:each] for own in rows]
        z = [centred(photos.features[torch.cat(part)]) for part in (half, rows)]
        now, later = (
            float(leave_one_out(x, labels_of(part), classes).right.double().mean())
            for x, part in zip(z, (half, rows), strict=True)
        )
        expected = outlook(z[0], labels_of(half), classes, now)
        assert expected is not None
        found.append((now, expected.doubled, later, expected.low <= later <= expected.high))
    return [float(mean) for mean in np.mean(found, axis=0)]


def images_to_label(photos: Photos, classes: int, each: int, count: int, draws: int) -> list[float]:
    """Accuracy before, and with `count` more labels: drawn at random, the most uncertain, and those suggested."""
    found = []
    for seed in range(draws):
        rows, rng = photos.draw(classes, photos.fewest, seed)
        half = each + (photos.fewest - each) // 2
        train, pool, test = ([own[a:b] for own in rows] for a, b in ((0, each), (each, half), (half, None)))
        reference = photos.features[torch.cat([*train, *pool])]
        z = [centred(photos.features[torch.cat(part)], reference) for part in (train, pool, test)]
        y = [labels_of(part) for part in (train, pool, test)]
        weights = ridge_weights(z[0], y[0], classes, RIDGE)
        unsure = uncertainty((extended(z[1]) @ weights / TEMPERATURE).softmax(dim=1))
        choices = [
            torch.zeros(0, dtype=torch.long),
            torch.from_numpy(rng.choice(len(y[1]), count, replace=False)),
            unsure.argsort(descending=True)[:count],
            torch.tensor(most_useful(unsure, z[1], count)),
        ]
        accuracies = []
        for more in choices:
            both = torch.cat([z[0], z[1][more]]), torch.cat([y[0], y[1][more]])
            predicted = (extended(z[2]) @ ridge_weights(*both, classes, RIDGE)).argmax(dim=1)
            accuracies.append(float((predicted == y[2]).double().mean()))
        found.append(accuracies)
    return [float(mean) for mean in np.mean(found, axis=0)]


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="class folders, a zip of them, or a folder of train*.zip, test*.zip")
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--classes", type=int, default=20, help="classes that are looked at")
    parser.add_argument("--each", type=int, default=40, help="images of each of them")
    parser.add_argument("--draws", type=int, default=12)
    given = parser.parse_args()
    folder = labelled_images(given.folder, testing=True)
    kept = np.random.default_rng(0).choice(len(folder.class_names), given.classes, replace=False)
    folder = folder.only([folder.class_names[c] for c in kept])
    rows = np.concatenate([np.flatnonzero(folder.images.labels == c)[: given.each] for c in range(given.classes)])
    reader = FeatureReader(create_encoder(given.encoder, given.weights), choose_compute("auto", "auto", "auto"))
    looked = reader.look(batches_of(folder.images.select(rows), reader.preprocess))
    photos, few = Photos(looked.features, looked.labels), min(10, given.classes)
    sizes = [(few, 10), (few, photos.fewest), (given.classes, photos.fewest)]
    found = [(c, n, wrong_labels(photos, c, n, given.draws)) for c, n in sizes]
    table(
        f"Wrong labels, {given.encoder}",
        ["classes", "images of each", "made wrong", "found", "suspected", "suspected if all are right"],
        [[str(number) for number in (c, n, *row)] for c, n, row in found],
    )
    sizes = [(c, n) for c in (few, given.classes) for n in (5, 10, 20) if 2 * n <= photos.fewest]
    shares = [(c, n, twice_the_images(photos, c, n, given.draws)) for c, n in sizes]
    table(
        f"Twice the images, {given.encoder}",
        ["classes", "images of each", "now %", "predicted %", "measured %", "in the interval %"],
        [[str(c), str(n), *(f"{100 * share:.1f}" for share in row)] for c, n, row in shares],
    )
    wanted = [(c, n, 20) for c in (few, given.classes) for n in (2, 3, 5)]
    gained = [(c, n, images_to_label(photos, c, n, count, given.draws)) for c, n, count in wanted]
    table(
        f"20 images to label, {given.encoder}",
        ["classes", "images of each", "before %", "random %", "most uncertain %", "suggested %"],
        [[str(c), str(n), *(f"{100 * share:.1f}" for share in row)] for c, n, row in gained],
    )


if __name__ == "__main__":
    main()
