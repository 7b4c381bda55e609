"""How to train the expert's first view: adapters or LoRA, with and without averaged weights, on held-out images.

    python recipes/first_view.py --data cifar100/ --weights vit_tiny_patch16_224.safetensors --device cuda

Small trainable parts in a frozen ViT learn the first task of C100-10T; then they are frozen, and a ridge regression on
random features of the encoder and of the trained view learns all ten tasks, with exact sums. Held-out training images
measure it, a tenth of all. One training gives a row with the weights of its last step, and one for each exponential
moving average of the weights (EMA). Trained beside the part named are all layer norms and a linear head: SGD with
momentum 0.9, batches of 64, horizontal flips.

Prints one JSON line a row: accuracy in per cent of the ridge, and of the head on held-out images of the first task.
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
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.nets.plain import PlainViT
from tpl.nets.vit import ViTEncoder

BATCH, AT_ONCE = 64, 500
DECAYS = (0.99, 0.995, 0.998)  # of the EMA: means over about 100 to 500 of 560 steps
WIDTH = 5000  # random features a view


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
    falling: bool = True  # cosine to zero, or constant
    epochs: int = 8

    def parts(self) -> dict[str, object]:
        """What to report."""
        schedule = "cosine" if self.falling else "constant"
        return {"view": self.name, "size": self.size, "lr": self.rate, "schedule": schedule, "epochs": self.epochs}


SETTINGS = (
    Setting("adapters", with_adapters, 64, 0.01),
    Setting("adapters", with_adapters, 64, 0.01, falling=False),
    Setting("adapters", with_adapters, 64, 0.02, falling=False),
    Setting("lora", with_lora, 8, 0.01),
    Setting("lora", with_lora, 16, 0.03),
    Setting("lora", with_lora, 64, 0.03),
    Setting("lora", with_lora, 16, 0.03, falling=False),
)


def train(net: nn.Sequential, images: Images, setting: Setting, seed: int) -> Iterator[tuple[str, nn.Sequential]]:
    """Train what in `net` needs gradients; the network of the last step, and those of averaged weights."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(parameters, setting.rate, momentum=0.9)
    means = {decay: [p.detach().clone() for p in parameters] for decay in DECAYS}
    draw = torch.Generator(images.pixels.device).manual_seed(seed)
    steps = setting.epochs * (len(images.labels) // BATCH)
    rows = torch.cat([torch.randperm(len(images.labels), generator=draw, device=draw.device) for _ in range(99)])
    for step in range(steps):
        if setting.falling:
            optimiser.param_groups[0]["lr"] = setting.rate * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        own = rows[step * BATCH : (step + 1) * BATCH]
        pixels = images.pixels[own]
        mirrored = torch.rand(len(own), generator=draw, device=draw.device) < 0.5
        pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(3), pixels)
        with torch.autocast(pixels.device.type, torch.bfloat16):
            loss = F.cross_entropy(net(pixels), images.labels[own])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for decay, mean in means.items():
            # In the first steps a plain mean, so that random initial weights do not linger.
            torch._foreach_lerp_(mean, [p.detach() for p in parameters], 1 - min(decay, step / (step + 1)))
    yield "last step", net
    for decay, mean in means.items():
        with torch.no_grad():
            for p, value in zip(parameters, mean, strict=True):
                p.copy_(value)
        yield f"EMA {decay}", net


@torch.no_grad()
def features(vit: nn.Module, pixels: Tensor) -> Tensor:
    """What a network sees of images, scaled to one length."""
    with torch.autocast(pixels.device.type, torch.bfloat16):
        found = torch.cat([vit(part).float() for part in pixels.split(AT_ONCE)])
    return F.normalize(found, dim=1)


def ridge_accuracy(views: list[Tensor], labels: Tensor, held_views: list[Tensor], truth: Tensor) -> float:
    """Accuracy on held-out images, in per cent, of a ridge on all views' random features.

    It learns all classes at once: its sums are those after ten tasks.
    """
    draw = torch.Generator().manual_seed(1)
    config = RidgeConfig(random_features=WIDTH * len(views))
    ridge = RandomRidge.drawn_for_views(views, config, draw, share=len(views))
    ridge.learn(torch.cat(views, dim=1), labels, draw)
    right = ridge.log_probabilities(torch.cat(held_views, dim=1)).argmax(dim=1) == truth
    return round(100 * float(right.double().mean()), 2)


def loaded(spec: RunSpec) -> tuple[PlainViT, list[Images], list[Images]]:
    """The frozen network, and all tasks' images to learn and to measure on, on the device."""
    method = spec.learner().method
    device, seen, held, first = method.compute.device, list[Images](), list[Images](), 0
    normalise = method.preprocess.normaliser(device)
    for task in spec.stream():
        for found, own in ((seen, task.train), (held, task.test)):
            assert own is not None
            pixels = normalise(method.preprocess.batch(own, device=device))
            found.append(Images(pixels.bfloat16(), torch.as_tensor(own.labels).long().to(device) + first))
        first += len(task.classes)
    assert isinstance(method.encoder, ViTEncoder) and isinstance(method.encoder.vit, PlainViT)
    return method.encoder.vit.to(device), seen, held


def main() -> None:
    """Train all settings; one line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--orders", default="random:11,random:12", help="class orders other than those of the tables")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    for order in given.orders.split(","):
        spec = RunSpec(
            "c100-10t", "ranpac", given.encoder, given.weights, given.data, order, validation=0.1, device=given.device
        )
        frozen, tasks, held = loaded(spec)
        everything, measured = (torch.cat([own.pixels for own in part]) for part in (tasks, held))
        plain, plain_held = features(frozen, everything), features(frozen, measured)
        labels, truth = (torch.cat([own.labels for own in part]) for part in (tasks, held))
        alone = ridge_accuracy([plain], labels, [plain_held], truth)
        print(json.dumps({"order": order, "view": "none", "accuracy": alone}), flush=True)
        for seed, setting in enumerate(SETTINGS):
            torch.manual_seed(seed)
            vit = copy.deepcopy(frozen).requires_grad_(False)
            setting.change(vit, setting.size)
            for module in vit.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(True)
            head = nn.Linear(vit.embed_dim, int(tasks[0].labels.max()) + 1)
            net = nn.Sequential(vit, head).to(everything.device)
            for weights, trained in train(net, tasks[0], setting, seed):
                z, z_held = features(trained[0], everything), features(trained[0], measured)
                accuracy = ridge_accuracy([plain, z], labels, [plain_held, z_held], truth)
                with torch.no_grad():
                    answers = trained(held[0].pixels.float()).argmax(dim=1)
                own = round(100 * float((answers == held[0].labels).double().mean()), 2)
                row = {"order": order, **setting.parts(), "weights": weights, "accuracy": accuracy, "first_task": own}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
