"""Two models that were trained apart on the same encoder, in one.

The task models stand side by side, each with the adapters it was trained with: their features stay the same, bit for
bit. Statistics are exact sums over samples, so they are added; the memories are joined, and the calibration is fitted
on both.

The global expert of tpl-plus is a sum over samples, too, but of features under its views. With the same random features
and no views but the encoder, the sums of both experts are added. Otherwise the first model's expert learns the images
of the second from its memory. That is exact if the memory holds all of them; if not, it is an estimate, and is refused
unless it is asked for.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from tpl.engine import Recipe
from tpl.errors import TplError
from tpl.methods.bank import Outputs, Query
from tpl.methods.base import Method
from tpl.methods.closed_form import ClosedFormExperts
from tpl.methods.parts.added_ridge import add_samples, add_sums, finish, same_features
from tpl.methods.parts.closed_form import ClosedForm
from tpl.methods.parts.closed_form import same_features as same_random_features
from tpl.methods.plus import EXPERT, TPLPlus
from tpl.methods.tpl import TPL

# Two models may differ in options of training, and in how many task models are run.
MAY_DIFFER = {f.name for f in fields(Recipe)} | {
    "memory",
    "sparsity",
    "mask_gradient",
    "random_features",
    "grow_adapters",
}
MAY_DIFFER |= {"passes", "passes_mass"}  # the first model's hold
# What an expert consists of: anything else in it could not be merged.
PARTS = ("projection", "gram", "sums", "counts", "weights", "chosen", "balance.", "view", "closed.")
ADDED, LEARNED, ESTIMATED = "added", "learned", "estimated"


def merge(a: Method, b: Method, estimate: bool = False) -> str | None:
    """Add all that `b` has learned to `a`; classes must be different, and options of prediction equal.

    Returns how the global expert was merged: its sums `added`, the images of `b` `learned` from its memory, or their
    part of the sums `estimated` from fewer images (only with `estimate`); None without an expert.
    """
    if isinstance(a, ClosedFormExperts) and isinstance(b, ClosedFormExperts):
        return _merge_closed_form_models(a, b)
    first, second = _check(a, b)
    how = _expert_rule(first, second, estimate) if isinstance(first, TPLPlus) and isinstance(second, TPLPlus) else None
    with first.attempt():
        _merge_banks(first, second)
        if isinstance(first, TPLPlus) and isinstance(second, TPLPlus):
            _merge_experts(first, second, how == ADDED)
    first.removed_tasks += second.removed_tasks
    first.set_options(memory=first.config.memory + second.config.memory)
    return how


def _check(a: Method, b: Method) -> tuple[TPL, TPL]:
    """Refuse what cannot be merged exactly; both are on one device."""
    for method in (a, b):
        if not isinstance(method, TPL) or type(method).name not in ("tpl", "tpl-plus"):
            raise TplError(f"Models of tpl, tpl-plus and closed-form can be merged; '{method.name}' cannot.")
    _check_alike(a, b)
    assert isinstance(a, TPL) and isinstance(b, TPL)
    return a, b


def _check_alike(a: Method, b: Method) -> None:
    """Refuse models of different methods, encoders or options, and equal classes."""
    if not a.task_classes_ or not b.task_classes_:
        raise TplError("One of the models has no class yet: there is nothing to merge.")
    if a.name != b.name:
        raise TplError(f"The models have different methods, {a.name} and {b.name}; only equal ones can be merged.")
    if a.encoder.fingerprint != b.encoder.fingerprint:
        raise TplError(
            f"The models have different encoders, {a.encoder.name} and {b.encoder.name}, or other weights of one: "
            "features of different encoders cannot be compared."
        )
    mine, others = a.config.to_dict(), b.config.to_dict()
    different = [name for name in mine if name not in MAY_DIFFER and mine[name] != others[name]]
    if different:
        pairs = ", ".join(f"{name}={mine[name]} and {others[name]}" for name in different)
        raise TplError(f"The models have different options, {pairs}; only models with equal ones can be merged.")
    known = sorted(set(a.classes_) & set(b.classes_))
    if known:
        raise TplError(f"Both models have {', '.join(known)}; class names must be different: rename them in one.")


def _merge_closed_form_models(a: ClosedFormExperts, b: ClosedFormExperts) -> str:
    """Add the sums of `b`: the result is that of learning all images of both."""
    _check_alike(a, b)
    if not same_random_features(a.learned, b.learned):
        raise TplError("The models have different random features (random_features); their sums cannot be added.")
    with a.attempt():
        a.learned.merge(b.learned)
        a.task_classes_ = [*a.task_classes_, *b.task_classes_]
    a.removed_tasks += b.removed_tasks
    return ADDED


def _merge_banks(a: TPL, b: TPL) -> None:
    """Task models, statistics and memories side by side; then the calibration."""
    device = a.compute.device
    here = a.memory.pixels(a.preprocess, device)
    there = b.memory.pixels(b.preprocess, device)
    old, new = len(a.bank.tasks), len(b.bank.tasks)
    a.bank.join(b.bank)
    if a.config.others == "per_class":  # outputs are counted by all classes, of which there are more now
        for model in a.bank.tasks[old:]:
            model.pad(len(a.classes_) if model.others else 0)
    mine = a.query(there, [Query(t) for t in range(old)])
    others = a.query(here, [Query(t) for t in range(old, old + new)])
    a.memory_outputs_ = [_joined(*pair) for pair in zip(a.memory_outputs_, mine, strict=True)]
    a.memory_outputs_ += [_joined(*pair) for pair in zip(others, b.memory_outputs_, strict=True)]
    exemplars = [list(images) for images in (*a.memory.exemplars, *b.memory.exemplars)]
    a.memory.restore(exemplars)
    a.scores_ += b.scores_
    a.held_ += b.held_
    a._held_scores = None
    if a.statistics is not None and b.statistics is not None:
        a.statistics.evidence.own_ = a.statistics.evidence.own_ + b.statistics.evidence.own_
        a.statistics.evidence.foreign_ = a.statistics.evidence.foreign_ + b.statistics.evidence.foreign_
        if a.statistics.space is not None and b.statistics.space is not None:
            a.statistics.space._take(a.statistics.space.statistics.joined(b.statistics.space.statistics))
    a.task_classes_ = [*a.task_classes_, *b.task_classes_]
    a._use_memory(a.task_classes_, calibrate=True)


def _joined(a: Outputs, b: Outputs) -> Outputs:
    return Outputs(*(torch.cat(pair) for pair in zip(a, b, strict=True)))


# The global expert


def _expert_rule(a: TPLPlus, b: TPLPlus, estimate: bool) -> str:
    """How the experts can be merged; refused if only an estimate is possible and that was not asked for."""
    for method in (a, b):
        names = [name.removeprefix(EXPERT) for name in method.shared_state() if name.startswith(EXPERT)]
        unknown = [name for name in names if not name.startswith(PARTS)]
        if unknown or method.expert is None:
            raise TplError(f"The expert of a model has parts that cannot be merged: {', '.join(unknown) or 'none'}.")
    assert a.expert is not None and b.expert is not None
    if not a.views_ and not b.views_ and same_features(a.expert, b.expert):
        return ADDED
    missing = int((b.expert.counts.cpu() - _stored(b)).clamp_min(0).sum())
    if not missing:
        return LEARNED
    trained = int(b.expert.counts.sum())
    if not len(b.memory):
        raise TplError(
            "The classifiers over all classes have different inputs (expert_views) or random features, so their sums "
            "cannot be added, and the second model stores no images to learn from. Merge models with "
            "expert_views=encoder, equal random_features and equal seed, or learn the images as a task."
        )
    if not estimate:
        raise TplError(
            f"The classifiers over all classes have different inputs (expert_views) or random features, so their sums "
            f"cannot be added, and the second model stores only {trained - missing} of the {trained} images it was "
            "trained on. Merge in the other order, if the first model stores all of its images; or pass --estimate, "
            "which lets each stored image stand for several."
        )
    return ESTIMATED


def _stored(method: TPLPlus) -> Tensor:
    """Number of stored images of every class."""
    return torch.tensor([len(images) for images in method.memory.exemplars], dtype=torch.float64)


def _merge_experts(a: TPLPlus, b: TPLPlus, add: bool) -> None:
    """One expert over all classes; bank and memory are merged already."""
    assert a.expert is not None and b.expert is not None
    labels = a.memory.labels.to(a.compute.device)
    known = a._normalised(a._memory_features()) if len(a.memory) else _empty(a)
    if add:
        add_sums(a.expert, b.expert)
    else:
        own = labels >= a.expert.classes
        add_samples(a.expert, known[own], labels[own] - a.expert.classes, b.expert.counts.to(a.expert.counts))
        # Their pixels are gone: which tasks they would be queried with cannot be computed any more.
        first = len(a.bank.tasks) - len(b.bank.tasks)
        a.held_[first:] = [held._replace(common=None) for held in a.held_[first:]]
    finish(a.expert, known, labels)
    a.closed_ = _merged_closed_forms(a, b)
    a.balance_ = a.balance_.joined(b.balance_)


def _merged_closed_forms(a: TPLPlus, b: TPLPlus) -> ClosedForm | None:
    """The sums of both closed forms added; None unless both models have one on the same random features."""
    if a.closed_ is None or b.closed_ is None or not same_random_features(a.closed_, b.closed_):
        return None
    a.closed_.merge(b.closed_)
    return a.closed_


def _empty(method: TPLPlus) -> Tensor:
    assert method.expert is not None
    return torch.zeros(0, sum(method.expert.dims), device=method.compute.device)
