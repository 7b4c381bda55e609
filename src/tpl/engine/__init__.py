"""The training loop, inference, the gated optimiser, devices and progress events."""

from tpl.engine.batches import IGNORED, QUARTERS, Batches, Feed, Samples, Turns
from tpl.engine.device import Compute, choose_compute
from tpl.engine.distributed import Processes, current, joined
from tpl.engine.events import Event, Listener, RunLabel, labelled, silent
from tpl.engine.infer import Inference
from tpl.engine.optim import GatedSGD
from tpl.engine.recording import records
from tpl.engine.steps import Objective, RecordedStep, Step
from tpl.engine.train import Recipe, batches_of_images, train

__all__ = [
    "IGNORED",
    "QUARTERS",
    "Batches",
    "Compute",
    "Event",
    "Feed",
    "GatedSGD",
    "Inference",
    "Listener",
    "Objective",
    "Processes",
    "Recipe",
    "RecordedStep",
    "RunLabel",
    "Samples",
    "Step",
    "Turns",
    "batches_of_images",
    "choose_compute",
    "current",
    "joined",
    "labelled",
    "records",
    "silent",
    "train",
]
