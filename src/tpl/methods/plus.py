"""TPL with a global expert: the bank's prediction times that of ridge regression on random features.

    P(class | x) ~ P_bank(class | x)^a * P_global(class | x)^w

A task model separates its own classes well but was hardly trained on others; the global expert (RanPAC's classifier) is
weaker but covers all classes. They make different errors, so their product is better than either. The expert's input
is the encoder's own features and those under the first task's model, which fit the images better and never change. The
expert also selects the tasks whose models are run (`passes`). The exponents a and w are fitted on images held out of
training; without any, a is 1 and w an option.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples
from tpl.errors import TplError
from tpl.methods.bank import ForwardPass, Outputs, Query, TaskModel, within_tasks
from tpl.methods.base import KEEP, UNKNOWN, Answers, register, task_of_class
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import Encoder
from tpl.scores.calibration import unknown_scores
from tpl.store import under_prefix
from tpl.stream import Task

ALL, AUTO, NO_TASK = "all", "auto", "0"
EXPERT = "expert."
VIEW = "view."
BALANCE = "balance."
# The parts of a prediction, by the options that switch the other one off.
PARTS: dict[str, dict[str, Any]] = {
    "expert": {"passes": NO_TASK, "calibration": "none"},  # of the bank, which does not count
    "bank": {"passes": ALL, "expert_weighting": "fixed", "expert_weight": 0.0},
}
NEVER = -1e4  # log-probability of a class whose task was not queried: below any other, and finite


@dataclass(frozen=True)
class PlusConfig(RidgeConfig, TPLConfig):
    """TPL's options, and those of the global expert."""

    expert_views: str = option(
        "first",
        "the expert's input: the encoder's own features, or (first) these and those under the first task's model",
        ("encoder", "first"),
        group="expert",
    )
    expert_weight: float = option(
        2.0,
        "w, the exponent of the expert's probabilities if it is not fitted; 0 is TPL alone",
        minimum=0,
        group="expert",
    )
    expert_weighting: str = option(
        "fitted",
        "the exponents a and w: fitted on held-out images, where there are any; or fixed",
        ("fitted", "fixed"),
        group="expert",
    )
    passes: str = option(
        "all",
        "task models run per image: all, a number (0: the expert alone), or auto: until `passes_mass` is reached",
        group="test time",
    )
    passes_mass: float = option(
        0.8, "auto: the share of the expert's probability that the queried tasks must have", above=0, group="test time"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes not in (ALL, AUTO) and not self.passes.isdecimal():
            raise TplError(f"passes must be all, auto or a number of tasks; got '{self.passes}'.")
        if self.passes != ALL and self.calibration == "probability":
            raise TplError("calibration=probability compares all tasks' answers: it needs passes=all.")
        if self.tta != "none":
            raise TplError(
                f"tpl-plus has no test-time augmentation: use tta=none, or the method tpl for tta={self.tta}."
            )


class Balance:
    """The exponents a and w of bank and expert with the largest likelihood on held-out images.

    Training images cannot be used, since the task models have memorised them; with few images or epochs, the bank is
    also overconfident. Of the held-out images only their likelihood at every a and w of a grid is stored, summed over
    tasks; each task adds its own images when it is learned. With few images the prior decides.
    """

    bank_grid = tuple(2.0**e for e in range(-6, 1))
    expert_grid = tuple(2.0 ** (e / 2) for e in range(-4, 5))
    # The expert's temperature is fitted already, the bank's is not. Chosen on held-out digits, 10 and 30 a class.
    usual = 1 / 8, 1.0
    prior = 1.0  # nats that half or twice the usual value costs; the penalty is quadratic in log2

    def __init__(self, likelihoods: Tensor | None = None, images: int = 0) -> None:
        zeros = torch.zeros(len(self.bank_grid), len(self.expert_grid), dtype=torch.float64)
        self.likelihoods = zeros if likelihoods is None else likelihoods.cpu()  # logarithms
        self.images = images
        self.exponents = self._most_likely()  # a and w

    def updated(self, bank: Tensor, expert: Tensor, labels: Tensor) -> Balance:
        """A balance that includes more held-out images: both log P(class | x), `[n, classes]`, and their classes."""
        own = labels.unsqueeze(1)
        added = torch.stack([
            torch.stack([(a * bank + w * expert).log_softmax(dim=1).gather(1, own).sum() for w in self.expert_grid])
            for a in self.bank_grid
        ])  # fmt: skip
        return Balance(self.likelihoods + added.cpu(), self.images + len(labels))

    def _most_likely(self) -> tuple[float, float]:
        bank, expert = (torch.tensor(grid, dtype=torch.float64) for grid in (self.bank_grid, self.expert_grid))
        far = (bank / self.usual[0]).log2().square().unsqueeze(1) + (expert / self.usual[1]).log2().square()
        best = int((self.likelihoods - self.prior * far).argmax())
        return self.bank_grid[best // len(expert)], self.expert_grid[best % len(expert)]

    def state(self) -> dict[str, Tensor]:
        """Tensors for storage."""
        return {"likelihoods": self.likelihoods, "images": torch.tensor(self.images)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Balance:
        """The balance that `state` came from; a new one from an empty state."""
        return cls(state["likelihoods"], int(state["images"])) if state else cls()


@register
class TPLPlus(TPL):
    """TPL's bank of task models times a global expert."""

    name = "tpl-plus"
    summary = "TPL times a global ridge classifier over all classes, which also selects the task models to run"
    keeps = "what tpl and ranpac keep"
    cost = "training: as tpl, plus one forward pass per image; prediction: one pass per queried task, plus one"
    config_class = PlusConfig
    from_scratch = False  # the expert needs a pre-trained encoder
    config: PlusConfig
    rescorable = TPL.rescorable | {"expert_weight", "expert_weighting", "passes", "passes_mass"}

    def __init__(self, encoder: Encoder, config: PlusConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.expert: RandomRidge | None = None
        self.balance_ = Balance()
        self.view_: TaskModel | None = None  # the first task's model, once it is removed from the bank

    def conclude(self, task: Task, samples: Samples) -> None:
        """Finish the task as TPL does, then train the expert on it."""
        super().conclude(task, samples)
        inputs, numbers = self._normalised(self.common_features(samples.pixels)), samples.labels + len(self.classes_)
        if self.expert is None:
            self.expert = RandomRidge.drawn_for(inputs, self.config, self.generator("projection"))
        if len(self.memory):  # it covers all classes: better data to choose the ridge on than the new task alone
            self.expert.learn_whole(
                inputs, numbers, self._normalised(self._memory_features()), self.memory.labels.to(self.compute.device)
            )
        else:
            self.expert.learn(inputs, numbers, self.generator("held out"))

    def hold_out(self, held: Samples) -> None:
        """Also fit the exponents of bank and expert."""
        super().hold_out(held)
        self._fit_exponents(
            held.pixels, held.labels + len(self.classes_) - self.bank.tasks[-1].own, self.held_[-1].common
        )

    def _fit_exponents(self, pixels: Tensor, numbers: Tensor, common: Tensor | None = None) -> None:
        """Fit the exponents to images that neither the bank nor the expert was trained on, given their classes."""
        if len(numbers) and len(self.classes_) > 1:
            common = self.common_features(pixels) if common is None else common
            bank = self.log_probabilities_of(self._outputs_beside(common, pixels), common=common)
            self.balance_ = self.balance_.updated(bank, self.expert_log_probabilities(common), numbers)

    @property
    def exponents(self) -> tuple[float, float]:
        """The exponents a and w."""
        fitted = self.config.expert_weighting == "fitted" and self.balance_.images > 0
        return self.balance_.exponents if fitted else (1.0, self.config.expert_weight)

    def weighting(self) -> dict[str, Any]:
        """The exponents, and the number of held-out images they were fitted on; 0: set by options."""
        a, w = self.exponents
        fitted = self.balance_.images if self.config.expert_weighting == "fitted" else 0
        return {"bank": round(a, 4), "expert": round(w, 4), "fitted_on": fitted}

    def _memory_features(self) -> Tensor:
        """`common_features` of the memory's images, reusing the stored features under the first task's model."""
        pixels = self.memory.pixels(self.preprocess, self.compute.device)
        if not self._through_first_task:
            return self.common_features(pixels)
        return torch.cat([self.encoder_features(pixels), self.memory_outputs_[0].features], dim=1)

    # Inference

    @property
    def models(self) -> list[TaskModel]:
        """The task models, and the first task's model if only the expert still uses it."""
        return [*self.bank.tasks, *([] if self.view_ is None else [self.view_])]

    @property
    def needs_encoder_features(self) -> bool:
        """Always True: the expert needs the encoder's own features."""
        return True

    def common_features(self, pixels: Tensor) -> Tensor:
        """The expert's input: encoder features, with `expert_views=first` also those under the first task's model."""
        plain = self.encoder_features(pixels)
        return plain if self.config.expert_views == "encoder" else torch.cat([plain, self._first(pixels)], dim=1)

    def join_common(self, encoder: Tensor, models: Sequence[Tensor]) -> Tensor:
        """`common_features` from the encoder's own features and those under each of `models`."""
        if self.config.expert_views == "encoder":
            return encoder
        return torch.cat([encoder, models[0 if self.view_ is None else len(self.bank.tasks)]], dim=1)

    @property
    def _through_first_task(self) -> bool:
        """Whether the expert's features include those of the bank's first task."""
        return self.config.expert_views == "first" and self.view_ is None

    def _first(self, pixels: Tensor) -> Tensor:
        if self.view_ is None:
            return self.bank.outputs(pixels, 0).features
        weights = self.bank.protection.finished(self.bank.adapters.weights, self.view_.embedding)
        return self.adapted_features(pixels, self.view_.norms, *weights)

    def _first_task(self, common: Tensor) -> Outputs:
        """The first task's outputs, from the expert's features under its model."""
        features = common[:, self.encoder.dim :]
        return Outputs(features, self.bank.logits(features, 0))

    def _outputs_beside(self, common: Tensor, pixels: Tensor, known: list[Outputs] | None = None) -> list[Outputs]:
        """Every task's outputs; `known` ones, and the first task's if part of `common`, are not computed again."""
        if not known and self._through_first_task:
            known = [self._first_task(common)]
        return self.outputs(pixels, known)

    def expert_log_probabilities(self, common: Tensor) -> Tensor:
        """log P_global(class | image) from `common_features`."""
        assert self.expert is not None
        return self.expert.log_probabilities(self._normalised(common))

    def _normalised(self, common: Tensor) -> Tensor:
        """Encoder and first-task features, each scaled to length 1, so that neither dominates."""
        return F.normalize(common.unflatten(1, (-1, self.encoder.dim)), dim=2).flatten(1)

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: ForwardPass | None = None) -> ForwardPass:
        """The expert's features, then the outputs of the tasks that it selects for each image.

        With KEEP every task is queried with every image, since the expert may select other tasks at a later stage. So
        it is for unknown scores of a model from an early version, which did not store `held_common`.
        """
        common = self._common(pixels, before)
        assert common is not None
        if KEEP in want or self.config.passes == ALL or (UNKNOWN in want and not self._knows_queried_tasks):
            return ForwardPass(self._outputs_beside(common, pixels, self._reusable(before)), common, by=self)
        queried = self.tasks_to_query(self.expert_log_probabilities(common))
        rows_of = [torch.nonzero(column).squeeze(1) for column in queried.T.cpu()]
        outputs: list[Outputs] = []
        if self._through_first_task and self.bank.tasks:
            outputs = [self._first_task(common[rows_of[0].to(common.device)])]
        queries = [Query(t, rows_of[t]) for t in range(len(outputs), len(rows_of))]
        return ForwardPass(outputs + self.query(pixels, queries), common, queried, by=self)

    def decide(
        self, passes: Sequence[ForwardPass], want: Collection[str] = (), scores: Tensor | None = None
    ) -> Answers:
        """The bank's prediction times the expert's; tasks that are not selected for an image do not count."""
        joined = ForwardPass.joined(passes)
        assert joined.common is not None
        expert = self.expert_log_probabilities(joined.common)
        queried = self.tasks_to_query(expert) if joined.queried is None else joined.queried
        scores = _dense(joined, self._scores_of(joined)) if scores is None else scores
        log_p = self._fused(joined, queried, scores, expert)
        unknown = None
        if UNKNOWN in want:
            known = _dense(joined, [self.in_distribution_score(t, each) for t, each in enumerate(joined.outputs)])
            known = known.masked_fill(~queried, -torch.inf) if self._knows_queried_tasks else known
            unknown = unknown_scores(list(known.T.contiguous()), self.held_scores())
        return Answers(log_p, scores, unknown, queried.sum(dim=1))

    def _scores_of(self, run: ForwardPass) -> list[Tensor]:
        """Every task's scores of the images it was queried with."""
        contrast = self.contrast(run.common)
        if run.queried is None or contrast is None:
            return [self.score_of(t, each, contrast) for t, each in enumerate(run.outputs)]
        return [self.score_of(t, each, contrast[run.queried[:, t]]) for t, each in enumerate(run.outputs)]

    def _fused(self, run: ForwardPass, queried: Tensor, scores: Tensor, expert: Tensor) -> Tensor:
        """log P(class | image) of bank and expert; classes of tasks that were not queried cannot win."""
        a, w = self.exponents
        if self.config.passes == NO_TASK:
            return expert
        if self.config.passes == ALL:
            bank = self.log_probabilities_of(run.outputs, scores, run.common)
            return (a * bank + w * expert).log_softmax(dim=1)
        owner = task_of_class(self.task_classes_).to(scores.device)
        if run.queried is None:
            within = within_tasks(run.outputs)
        else:
            within = torch.zeros_like(expert)
            for t, each in enumerate(run.outputs):
                within[queried[:, t].unsqueeze(1) & (owner == t)] = within_tasks([each]).flatten()
        bank = a * (within + self.task_log_probabilities(scores.masked_fill(~queried, -torch.inf))[:, owner])
        return (bank.masked_fill(~queried[:, owner], NEVER) + w * expert).log_softmax(dim=1)

    def parts(self, passes: Sequence[ForwardPass], answers: Answers) -> dict[str, Tensor]:
        """log P(class | image) by the expert alone and by the bank alone."""
        trained, found = self.config, {}
        try:
            for name, changes in PARTS.items():
                self.config = trained.replace(**changes)
                found[name] = self.decide(passes, scores=answers.scores).log_p
        finally:
            self.config = trained
        return found

    def tasks_to_query(self, expert: Tensor) -> Tensor:
        """Which tasks are queried with each image, `[n, tasks]`, given the expert's log-probabilities of classes.

        The first task is always included where its features are part of the expert's.
        """
        owner = task_of_class(self.task_classes_).to(expert.device)
        count = len(self.task_classes_)
        share = torch.zeros(expert.shape[0], count, dtype=torch.float64, device=expert.device)
        share.index_add_(1, owner, expert.exp())
        if self.config.passes in (ALL, NO_TASK):
            return torch.full_like(share, self.config.passes == ALL, dtype=torch.bool)
        ranked, order = share.sort(dim=1, descending=True)
        if self.config.passes == AUTO:
            wanted = ranked.cumsum(dim=1) - ranked < self.config.passes_mass  # up to the one that reaches it
        else:
            wanted = torch.arange(count, device=expert.device).expand_as(ranked) < int(self.config.passes)
        queried = torch.zeros_like(wanted).scatter(1, order, wanted)
        queried[:, 0] |= self._through_first_task
        return queried

    # Unknown scores, from the queried tasks alone

    def held_common(self, pixels: Tensor) -> Tensor:
        """The expert's input for held-out images: it decides which tasks are queried with them, now and later."""
        return self.common_features(pixels)

    @property
    def _knows_queried_tasks(self) -> bool:
        """Whether every held-out image's queried tasks are known; early versions did not store `held_common`."""
        return self.config.passes == ALL or all(h.common is not None for h in self.held_ if len(h.labels))

    def held_out_scores(self, task: int) -> Tensor:
        """Sorted in-distribution scores, with -inf for images that their own task would not be queried with.

        Held-out images are thus treated like new ones, and a threshold rejects the same share of known images as when
        every task is queried.
        """
        held = self.held_[task]
        known = self.in_distribution_score(task, Outputs(held.features, self.bank.logits(held.features, task)))
        if self.config.passes != ALL and self._knows_queried_tasks and held.common is not None:
            queried = self.tasks_to_query(self.expert_log_probabilities(held.common))[:, task]
            known = known.masked_fill(~queried, -torch.inf)
        return known.sort().values

    # Changes and storage

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Also add the images to the expert's sums, and the held-out ones to the fit of the exponents."""
        super().update_classes(task, samples, held)
        assert self.expert is not None
        self.expert.update(self._normalised(self.common_features(samples.pixels)), self.numbers_of(task, samples))
        self._fit_exponents(held.pixels, self.numbers_of(task, held))
        self._held_scores = None  # the expert has changed

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Remove the class from TPL and from the expert."""
        assert self.expert is not None
        if self._through_first_task and task == 0 and self.bank.tasks[0].own == 1:
            self.view_ = self.bank.tasks[0]  # the expert still needs it: its units stay protected
        self.expert.forget(number)
        super().remove_class(task, own, number)

    def shared_state(self) -> dict[str, Tensor]:
        """Also the expert's sums, the likelihoods behind the exponents, and the first task's model if kept for it."""
        expert = {} if self.expert is None else self.expert.state()
        if self.balance_.images:
            expert |= {BALANCE + k: v for k, v in self.balance_.state().items()}
        if self.view_ is not None:
            expert |= {VIEW + k: v.detach() for k, v in self.view_.state_dict().items()}
        return super().shared_state() | {EXPERT + k: v for k, v in expert.items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore scores, calibration and expert."""
        super().load_own_state(shared, tasks)
        found = under_prefix(EXPERT, shared)
        self.expert = RandomRidge.from_state(found, self.config) if found else None
        self.balance_ = Balance.from_state(under_prefix(BALANCE, found))
        view = under_prefix(VIEW, found)
        self.view_ = TaskModel(1, **view).requires_grad_(False) if view else None


def _dense(run: ForwardPass, columns: Sequence[Tensor]) -> Tensor:
    """A value of every task for every image, `[n, tasks]`; -inf where the task was not queried."""
    if run.queried is None:
        return torch.stack(list(columns), dim=1)
    dense = torch.full_like(run.queried, -torch.inf, dtype=torch.float64)
    for t, column in enumerate(columns):
        dense[run.queried[:, t], t] = column
    return dense
