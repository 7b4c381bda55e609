"""DER++: replay of images with their labels and with the logits they once had (Buzzega et al., NeurIPS 2020).

    loss = CE(f(x), y) + alpha * mean_c (f_c(x') - z'_c)^2 + beta * CE(f(x'), y')

x, y are new images; x', y', z' come from a reservoir, a uniform sample of all images seen. z' are the logits that the
network gave when the image entered it. They are never refreshed, so they show what was known at different moments of
training; a teacher kept from the end of the last task would show one moment only.

As published, logits stem from all epochs of a task: every image that will be stored draws a random epoch, and its
logits are recorded at the end of that epoch. (The reservoir's choice depends on nothing that is learned, so it is made
before the task is trained.)

Differences from public codes: distances between features instead of logits, measured to the last task's model
(another algorithm under the same name); a head as wide as all tasks to come, whose never-trained outputs take part in
the squared error. Here the head grows, and the squared error runs over the classes that were known when the image
entered.

Adapted: images enter the memory when their task ends, each once, so what is replayed are old tasks' images; the
published code offers an image again in every epoch and also replays the current task's. One draw of replayed images
serves both terms instead of two draws: the expected gradient is the same, for one pass less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import IGNORED, Callback, Compute, Event, Samples, batches_of_images, masked_mean
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network, NetworkConfig, NetworkMethod
from tpl.methods.parts.rehearsal import Reservoir
from tpl.nets import Encoder
from tpl.store import State
from tpl.stream import Task

CARRIED = ("memory.keys", "memory.logits")  # names of tensors with a row for each stored image


@dataclass(frozen=True)
class DERppConfig(NetworkConfig):
    """DER++'s options."""

    memory: int = option(2000, "images kept for replay, a uniform sample of all seen", minimum=0, group="memory")
    alpha: float = option(0.1, "weight of the squared distance to the stored logits", minimum=0, group="loss")
    beta: float = option(0.5, "weight of the cross-entropy of replayed images", minimum=0, group="loss")


class DarkExperience(CrossEntropy):
    """DER++'s loss. Replayed images are labelled by their row in the memory, new ones by their class."""

    def __init__(self, network: Network, classes: Tensor, logits: Tensor, known: Tensor, config: DERppConfig) -> None:
        super().__init__(network)
        self.classes, self.alpha, self.beta = classes, config.alpha, config.beta
        outputs = torch.arange(len(network.head_bias), device=known.device)
        self.known = outputs < known.unsqueeze(1)  # which classes were known when a row entered
        self.logits = F.pad(logits, (0, len(outputs) - logits.shape[1]))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """All three terms of one batch, whose second half is replayed."""
        fresh, replayed = self.network(images).chunk(2)
        new, rows = labels.chunk(2)
        counted, rows = rows != IGNORED, rows.clamp_min(0)
        known = self.known[rows]
        apart = (replayed - self.logits[rows]).square().where(known, 0).sum(dim=1) / known.sum(dim=1)
        again = F.cross_entropy(replayed, self.classes[rows].where(counted, IGNORED))
        return F.cross_entropy(fresh, new) + self.alpha * masked_mean(apart, counted) + self.beta * again


@register
class DERpp(NetworkMethod):
    """Replay of images with their labels and with the logits they had when they were stored."""

    name = "derpp"
    summary = "DER++: replay with labels and with the logits an image had when it was stored"
    paper = "Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020"
    keeps = "a reservoir of images with the logits they had"
    cost = "new and remembered images; one pass an answer"
    from_scratch = True
    splits = True
    config_class = DERppConfig
    config: DERppConfig
    memory: Reservoir

    def __init__(self, encoder: Encoder, config: DERppConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.memory = Reservoir(config.memory, seed=seed)
        self.stored_logits = torch.zeros(0, 0, device=compute.device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train on new and stored images, and record the logits of those that will be stored."""
        admission = self.memory.admit(samples.labels, self.generator("reservoir"))
        epochs = torch.randint(self.config.epochs, admission.entering.shape, generator=self.generator("moments"))
        new = self.grow(task, samples)
        recorded = torch.zeros(len(epochs), len(self.network.head_bias), device=self.compute.device)

        replay = self.old_samples()

        def record(event: Event) -> None:
            if event.kind == "epoch":
                due = torch.nonzero(epochs == event.data["epoch"] - 1).squeeze(1)
                if self.encoder.batch_norms:  # inference uses their statistics, which training has made out of date
                    batches = self.config.batches(new, replay, self.generator("statistics"), whole=True)
                    self.network.estimate_batch_norms(batches_of_images(batches, self.normalise))
                recorded[due] = self.logits(samples.pixels[admission.entering[due]])
            callback(event)

        self.fit(new, record, self.objective() if replay is not None else None, replay)
        widened = F.pad(self.stored_logits, (0, len(task.classes)))[admission.kept]
        self.stored_logits = torch.cat([widened, recorded])
        self.memory.take(admission, task.train, len(task.classes), self.preprocess)

    def objective(self) -> DarkExperience:
        """The loss with the current memory."""
        device = self.compute.device
        sizes = torch.tensor([len(classes) for classes in self.task_classes_])
        known_then = (
            sizes.cumsum(0).repeat_interleave(sizes).to(device)
        )  # by class: how many classes there were at the end of its task
        classes = self.memory.labels.to(device)
        return DarkExperience(self.network, classes, self.stored_logits, known_then[classes], self.config)

    def old_samples(self) -> Samples | None:
        """The stored images, labelled by their rows; None while there are none."""
        if not len(self.memory):
            return None
        device = self.compute.device
        return Samples(self.memory.pixels(self.preprocess, device), torch.arange(len(self.memory), device=device))

    def logits(self, pixels: Tensor) -> Tensor:
        """The network's current logits of uint8 images."""
        network = self.network
        return self._logits(pixels, network.head_weight, network.head_bias, network.norms, *network.adapters.weights)

    @property
    def memory_bytes(self) -> int:
        """Size of the memory's images, their keys and their logits."""
        return super().memory_bytes + self.memory.keys.nbytes + self.stored_logits.nbytes

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head, its images, and its column of the stored logits."""
        super().remove_class(task, own, number)
        stayed = self.memory.remove(number)
        others = torch.arange(self.stored_logits.shape[1]) != number
        self.stored_logits = self.stored_logits[stayed][:, others.to(self.compute.device)]

    def state(self) -> State:
        """The network, and the keys and logits of the stored images."""
        found = super().state()
        carried = zip(CARRIED, (self.memory.keys, self.stored_logits), strict=True)
        return State(found.shared | dict(carried), found.tasks)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        super().load_state(State({k: v for k, v in state.shared.items() if k not in CARRIED}, state.tasks))
        keys, logits = (state.shared[name] for name in CARRIED)
        self.memory.keys, self.stored_logits = keys.cpu(), logits.to(self.compute.device)
