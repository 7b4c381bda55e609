"""L2P: a pool of prompts, from which each image selects its own, for a frozen encoder (Wang et al., CVPR 2022).

The pool has M prompts, each a few tokens long, with a key k_m each. The frozen encoder's features q(x) of an image are
its query. The N prompts with the keys most similar to it are added to the image's own tokens in a second pass through
the frozen encoder, and a linear head takes the mean of their outputs:

    chosen(x) = the N largest of cos(q(x), k_m)
    loss      = cross-entropy over the new task's classes - key_weight * (sum of cos(q(x), k_m) over chosen(x))

Prompts are shared by all tasks and change little by images that do not select them; there is no replay. Old classes
take no part in a new task's softmax: else its images would only teach never to predict them. Inference compares all
classes.

Public codes select one set of prompts by a vote of the whole batch, in tests as well: a batch of one task then reveals
the task, and users saw accuracy fall by ten points when images came one by one. Here every image selects its own, in
training and at inference, as described in the paper.

There are no adapters, as published. Trained by Adam, as published (SGD at the usual rates does not move prompts):
`momentum` is its first beta. Prompts need many small steps: a benchmark's epochs, batch size and learning rate are
meant for SGD on adapters and are not used. Unless they are given, 5 epochs of batches of 16 are trained, as published
(1,565 steps for a task of 5,000 images). Each image takes two passes through the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import IGNORED, Adam, Callback, Compute, Inference, Recipe, Samples, train
from tpl.errors import TplError
from tpl.methods.base import Method, register
from tpl.methods.parts.network import GrowingHead, Loss
from tpl.nets import Encoder, as_vit
from tpl.nets.vit import prompted
from tpl.store import State
from tpl.stream import Task


@dataclass(frozen=True)
class L2PConfig(Recipe):
    """L2P's options: a recipe, and the size of the pool."""

    epochs: int = option(5, "passes over a task's training images", minimum=1, group="training")
    batch_size: int = option(16, "images a step", minimum=1, group="training")
    lr: float = option(0.001875, "learning rate of Adam, for batches of 16", above=0, group="training")
    momentum: float = option(0.9, "Adam's first beta, above 0 and below 1", above=0, group="training")
    prompt_pool: int = option(10, "prompts in the pool", minimum=1, group="prompts", maximum=256)
    prompt_length: int = option(5, "tokens a prompt", minimum=1, group="prompts", maximum=64)
    prompts_per_image: int = option(5, "prompts an image chooses", minimum=1, group="prompts", maximum=32)
    key_weight: float = option(
        0.1, "how strongly chosen keys are drawn towards the queries that chose them", minimum=0, group="prompts"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov or self.momentum >= 1:
            raise TplError("L2P is trained by Adam: momentum must be below 1, and nesterov=true means nothing here.")
        if self.prompts_per_image > self.prompt_pool:
            raise TplError(
                f"An image cannot choose {self.prompts_per_image} prompts of {self.prompt_pool}; "
                "lower prompts_per_image or raise prompt_pool."
            )

    def optimiser(self, parameters: Sequence[Tensor]) -> Adam:
        """Adam, as published."""
        return Adam(parameters, self.lr, (self.momentum, 0.999), self.weight_decay)


class Pool(GrowingHead):
    """Keys, prompts, and a linear head that grows."""

    def __init__(self, dim: int, config: L2PConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(config.prompt_pool, dim).uniform_(-1, 1, generator=generator))
        self.prompts = nn.Parameter(
            torch.empty(config.prompt_pool, config.prompt_length, dim).uniform_(-1, 1, generator=generator)
        )
        self.new_head(dim)


def choose(queries: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` keys most similar to each query by cosine: similarities and numbers, `[n, count]`."""
    similarity = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T
    return similarity.topk(count, dim=1)


class PromptLoss(Loss):
    """Cross-entropy over the newest classes, and keys pulled towards their queries."""

    def __init__(self, method: L2P, old: int) -> None:
        self.method, self.old = method, old

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch, labelled by number within the task."""
        pool = self.method.pool
        features, similarity = self.method.prompted_features(images, pool.keys, pool.prompts)
        logits = F.linear(features, pool.head_weight[self.old :], pool.head_bias[self.old :])
        counted = (labels != IGNORED).float()
        similar = (similarity.sum(dim=1) * counted).sum() / counted.sum()
        return F.cross_entropy(logits, labels) - self.method.config.key_weight * similar


@register
class L2P(Method):
    """One pool of prompts and one head over a frozen encoder."""

    name = "l2p"
    summary = "prompts from a shared pool, chosen by each image, in front of a frozen encoder; no replay"
    paper = "Wang et al., Learning to Prompt for Continual Learning, CVPR 2022"
    keeps = "a pool of prompts"
    cost = "two passes a training image and epoch; two an answer"
    own_options = ("epochs", "batch_size", "lr")
    splits = True
    config_class = L2PConfig
    config: L2PConfig

    def __init__(self, encoder: Encoder, config: L2PConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.norms = self.encoder.new_norms()
        self.pool = self.new_pool()
        self._logits = Inference(
            lambda images, keys, prompts, head, bias: F.linear(
                self.prompted_features(images, keys, prompts)[0], head, bias
            ),
            compute,
            self.normalise,
        )

    def new_pool(self) -> Pool:
        """A pool and a head without classes."""
        pool = Pool(self.encoder.dim, self.config, self.generator("prompts", task=0))
        return pool.to(self.compute.device)

    def prompted_features(self, images: Tensor, keys: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Features of normalised images with the prompts that each selects, and their similarities to the keys."""
        dtype = self.compute.dtype
        with torch.no_grad():
            queries = self.encoder(images, self.norms, dtype=dtype)
        similarity, numbers = choose(queries, keys, self.config.prompts_per_image)
        # A product, not an index: gradients of a prompt that many images select are then summed in a fixed order.
        picked = (numbers.unsqueeze(2) == torch.arange(len(keys), device=keys.device)).to(prompts)
        own = (picked @ prompts.flatten(1)).unflatten(2, prompts.shape[1:]).flatten(1, 2)
        return prompted(as_vit(self.encoder), images, self.norms, own, dtype), similarity

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Grow the head; train prompts, keys and head on the task's data alone."""
        config, old = self.config, len(self.classes_)
        self.pool.grow(len(task.classes), self.generator("head"))
        batches = config.batches(samples, None, self.generator("training"))
        optimiser = config.optimiser(list(self.pool.parameters()))
        train(PromptLoss(self, old), optimiser, [batches], config, self.normalise, [callback])

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax over all classes so far."""
        pool = self.pool
        return self._logits(pixels, pool.keys, pool.prompts, pool.head_weight, pool.head_bias).double().log_softmax(1)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head."""
        self.pool.drop(number)

    def state(self) -> State:
        """Everything is shared: there is one pool."""
        return State({k: v.detach() for k, v in self.pool.state_dict().items()}, [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Rebuild the pool."""
        self.pool = self.new_pool()
        self.pool.grow(len(state.shared["head_bias"]), torch.Generator())
        self.pool.load_state_dict(state.shared)
