"""The training loop, inference, gated optimisers, devices and progress events."""

from tpl.engine.batches import IGNORED, ROTATIONS, Batches, Feed, RotationClasses, Samples, masked_mean
from tpl.engine.compute import (
    BLOCK,
    CapturedFunction,
    Compute,
    Inference,
    choose_compute,
    host_has_room_for,
    uses_cuda_graphs,
)
from tpl.engine.distributed import Processes, current, joined
from tpl.engine.events import FREQUENT, Callback, Event, RunLabel, labelled, no_callback
from tpl.engine.train import Adam, CapturedStep, GatedSGD, Objective, Recipe, Step, batches_of_images, train

__all__ = [
    "BLOCK",
    "FREQUENT",
    "IGNORED",
    "ROTATIONS",
    "Adam",
    "Batches",
    "Callback",
    "CapturedFunction",
    "CapturedStep",
    "Compute",
    "Event",
    "Feed",
    "GatedSGD",
    "Inference",
    "Objective",
    "Processes",
    "Recipe",
    "RotationClasses",
    "RunLabel",
    "Samples",
    "Step",
    "batches_of_images",
    "choose_compute",
    "current",
    "host_has_room_for",
    "joined",
    "labelled",
    "masked_mean",
    "no_callback",
    "train",
    "uses_cuda_graphs",
]
