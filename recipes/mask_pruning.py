"""How many units HAT's regulariser alone can close while a task is trained from scratch: no image is looked at.

python recipes/mask_pruning.py --images 5000 --epochs 30 --sparsity 0.75 1.5 3          # some 10 s each on one core

A task's mask begins with half of its units open. What is left open here, where no unit is of any use, is about the
least that a task takes with these settings; a trained one takes more. One JSON line a setting: the share of open units
of the first few tasks, and of units in use after each.
"""

from __future__ import annotations

import argparse
import json
import math

import torch

from tpl.engine import Recipe
from tpl.methods.bank.protect import PROTECTIONS, ProtectConfig
from tpl.nets.resnet import KernelStack, Layout


def main() -> None:
    """Print one line a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--images", type=int, default=5000, help="training images of a task")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.75])
    parser.add_argument("--s-max", type=float, default=400.0)
    parser.add_argument("--mask-gradient", default="autograd", choices=("autograd", "analytic"))
    options = parser.parse_args()
    recipe = Recipe(epochs=options.epochs, batch_size=options.batch_size, lr=options.lr, schedule="cosine")
    steps = math.ceil(options.images / options.batch_size)
    for sparsity in options.sparsity:
        config = ProtectConfig(sparsity=sparsity, s_max=options.s_max, mask_gradient=options.mask_gradient)
        used, opened, taken = None, [], []
        for number in range(options.tasks):
            mask = last_mask(Layout(options.width), config, recipe, steps, used, number)
            used = mask if used is None else torch.maximum(used, mask)
            opened.append(round(float(mask.mean()), 3))
            taken.append(round(float(used.mean()), 3))
        print(json.dumps(vars(options) | {"sparsity": sparsity, "open": opened, "used": taken}), flush=True)


def last_mask(
    layout: Layout, config: ProtectConfig, recipe: Recipe, steps: int, used: torch.Tensor | None, seed: int
) -> torch.Tensor:
    """The mask that is left of a random one when the regulariser has had its way."""
    protection = PROTECTIONS["hat"](config)
    nothing = KernelStack(layout, torch.empty(0))
    embedding = torch.randn(1, sum(layout.groups), generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimiser = recipe.optimiser([embedding])
    total = steps * recipe.epochs
    for number in range(total):
        progress = torch.tensor(number % steps / steps)
        optimiser.zero_grad()
        protection.penalty(protection.masked(nothing, embedding, progress).mask, used).sum().backward()
        protection.after_backward(embedding, progress)
        optimiser.scale_rate(recipe.rate_at(number / total))
        optimiser.step()
        protection.after_step(embedding)
    return (embedding.detach() > 0).float()


if __name__ == "__main__":
    main()
