"""What all tests share: a fixed number of threads and small ready-made streams."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

import small_encoder  # noqa: F401 (timm knows it from now on)
from tpl import program
from tpl.stream import ArrayImages, Stream, Task

pytest.register_assert_rewrite("common_checks")
program.claim = lambda: None  # this process stays one that imports the package, also where a test calls `main`
os.environ["TPL_OFFLINE"] = "1"  # nothing is fetched by default, network or not
os.environ["TPL_IMAGE_CACHE"] = "off"  # tests leave nothing behind in the user's cache folder
# For workers that start later, as it is read when torch is loaded: a thread that waits leaves its core to the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # programs that a test starts: there is a worker a core


# Modules of 15 seconds and more. A module is the work of one process: begun last, a long one would leave others idle.
LONG = (
    "test_devices", "test_common", "test_ray", "test_serve_learning", "test_export", "test_estimator",
    "test_serve_command", "test_model_commands", "test_run", "test_suite", "test_crash", "test_ablate",
    "test_common_baselines", "test_cli", "test_walkthrough", "test_scratch", "test_gallery", "test_serve_page",
    "test_set_up", "test_site", "test_notebooks", "test_one_road", "test_bounds", "test_family",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first; all others stay in their order."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Modules stay: the many collections that a run asks for need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # a worker a core


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What draws from torch's own generator draws the same, whichever tests were run before."""
    torch.manual_seed(0)


def blobs(classes: list[int], per_class: int, seed: int) -> ArrayImages:
    """Tiny pictures whose class is a colour and a stripe direction: easy to learn, quick to make."""
    rng = np.random.default_rng(seed)
    pixels, labels = [], []
    for label, c in enumerate(classes):
        colour = np.array([(c * 97) % 256, (c * 57 + 80) % 256, (c * 151 + 30) % 256])
        for _ in range(per_class):
            image = rng.normal(0, 18, (32, 32, 3)) + colour
            stripes = np.sin(np.arange(32) * (0.3 + 0.25 * (c % 5)))[:, None] * 60
            image += (stripes if c % 2 else stripes.T)[:, :, None]
            pixels.append(image.clip(0, 255).astype(np.uint8))
            labels.append(label)
    return ArrayImages(np.stack(pixels), np.array(labels))


@pytest.fixture(scope="session")
def small_stream() -> Stream:
    """Three tasks of two easy classes, 16 training and 8 test images each."""
    tasks = []
    for t in range(3):
        classes = [2 * t, 2 * t + 1]
        names = tuple(f"class {c}" for c in classes)
        tasks.append(Task(f"task {t}", names, blobs(classes, 16, seed=t), blobs(classes, 8, seed=100 + t)))
    return Stream(tasks)
