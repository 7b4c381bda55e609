"""How to train the expert's first view: adapters or LoRA, with and without averaged weights, on held-out images.

    python recipes/first_view.py --data cifar100/ --weights vit_tiny_patch16_224.safetensors     # a GPU's work
    python recipes/first_view.py --data tiny/ --benchmark t-10t --encoder compact --device cpu --images 100 --width 2000

Small trainable parts in a frozen ViT learn the first task of a benchmark. Then they are frozen, and a ridge regression
on random features of the encoder and of the trained view learns all tasks, with exact sums. Held-out training images
measure it, a tenth of all. One training gives a row with the weights of its last step, one for each exponential moving
average of the weights (EMA), and one for each mean of first and last weights. Trained beside the part named are all
layer norms and a linear head: SGD with momentum 0.9, batches of 64, horizontal flips.

Prints one JSON line a row: accuracy in per cent of the ridge at every strength (`by`) and at the best one on these same
images, and of the head on held-out images of the first task.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.bench.spec import RunSpec
from tpl.engine import Recipe
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.nets.plain import PlainViT
from tpl.nets.vit import ViTEncoder

BATCH, AT_ONCE = 64, 1000
DECAYS = (0.99, 0.995, 0.998)  # of the EMA: means over about 100 to 500 of 560 steps
SHARES = (0.5, 0.7, 0.85)  # of the way from the first to the last step's weights (Wortsman et al., 2022)
STRENGTHS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # of the ridge, in units of the Gram matrix's mean diagonal


class Images(NamedTuple):
    """Normalised images of a task, and their classes by number among all."""

    pixels: Tensor
    labels: Tensor


class Adapted(nn.Module):
    """A layer with a bottleneck behind it: y + W_up relu(W_down y)."""

    def __init__(self, layer: nn.Module, dim: int, latent: int) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(dim, latent), nn.Linear(latent, dim)
        for linear in (self.down, self.up):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, adapted."""
        y = self.layer(x)
        out: Tensor = y + self.up(F.relu(self.down(y)))
        return out


class LoRA(nn.Module):
    """A linear layer with a low-rank addition that begins as zero (Hu et al., 2022)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the addition."""
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def with_adapters(vit: PlainViT, latent: int) -> None:
    """Adapters behind attention and MLP of every block, as in the task models."""
    block: Any
    for block in vit.blocks:
        block.attn = Adapted(block.attn, vit.embed_dim, latent)
        block.mlp = Adapted(block.mlp, vit.embed_dim, latent)


def with_lora(vit: PlainViT, rank: int) -> None:
    """LoRA on query, key and value, and on the attention's projection, of every block."""
    block: Any
    for block in vit.blocks:
        block.attn.qkv, block.attn.proj = LoRA(block.attn.qkv, rank), LoRA(block.attn.proj, rank)


class Setting(NamedTuple):
    """One training of the view."""

    name: str
    change: Callable[[PlainViT, int], None]
    size: int
    rate: float
    schedule: str = "cosine"
    epochs: int = 8

    def parts(self) -> dict[str, object]:
        """What to report."""
        options = {"lr": self.rate, "schedule": self.schedule, "epochs": self.epochs}
        return {"view": self.name, "size": self.size} | options

    @property
    def recipe(self) -> Recipe:
        """How long and how fast."""
        return Recipe(self.epochs, BATCH, self.rate, self.schedule)


SETTINGS = (
    Setting("adapters", with_adapters, 64, 0.01),
    Setting("adapters", with_adapters, 64, 0.01, schedule="constant"),
    Setting("adapters", with_adapters, 64, 0.02, schedule="constant"),
    Setting("lora", with_lora, 8, 0.01),
    Setting("lora", with_lora, 16, 0.03),
    Setting("lora", with_lora, 64, 0.03),
    Setting("lora", with_lora, 16, 0.03, schedule="constant"),
)


def train(net: nn.Sequential, images: Images, setting: Setting, seed: int) -> Iterator[str]:
    """Train what in `net` needs gradients; yields with the weights of the last step in it, then with averaged ones."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    recipe = setting.recipe
    optimiser = torch.optim.SGD(parameters, recipe.lr, momentum=recipe.momentum)
    start = [p.detach().clone() for p in parameters]
    means = {decay: [p.clone() for p in start] for decay in DECAYS}
    draw = torch.Generator(images.pixels.device).manual_seed(seed)
    steps = recipe.epochs * (len(images.labels) // BATCH)
    rows = torch.cat([torch.randperm(len(images.labels), generator=draw, device=draw.device) for _ in range(99)])
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = recipe.lr * recipe.rate_at(step / steps)
        own = rows[step * BATCH : (step + 1) * BATCH]
        pixels = images.pixels[own]
        mirrored = torch.rand(len(own), generator=draw, device=draw.device) < 0.5
        pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(3), pixels)
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda):
            loss = F.cross_entropy(net(pixels), images.labels[own])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for decay, mean in means.items():
            # In the first steps a plain mean, so that random initial weights do not linger.
            torch._foreach_lerp_(mean, [p.detach() for p in parameters], 1 - min(decay, step / (step + 1)))
    end = [p.detach().clone() for p in parameters]
    others = {f"EMA {decay}": mean for decay, mean in means.items()}
    others |= {f"{share} of the way": [a.lerp(b, share) for a, b in zip(start, end, strict=True)] for share in SHARES}
    yield "last step"
    for name, values in others.items():
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)
        yield name


@torch.no_grad()
def features(vit: nn.Module, pixels: Tensor) -> Tensor:
    """What a network sees of images."""
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda):
        return torch.cat([vit(part).float() for part in pixels.split(AT_ONCE)])


class Study(NamedTuple):
    """All images of one class order, and what the frozen encoder sees of them."""

    order: str
    seen: Images
    held: Images
    views: tuple[Tensor, Tensor]  # of the images to learn, and of those held out
    width: int  # random features a view

    def report(self, row: dict[str, object], *view: Tensor) -> None:
        """Print a row: the ridge's accuracies with another `view`, if there is one, beside the encoder's."""
        pairs = [self.views, *([view] if view else [])]
        rates = self.accuracies([seen for seen, _ in pairs], [held for _, held in pairs])
        print(json.dumps({"order": self.order} | row | {"accuracy": max(rates.values()), "by": rates}), flush=True)

    def accuracies(self, views: list[Tensor], held: list[Tensor]) -> dict[str, float]:
        """Accuracy on held-out images, in per cent, by the strength of the ridge.

        It learns all classes at once: its sums are those after the last task.
        """
        config = RidgeConfig(random_features=self.width * len(views))
        ridge = RandomRidge.drawn_for_views(views, config, torch.Generator().manual_seed(1), share=len(views))
        width = sum(each.shape[1] for each in ridge.projections)
        classes = int(self.seen.labels.max()) + 1
        gram, sums = (views[0].new_zeros(width, n, dtype=torch.float64) for n in (width, classes))
        for z, y in zip(torch.cat(views, dim=1).split(AT_ONCE), self.seen.labels.split(AT_ONCE), strict=True):
            h = ridge.hidden(z)
            gram.addmm_(h.T, h)
            sums.addmm_(h.T, F.one_hot(y, classes).double())
        found = dict[str, float]()
        for strength in STRENGTHS:
            system = gram + strength * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
            weights = torch.cholesky_solve(sums, torch.linalg.cholesky(system))
            right = (ridge.hidden(torch.cat(held, dim=1)) @ weights).argmax(dim=1) == self.held.labels
            found[f"{strength:g}"] = round(100 * float(right.double().mean()), 2)
        return found


def loaded(spec: RunSpec, most: int) -> tuple[PlainViT, list[Images], list[Images]]:
    """The frozen network, and all tasks' images to learn and to measure on, on the device.

    Of a later task's class, at most `most` images to learn.
    """
    method = spec.learner().method
    device, seen, held, first = method.compute.device, list[Images](), list[Images](), 0
    normalise = method.preprocess.normaliser(device)
    for task in spec.stream():
        for found, images in ((seen, task.train), (held, task.test)):
            assert images is not None
            labels = torch.tensor(images.labels)
            rows = torch.arange(len(labels))
            if first and found is seen:
                rows = torch.cat([torch.nonzero(labels == c).flatten()[:most] for c in range(len(task.classes))])
            pixels = method.preprocess.batch(images.select(rows.tolist()), device=device)
            parts = [normalise(part).to(method.compute.dtype) for part in pixels.split(AT_ONCE)]
            found.append(Images(torch.cat(parts), labels[rows].long().to(device) + first))
        first += len(task.classes)
    assert isinstance(method.encoder, ViTEncoder) and isinstance(method.encoder.vit, PlainViT)
    return method.encoder.vit.to(device), seen, held


def main() -> None:
    """Train all settings; one line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--benchmark", default="c100-10t")
    parser.add_argument("--encoder", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--orders", default="random:11,random:12", help="class orders other than those of the tables")
    numbers = range(len(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="+", choices=numbers, default=numbers, help="numbers of SETTINGS")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each setting")
    parser.add_argument("--width", type=int, default=5000, help="random features a view")
    parser.add_argument("--images", type=int, default=10_000, help="training images of a later task's class, at most")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    for order in given.orders.split(","):
        spec = RunSpec(
            given.benchmark,
            "ranpac",
            given.encoder,
            given.weights,
            given.data,
            order=order,
            validation=0.1,
            device=given.device,
        )
        frozen, tasks, held = loaded(spec, given.images)
        seen, other = (Images(*(torch.cat(column) for column in zip(*part, strict=True))) for part in (tasks, held))
        views = features(frozen, seen.pixels), features(frozen, other.pixels)
        study = Study(order, seen, other, views, given.width)
        study.report({"view": "none"})
        for setting in (SETTINGS[number] for number in given.settings):
            for seed in range(given.seeds):
                torch.manual_seed(seed)
                vit = copy.deepcopy(frozen).requires_grad_(False)
                setting.change(vit, setting.size)
                for module in vit.modules():
                    if isinstance(module, nn.LayerNorm):
                        module.requires_grad_(True)
                net = nn.Sequential(vit, nn.Linear(vit.embed_dim, len(tasks[0].labels.unique()))).to(seen.pixels.device)
                for weights in train(net, tasks[0], setting, seed):
                    z, z_held = features(vit, seen.pixels), features(vit, other.pixels)
                    right = net[1](z_held[: len(held[0].labels)]).argmax(dim=1) == held[0].labels
                    own = {"weights": weights, "first_task": round(100 * float(right.double().mean()), 2)}
                    study.report(setting.parts() | {"seed": seed} | own, z, z_held)


if __name__ == "__main__":
    main()
