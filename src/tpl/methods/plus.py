"""TPL with a global expert: the bank's prediction times that of ridge regression on random features.

    P(class | x) ~ P_bank(class | x)^a * P_global(class | x)^w

A task model separates its own classes well but was hardly trained on others; the global expert (RanPAC's classifier) is
weaker but covers all classes. They make different errors, so their product is better than either. The expert's input
is the encoder's own features and those under the models of the first task or tasks (its views), which fit the images
better and never change. If the first task has few images (fewer than 1000), the expert's probabilities are multiplied
by those of a classifier in closed form over the encoder's features (`parts.closed_form`), the best one with so few;
leave-one-out then calibrates the unknown score on all images. The expert also selects the tasks whose models are run
(`passes`). The exponents a and w are fitted on images held out of training; without any, a is 1 and w an option.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples
from tpl.errors import TplError
from tpl.methods.bank import ForwardPass, Outputs, Query, TaskModel, within_tasks
from tpl.methods.bank.protect import GROWTHS, WHEN_FULL
from tpl.methods.base import KEEP, UNKNOWN, Answers, LeftOut, register, seeded, task_of_class
from tpl.methods.parts.closed_form import ClosedForm
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import Encoder
from tpl.scores.calibration import unknown_scores
from tpl.store import under_prefix
from tpl.stream import Task

ALL, AUTO, NO_TASK = "all", "auto", "0"
ENCODER, FIRST, SEVERAL = "encoder", "first", "several"
REMOVED = -1  # instead of a task's number: its model is in the expert alone
EXPERT = "expert."
VIEW = "view."
BALANCE = "balance."
CLOSED = "closed."
SHARED = 4  # views that share the random features, the encoder among them; a further one has as many as each of these
MOST_VIEWS = 5  # task models in the expert: each is a pass for every image
VIEW_IMAGES = 100  # of every old class in the memory, or all of its images, for one more view
MOST_QUERIED = 10  # tasks that `auto` selects, however unsure the expert is: an answer then costs the same at any T
MANY_IMAGES = 1000  # of the first task: with fewer, further views bring nothing (digits, docs/beyond-evidence.md)
NEVER = -1e4  # log-probability of a class whose task was not queried: below any other, and finite


@dataclass(frozen=True)
class PlusConfig(RidgeConfig, TPLConfig):
    """TPL's options, and those of the global expert."""

    others: str = option(
        "per_class",
        "outputs for replayed images: one for each of their classes; single: one for all (tpl)",
        ("per_class", "single"),
        group="training",
    )
    grow_adapters: str = option(
        WHEN_FULL,
        "new tasks get a further set of adapters when 90 % of the units are in use; never: as in tpl",
        GROWTHS,
        group="masks",
    )
    expert_views: str = option(
        SEVERAL,
        "the expert's input: the encoder's own features; also those under the first task's model (first), or under the "
        "first few tasks' models (several), if the first task has 1000 images, and while the memory holds enough",
        (ENCODER, FIRST, SEVERAL),
        group="expert",
    )
    expert_weight: float = option(
        4.0,
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
        "task models run per image: all, a number (0: the expert alone), or auto: until `passes_mass` is reached, but "
        "at most ten",
        group="test time",
    )
    passes_mass: float = option(
        0.5, "auto: the share of the expert's probability that the queried tasks must have", above=0, group="test time"
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
    tasks; each task adds its own images when it is learned. With few images the prior decides. At a = 0 the bank does
    not count at all; a model of an early version, whose likelihoods begin at the next a, goes on without it.
    """

    bank_grid = (0.0, *(2.0**e for e in range(-6, 1)))
    expert_grid = tuple(2.0 ** (e / 2) for e in range(-4, 5))
    # The expert's temperature is fitted already, the bank's is not. Chosen on held-out digits, 10 and 30 a class.
    usual = 1 / 8, 1.0
    prior = 1.0  # nats that half or twice the usual value costs; the penalty is quadratic in log2

    def __init__(self, likelihoods: Tensor | None = None, images: int = 0) -> None:
        zeros = torch.zeros(len(self.bank_grid), len(self.expert_grid), dtype=torch.float64)
        self.likelihoods = zeros if likelihoods is None else likelihoods.cpu()  # logarithms
        if len(self.likelihoods) not in (len(zeros) - 1, len(zeros)) or self.likelihoods.shape[1:] != zeros.shape[1:]:
            raise ValueError(f"likelihoods of {tuple(self.likelihoods.shape)} exponents")
        self.bank_exponents = self.bank_grid[-len(self.likelihoods) :]
        self.images = images
        self.exponents = self._most_likely()  # a and w

    def updated(self, bank: Tensor, expert: Tensor, labels: Tensor) -> Balance:
        """A balance that includes more held-out images: both log P(class | x), `[n, classes]`, and their classes."""
        own = labels.unsqueeze(1)
        added = torch.stack([
            torch.stack([(a * bank + w * expert).log_softmax(dim=1).gather(1, own).sum() for w in self.expert_grid])
            for a in self.bank_exponents
        ])  # fmt: skip
        return Balance(self.likelihoods + added.cpu(), self.images + len(labels))

    def joined(self, other: Balance) -> Balance:
        """A balance of the held-out images of both."""
        rows = min(len(self.likelihoods), len(other.likelihoods))
        return Balance(self.likelihoods[-rows:] + other.likelihoods[-rows:], self.images + other.images)

    def _most_likely(self) -> tuple[float, float]:
        far = [[self.distance(a, w) for w in self.expert_grid] for a in self.bank_exponents]
        penalty = self.prior * torch.tensor(far, dtype=torch.float64)
        best = int((self.likelihoods - penalty).argmax())
        return self.bank_exponents[best // len(self.expert_grid)], self.expert_grid[best % len(self.expert_grid)]

    @classmethod
    def distance(cls, a: float, w: float) -> float:
        """How far exponents are from the usual ones, in squares of log2; 0 counts as half of the next value."""
        pairs = zip((a or cls.bank_grid[1] / 2, w), cls.usual, strict=True)
        return sum(math.log2(value / usual) ** 2 for value, usual in pairs)

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
        self.closed_: ClosedForm | None = None  # a further expert, if the first task has few images
        self._measured: Tensor | None = None  # answers for the newest task's held-out images, before it learned them
        self.views_: list[TaskModel] = []  # the models whose features the expert uses; they outlast their tasks

    def conclude(self, task: Task, samples: Samples) -> None:
        """Finish the task as TPL does, then train the expert on it."""
        stored = self._stored_for_a_view()
        super().conclude(task, samples)
        if stored is not None or (self.expert is None and self.config.expert_views != ENCODER):
            self.views_.append(self.bank.tasks[-1])
        common, numbers = self.common_features(samples.pixels), samples.labels + len(self.classes_)
        inputs = self._normalised(common)
        if self.expert is None and len(inputs) < MANY_IMAGES:
            drawn = seeded(0, 0, "closed form")  # whatever the method's seed: then models can be merged
            self.closed_ = ClosedForm.drawn(self.encoder.dim, 0, drawn, inputs.device)
        if self.closed_ is not None:
            self.closed_.learn(common[:, : self.encoder.dim], numbers)
        if self.expert is None:
            self.expert = self._new_expert(inputs)
        elif stored is not None:
            self._add_view(inputs, stored)
        if len(self.memory):  # it covers all classes: better data to choose the ridge on than the new task alone
            self.expert.learn_whole(
                inputs, numbers, self._normalised(self._memory_features()), self.memory.labels.to(self.compute.device)
            )
        else:
            self.expert.learn(inputs, numbers, self.generator("held out"))

    def _new_expert(self, inputs: Tensor) -> RandomRidge:
        generator = self.generator("projection")
        if len(inputs) < MANY_IMAGES or self.config.expert_views == ENCODER:
            return RandomRidge.drawn_for(inputs, self.config, generator)
        more = self.config.expert_views == SEVERAL and self.memory_budget > 0
        views = inputs.split(self.encoder.dim, dim=1)
        return RandomRidge.drawn_for_views(views, self.config, generator, SHARED if more else len(views))

    def _stored_for_a_view(self) -> Samples | None:
        """The memory before a new task, if its model can become one more view; None if not.

        So it is for the first tasks in a row, while the memory holds enough images of every class to estimate the new
        view's sums over old images.
        """
        learned = len(self.task_classes_) + self.removed_tasks
        if self.config.expert_views != SEVERAL or self.expert is None or not len(self.memory):
            return None
        if len(self.expert.projections) == 1:  # one projection of everything, which no view can be added to
            return None
        if len(self.views_) != learned or learned >= MOST_VIEWS:
            return None
        labels = self.memory.labels.to(self.compute.device)
        enough = self.expert.counts.clamp_max(VIEW_IMAGES)
        if bool((labels.bincount(minlength=self.expert.classes) < enough).any()):
            return None
        return Samples(self.memory.pixels(self.preprocess, self.compute.device), labels)

    def _add_view(self, inputs: Tensor, stored: Samples) -> None:
        """Add the newest model to the expert's views, whose input for the new task's images is `inputs`.

        The pixels of held-out images are gone: their features under the new view are predicted from the other views.
        """
        expert = self.expert
        assert expert is not None
        commons = {t: held.common for t, held in enumerate(self.held_) if held.common is not None}
        hidden = {t: expert.hidden(self._normalised(common)) for t, common in commons.items()}
        known = self._normalised(self.common_features(stored.pixels))
        to_features = expert.add_view(inputs, known, stored.labels, self.generator("view"))
        for t, common in commons.items():
            joined = torch.cat([common, (hidden[t] @ to_features).to(common)], dim=1)
            self.held_[t] = self.held_[t]._replace(common=joined)

    def hold_out(self, held: Samples) -> None:
        """Also fit the exponents of bank and expert."""
        with self.bank.sharing(held.pixels):
            super().hold_out(held)
            numbers = held.labels + len(self.classes_) - self.bank.tasks[-1].own
            self._fit_exponents(held.pixels, numbers, self.held_[-1].common)
            if self.closed_ is not None:
                self._measured = self.answer(held.pixels).log_p
                self.closed_.update(self.encoder_features(held.pixels), numbers)

    def measure(self, held: Samples) -> Tensor:
        """Answers for the newest task's held-out images, as they were before the closed form learned these as well."""
        return super().measure(held) if self._measured is None else self._measured

    def _fit_exponents(self, pixels: Tensor, numbers: Tensor, common: Tensor | None = None) -> None:
        """Fit the exponents to images that neither the bank nor the expert was trained on, given their classes.

        If answers do not query all tasks, the fit does not either: it then costs the same with any number of tasks.
        Images count whose own task is among those that are queried.
        """
        if not len(numbers) or len(self.classes_) < 2:
            return
        common = self.common_features(pixels) if common is None else common
        expert = self.expert_log_probabilities(common)
        if self.config.passes == ALL:
            bank = self.log_probabilities_of(self._outputs_beside(common, pixels), common=common)
        else:
            queried = self.tasks_to_query(expert, AUTO if self.config.passes == NO_TASK else self.config.passes)
            run = self._run_queried(pixels, common, queried)
            bank = self._bank_of_queried(run, queried, self._dense_scores(run))
            possible = queried[:, task_of_class(self.task_classes_).to(queried.device)]
            expert = expert.masked_fill(~possible, -torch.inf)
            own = possible.gather(1, numbers.unsqueeze(1)).squeeze(1)
            bank, expert, numbers = bank[own], expert[own], numbers[own]
        self.balance_ = self.balance_.updated(bank, expert, numbers)

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
        """`common_features` of the memory's images, reusing their stored features under the task models."""
        pixels = self.memory.pixels(self.preprocess, self.compute.device)
        return self._joined(pixels, self.encoder_features(pixels), [each.features for each in self.memory_outputs_])

    # Inference

    @property
    def models(self) -> list[TaskModel]:
        """The task models, and those of removed tasks that the expert still uses."""
        return [*self.bank.tasks, *(view for view in self.views_ if view not in self.bank.tasks)]

    @property
    def needs_encoder_features(self) -> bool:
        """Always True: the expert needs the encoder's own features."""
        return True

    def common_features(self, pixels: Tensor) -> Tensor:
        """The expert's input: the encoder's own features and those under every view, side by side."""
        queries = [Query(t) for t in self._view_tasks]
        outputs = self.query(pixels, queries) if queries else []
        found = {q.task: each.features for q, each in zip(queries, outputs, strict=True)}
        features = [found.get(t) for t in range(len(self.bank.tasks))]
        return self._joined(pixels, self.encoder_features(pixels), features)

    def join_common(self, encoder: Tensor, models: Sequence[Tensor]) -> Tensor:
        """`common_features` from the encoder's own features and those under each of `models`."""
        return torch.cat([encoder, *(models[self.models.index(view)] for view in self.views_)], dim=1)

    def _joined(self, pixels: Tensor, encoder: Tensor, tasks: Sequence[Tensor | None]) -> Tensor:
        """`common_features` from the encoder's features and those of the tasks that are views."""
        views = []
        for view in self.views_:
            known = tasks[self.bank.tasks.index(view)] if view in self.bank.tasks else None
            views.append(self._removed_features(pixels, view) if known is None else known)
        return torch.cat([encoder, *views], dim=1)

    def _removed_features(self, pixels: Tensor, view: TaskModel) -> Tensor:
        """Features under the model of a task that was removed from the bank."""
        weights = self.bank.protection.finished(self.bank.adapters_of(view).weights, view.embedding)
        return self.adapted_features(pixels, view.norms, *weights)

    @property
    def _view_tasks(self) -> dict[int, int]:
        """The tasks in the bank whose models are views, and which view each is; 0 is the encoder."""
        places = enumerate(self.views_, start=1)
        return {self.bank.tasks.index(view): place for place, view in places if view in self.bank.tasks}

    def _from_common(self, common: Tensor, task: int) -> Outputs:
        """The outputs of a task that is a view, from the expert's input."""
        features = common.unflatten(1, (-1, self.encoder.dim))[:, self._view_tasks[task]].contiguous()
        return Outputs(features, self.bank.logits(features, task))

    def _outputs_beside(self, common: Tensor, pixels: Tensor) -> list[Outputs]:
        """Every task's outputs; those of views are not computed again."""
        views = self._view_tasks
        rest = [t for t in range(len(self.bank.tasks)) if t not in views]
        computed = dict(zip(rest, self.query(pixels, [Query(t) for t in rest]), strict=True)) if rest else {}
        return [self._from_common(common, t) if t in views else computed[t] for t in range(len(self.bank.tasks))]

    def expert_log_probabilities(self, common: Tensor) -> Tensor:
        """log P_global(class | image) from `common_features`."""
        assert self.expert is not None
        found = self.expert.log_probabilities(self._normalised(common))
        if self.closed_ is None:
            return found
        return (found + self.closed_.log_probabilities(common[:, : self.encoder.dim])).log_softmax(dim=1)

    def _normalised(self, common: Tensor) -> Tensor:
        """The encoder's features and those under every view, each scaled to length 1, so that none dominates."""
        return F.normalize(common.unflatten(1, (-1, self.encoder.dim)), dim=2).flatten(1)

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: ForwardPass | None = None) -> ForwardPass:
        """The expert's features, then the outputs of the tasks that it selects for each image.

        With KEEP every task is queried with every image, since the expert may select other tasks at a later stage. So
        it is for unknown scores of a model from an early version, which did not store `held_common`.
        """
        with self.bank.sharing(pixels):
            return self._forward(pixels, want, before)

    def _forward(self, pixels: Tensor, want: Collection[str], before: ForwardPass | None) -> ForwardPass:
        known = self._reusable(before)
        if known:  # the newest tasks' outputs are missing, and with them perhaps a view
            assert before is not None
            encoder = self.encoder_features(pixels) if before.common is None else before.common[:, : self.encoder.dim]
            outputs = self.outputs(pixels, known)
            common = self._joined(pixels, encoder, [each.features for each in outputs])
            return ForwardPass(outputs, common, by=self)
        common = self.common_features(pixels)
        if KEEP in want or self.config.passes == ALL or (UNKNOWN in want and not self._knows_queried_tasks):
            return ForwardPass(self._outputs_beside(common, pixels), common, by=self)
        return self._run_queried(pixels, common, self.tasks_to_query(self.expert_log_probabilities(common)))

    def _run_queried(self, pixels: Tensor, common: Tensor, queried: Tensor) -> ForwardPass:
        """The outputs of the tasks that are queried with each image, `[n, tasks]`; those of views are there already."""
        views, none = self._view_tasks, common.new_zeros(0, self.encoder.dim)
        outputs = [Outputs(none, none.new_zeros(0, model.own)) for model in self.bank.tasks]
        queries = []
        for task, rows in _rows_of_tasks(queried.cpu()):
            if task in views:
                outputs[task] = self._from_common(common[rows.to(common.device)], task)
            else:
                queries.append(Query(task, rows))
        for (task, _), found in zip(queries, self.query(pixels, queries) if queries else [], strict=True):
            outputs[task] = found
        return ForwardPass(outputs, common, queried, by=self)

    def decide(
        self, passes: Sequence[ForwardPass], want: Collection[str] = (), scores: Tensor | None = None
    ) -> Answers:
        """The bank's prediction times the expert's; tasks that are not selected for an image do not count."""
        joined = ForwardPass.joined(passes)
        assert joined.common is not None
        expert = self.expert_log_probabilities(joined.common)
        queried = self.tasks_to_query(expert) if joined.queried is None else joined.queried
        scores = self._dense_scores(joined) if scores is None else scores
        log_p = self._fused(joined, queried, scores, expert)
        unknown = None
        if UNKNOWN in want and self.closed_ is not None:
            unknown = self.closed_.unknown_scores(joined.common[:, : self.encoder.dim])
        elif UNKNOWN in want:
            known = _dense(joined, self.in_distribution_score)
            known = known.masked_fill(~queried, -torch.inf) if self._knows_queried_tasks else known
            unknown = unknown_scores(list(known.T.contiguous()), self.held_scores())
        return Answers(log_p, scores, unknown, queried.sum(dim=1))

    def _dense_scores(self, run: ForwardPass) -> Tensor:
        """Every task's scores, `[n, tasks]`; -inf where it was not queried."""
        contrast = self.contrast(run.common)

        def score(task: int, outputs: Outputs) -> Tensor:
            own = contrast if contrast is None or run.queried is None else contrast[run.queried[:, task]]
            return self.score_of(task, outputs, own)

        return _dense(run, score)

    def _fused(self, run: ForwardPass, queried: Tensor, scores: Tensor, expert: Tensor) -> Tensor:
        """log P(class | image) of bank and expert; classes of tasks that were not queried cannot win."""
        a, w = self.exponents
        if self.config.passes == NO_TASK:
            return expert
        if self.config.passes == ALL:
            bank = self.log_probabilities_of(run.outputs, scores, run.common)
            return (a * bank + w * expert).log_softmax(dim=1)
        bank = a * self._bank_of_queried(run, queried, scores)
        possible = queried[:, task_of_class(self.task_classes_).to(queried.device)]
        return (bank.masked_fill(~possible, NEVER) + w * expert).log_softmax(dim=1)

    def _bank_of_queried(self, run: ForwardPass, queried: Tensor, scores: Tensor) -> Tensor:
        """The bank's log P(class | image) if only the queried tasks are possible; 0 for classes of all others."""
        owner = task_of_class(self.task_classes_).to(scores.device)
        if run.queried is None:
            within = within_tasks(run.outputs)
        else:
            within = scores.new_zeros(len(scores), len(owner))
            ends = list(accumulate(each.logits.shape[1] for each in run.outputs))
            for t, own in _rows_of_tasks(run.queried):
                within[own, ends[t] - run.outputs[t].logits.shape[1] : ends[t]] = within_tasks([run.outputs[t]])
        bank = within + self.task_log_probabilities(scores.masked_fill(~queried, -torch.inf))[:, owner]
        return bank.masked_fill(~queried[:, owner], 0.0)

    def parts(self, passes: Sequence[ForwardPass], answers: Answers) -> dict[str, Tensor]:
        """log P(class | image) by the expert alone and by the bank alone."""
        joined = ForwardPass.joined(passes)
        assert joined.common is not None
        bank = self.log_probabilities_of(joined.outputs, answers.scores, joined.common)
        return {"expert": self.expert_log_probabilities(joined.common), "bank": bank}

    def tasks_to_query(self, expert: Tensor, passes: str | None = None) -> Tensor:
        """Which tasks are queried with each image, `[n, tasks]`, given the expert's log-probabilities of classes.

        Tasks come in the order of their most probable class: among thousands of classes, the sum over a task says more
        about the many improbable ones (docs/scale.md). Tasks whose models are views of the expert are always included:
        their outputs are there already. `passes` replaces the option of that name.
        """
        passes = self.config.passes if passes is None else passes
        owner = task_of_class(self.task_classes_).to(expert.device)
        count = len(self.task_classes_)
        share = torch.zeros(expert.shape[0], count, dtype=torch.float64, device=expert.device)
        share.index_add_(1, owner, expert.exp())
        if passes in (ALL, NO_TASK):
            return torch.full_like(share, passes == ALL, dtype=torch.bool)
        best = torch.full_like(share, -torch.inf).scatter_reduce_(1, owner.expand_as(expert), expert, "amax")
        _, order = best.sort(dim=1, descending=True)
        ranked = share.gather(1, order)
        if passes == AUTO:
            wanted = ranked.cumsum(dim=1) - ranked < self.config.passes_mass  # up to the one that reaches it
            wanted[:, MOST_QUERIED:] = False
        else:
            wanted = torch.arange(count, device=expert.device).expand_as(ranked) < int(passes)
        queried = torch.zeros_like(wanted).scatter(1, order, wanted)
        for task in self._view_tasks:
            queried[:, task] = True
        return queried

    # Unknown scores: of the closed form, or from the queried tasks alone

    def rejection_floor(self) -> float:
        """The smallest share that rests on counted images, and not on extrapolation or nothing."""
        return super().rejection_floor() if self.closed_ is None else self.closed_.smallest_share

    def stored_vectors(self) -> tuple[Tensor, Tensor] | None:
        """Those of the closed form, which models of few images have."""
        return None if self.closed_ is None else (self.closed_.features, self.closed_.labels)

    def left_out(self) -> LeftOut | None:
        """What leave-one-out says of stored features by the closed form alone; None with many images."""
        return None if self.closed_ is None else LeftOut(*self.closed_.measured())

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
        if self.closed_ is not None:
            for part in (samples, held):
                if len(part):
                    self.closed_.update(self.encoder_features(part.pixels), self.numbers_of(task, part))
        self._held_scores = None  # the expert has changed

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Remove the class from TPL and from the expert; a removed task's model stays a view, its units protected."""
        assert self.expert is not None
        self.expert.forget(number)
        if self.closed_ is not None:
            self.closed_.forget(number)
        super().remove_class(task, own, number)

    def shared_state(self) -> dict[str, Tensor]:
        """Also the expert's sums, the likelihoods behind the exponents, and the views: their tasks, or their models."""
        return super().shared_state() | self._expert_state(whole=False)

    def shared_snapshot(self) -> dict[str, Tensor]:
        """The same with the Gram matrix as it is: to pack it takes its size once more."""
        return super().shared_state() | self._expert_state(whole=True)

    def _expert_state(self, whole: bool) -> dict[str, Tensor]:
        expert = {} if self.expert is None else self.expert.state(whole)
        if self.balance_.images:
            expert |= {BALANCE + k: v for k, v in self.balance_.state().items()}
        tasks = [self.bank.tasks.index(view) if view in self.bank.tasks else REMOVED for view in self.views_]
        if (self.config.expert_views == SEVERAL and tasks) or REMOVED in tasks:
            expert["views"] = torch.tensor(tasks, dtype=torch.long)
        if self.closed_ is not None:
            expert |= {CLOSED + k: v for k, v in self.closed_.state().items()}
        for place, (view, task) in enumerate(zip(self.views_, tasks, strict=True)):
            if task == REMOVED:
                expert |= {f"{VIEW}{place}.{k}": v.detach() for k, v in view.state_dict().items()}
        return {EXPERT + k: v for k, v in expert.items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore scores, calibration and expert."""
        super().load_own_state(shared, tasks)
        found = under_prefix(EXPERT, shared)
        self.expert = RandomRidge.from_state(found, self.config) if found else None
        closed = under_prefix(CLOSED, found)
        self.closed_, self._measured = ClosedForm.from_state(closed) if closed else None, None
        self.balance_ = Balance.from_state(under_prefix(BALANCE, found))
        self.views_ = self._stored_views(found)

    def _stored_views(self, expert: dict[str, Tensor]) -> list[TaskModel]:
        """The views of a stored model; without a list of them, the first task's model is the only one."""
        if not expert or self.config.expert_views == ENCODER:
            return []
        if "views" not in expert:
            removed = under_prefix(VIEW, expert)  # early versions had one
            return [_removed_model(removed)] if removed else self.bank.tasks[:1]
        return [
            _removed_model(under_prefix(f"{VIEW}{place}.", expert)) if task == REMOVED else self.bank.tasks[task]
            for place, task in enumerate(expert["views"].tolist())
        ]


def _removed_model(state: dict[str, Tensor]) -> TaskModel:
    """The model of a task that was removed, for its features alone."""
    return TaskModel(1, **state).requires_grad_(False)


def _dense(run: ForwardPass, value: Callable[[int, Outputs], Tensor]) -> Tensor:
    """A value of every task for every image, `[n, tasks]`; -inf where the task was not queried."""
    if run.queried is None:
        return torch.stack([value(t, each) for t, each in enumerate(run.outputs)], dim=1)
    dense = torch.full_like(run.queried, -torch.inf, dtype=torch.float64)
    values = [value(t, each) for t, each in enumerate(run.outputs) if len(each.features)]
    if values:
        tasks, rows = run.queried.T.nonzero(as_tuple=True)
        dense[rows, tasks] = torch.cat(values)
    return dense


def _rows_of_tasks(queried: Tensor) -> list[tuple[int, Tensor]]:
    """Every task that is queried at all, with the rows of its images, ascending; `queried` is `[n, tasks]`."""
    tasks, rows = queried.T.nonzero(as_tuple=True)
    counts = torch.bincount(tasks, minlength=queried.shape[1])
    return [(t, own) for t, own in enumerate(rows.split(counts.tolist())) if len(own)]
