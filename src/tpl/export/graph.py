"""What is exported: all that happens to a batch of images, from pixels to probabilities, as one module.

Scores, calibration and composition are the method's own code, traced: every choice of its options is exported alike.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.export.trunk import trunk_of
from tpl.learner import Learner
from tpl.methods.bank import Outputs
from tpl.methods.bank.looks import UPRIGHT
from tpl.methods.base import task_of_class
from tpl.methods.plus import TPLPlus
from tpl.methods.tpl import TPL
from tpl.nets.encoder import ViTEncoder
from tpl.scores.conformal import unknown_scores

CPU = torch.device("cpu")
METHODS = ("tpl", "tpl-plus")


def exportable(learner: Learner) -> TPL:
    """The method of a learner that can become a graph, or the reason why it cannot."""
    method = learner.method
    if not isinstance(method, TPL) or method.name not in METHODS:
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
        self.tells_unknown = method.smallest_rejected_share() < 1
        self.held_out = [method.held_out_knownness(t) for t in range(len(method.bank.tasks))]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """log P(class), P(task), and where the model can tell it, how unknown each image is; float32."""
        method = self.method
        seen = self.trunk(self.normalise(images)).unbind(0)
        outputs = [Outputs(z, method.bank.logits(z, t)) for t, z in enumerate(seen[: len(method.bank.tasks)])]
        log_p = method.log_probabilities_of(outputs, common=self._common(seen))
        answers = [log_p, log_p.exp() @ self.members]
        if self.tells_unknown:
            known = [method.knownness(t, each) for t, each in enumerate(outputs)]
            answers.append(unknown_scores(known, self.held_out))
        return tuple(answer.float() for answer in answers)

    def _common(self, seen: tuple[Tensor, ...]) -> Tensor | None:
        """What is seen beside the tasks' models, if anything: the trunk's last network is the encoder as it came."""
        if not self.method.asks_encoder:
            return None
        if not isinstance(self.method, TPLPlus) or self.method.config.sees != "first":
            return seen[-1]
        first = 0 if self.method.view_ is None else len(self.method.bank.tasks)
        return torch.cat([seen[-1], seen[first]], dim=1)
