"""The exported module: everything that happens to a batch of images, from pixels to probabilities.

Scores, calibration and composition are the method's own code, traced: every choice of its options is exported alike.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.bank import ForwardPass, Outputs
from tpl.methods.bank.bank import ORIGINAL
from tpl.methods.base import UNKNOWN, task_of_class
from tpl.methods.closed_form import ClosedFormExperts
from tpl.methods.tpl import TPL
from tpl.nets import AdapterStack, ViTEncoder

CPU = torch.device("cpu")
METHODS = ("closed-form", "tpl", "tpl-plus")
Exportable = ClosedFormExperts | TPL


def exportable(learner: Learner) -> Exportable:
    """The method of a learner that can be exported, or the reason why it cannot."""
    method = learner.method
    if method.name not in METHODS or not isinstance(method, Exportable):
        raise TplError(
            f"A model of the method '{method.name}' cannot be exported; only {', '.join(METHODS[:-1])} and "
            f"{METHODS[-1]} can."
        )
    if not isinstance(method.encoder, ViTEncoder):
        raise TplError(f"A model over '{method.encoder.name}' cannot be exported; one over a ViT or DeiT can.")
    if isinstance(method, TPL) and method.bank.views != ORIGINAL:
        raise TplError(f"A model with tta={method.config.tta} cannot be exported; one with tta=none can.")
    if not method.classes_:
        raise TplError("Nothing was learned yet: there is nothing to export.")
    if method.compute.device != CPU or method.compute.bf16:
        raise TplError("A model is exported on the CPU in full precision: load it with device='cpu', precision='fp32'.")
    return method


class FrozenTrunk(nn.Module):
    """Normalised images `[n, 3, height, width]` to the encoder's own features `[n, dim]`, float32."""

    def __init__(self, encoder: ViTEncoder, norms: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder, self.dtype = encoder, dtype
        self.norms = norms  # those behind the last block: float32, whatever the blocks compute in

    def forward(self, images: Tensor) -> Tensor:
        """All blocks as they were pre-trained, in `dtype`."""
        tokens = self.encoder.tokens(images, self.dtype, below=self.encoder.depth)
        return self.encoder.pooled(tokens, self.norms)


class Trunk(nn.Module):
    """Normalised images `[n, 3, height, width]` to features `[networks, n, dim]`, float32; it computes in `dtype`.

    All networks are in one pass of the encoder: one for each task, and, where the method uses it, the encoder without
    adapters, last. The frozen weights and, under masks of units, the adapters' are there once for all of them.
    """

    def __init__(self, method: TPL, encoder: ViTEncoder, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder, self.dtype, self.below = encoder, dtype, method.bank.below
        norms = [model.norms.detach() for model in method.models]
        if method.needs_encoder_features:
            norms.append(method.encoder.new_norms(method.bank.below))
        self.norms = torch.stack(norms)
        # Cut into blocks beforehand: in `forward`, every cut would become a node of the graph.
        self.weights = encoder.block_weights(self.norms, *_adapters(method, len(norms) - len(method.models)), dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Patches and blocks below the adapted ones are computed once; then every network has its own copy of them."""
        networks = len(self.norms)
        x = self.encoder.tokens(images, self.dtype, self.below).unsqueeze(0).expand(networks, -1, -1, -1).flatten(0, 1)
        features = self.encoder.pooled(self.encoder.run(x, self.weights), self.norms)
        z: Tensor = features.unflatten(0, (networks, images.shape[0]))
        return z


def _adapters(method: TPL, bare: int) -> tuple[AdapterStack, Tensor | None]:
    """The tasks' adapters and masks, followed by those of `bare` networks whose adapters change nothing."""
    bank, embeddings = method.bank, [model.embedding.detach() for model in method.models]
    sets = [AdapterStack(*(w.detach() for w in bank.adapters_of(model).weights)) for model in method.models]
    shared = sets[0]
    found = [bank.protection.unit_mask(embedding) for embedding in embeddings]
    masks = [mask for mask in found if mask is not None]
    if len(masks) == len(found) and len(bank.sets) == 1:  # masks of units act on the units' activations
        return shared, torch.stack(masks + [torch.zeros_like(masks[0])] * bare)
    pairs = zip(sets, embeddings, strict=True)  # masks of weights, or adapters of several banks: a set for each
    own = [bank.protection.finished(each, embedding) for each, embedding in pairs]
    own += [AdapterStack(*(torch.zeros_like(weight) for weight in shared))] * bare
    return AdapterStack(*(torch.stack(parts) for parts in zip(*own, strict=True))), None


class AnswerGraph(nn.Module):
    """Images `[n, 3, height, width]`, uint8, to the method's answers; the trunk computes in `dtype`."""

    def __init__(self, method: Exportable, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.method = method
        self.trunk = _trunk(method, dtype)
        self.normalise = method.preprocess.normaliser(CPU)
        owner = task_of_class(method.task_classes_)
        self.members = torch.nn.functional.one_hot(owner, len(method.task_classes_)).double()  # [classes, tasks]
        # There is an unknown score where images were held out of every task, or can be left out one by one.
        self.want = {UNKNOWN} if method.rejection_floor() < 1 else set()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """log P(class), P(task), and the unknown score where the model has one; float32."""
        answers = self.method.decide([self._forward_pass(self.trunk(self.normalise(images)))], self.want)
        unknown = [] if answers.unknown is None else [answers.unknown]
        return tuple(part.float() for part in (answers.log_p, answers.log_p.exp() @ self.members, *unknown))

    def _forward_pass(self, features: Tensor) -> Any:
        """What the method's `decide` takes, from the trunk's features."""
        method = self.method
        if isinstance(method, ClosedFormExperts):
            return features
        networks = features.unbind(0)
        outputs = [Outputs(z, method.bank.logits(z, t)) for t, z in enumerate(networks[: len(method.bank.tasks)])]
        return ForwardPass(outputs, method.join_common(networks[-1], networks))


def _trunk(method: Exportable, dtype: torch.dtype) -> FrozenTrunk | Trunk:
    """The networks of a method, with their frozen weights in `dtype`."""
    encoder = method.encoder
    assert isinstance(encoder, ViTEncoder)  # `exportable` saw to it
    converted = encoder if dtype == torch.float32 else copy.deepcopy(encoder).to(dtype)
    if isinstance(method, ClosedFormExperts):
        return FrozenTrunk(converted, encoder.new_norms(encoder.depth), dtype)
    return Trunk(method, converted, dtype)
