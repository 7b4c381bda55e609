"""Verdicts: a row of the paper beside finished runs of one recipe.

Every quantity is `equal` to the paper's within the tolerance, `above` or `below` it. A row is `reached` if every
quantity is equal or better, in as many class orders as are wanted, with encoder weights that are known by their hash;
with others it is `unverified`. Imports no torch: committed results are judged in a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpl.bench.bounds import trained_to_the_end
from tpl.bench.paper import QUANTITIES, Printed, Row
from tpl.bench.paper.evidence import Run, RunGroup, amount, fits, groups
from tpl.bench.paper.recipes import UNDECLARED, Recipe, differing, find_recipe, load_recipes, paper_orders
from tpl.pretraining import known_weights

JOINT = "joint"  # the method behind the paper's Non-CL, the reference for forgetting
EQUAL, ABOVE, BELOW = "equal", "above", "below"  # of a quantity
REACHED, MISSED, UNVERIFIED = "reached", "missed", "unverified"  # of a row
NO_EVIDENCE, AMBIGUOUS, SHOWN = "no evidence", "ambiguous", "shown"  # of both


@dataclass(frozen=True)
class Finding:
    """One quantity of a row, in the paper's unit."""

    quantity: str
    paper: Printed
    target: float
    ours: float | None
    std: float | None
    verdict: str  # equal, above, below, no evidence, ambiguous or shown

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.ours is None else self.ours - self.target

    @property
    def reached(self) -> bool | None:
        """Whether ours is equal or better; None without evidence, and where no direction is better."""
        better = QUANTITIES[self.quantity].better
        if self.verdict in (NO_EVIDENCE, AMBIGUOUS, SHOWN):
            return None
        return self.verdict in (EQUAL, ABOVE if better > 0 else BELOW)

    def to_dict(self) -> dict[str, Any]:
        """The content for JSON."""
        return {
            "quantity": self.quantity,
            "paper": self.paper.mean,
            "paper_std": self.paper.std,
            "target": self.target,
            "ours": self.ours,
            "std": self.std,
            "difference": self.difference,
            "verdict": self.verdict,
            "reached": self.reached,
        }


@dataclass(frozen=True)
class Judgement:
    """A row of the paper, one recipe, the findings, and the runs behind them."""

    row: Row
    recipe: str | None  # a name in recipes.toml, UNDECLARED, or None without runs
    findings: tuple[Finding, ...]
    used: tuple[RunGroup, ...]  # one a benchmark, and the joint runs that forgetting is relative to
    unused: tuple[RunGroup, ...]  # fitting runs with other settings, which are not mixed in
    orders: int  # number of class orders behind the numbers; for an average, the smallest of the five
    reason: str | None = None  # why there is no evidence, which groups are as many, or whose weights are unknown
    any_weights: bool = False  # whether runs with unverified weights count

    @property
    def verdict(self) -> str:
        """Reached if all quantities are; missed if one is not; ambiguous if runs of different settings are as many.

        Neither reached nor missed but unverified if the runs have weights that are not known by their hash.
        """
        for lacking in (AMBIGUOUS, NO_EVIDENCE):
            if any(finding.verdict == lacking for finding in self.findings):
                return lacking
        reached = [finding.reached for finding in self.findings if finding.reached is not None]
        if not reached:
            return SHOWN
        if not (self.verified or self.any_weights):
            return UNVERIFIED
        return REACHED if all(reached) else MISSED

    @property
    def by_paper(self) -> bool:
        """Whether the recipe is the paper's own."""
        return self.recipe in load_recipes() and load_recipes()[str(self.recipe)].by_paper

    @property
    def verified(self) -> bool:
        """Whether the encoder's weights are known by their hash, or there are none."""
        return all(group.verified for group in self.used)

    def to_dict(self) -> dict[str, Any]:
        """The content for JSON."""
        row = self.row
        return {
            "row": row.name,
            "verdict": self.verdict,
            "recipe": self.recipe,
            "by_paper": self.by_paper,
            "reason": self.reason,
            "printed_as": row.label,
            "benchmark": row.benchmark,
            "method": row.method,
            "encoder": row.encoder,
            "weights_verified": self.verified if self.used else None,
            "misprint": row.misprint,
            "note": row.note,
            "class_orders": self.orders,
            "paper_class_orders": paper_orders(),
            "quantities": [finding.to_dict() for finding in self.findings],
            "evidence": [group.to_dict() for group in self.used],
            "not_judged": [group.to_dict() for group in self.unused],
        }


@dataclass(frozen=True)
class Question:
    """What to judge: how close is equal, and which options, class orders, recipes and weights count."""

    tolerance: float  # points
    options: Mapping[str, Any] | None = None  # required in addition to the row's own
    orders: Sequence[str] | None = None
    recipe: str | None = None  # None: each one that has runs
    undeclared: bool = False  # also judge runs that follow no recipe
    min_orders: int = 1  # class orders that a row must have behind its numbers
    any_weights: bool = False  # whether runs with unverified weights count


def judge(row: Row, runs: Sequence[Run], question: Question) -> list[Judgement]:
    """Compare a row with the runs that fit it: one judgement for every recipe that has runs, at least one in all."""
    fitting = {
        part.benchmark: [run for run in runs if fits(run, part, question.options or {}, question.orders)]
        for part in row.parts()
    }
    if question.recipe is not None:
        return [_by_recipe(row, runs, fitting, find_recipe(question.recipe), question)]
    made = [_by_recipe(row, runs, fitting, recipe, question) for recipe in load_recipes().values()]
    if question.undeclared:
        made.append(_by_recipe(row, runs, fitting, None, question))
    partly = [judgement for judgement in made if judgement.used or judgement.reason]
    found = [judgement for judgement in partly if judgement.verdict != NO_EVIDENCE]
    if partly and not found:
        found = [max(partly, key=lambda judgement: judgement.orders)]
    judged = {key for judgement in found for key in _keys(judgement.used)}
    return [
        replace(judgement, unused=tuple(g for g in judgement.unused if not _keys([g]) & judged)) for judgement in found
    ] or [_without(row, fitting)]


def overall(judgements: Sequence[Judgement]) -> Judgement:
    """The judgement that a row is counted by: reached before missed, by the paper's recipe before any other.

    A miss with known weights comes before numbers with unverified ones.
    """
    order = (REACHED, MISSED, UNVERIFIED, AMBIGUOUS, SHOWN, NO_EVIDENCE)
    return min(judgements, key=lambda judgement: (order.index(judgement.verdict), not judgement.by_paper))


def _by_recipe(
    row: Row, runs: Sequence[Run], fitting: Mapping[str, Sequence[Run]], recipe: Recipe | None, question: Question
) -> Judgement:
    """Compare a row with the runs of one recipe, or with those of none."""
    found, joint, unused = [], [], []
    ambiguous = None
    for part in row.parts():
        mine = [run for run in fitting[part.benchmark] if _follows(run, recipe, [*row.options, *part.options])]
        candidates = _counting(mine, question)
        unused += [g for g in groups(fitting[part.benchmark]) if g.runs[0].settings() not in _keys(candidates[:1])]
        if len(candidates) > 1 and amount(candidates[0]) == amount(candidates[1]):
            names = ", ".join(differing([group.settings() for group in candidates]))
            ambiguous = f"several groups of runs have as many class orders and differ in {names}: choose with --set"
            continue
        found += candidates[:1]
        if any(key.startswith("forgetting_") for key in row.values):
            bound = replace(part, method=JOINT, options={})
            bounds = [run for run in runs if fits(run, bound, {}, question.orders)]
            joint += _counting((run for run in bounds if trained_to_the_end(run.description)), question)[:1]
    name = recipe.name if recipe else UNDECLARED
    complete = len(found) == len(row.parts())
    against = [run for group in joint for run in group.runs]
    if ambiguous:
        findings = _nothing(row, AMBIGUOUS)
        return Judgement(row, name, findings, (*found, *joint), tuple(unused), 0, ambiguous)
    findings = tuple(_find(row, key, found if complete else [], against, question.tolerance) for key in row.values)
    lacking = any(finding.verdict == NO_EVIDENCE for finding in findings) and (found or question.recipe is not None)
    reason = _reason(row, found, complete, name) if lacking else None
    fewest = min((len(group.by_order()) for group in found), default=0) if complete else 0
    if complete and not lacking and fewest < question.min_orders:
        findings = tuple(replace(finding, verdict=NO_EVIDENCE) for finding in findings)
        reason = _too_few(found, question.min_orders)
    made = Judgement(row, name, findings, (*found, *joint), tuple(unused), fewest, reason, question.any_weights)
    return replace(made, reason=_unknown_weights(made)) if made.verdict == UNVERIFIED else made


def _counting(runs: Iterable[Run], question: Question) -> list[RunGroup]:
    """Runs in groups; unless any weights count, those with unverified weights only where there are no others."""
    found = groups(runs)
    return found if question.any_weights else [group for group in found if group.verified] or found


def _follows(run: Run, recipe: Recipe | None, leave_out: Sequence[str] = ()) -> bool:
    """Whether a run follows a recipe; for None, whether it follows none."""
    if recipe is not None:
        return recipe.matches(run.description, leave_out)
    return not any(each.matches(run.description, leave_out) for each in load_recipes().values())


def _keys(chosen: Sequence[RunGroup]) -> set[str]:
    return {group.runs[0].settings() for group in chosen}


def _without(row: Row, fitting: Mapping[str, Sequence[Run]]) -> Judgement:
    """A row for which no recipe has runs."""
    unused = tuple(group for runs in fitting.values() for group in groups(runs))
    return Judgement(row, None, _nothing(row, NO_EVIDENCE), (), unused, 0, _reason(row, [], False, None))


def _nothing(row: Row, verdict: str) -> tuple[Finding, ...]:
    return tuple(Finding(key, row.values[key], row.target(key), None, None, verdict) for key in row.values)


def _find(row: Row, key: str, found: Sequence[RunGroup], joint: Sequence[Run], tolerance: float) -> Finding:
    """The verdict on one quantity; an average row takes the mean over the benchmarks' means."""
    quantity, target = QUANTITIES[key], row.target(key)
    measured = [group.measure(key, joint) for group in found]
    numbers = [value for value in measured if value is not None]
    if not numbers or len(numbers) < len(measured):
        return Finding(key, row.values[key], target, None, None, NO_EVIDENCE)
    ours = quantity.scale * float(np.mean([mean for mean, _ in numbers]))
    std = numbers[0][1] if len(numbers) == 1 else None
    spread = None if std is None else quantity.scale * std
    verdict = SHOWN
    if quantity.better:
        # 1e-9: a difference equal to the tolerance in decimals counts as equal
        verdict = EQUAL if abs(ours - target) <= tolerance + 1e-9 else ABOVE if ours > target else BELOW
    return Finding(key, row.values[key], target, ours, spread, verdict)


def counted_orders(smallest: int, largest: int | None = None) -> str:
    """One or two numbers of class orders in words: `1 class order`, `1 to 3 class orders`."""
    most = smallest if largest is None else largest
    return f"{smallest if most == smallest else f'{smallest} to {most}'} class order{'' if most == 1 else 's'}"


def _too_few(found: Sequence[RunGroup], wanted: int) -> str:
    """How many class orders there are and how many are wanted; for an average, on which benchmarks there are fewer."""
    numbers = {group.description["benchmark"]: len(group.by_order()) for group in found}
    fewer = ", ".join(f"{name} has {number}" for name, number in numbers.items() if number < wanted)
    text = f"{counted_orders(min(numbers.values()))}, {wanted} wanted"
    return f"{text} ({fewer})" if len(numbers) > 1 else text


def _unknown_weights(judgement: Judgement) -> str:
    """Whose weights are not known by their hash, the hash, and what to do."""
    encoder = judgement.row.encoder
    hashes = dict.fromkeys(g.description["encoder"].get("sha256") for g in judgement.used if not g.verified)
    theirs = " and ".join(f"sha256 {sha256}" if sha256 else "no recorded sha256" for sha256 in hashes)
    trust = "count these runs with --any-weights if you trust where the weights are from"
    if known := known_weights(encoder):
        names = " or ".join(sha256[:12] for sha256 in known)
        return f"the weights of {encoder} ({theirs}) are not the known ones ({names}): run with those, or {trust}"
    return f"the weights of {encoder} ({theirs}) cannot be checked, no hash is known for this encoder: {trust}"


def _reason(row: Row, found: Sequence[RunGroup], complete: bool, recipe: str | None) -> str:
    """Why there is no evidence."""
    if complete:
        return "the runs found lack a quantity" + (
            f" (forgetting needs {JOINT} runs over the same tasks, trained to the end)"
            if row.table == "forgetting"
            else ""
        )
    by = f" by the recipe {recipe}" if recipe else " by a named recipe"
    what = f"{row.method} on {row.benchmark} with {row.encoder}"
    if len(row.parts()) == 1:
        return f"no complete run of {what} on test images with the row's options{by}"
    have = {group.description["benchmark"] for group in found}
    missing = [part.benchmark for part in row.parts() if part.benchmark not in have]
    return f"no complete runs of {what}{by}: missing {', '.join(missing)}"
