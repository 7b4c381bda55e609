"""TPL with a global expert: the bank's answer times that of ridge regression on random features.

    P(class | x) ~ P_bank(class | x)^a * P_global(class | x)^w

The bank knows each task well and the others little; the global expert (RanPAC's classifier) knows all classes a little.
What they get wrong differs, so their product is better than either. The expert sees the encoder's own features, and
those under the first task's model, which are nearer to the images at hand and never change. It also says which tasks
are worth asking at all (`passes`). a is 1 and w an option, unless images held out of training say better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Inference, Samples
from tpl.errors import TplError
from tpl.methods.bank import Outputs, Question, TaskModel, within_tasks
from tpl.methods.base import register, task_of_class
from tpl.methods.parts.balance import Balance
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import Encoder, unstacked
from tpl.state import beginning_with
from tpl.stream import Task

ALL, AUTO = "all", "auto"
EXPERT = "expert."
VIEW = "view."
BALANCE = "balance."
NEVER = -1e4  # log-probability of a class whose task was not asked: below any other, and still a number


@dataclass(frozen=True)
class PlusConfig(RidgeConfig, TPLConfig):
    """TPL's options, and those of the global expert."""

    sees: str = option(
        "first",
        "what the expert sees: the encoder's own features, or (first) those under the first task's model beside them",
        ("encoder", "first"),
    )
    weight: float = option(2.0, "w: how much the expert counts, if that is not fitted; 0 leaves TPL alone", minimum=0)
    balance: str = option(
        "fitted",
        "how much bank and expert count: by images held out, where there are any; or fixed",
        ("fitted", "fixed"),
    )
    passes: str = option("all", "tasks asked for an image: all, a number, or auto: until `covered` is reached")
    covered: float = option(0.8, "auto: the share of the expert's probability that the tasks asked must hold", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes not in (ALL, AUTO) and not (self.passes.isdigit() and int(self.passes) > 0):
            raise TplError(f"passes must be all, auto or a number from 1 on; got '{self.passes}'.")
        if self.passes != ALL and self.calibration == "probability":
            raise TplError("calibration=probability compares all tasks' answers: it needs passes=all.")
        if self.looks != "upright":
            raise TplError(f"The expert of tpl-plus looks at an image once: looks={self.looks} is for tpl alone.")


@register
class TPLPlus(TPL):
    """TPL's bank with a global expert as prior."""

    name = "tpl-plus"
    summary = "TPL times a global ridge classifier over all classes, which also picks the tasks to ask"
    keeps = "what tpl and ranpac keep"
    cost = "as tpl, and one forward pass an image, once; a pass a task asked and answer, and one more"
    config_class = PlusConfig
    from_scratch = False  # the expert stands on the encoder's own features
    config: PlusConfig
    rescorable = TPL.rescorable | {"weight", "balance", "passes", "covered"}

    def __init__(self, encoder: Encoder, config: PlusConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.expert: RandomRidge | None = None
        self.balance_ = Balance()
        self.view_: TaskModel | None = None  # the first task's model, once the bank has let it go

    def conclude(self, task: Task, samples: Samples) -> None:
        """As TPL; and the expert takes up the task."""
        super().conclude(task, samples)
        seen, numbers = self._levelled(self.common_features(samples.pixels)), samples.labels + len(self.classes_)
        if self.expert is None:
            self.expert = RandomRidge.drawn_for(seen, self.config, self.generator("projection"))
        if len(self.memory):  # it has all classes: better to choose on than the new ones alone
            self.expert.learn_whole(
                seen, numbers, self._levelled(self._of_memory()), self.memory.labels.to(self.compute.device)
            )
        else:
            self.expert.learn(seen, numbers, self.generator("held out"))

    def hold_out(self, held: Samples) -> None:
        """As TPL; and the held-out images tell how far bank and expert can be trusted."""
        super().hold_out(held)
        self._weigh(held.pixels, held.labels + len(self.classes_) - self.bank.tasks[-1].own)

    def _weigh(self, pixels: Tensor, numbers: Tensor) -> None:
        """Take note of images that neither the bank nor the expert was trained on, and of their classes."""
        if len(numbers) and len(self.classes_) > 1:
            common = self.common_features(pixels)
            bank = super().log_probabilities_of(self._outputs_beside(common, pixels), common=common)
            self.balance_ = self.balance_.noted(bank, self.expert_says(common), numbers)

    @property
    def exponents(self) -> tuple[float, float]:
        """a and w."""
        fitted = self.config.balance == "fitted" and self.balance_.images > 0
        return self.balance_.exponents if fitted else (1.0, self.config.weight)

    def _of_memory(self) -> Tensor:
        """The `common_features` of the memory's images; what the first task's model says of them is there already."""
        pixels = self.memory.pixels(self.preprocess, self.compute.device)
        if not self._through_first_task:
            return self.common_features(pixels)
        return torch.cat([self.encoder_features(pixels), self.memory_outputs_[0].features], dim=1)

    # Answers

    @property
    def models(self) -> list[TaskModel]:
        """Those of the tasks; and the first one's, for the expert, if the bank has let it go."""
        return [*self.bank.tasks, *([] if self.view_ is None else [self.view_])]

    @property
    def asks_encoder(self) -> bool:
        """Always: the expert does."""
        return True

    def common_features(self, pixels: Tensor) -> Tensor:
        """What the encoder itself sees, and the first task's model, if the expert is to know: no task changes it."""
        plain = self.encoder_features(pixels)
        return plain if self.config.sees == "encoder" else torch.cat([plain, self._first(pixels)], dim=1)

    @property
    def _through_first_task(self) -> bool:
        """Whether what the expert sees is also what the first task of the bank sees."""
        return self.config.sees == "first" and self.view_ is None

    def _first(self, pixels: Tensor) -> Tensor:
        if self.view_ is None:
            return self.bank.outputs(pixels, 0).features
        weights = self.bank.protection.finished(self.bank.adapters.weights, self.view_.embedding)
        return self._look(pixels, self.view_.norms, *weights)

    @cached_property
    def _look(self) -> Inference:
        return Inference(unstacked(self.encoder, self.compute.dtype), self.compute, self.normalise)

    def _first_task(self, common: Tensor) -> Outputs:
        """The first task's answer, of what the expert has seen through its model."""
        features = common[:, self.encoder.dim :]
        return Outputs(features, self.bank.logits(features, 0))

    def _outputs_beside(self, common: Tensor, pixels: Tensor) -> list[Outputs]:
        """Every task's outputs; what the expert has seen of the first one already is not computed again."""
        return self.outputs(pixels, [self._first_task(common)] if self._through_first_task else None)

    def expert_says(self, common: Tensor) -> Tensor:
        """log P_global(class | image) from the encoder's own features."""
        assert self.expert is not None
        return self.expert.log_probabilities(self._levelled(common))

    def _levelled(self, common: Tensor) -> Tensor:
        """Features of both kinds at one length, so that neither outweighs the other."""
        return F.normalize(common.unflatten(1, (-1, self.encoder.dim)), dim=2).flatten(1)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """The bank's answer times the expert's; without the encoder's own features, the bank's alone."""
        if common is None:
            return super().log_probabilities_of(outputs, scores)
        says = self.expert_says(common)
        if self.config.passes == ALL:
            bank = super().log_probabilities_of(outputs, scores, common)
            a, w = self.exponents
            return (a * bank + w * says).log_softmax(dim=1)
        scores = self.task_scores(outputs, common) if scores is None else scores
        return self._of_some(within_tasks(outputs), scores.masked_fill(~self.tasks_to_ask(says), -torch.inf), says)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """The same; tasks that are not to be asked about an image do not see it."""
        common = self.common_features(pixels)
        if self.config.passes == ALL:
            return self.log_probabilities_of(self._outputs_beside(common, pixels), common=common)
        says = self.expert_says(common)
        asked = self.tasks_to_ask(says)
        contrast = self.contrast(common)
        scores = torch.full_like(asked, -torch.inf, dtype=torch.float64)
        within = torch.zeros_like(says)
        firsts = [sum(model.own for model in self.bank.tasks[:t]) for t in range(len(self.bank.tasks))]
        for t, rows, seen in self._asked(asked, pixels, common):
            scores[rows, t] = self.score_of(t, seen, None if contrast is None else contrast[rows])
            within[rows, firsts[t] : firsts[t] + self.bank.tasks[t].own] = within_tasks([seen])
        return self._of_some(within, scores, says)

    def _asked(self, asked: Tensor, pixels: Tensor, common: Tensor) -> Iterator[tuple[int, Tensor, Outputs]]:
        """What each task's model says of the rows it is asked about, `[n, tasks]`: all of them share their passes.

        What the expert has seen of the first one already is not computed again.
        """
        rows_of = [torch.nonzero(column).squeeze(1) for column in asked.T.cpu()]
        known = int(self._through_first_task)
        if known and len(rows_of[0]):
            rows = rows_of[0].to(common.device)
            yield 0, rows, self._first_task(common[rows])
        questions = [Question(t, rows) for t, rows in enumerate(rows_of) if t >= known and len(rows)]
        for (task, _), seen in zip(questions, self.answers(pixels, questions), strict=True):
            yield task, rows_of[task].to(common.device), seen

    def _of_some(self, within: Tensor, scores: Tensor, says: Tensor) -> Tensor:
        """The answer where some tasks, with score -inf, were not asked: their classes are out of question."""
        owner = task_of_class(self.task_classes_).to(scores.device)
        a, w = self.exponents
        bank = a * (within + self.task_log_probabilities(scores)[:, owner])
        return (bank.masked_fill(scores.isneginf()[:, owner], NEVER) + w * says).log_softmax(dim=1)

    def tasks_to_ask(self, says: Tensor) -> Tensor:
        """Which tasks are asked about each image, `[n, tasks]`, given the expert's log-probabilities of classes.

        What the expert sees through the first task's model is that task's answer as well: it is always asked then.
        """
        owner = task_of_class(self.task_classes_).to(says.device)
        count = len(self.task_classes_)
        share = torch.zeros(says.shape[0], count, dtype=torch.float64, device=says.device)
        share.index_add_(1, owner, says.exp())
        if self.config.passes == ALL:
            return torch.ones_like(share, dtype=torch.bool)
        ranked, order = share.sort(dim=1, descending=True)
        if self.config.passes == AUTO:
            wanted = ranked.cumsum(dim=1) - ranked < self.config.covered  # up to the one that reaches it
        else:
            wanted = torch.arange(count, device=says.device).expand_as(ranked) < int(self.config.passes)
        asked = torch.zeros_like(wanted).scatter(1, order, wanted)
        asked[:, 0] |= self._through_first_task
        return asked

    def passes(self, common: Tensor | None = None) -> float:
        """Task models asked about an image, on average over those whose encoder features are given."""
        if common is None:
            return super().passes()
        return float(self.tasks_to_ask(self.expert_says(common)).double().sum(dim=1).mean())

    # Changes and storage

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """As TPL; and more images add to the expert's sums."""
        super().update_classes(task, samples, held)
        assert self.expert is not None
        self.expert.update(self._levelled(self.common_features(samples.pixels)), self.numbers_of(task, samples))
        self._weigh(held.pixels, self.numbers_of(task, held))

    def remove_class(self, task: int, own: int, number: int) -> None:
        """As TPL; and the expert drops the class's sum."""
        assert self.expert is not None
        if self._through_first_task and task == 0 and self.bank.tasks[0].own == 1:
            self.view_ = self.bank.tasks[0]  # the expert goes on seeing through it: its units stay as they are
        self.expert.forget(number)
        super().remove_class(task, own, number)

    def shared_state(self) -> dict[str, Tensor]:
        """The calibration, and the expert's sums."""
        expert = {} if self.expert is None else self.expert.state()
        if self.balance_.images:
            expert |= {BALANCE + k: v for k, v in self.balance_.state().items()}
        if self.view_ is not None:
            expert |= {VIEW + k: v.detach() for k, v in self.view_.state_dict().items()}
        return super().shared_state() | {EXPERT + k: v for k, v in expert.items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Scores, calibration and expert back."""
        super().load_own_state(shared, tasks)
        found = beginning_with(EXPERT, shared)
        self.expert = RandomRidge.from_state(found, self.config) if found else None
        self.balance_ = Balance.from_state(beginning_with(BALANCE, found))
        view = beginning_with(VIEW, found)
        self.view_ = TaskModel(1, **view).requires_grad_(False) if view else None
