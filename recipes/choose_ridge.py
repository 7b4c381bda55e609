"""Random features, ridge strength, logit adjustment and kernels, measured on held-out training images of CIFAR-100.

python recipes/choose_ridge.py features --data cifar100/ --weights vit_tiny_patch16_224.safetensors    # a GPU's work
python recipes/choose_ridge.py widths                                # few images: 3 minutes on two cores
python recipes/choose_ridge.py even                                  # unequal classes: a minute on two cores
python recipes/choose_ridge.py strengths --device cuda               # all images, 10 tasks of 10 classes
python recipes/choose_ridge.py kernels                               # KLDA, all images: 5 minutes on two cores

`features` writes what the frozen encoder sees of every training image into one file, which the others read
(`--file`). Every other command prints one JSON line a setting: accuracy in per cent on a tenth of the images, drawn at
random, with the strength and temperature that were chosen after the last task. The tables are in
docs/beyond-evidence.md; those of `kernels` in docs/baselines.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tpl.bench.spec import RunSpec
from tpl.methods.klda import PUBLISHED, FourierAnalysis, KLDAConfig
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig

PER_TASK = 10  # classes
STORED = 20  # images a class in the memory
HELD_OUT = 0.1


class Split(NamedTuple):
    """Features and classes to learn, and others to measure on."""

    seen: Tensor
    labels: Tensor
    held: Tensor
    truth: Tensor

    @classmethod
    def of(cls, file: Path, device: str) -> Split:
        """A tenth of a file's images is held out, at random."""
        found = load_file(file)
        mixed = torch.randperm(len(found["y"]), generator=torch.Generator().manual_seed(0))
        z, y = found["z"][mixed].float().to(device), found["y"][mixed].to(device)
        held = int(HELD_OUT * len(y))
        return cls(z[held:], y[held:], z[:held], y[:held])

    def rows(self, c: int, count: int | None = None) -> Tensor:
        """The first so many images of a class, or all."""
        return torch.nonzero(self.labels == c).squeeze(1)[:count]

    def accuracy(self, ridge: RandomRidge) -> float:
        """Of the held-out images whose class was learned, in per cent."""
        known = self.truth < ridge.classes
        right = ridge.log_probabilities(self.held[known]).argmax(dim=1) == self.truth[known]
        return round(100 * float(right.double().mean()), 2)


def learned(split: Split, counts: list[int | None], config: RidgeConfig, memory: bool) -> RandomRidge:
    """A ridge that learned so many images of each class, ten classes a task.

    With a `memory` its strength is chosen as `tpl-plus` does, on stored images left out one at a time; without, as
    `ranpac` does, on a fifth of each task.
    """
    draw = torch.Generator().manual_seed(1)
    ridge = None
    for first in range(0, len(counts), PER_TASK):
        upto = first + PER_TASK
        new = torch.cat([split.rows(c, counts[c]) for c in range(first, upto)])
        z, y = split.seen[new], split.labels[new]
        ridge = ridge or RandomRidge.drawn_for(z, config, draw)
        if memory:
            stored = torch.cat([split.rows(c, min(STORED, counts[c] or STORED)) for c in range(upto)])
            ridge.learn_whole(z, y, split.seen[stored], split.labels[stored])
        else:
            ridge.learn(z, y, draw)
    assert ridge is not None
    return ridge


def report(split: Split, expert: RandomRidge, **setting: object) -> None:
    """Print one line of JSON."""
    chosen = {"strength": expert.strength, "temperature": round(expert.temperature, 4)}
    print(json.dumps(setting | {"accuracy": split.accuracy(expert)} | chosen), flush=True)


def widths(split: Split) -> None:
    """Few images: how many random features are worth it?"""
    for first, later, classes in ((3, 3, 20), (10, 10, 20), (5, 50, 20), (5, 200, 50)):
        counts: list[int | None] = [*[first] * PER_TASK, *[later] * (classes - PER_TASK)]
        for width in (256, 512, 1024, 2048):
            ridge = learned(split, counts, RidgeConfig(random_features=width, logit_adjustment=False), memory=True)
            report(split, ridge, first=first, later=later, classes=classes, width=width)


def even(split: Split) -> None:
    """Classes with unequally many images: as published, or as if they had equally many?"""
    for counts in (
        [5] * 10 + [50] * 10,
        [50] * 10 + [5] * 10,
        [5] * 10 + [200] * 10,
        [10, 20, 40, 80, 160] * 4,
        [20] * 20,
    ):
        for choice in (False, True):
            ridge = learned(
                split, list(counts), RidgeConfig(random_features=1024, logit_adjustment=choice), memory=True
            )
            report(split, ridge, images=sorted(set(counts)), first=counts[0], logit_adjustment=choice)


def strengths(split: Split) -> None:
    """All images of all classes: by which error is the strength to be chosen?"""
    everything: list[int | None] = [None] * 100
    for width in (5000, 10_000):
        for choice in ("error", "entropy"):
            for memory in (False, True):
                ridge = learned(split, everything, RidgeConfig(random_features=width, ridge_criterion=choice), memory)
                report(
                    split,
                    ridge,
                    width=width,
                    ridge_criterion=choice,
                    chosen_on="memory" if memory else "a fifth of each task",
                )


def kernels(split: Split) -> None:
    """KLDA: how wide a kernel, and how much is added to the scatter?"""
    for gamma in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3):
        draw = torch.Generator().manual_seed(1)
        analysis = FourierAnalysis.drawn(split.seen.shape[1], PUBLISHED, KLDAConfig(gamma=gamma), draw)
        analysis = analysis.to(split.seen.device)
        analysis.add(split.seen, split.labels)
        for ridge in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
            analysis.ridge = ridge
            analysis.take(analysis.statistics)
            right = analysis.logits(split.held).argmax(dim=1) == split.truth
            accuracy = round(100 * float(right.double().mean()), 2)
            print(json.dumps({"gamma": gamma, "ridge": ridge, "accuracy": accuracy}), flush=True)


def features(file: Path, data: Path, encoder: str, weights: Path | None, device: str) -> None:
    """What the frozen encoder sees of all training images, into one file."""
    spec = RunSpec("c100-10t", "ranpac", encoder, weights, data, device=device)
    method = spec.learner().method
    parts = []
    for number, task in enumerate(spec.stream()):
        images = task.train
        z = method.encoder_features(method.preprocess.batch(images, device=method.compute.device)).cpu()
        parts.append((z, torch.tensor(images.labels) + PER_TASK * number))
        print(f"task {number + 1} of 10", flush=True)
    z, y = (torch.cat(column) for column in zip(*parts, strict=True))
    save_file({"z": z, "y": y}, file)


def main() -> None:
    """Run one of the studies."""
    studies = {study.__name__: study for study in (widths, even, strengths, kernels)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["features", *studies])
    parser.add_argument("--file", type=Path, default=Path("features.safetensors"))
    parser.add_argument("--data", type=Path, help="for features: CIFAR-100")
    parser.add_argument("--encoder", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.what == "features" and given.data is None:
        parser.error("features needs --data, the folder of CIFAR-100")
    if given.what != "features" and not given.file.is_file():
        parser.error(f"there is no {given.file}: make it with `features`, or name another with --file")
    if given.what == "features":
        features(given.file, given.data, given.encoder, given.weights, given.device)
    else:
        studies[given.what](Split.of(given.file, given.device))


if __name__ == "__main__":
    main()
