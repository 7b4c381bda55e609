"""Pre-train the compact ViT on CIFAR-100 and write the weights the package ships.

    PYTHONPATH=src python3 recipes/pretrain_compact.py --data cifar100 --out build/compact --minutes 6

Images stay on the device as bytes, augmentations are batched there, and on a GPU one CUDA graph holds
the whole step (augment, forward, backward, AdamW, weight average), so the host only replays it. 5 000
training images (50 a class) are held out for choices; the test images are scored once, at the end, with
the float16 file that was written. Into --out go `compact.safetensors` (trunk) and `compact.json`
(record), both to be copied into `src/tpl/nets/pretrained`, and `compact-head.safetensors` (not shipped).
A data-centre GPU needs a few minutes; a CPU smoke test is `--limit 1000 --epochs 1 --batch 100`.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import DropPath, HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import Tensor, nn

from tpl.files import sha256_of
from tpl.nets.compact import CHANNELS, DATA_CONFIG, DEPTH, DIM, HEADS, NAME, STRIDES, create_compact
from tpl.nets.vit import hash_tensors

CLASSES, SIDE, PAD, HELD_OUT, SPLIT_SEED, MAX_BYTES = 100, 32, 4, 50, 0, 6_000_000
Arrays = tuple[np.ndarray, np.ndarray]


# ------------------------------------------------------------------------------------------------ data


def decode(path: Path, names: list[str]) -> np.ndarray:
    """Members of one archive as (N, 32, 32, 3) bytes."""
    with zipfile.ZipFile(path) as archive:
        return np.stack([np.asarray(Image.open(BytesIO(archive.read(n))).convert("RGB")) for n in names])


def read_zips(paths: list[Path]) -> Arrays:
    """Images (N, 32, 32, 3) uint8 and labels; the label is the rank of the member's folder name."""
    tasks: list[tuple[Path, list[str]]] = []
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        tasks += [(path, names[i : i + 1000]) for i in range(0, len(names), 1000)]
    folders = [name.split("/")[-2] for _, names in tasks for name in names]
    rank = {folder: i for i, folder in enumerate(sorted(set(folders)))}
    with ProcessPoolExecutor() as pool:
        images = np.concatenate(list(pool.map(decode, *zip(*tasks, strict=True))))
    return images, np.array([rank[folder] for folder in folders])


def read_split(root: Path, split: str) -> Arrays:
    """One split ("train" or "test") of a torchvision CIFAR-100 root or of a folder of zips."""
    pickled = root / "cifar-100-python" / split
    if pickled.exists():
        content = pickle.loads(pickled.read_bytes(), encoding="latin1")
        images = content["data"].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), np.array(content["fine_labels"])
    paths = sorted(root.glob(f"{split}*.zip"))
    if not paths:
        raise SystemExit(f"{root} holds neither cifar-100-python/{split} nor {split}*.zip")
    return read_zips(paths)


def hold_out(images: np.ndarray, labels: np.ndarray, limit: int) -> tuple[Arrays, Arrays]:
    """Training and validation images; the split never changes, `limit` shortens the training part."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    held = np.concatenate([order[labels[order] == c][:HELD_OUT] for c in range(CLASSES)])
    kept = order[~np.isin(order, held)]
    kept = kept[:limit] if limit else kept
    return (images[kept], labels[kept]), (images[held], labels[held])


def statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the network's input, ready to broadcast over (N, 3, H, W)."""
    return (
        torch.tensor(DATA_CONFIG["mean"], device=device).view(1, 3, 1, 1),
        torch.tensor(DATA_CONFIG["std"], device=device).view(1, 3, 1, 1),
    )


# --------------------------------------------------------------------------------------------- trainer


def boxes(y: Tensor, x: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Mask (N, 1, 32, 32), true inside the boxes of centre (y, x); the arguments have shape (N,)."""
    at = torch.arange(SIDE, device=y.device) + 0.5
    rows = (at - y[:, None]).abs() < height[:, None] / 2
    columns = (at - x[:, None]).abs() < width[:, None] / 2
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def with_classifier() -> VisionTransformer:
    """The network with timm's initial weights, dropped paths and a classifier, which the package does without."""
    stem = ConvStem(depth=len(CHANNELS), channels=CHANNELS, stride=STRIDES, act_layer=nn.GELU)
    return VisionTransformer(
        img_size=SIDE,
        patch_size=1,
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        num_classes=CLASSES,
        embed_layer=partial(HybridEmbed, backbone=stem, proj=False),
    )


class Trainer:
    """One training step that never waits for the device; its inputs are `index` and `control`."""

    def __init__(self, train: Arrays, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        pad = ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0))
        self.images = torch.from_numpy(np.pad(train[0], pad, mode="reflect")).to(self.device)
        self.labels = torch.from_numpy(train[1]).to(self.device)
        self.mean, self.std = statistics(self.device)
        self.model, self.ema = (self.place(with_classifier()) for _ in range(2))
        self.ema.load_state_dict(self.model.state_dict())
        self.ema.eval()
        blocks: Any = self.model.blocks
        for i, block in enumerate(blocks):  # the rate grows with depth; the averaged copy has none
            rate = args.drop_path * i / (len(blocks) - 1)
            block.drop_path1, block.drop_path2 = DropPath(rate), DropPath(rate)
        self.average = [value for value in self.ema.state_dict().values() if value.is_floating_point()]
        self.source = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        self.batch = min(args.batch, len(self.labels))
        self.index = torch.arange(self.batch, device=self.device)
        self.control = torch.zeros(6, device=self.device)  # lr, average's rate, lambda, cutmix?, y, x
        self.loss = torch.zeros((), device=self.device)
        self.optimizer = self.build_optimizer()
        self.compute = self.batch_loss
        self.run = self.prepare()

    def place(self, network: nn.Module) -> nn.Module:
        model: Any = network.to(self.device)
        placed: nn.Module = model.to(memory_format=torch.channels_last) if self.device.type == "cuda" else model
        return placed

    def build_optimizer(self) -> torch.optim.AdamW:
        """AdamW with its learning rate on the device; no decay on norms, biases and tokens."""
        decay: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            exempt = parameter.ndim < 2 or name in ("pos_embed", "cls_token")
            (plain if exempt else decay).append(parameter)
        groups = [
            {"params": decay, "weight_decay": self.args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        on_gpu = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.control[0], betas=(0.9, 0.999), fused=True, capturable=on_gpu)

    def uniform(self, low: float, high: float) -> Tensor:
        return torch.rand(self.batch, device=self.device) * (high - low) + low

    def augment(self, index: Tensor) -> Tensor:
        """Crop, flip, colour, grayscale and erasing for a batch, each image with its own numbers."""
        args, at = self.args, torch.arange(SIDE, device=self.device)
        flip = self.uniform(0, 1) < 0.5
        columns = torch.where(flip[:, None], SIDE - 1 - at, at)
        shift = torch.randint(0, 2 * PAD + 1, (2, self.batch, 1), device=self.device)
        rows, columns = at + shift[0], columns + shift[1]
        crop = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        x = crop.permute(0, 3, 1, 2).float() / 255

        s = args.jitter
        wide = (self.batch, 1, 1, 1)
        tint = 1 + (torch.rand(self.batch, 3, 1, 1, device=self.device) - 0.5) * s
        x = x * tint * self.uniform(1 - s, 1 + s).view(wide)
        gray = (0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]).expand_as(x)
        coloured = self.uniform(0, 1) >= args.grayscale
        saturation = self.uniform(1 - s, 1 + s) * coloured
        x = gray + (x - gray) * saturation.view(wide)
        middle = gray.mean((1, 2, 3), keepdim=True)
        x = (middle + (x - middle) * self.uniform(1 - s, 1 + s).view(wide)).clamp(0, 1)
        x = (x - self.mean) / self.std

        area = self.uniform(0.02, 0.2) * (self.uniform(0, 1) < args.erase)
        aspect = self.uniform(-1, 1).exp()
        height, width = SIDE * (area * aspect).sqrt(), SIDE * (area / aspect).sqrt()
        erased: Tensor = x.masked_fill(boxes(self.uniform(0, SIDE), self.uniform(0, SIDE), height, width), 0.0)
        return erased

    def batch_loss(self, index: Tensor, control: Tensor) -> Tensor:
        """Loss of an augmented batch mixed with its reverse: blended (mixup) or patched (cutmix)."""
        x, target = self.augment(index), self.labels[index]
        lam, cutmix, y_box, x_box = control[2], control[3], control[4:5], control[5:6]
        side = (SIDE * (1 - lam).sqrt()).expand(1)
        outside = 1 - boxes(y_box * SIDE, x_box * SIDE, side, side).float()
        weight = torch.where(cutmix > 0, outside, lam)
        x = x * weight + x.flip(0) * (1 - weight)
        share = weight.mean()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            logits = self.model(x)
        first, second = (
            F.cross_entropy(logits.float(), t, label_smoothing=self.args.smoothing) for t in (target, target.flip(0))
        )
        return share * first + (1 - share) * second

    def step(self) -> None:
        """Forward, backward, update and weight average (parameters and BatchNorm statistics)."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.compute(self.index, self.control)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            change = torch._foreach_sub(self.source, self.average)
            torch._foreach_mul_(change, self.control[1])
            torch._foreach_add_(self.average, change)
            self.loss += loss.detach()

    def prepare(self) -> Any:
        """The callable that runs a step: a replayed CUDA graph if possible, else the plain method.

        The rehearsal has learning and averaging rate 0, so it leaves the weights as they are.
        """
        self.model.train()
        if self.args.compile:
            try:
                self.compute = torch.compile(self.batch_loss, dynamic=False)
                self.step()
            except (RuntimeError, OSError, ImportError) as error:
                print(f"torch.compile failed ({type(error).__name__}: {error}); going on without", flush=True)
                self.compute = self.batch_loss
        if self.device.type != "cuda" or self.args.eager:
            return self.step
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(4):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            self.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
        except RuntimeError as error:
            print(f"CUDA graph capture failed ({error}); going on without", flush=True)
            return self.step
        return graph.replay

    def epoch(self, controls: np.ndarray) -> None:
        """One pass in random order, one row of `controls` a step; nothing here waits for the device."""
        order = torch.randperm(len(self.labels), device=self.device)
        table = torch.from_numpy(controls).float()
        if self.device.type == "cuda":
            table = table.pin_memory().to(self.device, non_blocking=True)
        for i in range(len(controls)):
            self.index.copy_(order[i * self.batch : (i + 1) * self.batch])
            self.control.copy_(table[i])
            self.run()


# ------------------------------------------------------------------------------------------ evaluation


@torch.no_grad()
def accuracy(model: nn.Module, data: Arrays, device: torch.device, fast: bool = False) -> float:
    """Top-1 on plain images, in float32, or in bfloat16 where `fast` allows it."""
    mean, std = statistics(device)
    correct = torch.zeros((), device=device)
    for i in range(0, len(data[1]), 1000):
        x = torch.from_numpy(data[0][i : i + 1000]).to(device).permute(0, 3, 1, 2).float() / 255
        with torch.autocast(device.type, torch.bfloat16, enabled=fast and device.type == "cuda"):
            guess = model((x - mean) / std).argmax(1)
        correct += (guess == torch.from_numpy(data[1][i : i + 1000]).to(device)).sum()
    return correct.item() / len(data[1])


@torch.no_grad()
def digits_ncm(trunk: nn.Module, device: torch.device) -> float | None:
    """Nearest class mean (cosine) on scikit-learn's digits, half to build and half to score."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return None
    digits, (mean, std) = load_digits(), statistics(device)
    pixels = torch.from_numpy(digits.images / 16).float()[:, None].expand(-1, 3, -1, -1)
    images = F.interpolate(pixels, size=(SIDE, SIDE), mode="bicubic", antialias=True).clamp(0, 1)
    features = F.normalize(trunk((images.to(device) - mean) / std).float().cpu(), dim=1)
    labels, order = (
        torch.from_numpy(digits.target),
        np.random.default_rng(SPLIT_SEED).permutation(len(images)),
    )
    build, score = order[: len(order) // 2], order[len(order) // 2 :]
    means = torch.stack([features[build][labels[build] == c].mean(0) for c in range(10)])
    guess = (features[score] @ F.normalize(means, dim=1).T).argmax(1)
    return round((guess == labels[score]).float().mean().item(), 4)


def write_weights(model: nn.Module, out: Path) -> None:
    """Trunk and head as float16, in two files."""
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: (value.half() if value.is_floating_point() else value).contiguous().cpu()
        for name, value in model.state_dict().items()
    }
    if not all(torch.isfinite(value).all() for value in state.values()):
        raise SystemExit("the weights are not finite in float16; nothing was written")
    head = {name: state.pop(name) for name in list(state) if name.startswith("head.")}
    for name, tensors in ((NAME, state), (f"{NAME}-head", head)):
        save_file(tensors, out / f"{name}.safetensors", metadata={"format": "pt"})
        (out / f"{name}.safetensors").chmod(0o644)


def score_files(out: Path, val: Arrays, test: Arrays, device: torch.device) -> dict[str, Any]:
    """What the written file is worth: read back as a user would, in float32."""
    path = out / f"{NAME}.safetensors"
    trunk_state, head_state = load_file(path), load_file(out / f"{NAME}-head.safetensors")
    trunk, full = create_compact().eval().to(device), with_classifier().eval().to(device)
    trunk.load_state_dict(trunk_state)
    full.load_state_dict({**trunk_state, **head_state})
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MAX_BYTES}")
    return {
        "val_top1": round(accuracy(full, val, device), 4),
        "test_top1": round(accuracy(full, test, device), 4),
        "digits_ncm": digits_ncm(trunk, device),
        "parameters": sum(p.numel() for p in trunk.parameters()),
        "sha256": sha256_of(path),
        "fingerprint": hash_tensors(trunk.state_dict()),
        "bytes": size,
    }


# ------------------------------------------------------------------------------------------------ main


def controls(args: argparse.Namespace, epoch: int, epochs: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """The rows of `Trainer.control` for one epoch: schedules and the draws of mixup and cutmix."""
    total, at = epochs * steps, epoch * steps + np.arange(steps)
    warm = min(args.warmup * steps, total / 5)
    peak = args.lr * args.batch / 512
    cosine = 0.5 * (1 + np.cos(math.pi * np.clip((at - warm) / max(total - warm, 1), 0, 1)))
    lr = np.where(at < warm, peak * (at + 1) / max(warm, 1), args.min_lr + (peak - args.min_lr) * cosine)
    # The average forgets within a twentieth of the run at most, and faster while the run is young.
    rate = np.maximum(max(1 - args.ema, min(1.0, 20 / total)), 9 / (10 + at))
    cut = rng.random(steps) < 0.5
    lam = np.where(cut, rng.random(steps), rng.beta(args.mixup, args.mixup, steps))
    lam = np.where(rng.random(steps) < args.mix, lam, 1.0)
    return np.stack([np.minimum(lr, peak), rate, lam, cut, rng.random(steps), rng.random(steps)], axis=1)


def train(trainer: Trainer, val: Arrays, args: argparse.Namespace, start: float) -> dict[str, Any]:
    """Train to the horizon; with --minutes it is fixed after three epochs (within warm-up), two timed."""

    def clock() -> float:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    rng, steps, epochs = np.random.default_rng(args.seed), len(trainer.labels) // trainer.batch, args.epochs
    trainer.loss.zero_()
    began = mark = clock()
    seen = epoch = 0
    busy = 0.0  # seconds of training, scoring left out
    while epoch < epochs:
        trainer.epoch(controls(args, epoch, epochs, steps, rng))
        epoch, seen = epoch + 1, seen + 1
        if args.minutes and epoch in (1, 3):
            now = clock()
            if epoch == 3:
                accuracy(trainer.ema, val, trainer.device, fast=True)  # the first call is slow
                warm = clock()
                accuracy(trainer.ema, val, trainer.device, fast=True)
                scoring = clock() - warm
                cost = (now - mark) / 2 + scoring / args.log
                left = args.minutes * 60 * 0.97 - (clock() - start) - 4 * scoring - 5
                epochs = min(epochs, max(4, 3 + int(left / (1.03 * cost))))
                print(f"{cost:.3f} s an epoch: {epochs} epochs in all", flush=True)
            busy, seen = busy + now - mark, 0
            mark = clock()
            trainer.loss.zero_()
        elif epoch % args.log == 0 or epoch == epochs:
            now = clock()
            busy, rate = busy + now - mark, seen * steps * trainer.batch / (now - mark)
            loss = trainer.loss.item() / (seen * steps)
            top1 = accuracy(trainer.ema, val, trainer.device, fast=True)
            left = (clock() - began) / epoch * (epochs - epoch)
            print(
                f"epoch {epoch:3d}/{epochs}  loss {loss:.4f}  val {100 * top1:.2f}%  "
                f"{rate:,.0f} images/s  {left:.0f} s left",
                flush=True,
            )
            if not math.isfinite(loss):
                raise SystemExit("the loss is not finite")
            mark, seen = clock(), 0
            trainer.loss.zero_()
    images = epochs * steps * trainer.batch
    return {"epochs": epochs, "images_per_second": round(images / busy), "train_images": len(trainer.labels)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a torchvision CIFAR-100 root, or train-*.zip and test.zip")
    add("--out", type=Path, required=True, help="folder for the three files")
    add("--epochs", type=int, default=400, help="number of epochs, with --minutes at most so many (400)")
    add("--minutes", type=float, default=0.0, help="wall-clock limit, decoding included (0: none)")
    add("--batch", type=int, default=512, help="batch size (512)")
    add("--lr", type=float, default=1e-3, help="peak learning rate for batch 512, scaled linearly (1e-3)")
    add("--min-lr", type=float, default=1e-5, help="final learning rate (1e-5)")
    add("--warmup", type=int, default=8, help="epochs of linear warm-up, at most a fifth of the run (8)")
    add("--weight-decay", type=float, default=0.05, help="not on norms, biases, tokens (0.05)")
    add("--clip", type=float, default=1.0, help="largest gradient norm (1.0)")
    add("--ema", type=float, default=0.9998, help="largest decay of the weight average (0.9998)")
    add("--drop-path", type=float, default=0.05, help="stochastic depth of the last block (0.05)")
    add("--smoothing", type=float, default=0.1, help="label smoothing (0.1)")
    add("--mix", type=float, default=0.5, help="share of batches with mixup or cutmix, evenly (0.5)")
    add("--mixup", type=float, default=0.8, help="mixup's Beta parameter; cutmix is uniform (0.8)")
    add("--jitter", type=float, default=0.2, help="brightness, contrast, saturation, half for tint (0.2)")
    add("--grayscale", type=float, default=0.1, help="share of images without colour (0.1)")
    add("--erase", type=float, default=0.25, help="share of images with an erased box (0.25)")
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation (0)")
    add("--limit", type=int, default=0, help="use so many training images only (0: all)")
    add("--log", type=int, default=10, help="epochs between progress lines (10)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    add("--compile", action="store_true", help="torch.compile the loss: faster steps, a minute to compile")
    add("--eager", action="store_true", help="no CUDA graph")
    add("--score-only", action="store_true", help="score the files in --out again and update the record")
    return parser.parse_args()


def main() -> None:
    start, args = time.perf_counter(), parse()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    device, record_path = torch.device(args.device), args.out / f"{NAME}.json"
    train_data, val = hold_out(*read_split(args.data, "train"), args.limit)
    test = read_split(args.data, "test")
    sizes = f"{len(train_data[1])} / {len(val[1])} / {len(test[1])}"
    print(f"train / val / test: {sizes} images, read in {time.perf_counter() - start:.1f} s", flush=True)
    if args.score_only:
        record = json.loads(record_path.read_text(encoding="utf-8"))
    else:
        trainer = Trainer(train_data, args)
        print(f"ready to train after {time.perf_counter() - start:.1f} s", flush=True)
        result = train(trainer, val, args, start)
        write_weights(trainer.ema, args.out)
        skip = ("data", "out", "epochs", "device", "score_only", "log")
        record = {
            "architecture": NAME,
            "dataset": "CIFAR-100",
            **result,
            "hyper_parameters": {k: v for k, v in vars(args).items() if k not in skip},
            "seconds": round(time.perf_counter() - start, 1),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": {"torch": torch.__version__, "timm": timm.__version__},
        }
    record |= score_files(args.out, val, test, device)
    text = json.dumps(record, indent=2)
    record_path.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
