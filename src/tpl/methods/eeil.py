"""EEIL: distillation task by task, then a short training on a balanced set.

1. Main training, on new and remembered images: cross-entropy over all classes so far, and for every old task s its own
distillation from the network P as it was before,

    + sum_s |s| / |old| T^2 KL(softmax_s(P / T) || softmax_s(f / T)),   T = 2

where softmax_s is over the classes of task s alone.
2. Balanced fine-tuning of the whole network at a tenth of the rate, on the memory and as many images of each new class
as it has of an old one. Now the teacher is the network at the end of the first training, and the new task is distilled
like the others, so that what was learned from the images left out is kept.

The paper's separate classification layers amount to distillation task by task. The weights |s| / |old| and the factor
T^2 are those of the code of Lee et al. (ICCV 2019), which the method is usually measured with; the paper adds the terms
unweighted, and they would outweigh the cross-entropy after twenty tasks. Adapted to adapters: the benchmark's rate and
epochs, and in the second training a rate that falls along a cosine instead of in two steps. Left out: the paper's
gradient noise and image augmentation, which no method here has (but see `augment`). The first task is plain training.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpl.config import option
from tpl.engine import Callback, Samples, no_callback
from tpl.methods.base import register
from tpl.methods.parts.distill import Distillation, class_slices
from tpl.methods.parts.rehearsal import BalancingConfig, RehearsalMethod, balanced
from tpl.stream import Task


@dataclass(frozen=True)
class EEILConfig(BalancingConfig):
    """EEIL's options."""

    temperature: float = option(2.0, "temperature of distillation", above=0, group="loss")


@register
class EEIL(RehearsalMethod):
    """Replay with distillation inside each old task, and balanced fine-tuning."""

    name = "eeil"
    summary = "replay with distillation task by task, then fine-tuning on a class-balanced set"
    paper = "Castro et al., End-to-End Incremental Learning, ECCV 2018"
    keeps = "a class-balanced memory of images"
    cost = "as icarl, then a short training on a balanced set with a teacher; one pass an answer"
    from_scratch = True
    splits = True
    config_class = EEILConfig
    config: EEILConfig

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train with the old network as teacher; then balance, with the trained one as teacher."""
        config, old = self.config, self.old_samples()
        tasks = class_slices([len(classes) for classes in (*self.task_classes_, task.classes)])
        new = self.grow(task, samples)
        teachers = [(self.network.copy(), tasks[:-1])] if self.classes_ else []
        self.fit(new, callback, Distillation(self.network, teachers, config.temperature), old)
        balancing = config.balancing()
        if old is not None and balancing is not None:
            objective = Distillation(self.network, [(self.network.copy(), tasks)], config.temperature)
            few = balanced(new, old, self.generator("balanced set"))
            self.fit(few, no_callback, objective, recipe=balancing, name="balancing")
        self.remember(task, samples)
