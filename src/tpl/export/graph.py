"""What is exported: all that happens to a batch of images, from pixels to probabilities, as one module.

Scores, calibration and composition are the method's own code, traced: every choice of its options is exported alike.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.export.trunk import trunk_of
from tpl.learner import Learner
from tpl.methods.bank import Outputs, Seen
from tpl.methods.bank.bank import UPRIGHT
from tpl.methods.base import UNKNOWN, task_of_class
from tpl.methods.tpl import TPL
from tpl.nets.encoder import ViTEncoder

CPU = torch.device("cpu")
METHODS = ("tpl", "tpl-plus")


def exportable(learner: Learner) -> TPL:
    """The method of a learner that can become a graph, or the reason why it cannot."""
    method = cast(TPL, learner.method)
    if method.name not in METHODS:
        raise TplError(f"A model of the method '{method.name}' cannot be exported; only {' and '.join(METHODS)} can.")
    if not isinstance(method.encoder, ViTEncoder):
        raise TplError(f"A model over '{method.encoder.name}' cannot be exported; one over a ViT or DeiT can.")
    if method.bank.looks != UPRIGHT:
        raise TplError(f"A model with looks={method.config.looks} cannot be exported; one that looks once can.")
    if not method.classes_:
        raise TplError("Nothing was learned yet: there is nothing to export.")
    if method.compute.device != CPU or method.compute.bf16:
        raise TplError("A model is exported on the CPU in full precision: load it with device='cpu', precision='fp32'.")
    return method


class AnswerGraph(nn.Module):
    """Images `[n, 3, height, width]`, uint8, to what there is to say of them; the trunk computes in `dtype`."""

    def __init__(self, method: TPL, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.method = method
        encoder = method.encoder
        assert isinstance(encoder, ViTEncoder)  # `exportable` saw to it
        encoder = encoder if dtype == torch.float32 else copy.deepcopy(encoder).to(dtype)
        self.trunk = trunk_of(method, encoder, dtype)
        self.normalise = method.preprocess.normaliser(CPU)
        owner = task_of_class(method.task_classes_)
        self.members = torch.nn.functional.one_hot(owner, len(method.task_classes_)).double()  # [classes, tasks]
        # Unknown images can be told where every task has images that were held out.
        self.want = {UNKNOWN} if method.rejection_floor() < 1 else set()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """log P(class), P(task), and where the model can tell it, how unknown each image is; float32."""
        method = self.method
        networks = self.trunk(self.normalise(images)).unbind(0)  # the last is the encoder as it came, where it is asked
        outputs = [Outputs(z, method.bank.logits(z, t)) for t, z in enumerate(networks[: len(method.bank.tasks)])]
        told = method.decide([Seen(outputs, method.join_common(networks[-1], networks))], self.want)
        answers = [told.log_p, told.log_p.exp() @ self.members, *([] if told.unknown is None else [told.unknown])]
        return tuple(answer.float() for answer in answers)
