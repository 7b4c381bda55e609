"""Distil a ViT-tiny for 224 pixels into one for 128 pixels: three times faster, for photos, to ship with the package.

    PYTHONPATH=src python3 recipes/distil_photos.py --data tiny-imagenet --teacher vit_tiny_patch16_224.safetensors \
        --out build/photos --minutes 6 --photos caltech groceries

The student begins as the teacher with resampled positions, and learns the teacher's tokens for the same images: the
class token (and what the teacher's classifier says of it), and the patches' tokens. No labels are used. The images are
those of Tiny-ImageNet, of 64 pixels, which are too blurred for a network that will see photos at 128. So two of three
batches are mosaics of 2 x 2 or 3 x 3 images, as sharp as a photo. `--photos` names class folders to judge by, none of
which is trained on: ten photos of each of ten classes, shrunk LDA on the features, teacher and student side by side.
Into --out go `photos.safetensors` (float16) and `photos.json` (record).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from tpl.files import sha256_of
from tpl.nets.vit import hash_tensors

NAME, PATCH, SIDE = "vit_tiny_patch16_224", 16, 64
TEACHER, STUDENT, CROP = 224, 128, 0.9
MEAN = STD = 0.5


def main() -> None:
    """Distil, judge and write."""
    args = parsed()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    teacher, student = network(args.teacher, TEACHER).to(device), network(args.teacher, STUDENT).to(device)
    before = judged(args.photos, teacher, student, device)
    images = read(args.data, args.limit).to(device)
    started = time.perf_counter()
    averaged, steps, losses = distilled(teacher, student, images, args)
    seconds = time.perf_counter() - started
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "photos.safetensors"
    trunk = {k: v.half().contiguous().cpu() for k, v in averaged.state_dict().items() if not k.startswith("head")}
    save_file(trunk, file)
    averaged.load_state_dict({k: v.float() for k, v in load_file(file).items()}, strict=False)  # as it was stored
    record = {
        "sha256": sha256_of(file),
        "fingerprint": hash_tensors({k: v.float() for k, v in trunk.items()}),
        "parameters": sum(value.numel() for value in trunk.values()),
        "distilled": True,
        "licence": "Apache-2.0, as the teacher",
        "data": "Tiny-ImageNet, training images, without labels",
        "teacher": {"name": NAME, "sha256": sha256_of(args.teacher)},
        "pixels": STUDENT,
        "images": len(images),
        "steps": steps,
        "batch": args.batch,
        "rate": args.rate,
        "seconds": round(seconds, 1),
        "images_per_second": round(steps * args.batch / seconds),
        "loss": losses,
        "photos": {"before": before, "after": judged(args.photos, teacher, averaged, device)},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }
    (args.out / "photos.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="train*.zip of Tiny-ImageNet")
    parser.add_argument("--teacher", type=Path, required=True, help=f"weights of {NAME}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--photos", type=Path, nargs="*", default=[], help="class folders to judge by")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--average", type=float, default=0.998, help="of the weights, from step to step")
    parser.add_argument("--limit", type=int, default=0, help="images to read, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


# ----------------------------------------------------------------------------------------------- networks and images


def network(weights: Path, size: int) -> nn.Module:
    """The pre-trained network for images of that size, its positions resampled."""
    model: nn.Module = timm.create_model(NAME, pretrained=False, img_size=size)
    state = load_file(weights)
    grid = size // PATCH
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], new_size=[grid, grid], num_prefix_tokens=1)
    model.load_state_dict(state)
    return model.eval()


def decode(path: Path, names: list[str]) -> np.ndarray:
    """Members of one archive as bytes `[n, 64, 64, 3]`."""
    with zipfile.ZipFile(path) as archive:
        return np.stack([np.asarray(Image.open(BytesIO(archive.read(n))).convert("RGB")) for n in names])


def read(root: Path, limit: int) -> Tensor:
    """All training images, `[n, 3, 64, 64]` bytes."""
    jobs: list[tuple[Path, list[str]]] = []
    for path in sorted(root.glob("train*.zip")):
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        jobs += [(path, names[i : i + 500]) for i in range(0, len(names), 500)]
    if not jobs:
        raise SystemExit(f"{root} holds no train*.zip")
    jobs = jobs[: -(-limit // 500)] if limit else jobs
    with ProcessPoolExecutor() as pool:
        parts = list(pool.map(decode, *zip(*jobs, strict=True)))
    return torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).contiguous()


def batch_of(images: Tensor, count: int, grid: int, generator: torch.Generator) -> Tensor:
    """Images between 0 and 1, `[count, 3, side, side]`: mosaics of grid x grid, shifted, or parts of one image."""
    device = images.device
    chosen = torch.randint(len(images), (count, grid, grid), generator=generator).to(device)
    tiles = images[chosen.flatten()].float().div_(255)
    flipped = torch.rand(len(tiles), 1, 1, 1, generator=generator).to(device) < 0.5
    tiles = torch.where(flipped, tiles.flip(3), tiles)
    if grid == 1:
        return part_of(tiles, generator)
    canvas = tiles.view(count, grid, grid, 3, SIDE, SIDE).permute(0, 3, 1, 4, 2, 5)
    canvas = canvas.reshape(count, 3, grid * SIDE, grid * SIDE)
    shift = torch.randint(SIDE, (2,), generator=generator).tolist()
    return canvas.roll(shift, dims=(2, 3))


def part_of(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random square part of each image, at the same size."""
    count = len(images)
    scale = 0.5 + 0.5 * torch.rand(count, generator=generator)
    place = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - scale).unsqueeze(1)
    affine = torch.zeros(count, 2, 3)
    affine[:, 0, 0] = affine[:, 1, 1] = scale
    affine[:, :, 2] = place
    where = F.affine_grid(affine.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, where, padding_mode="reflection", align_corners=False)


def sized(images: Tensor, size: int) -> Tensor:
    """The network's input of that size."""
    resized = F.interpolate(images, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
    return (resized - MEAN) / STD


# --------------------------------------------------------------------------------------------------------- training


def objective(student: nn.Module, teacher: nn.Module, images: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How far the student's tokens are from the teacher's, and the class token's part of that."""
    net: Any = student
    expert: Any = teacher
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        with torch.no_grad():
            wanted = expert.forward_features(sized(images, TEACHER)).float()
        found = net.forward_features(sized(images, STUDENT)).float()
    side, small = TEACHER // PATCH, STUDENT // PATCH
    patches = wanted[:, 1:].transpose(1, 2).unflatten(2, (side, side))
    patches = F.adaptive_avg_pool2d(patches, small).flatten(2).transpose(1, 2)
    scale = wanted[:, 0].var(dim=0).mean().detach()
    token = F.mse_loss(found[:, 0], wanted[:, 0]) / scale
    rest = F.mse_loss(found[:, 1:], patches) / patches.var().detach()
    said, heard = (expert.head(tokens[:, 0]).log_softmax(dim=1) for tokens in (wanted, found))
    answer = F.kl_div(heard, said, log_target=True, reduction="batchmean")
    return token + 0.5 * rest + 0.5 * answer, token


def distilled(
    teacher: nn.Module, student: nn.Module, images: Tensor, args: argparse.Namespace
) -> tuple[nn.Module, int, list[float]]:
    """The student's averaged weights after the time that was given, the number of steps, and losses on the way."""
    device = images.device
    averaged = network(args.teacher, STUDENT).to(device)
    run = objective
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        for net in (teacher, student):
            typed: Any = net
            for block in typed.blocks:
                block.compile(dynamic=False)
    decayed = [p for p in student.parameters() if p.dim() > 1]
    others = [p for p in student.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(args.seed)
    started, step, losses = time.perf_counter(), 0, []
    student.train()
    rate_at = schedule(args.rate)
    while (done := (time.perf_counter() - started) / (60 * args.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = rate_at(done)
        loss, token = run(student, teacher, batch_of(images, args.batch, 1 + step % 3, generator), device)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            keep = min(args.average, (1 + step) / (10 + step))
            pairs = list(zip(averaged.parameters(), student.parameters(), strict=True))
            torch._foreach_lerp_([a for a, _ in pairs], [s for _, s in pairs], 1 - keep)
        if step % 200 == 0:
            losses.append(round(float(token), 4))
            print(f"{done:6.1%} step {step}: class token {losses[-1]}, all {float(loss):.4f}", flush=True)
        step += 1
    return averaged.eval(), step, losses


def schedule(rate: float) -> Callable[[float], float]:
    """The rate at a share of the time: a short rise, then a cosine to zero."""
    rise = 0.03
    return lambda done: (
        rate * (done / rise if done < rise else 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise))))
    )


# ---------------------------------------------------------------------------------------------------------- judging


def judged(folders: list[Path], teacher: nn.Module, student: nn.Module, device: torch.device) -> dict[str, Any]:
    """Accuracy of both networks on photos, ten to train on and twelve to test on of each of ten classes."""
    found: dict[str, Any] = {}
    for folder in folders:
        photos, labels, train = drawn(folder)
        found[folder.name] = {}
        for who, net, size in (("teacher", teacher, TEACHER), ("student", student, STUDENT)):
            z = features(net, photos, size, device)
            model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(z[train], labels[train])
            found[folder.name][who] = round(100 * float(model.score(z[~train], labels[~train])), 1)
    print(json.dumps(found), flush=True)
    return found


def drawn(folder: Path) -> tuple[list[Image.Image], np.ndarray, np.ndarray]:
    """Photos of ten classes, their labels, and which to train on; always the same ones."""
    choice = random.Random(1)
    classes = [path for path in sorted(folder.iterdir()) if path.is_dir() and len(list(path.iterdir())) >= 22]
    photos, labels, train = [], [], []
    for label, path in enumerate(choice.sample(classes, min(10, len(classes)))):
        for number, file in enumerate(choice.sample(sorted(path.iterdir()), 22)):
            photos.append(Image.open(file).convert("RGB"))
            labels.append(label)
            train.append(number < 10)
    return photos, np.array(labels), np.array(train)


def features(net: nn.Module, photos: list[Image.Image], size: int, device: torch.device) -> np.ndarray:
    """Class tokens of unit length, of the middle of each photo."""
    model: Any = net
    side, rows = int(size / CROP), []
    for photo in photos:
        scale = side / min(photo.size)
        small = photo.resize((max(side, round(photo.width * scale)), max(side, round(photo.height * scale))), 3)
        left, top = (small.width - size) // 2, (small.height - size) // 2
        rows.append(np.asarray(small.crop((left, top, left + size, top + size)), dtype=np.float32) / 255)
    pixels = (torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2) - MEAN) / STD
    with torch.inference_mode():
        parts = [model.forward_features(part.to(device))[:, 0].float().cpu() for part in pixels.split(64)]
    return np.asarray(F.normalize(torch.cat(parts), dim=1).numpy())


if __name__ == "__main__":
    main()
