"""A class-balanced set: a memory, and as many images of every new class as it has of an old one.

A task's new images outnumber what is remembered, and a head trained on both leans to the new classes. A short training
on such a set (`NetworkMethod.fit` with a shorter recipe) sets it right.
"""

from __future__ import annotations

import torch

from tpl.engine import Samples


def balanced(new: Samples, old: Samples, generator: torch.Generator) -> Samples:
    """All of `old`, and of every class of `new` as many, drawn by lot, as the largest old class has.

    A class with fewer gives all it has. Labels are numbers among all classes; pixels come to the labels' device.
    """
    quota = int(old.labels.bincount().max())
    labels = new.labels.cpu()
    order = torch.randperm(len(labels), generator=generator)
    chosen = torch.cat([order[labels[order] == c][:quota] for c in labels.unique().tolist()])
    pixels = new.pixels[chosen.to(new.pixels.device)].to(old.pixels.device)
    return Samples(torch.cat([old.pixels, pixels]), torch.cat([old.labels, new.labels[chosen.to(new.labels.device)]]))
