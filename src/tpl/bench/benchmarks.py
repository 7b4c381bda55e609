"""Benchmarks as data: which classes arrive when, and the paper's settings for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tpl.errors import TplError
from tpl.names import refuse_unknown
from tpl.pretraining import COMPACT, DEIT_611
from tpl.stream import Stream, class_order, load_source, split

BOUNDS = ("joint", "joint-ridge")  # upper bounds: methods that train on all classes at once
FEWEST_EPOCHS = 10  # of a bound with a pre-trained encoder
CHOSEN_BY_USER = ("folder", "imagenet380")  # data sets whose name does not say which images they have
# Options that say how long, how fast, on which copies of the images and with how much room a method is trained. Any
# other option that a benchmark sets changes the method itself.
TRAINED_WITH = (
    "epochs", "lr", "schedule", "augment", "batch_size", "weight_decay", "nesterov", "momentum", "latent", "memory",
    "trunk_rate", "align_epochs",
)  # fmt: skip


class FromScratch(NamedTuple):
    """Options for networks that start from random weights."""

    options: dict[str, Any]
    by_method: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """A data set split into tasks, with the options that its protocol prescribes."""

    name: str
    summary: str
    source: str
    per_task: int
    options: dict[str, Any] = field(default_factory=dict)  # options that a method does not have are left out
    by_method: dict[str, dict[str, Any]] = field(default_factory=dict)  # where single methods differ
    from_scratch: FromScratch | None = None  # where networks without pre-training differ
    small_memory: int | None = None  # memory size of the paper's runs with half as many exemplars
    encoder: str = COMPACT  # the default: one that was not pre-trained on this data set
    blurry: float = 0.0  # share of each class's training images that arrive in other tasks, see `Stream.blurred`

    def smaller_memory(self) -> int:
        """The memory of the paper's small-buffer experiments."""
        if self.small_memory is None:
            raise TplError(f"The paper has no small memory for {self.name}; give --memory a number.")
        return self.small_memory

    def prescribed(self, method: str, pretrained: bool) -> dict[str, Any]:
        """The options for a method, over an encoder with pre-training or without."""
        options = self.options | self.by_method.get(method, {})
        if pretrained or self.from_scratch is None:
            return options
        return options | self.from_scratch.options | self.from_scratch.by_method.get(method, {})

    def stream(
        self,
        data: Path | None = None,
        order: str = "natural",
        download: bool = False,
        per_task: int | tuple[int, ...] | None = None,
        tasks: int | None = None,
        validation: float | None = None,
        seed: int = 0,
    ) -> Stream:
        """The tasks in class order `order`; `validation` replaces the test images by a share of the training images."""
        source = load_source(self.source, data, download)
        count = len(source.class_names)
        if source.test is None and validation is None:
            raise TplError(f"{self.name} needs test images; {data} has none. Use --validation 0.1 to hold some out.")
        classes = class_order(order, self.source, count)
        stream = split(source.train, source.test, source.class_names, per_task or self.per_task, classes)
        if tasks is not None:
            if not 1 <= tasks <= len(stream):
                raise TplError(f"{self.name} has {len(stream)} tasks; --tasks must lie between 1 and that.")
            stream = stream[:tasks]
        if validation is not None:
            stream = stream.with_validation(validation, seed)
        if self.blurry:
            stream = stream.blurred(self.blurry, seed)
        unmeasured = [task.name for task in stream if task.test is None]
        if unmeasured:
            raise TplError(f"No images are left to measure {', '.join(unmeasured)} on: they have one image a class.")
        return stream


def _paper(latent: int, lr: float, epochs: int, memory: int) -> dict[str, Any]:
    # The calibration was chosen on held-out CIFAR-100 images (docs/choices.md), the rest is the paper's.
    schedule = {"lr": lr, "epochs": epochs, "batch_size": 64}
    return schedule | {"latent": latent, "memory": memory, "calibration": "shift"}


def _bounds(**options: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(BOUNDS, options)


# An upper bound is trained to the end, with a falling rate and horizontal flips, however few epochs the other methods
# have. The rate is the better of 0.01 and 0.003 on held-out images of CIFAR-100 (results/choices/cifar100/baselines).
JOINT = _bounds(lr=0.01, epochs=FEWEST_EPOCHS, schedule="cosine", augment="flip")

# The learning rate of HAT's paper, whose settings the TPL paper takes for its ResNet, with decay; random crops and
# horizontal flips as usual for CIFAR; the number of epochs of the measured runs. All else was chosen on held-out images
# of C100-10T (docs/scratch-training.md).
FROM_SCRATCH = FromScratch(
    {"lr": 0.05, "epochs": 75, "schedule": "cosine", "augment": "crop", "weight_decay": 5e-4, "nesterov": True},
    {
        "tpl": {
            "others": "per_class", "rotation_classes": True, "tta": "rotate", "compose": "and", "calibration": "none",
        },
    },
)  # fmt: skip

VIT_TINY = "vit_tiny_patch16_224"

BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        Benchmark(
            "digits-5t",
            "scikit-learn's bundled 8x8 digits, 5 tasks of 2 classes; needs no download",
            "digits",
            2,
            {"latent": 32, "lr": 0.05, "epochs": 4, "memory": 200, "batch_size": 16},
            # Chosen with --validation 0.2: without masks or projectors, larger steps collapse all features into one.
            {
                "finetune": {"lr": 0.005, "momentum": 0.5, "epochs": 3},
                "agem": {"lr": 0.005, "momentum": 0.5},
                "owm": {"momentum": 0.5},
                "eeil": {"lr": 0.02},
                # Digits are unlike what `compact` was trained on: its first layer moves much further than the others.
                "slca": {"lr": 0.01, "trunk_rate": 1e-6, "align_epochs": 50},
                "ease": {"lr": 0.1},
            }
            | _bounds(lr=0.05, epochs=FEWEST_EPOCHS, schedule="cosine"),  # a flipped digit is no digit
        ),
        Benchmark(
            "folder",
            "your own images: --data with a folder or zip of class folders (or train/ and test/); see --per-task",
            "folder",
            2,
            {"latent": 64, "lr": 0.01, "epochs": 20, "memory": 500, "batch_size": 32},
            _bounds(schedule="cosine"),  # no flips: they may change what an image shows
        ),
        Benchmark(
            "c10-5t",
            "CIFAR-10, 5 tasks of 2 classes",
            "cifar10",
            2,
            _paper(64, 0.005, 20, 200),
            JOINT,
            from_scratch=FROM_SCRATCH,
            small_memory=100,
            encoder=VIT_TINY,
        ),
        Benchmark(
            "c100-10t",
            "CIFAR-100, 10 tasks of 10 classes",
            "cifar100",
            10,
            _paper(128, 0.001, 40, 2000),
            JOINT,
            from_scratch=FROM_SCRATCH,
            small_memory=1000,
            encoder=VIT_TINY,
        ),
        Benchmark(
            "c100-20t",
            "CIFAR-100, 20 tasks of 5 classes",
            "cifar100",
            5,
            _paper(128, 0.005, 40, 2000),
            JOINT,
            from_scratch=FROM_SCRATCH,
            small_memory=1000,
            encoder=VIT_TINY,
        ),
        Benchmark(
            "t-5t",
            "Tiny-ImageNet, 5 tasks of 40 classes",
            "tiny-imagenet",
            40,
            _paper(128, 0.005, 15, 2000),
            JOINT,
            from_scratch=FROM_SCRATCH,
            small_memory=1000,
            encoder=DEIT_611,
        ),
        Benchmark(
            "t-10t",
            "Tiny-ImageNet, 10 tasks of 20 classes",
            "tiny-imagenet",
            20,
            _paper(128, 0.005, 10, 2000),
            JOINT,
            from_scratch=FROM_SCRATCH,
            small_memory=1000,
            encoder=DEIT_611,
        ),
        Benchmark(
            "imagenet380-10t",
            "380 ImageNet classes of your choice, 10 tasks of 38; --data with train/ and val/ of their folders",
            "imagenet380",
            38,
            _paper(128, 0.005, 10, 7600),
            JOINT,
            encoder=DEIT_611,
        ),
    )
}


LONG = (
    replace(BENCHMARKS["c100-20t"], name="c100-50t", summary="CIFAR-100, 50 tasks of 2 classes", per_task=2),
    replace(BENCHMARKS["t-10t"], name="t-100t", summary="Tiny-ImageNet, 100 tasks of 2 classes", per_task=2),
)
BLURRY = (
    replace(
        BENCHMARKS["digits-5t"],
        name="digits-blurry",
        summary="digits-5t, but a tenth of each class's images arrives in other tasks",
        blurry=0.1,
    ),
    replace(
        BENCHMARKS["c100-10t"],
        name="c100-blurry",
        summary="c100-10t, but a tenth of each class's images arrives in other tasks",
        blurry=0.1,
    ),
)
BENCHMARKS |= {b.name: replace(b, small_memory=None) for b in (*LONG, *BLURRY)}  # not of the paper


def find_benchmark(name: str) -> Benchmark:
    """A benchmark by name, or an error that lists them all."""
    refuse_unknown("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]
