"""Training jobs: training one task's model in its bank, for one bank or several at once.

A frozen trunk is shared, so runs that differ only in class order or seed can be trained in one pass over it: their
adapters, norms, masks and heads are stacked along a first axis, each network has its own part of the batch, and one
optimiser updates them all. The networks do not influence each other. Networks without such a trunk are trained one
after the other.

Blocks below those that tasks adapt give an image the same tokens in every epoch. They are computed once, and training
runs on the tokens instead of the images, where they fit into memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.engine import (
    BLOCK,
    IGNORED,
    Batches,
    Callback,
    Event,
    GatedSGD,
    Recipe,
    RotationClasses,
    Samples,
    batches_of_images,
    current,
    host_has_room_for,
    train,
)
from tpl.methods.bank.bank import Bank, TaskModel, Technique
from tpl.methods.bank.protect import ProtectConfig
from tpl.nets import ViTEncoder


@dataclass(frozen=True)
class TrainingJob:
    """One more task for one bank: `outputs` head outputs, `own` of them the task's classes.

    With `rotation_classes`, each of these has three more outputs, for its images rotated by 90, 180 and 270 degrees.
    """

    bank: Bank
    samples: Samples
    replay: Samples | None
    own: int
    outputs: int
    recipe: Recipe
    generator: torch.Generator
    callback: Callback
    rotation_classes: bool = False

    @property
    def rotations(self) -> RotationClasses | None:
        """The outputs for rotated images, which come after all others."""
        return RotationClasses(self.outputs, self.own) if self.rotation_classes else None

    @property
    def all_outputs(self) -> int:
        """Number of outputs of the head in training."""
        return self.outputs + (self.rotations.outputs if self.rotations else 0)

    @property
    def kind(self) -> tuple[object, ...]:
        """Jobs of one kind have the same shapes and settings: they can be trained together."""
        replayed = self.replay is not None and len(self.replay) > 0
        bank = self.bank
        free = bank.used is None  # all units may be trained
        network = bank.encoder.fingerprint, bank.config.part(ProtectConfig), bank.technique.name, bank.compute
        return *network, free, len(self.samples), replayed, self.outputs, self.rotations, self.recipe.part(Recipe)

    def equals(self, other: TrainingJob) -> bool:
        """Whether both jobs have the same inputs, and so would end with identical weights."""
        a, b = self.bank, other.bank
        return (
            self.kind == other.kind
            and len(a.tasks) == len(b.tasks)
            and torch.equal(self.generator.get_state(), other.generator.get_state())
            and _same(a.used, b.used)
            and all(torch.equal(x, y) for x, y in zip(a.adapters.weights, b.adapters.weights, strict=True))
            and same_samples(self.samples, other.samples)
            and same_samples(self.replay, other.replay)
        )


def run_jobs(jobs: Sequence[TrainingJob]) -> None:
    """Run training jobs: those of one kind in one pass over the trunk, and equal ones only once.

    Methods that differ in inference alone, like TPL, MORE and ROW, have equal jobs.
    """
    for _, alike in groupby(sorted(jobs, key=lambda job: repr(job.kind)), key=lambda job: job.kind):
        groups: list[list[TrainingJob]] = []
        for job in alike:
            twins = next((group for group in groups if group[0].equals(job)), None)
            groups.append([job]) if twins is None else twins.append(job)
        firsts = [replace(group[0], callback=to_all([job.callback for job in group])) for group in groups]
        for together in [firsts] if firsts[0].bank.encoder.pretrained else [[job] for job in firsts]:
            _train_together(together)
        for first, *twins in groups:
            for twin in twins:
                twin.bank.copy_newest(first.bank)


def to_all(callbacks: Sequence[Callback]) -> Callback:
    """A callback that passes events on to all of these."""

    def callback(event: Event) -> None:
        for each in callbacks:
            each(event)

    return callback


def _train_together(jobs: list[TrainingJob]) -> None:
    started, recipe = time.perf_counter(), jobs[0].recipe
    models = [_new_task(job) for job in jobs]
    on_tokens = with_tokens(jobs)
    objective = BankObjective([job.bank for job in jobs], models, recipe.batch_size, on_tokens=on_tokens is not None)
    optimiser = recipe.optimiser(objective.parameters())
    objective.protect(optimiser)
    networks = [
        recipe.batches(
            job.samples,
            job.replay,
            job.generator,
            technique.numbers,
            job.bank.encoder.batch_norms,
            job.rotations,
        )
        for job, technique in zip(on_tokens or jobs, objective.techniques, strict=True)
    ]
    callbacks = [job.callback for job in jobs]
    normalise = jobs[0].bank.normalise if on_tokens is None else unchanged
    train(objective, optimiser, networks, recipe, normalise, callbacks, started)
    objective.hand_back()
    for job, model, technique, batches in zip(jobs, models, objective.techniques, networks, strict=True):
        _estimate_batch_norms(job.bank, model, batches)
        job.bank.add(model)
        _finish(job, technique)
        job.callback(Event("capacity", job.bank.capacity()))


# Tokens instead of images


def with_tokens(jobs: Sequence[TrainingJob]) -> list[TrainingJob] | None:
    """The jobs with tokens in the place of images; None if training should run on images.

    So it should where tokens do not fit into memory, differ from epoch to epoch, or cost more than they save. Those of
    new images are on the device or, if that is full, in the computer's memory; those of replayed ones on the device.
    """
    first = jobs[0]
    bank, recipe = first.bank, first.recipe
    flipped = recipe.augment == "flip"
    changing = recipe.augment == "crop" or first.rotation_classes or bank.technique.mixed is not Technique.mixed
    # Each of several processes would compute all tokens, and use its share.
    if not bank.below or changing or recipe.epochs <= 1 + flipped or not current().alone:
        return None
    each = (1 + flipped) * bank.tokens(first.samples.pixels[:1]).nbytes
    new = each * sum(len(job.samples) for job in jobs)
    replayed = each * sum(len(job.replay) for job in jobs if job.replay is not None)
    device = bank.compute.device
    if bank.compute.room_for(new + replayed):
        place = device
    elif bank.compute.room_for(replayed) and host_has_room_for(new):
        place = torch.device("cpu")
    else:
        return None
    return [
        replace(
            job,
            samples=_tokens_of(job.bank, job.samples, flipped, place),
            replay=job.replay and _tokens_of(job.bank, job.replay, flipped, device),
        )
        for job in jobs
    ]


def _tokens_of(bank: Bank, samples: Samples, flipped: bool, place: torch.device) -> Samples:
    """Samples with tokens instead of images, and those of flipped images behind them if `flipped`."""
    found: Tensor | None = None
    row = 0
    for side in (False, True)[: 1 + flipped]:
        for start in range(0, len(samples), BLOCK):
            if side:
                tokens = bank.tokens(samples.pixels[start : start + BLOCK].flip(-1))
            else:
                tokens = bank.block_of_tokens(samples.pixels, start)
            if found is None:
                shape = (1 + flipped) * len(samples), *tokens.shape[1:]
                found = torch.empty(shape, dtype=tokens.dtype, device=place)
            found[row : row + len(tokens)] = tokens
            row += len(tokens)
    return samples if found is None else Samples(found, samples.labels, flipped)


def unchanged(tokens: Tensor) -> Tensor:
    """The tokens as they are: the normalisation of images is behind them."""
    return tokens


def _new_task(job: TrainingJob) -> TaskModel:
    return job.bank.new_task(job.own, job.all_outputs, job.generator, job.rotation_classes)


@torch.no_grad()
def _estimate_batch_norms(bank: Bank, model: TaskModel, batches: Batches) -> None:
    """Re-estimate batch-norm statistics from the task's training images, under its final mask."""
    if bank.encoder.batch_norms:
        weights = bank.protection.finished(bank.adapters.weights, model.embedding)
        images = batches_of_images(batches, bank.normalise)
        model.norms.copy_(bank.encoder.reestimated_norms(model.norms, weights, images, bank.compute.dtype))


def _finish(job: TrainingJob, technique: Technique) -> None:
    """Let the technique change the head once the network is frozen."""
    if type(technique).finish is Technique.finish:
        return
    bank, number = job.bank, len(job.bank.tasks) - 1
    features, model = bank.outputs(job.samples.pixels, number).features, bank.tasks[number]
    head = technique.finish(features, job.samples.labels, *model.own_head(), job.generator)
    with torch.no_grad():
        for parameter, trained in zip((model.head_weight, model.head_bias), head, strict=True):
            parameter[: model.own] = trained


class BankObjective:
    """The loss of a technique plus the protection's penalty for a mask.

    It holds one task of every bank, stacked along a first axis, until `hand_back` copies them to their banks.
    """

    def __init__(
        self, banks: Sequence[Bank], models: Sequence[TaskModel], batch_size: int, on_tokens: bool = False
    ) -> None:
        self.banks, self.models, self.on_tokens = banks, models, on_tokens
        self.encoder, self.protection, self.dtype = banks[0].encoder, banks[0].protection, banks[0].compute.dtype
        weights = zip(*(bank.adapters.weights for bank in banks), strict=True)
        self.adapters = banks[0].adapters.stack(
            *(_stacked(parts, self.protection.trains_adapters) for parts in weights)
        )
        self.embedding = _stacked([m.embedding for m in models])
        self.norms = _stacked([m.norms for m in models])
        self.head_weight = _stacked([m.head_weight for m in models])
        self.head_bias = _stacked([m.head_bias for m in models])
        used = [b.used for b in banks if b.used is not None]
        self.used = torch.stack(used) if used else None
        self.techniques = [b.technique(m.own, b.encoder.dim, batch_size, b.compute.device) for b, m in self._pairs()]

    def _pairs(self) -> list[tuple[Bank, TaskModel]]:
        return list(zip(self.banks, self.models, strict=True))

    def parameters(self) -> list[Tensor]:
        """Everything that is trained."""
        adapters = self.adapters if self.protection.trains_adapters else ()
        extra = [p for technique in self.techniques for p in technique.parameters()]
        return [*adapters, self.embedding, self.norms, self.head_weight, self.head_bias, *extra]

    def protect(self, optimiser: GatedSGD) -> None:
        """Freeze every weight that an earlier task uses."""
        gates = self.protection.gates(self.adapters, self.used) if self.used is not None else None
        if gates is not None:
            for weights, gate in zip(self.adapters, gates, strict=True):
                optimiser.gate(weights, gate.detach())

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """Every network's loss on its part of the batch of images, or of tokens in their place."""
        masked, mask = self.protection.masked(self.adapters, self.embedding, progress)
        weights, norms = tuple(masked), self.norms
        if len(self.models) == 1:  # matrix products are faster without the first axis
            weights, norms = tuple(w.squeeze(0) for w in weights), norms.squeeze(0)
        plain = type(self.techniques[0]) is Technique
        if not plain:
            images = self._mixed(images, labels, draws)
        z = self._features(images, norms, weights).unflatten(0, labels.shape)
        losses = self._entropies(z, labels) if plain else self._technique_losses(z, labels, draws)
        return losses + self.protection.penalty(mask, self.used)

    def _features(self, images: Tensor, norms: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        if isinstance(self.encoder, ViTEncoder):
            tokens = images if self.on_tokens else self.encoder.tokens(images, self.dtype, self.banks[0].below)
            return self.encoder.class_token_from(tokens, norms, weights)
        features: Tensor = self.encoder(images, norms, weights, dtype=self.dtype, learning=True)
        return features

    def _entropies(self, z: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of all networks at once."""
        logits = torch.baddbmm(self.head_bias.unsqueeze(1), z, self.head_weight.mT)
        entropies = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return entropies.sum(dim=1) / (labels != IGNORED).sum(dim=1)

    def _mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        parts = zip(self.techniques, images.unflatten(0, labels.shape), labels, draws, strict=True)
        return torch.cat([technique.mixed(*own) for technique, *own in parts])

    def _technique_losses(self, z: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        parts = zip(self.techniques, z, self.head_weight, self.head_bias, labels, draws, strict=True)
        return torch.stack([technique.loss(*own) for technique, *own in parts])

    def after_backward(self, progress: Tensor) -> None:
        """Let the protection change the gradient of the masks."""
        self.protection.after_backward(self.embedding, progress)

    def after_step(self) -> None:
        """Let the protection change the masks."""
        self.protection.after_step(self.embedding)

    @torch.no_grad()
    def hand_back(self) -> None:
        """Copy the trained tensors to their banks and tasks."""
        for i, (bank, model) in enumerate(self._pairs()):
            for own, trained in zip(bank.adapters.weights, self.adapters, strict=True):
                own.copy_(trained[i])
            for name in ("norms", "head_weight", "head_bias"):
                model.get_parameter(name).copy_(getattr(self, name)[i])
            kept = self.protection.kept(bank.adapters.weights, self.embedding[i].detach())
            model.embedding = nn.Parameter(kept.clone(), requires_grad=False)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def same_samples(a: Samples | None, b: Samples | None) -> bool:
    """Whether both are absent, or have the same images and labels."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and torch.equal(a.labels, b.labels) and torch.equal(a.pixels, b.pixels)


def _stacked(parts: Sequence[Tensor], trained: bool = True) -> Tensor:
    return torch.stack([part.detach() for part in parts]).requires_grad_(trained)
