"""The training loop, inference, the gated optimiser, devices and progress events."""

from tpl.engine.device import Compute, choose_compute
from tpl.engine.events import Event, Listener, silent
from tpl.engine.infer import in_batches
from tpl.engine.optim import GatedSGD
from tpl.engine.train import Batches, Objective, Recipe, RecordedStep, Samples, Step, train

__all__ = [
    "Batches",
    "Compute",
    "Event",
    "GatedSGD",
    "Listener",
    "Objective",
    "Recipe",
    "RecordedStep",
    "Samples",
    "Step",
    "choose_compute",
    "in_batches",
    "silent",
    "train",
]
