"""Reproducing rows of the paper: which runs a row takes, whether this program can make them, and making them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpl.bench.paper import Row
from tpl.bench.paper.evidence import Run
from tpl.bench.paper.judge import JOINT
from tpl.bench.paper.recipes import Recipe, find_recipe, recipe_for
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.spec import RunSpec
    from tpl.engine import Callback

# torch and timm are imported by the functions that run something: committed results are judged without them.

ORDERS = ("natural", "random:1", "random:2")


@dataclass(frozen=True)
class RowSettings:
    """Settings of the runs behind rows."""

    out: Path
    data: Path | None = None
    weights: Path | None = None  # a file, or a folder that has ENCODER.safetensors or ENCODER.pth
    download: bool = False
    orders: Sequence[str] = ORDERS
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)  # replace the recipe's and the row's
    recipe: str | None = None  # None: the first that is for the row, the paper's own if it has one

    def weights_of(self, encoder: str) -> Path | None:
        """The weight file of one encoder: `weights` itself, or the encoder's file in that folder."""
        from tpl.nets import is_resnet

        if is_resnet(encoder):
            return None
        if self.weights is None or not self.weights.is_dir():
            return self.weights
        pickled = self.weights / f"{encoder}.pth"
        return pickled if pickled.is_file() else self.weights / f"{encoder}.safetensors"

    def recipe_of(self, row: Row, method: str) -> Recipe | None:
        """The recipe for runs of a method on a row's benchmark; None where the benchmark's own settings are all."""
        if self.recipe is None:
            return recipe_for(method, row.encoder, row.benchmark)
        recipe = find_recipe(self.recipe)
        if recipe.values(method, row.encoder, row.benchmark) is None:
            raise TplError(f"The recipe {recipe.name} is not for {method} on {row.benchmark} with {row.encoder}.")
        return recipe


def obstacle(row: Row) -> str | None:
    """What is missing to run a row, or None if it can be run."""
    from tpl.bench.benchmarks import BENCHMARKS
    from tpl.methods import load_methods
    from tpl.nets import ENCODERS, is_resnet

    methods = load_methods()
    for part in row.parts():
        if part.benchmark not in BENCHMARKS:
            return f"no benchmark {part.benchmark}"
    if row.method not in methods:
        return f"no method {row.method}"
    if row.encoder not in ENCODERS:
        return f"no encoder {row.encoder}"
    if is_resnet(row.encoder) and not methods[row.method].from_scratch:
        return f"no {row.method} without pre-training"
    known = {f.name for f in dataclasses.fields(methods[row.method].config_class)}
    unknown = [name for name in row.options if name not in known]
    return f"no option {', '.join(unknown)} of {row.method}" if unknown else None


def plan(row: Row, settings: RowSettings) -> Iterator[list[RunSpec]]:
    """The runs behind a row, in batches that differ only in the class order and can train side by side."""
    from tpl.bench.spec import RunSpec
    from tpl.methods import find_method

    forgetting = any(key.startswith("forgetting_") for key in row.values)
    for part in row.parts():
        for method in (row.method, JOINT) if forgetting else (row.method,):
            known = {f.name for f in dataclasses.fields(find_method(method).config_class)}
            recipe = settings.recipe_of(part, method)
            values = (recipe.values(method, row.encoder, part.benchmark) if recipe else None) or {}
            needed = {name: some[0] for name, some in values.items() if name in known}
            if method == row.method:
                needed |= {name: v for name, v in part.required().items() if name in known} | dict(settings.options)
            else:  # joint training takes the options it shares with the row's method
                needed |= {name: v for name, v in settings.options.items() if name in known}
            yield [
                RunSpec(
                    part.benchmark,
                    method,
                    row.encoder,
                    settings.weights_of(row.encoder),
                    settings.data,
                    settings.download,
                    order,
                    settings.seed,
                    device=settings.device,
                    precision=settings.precision,
                    options=needed,
                    accept_contaminated_encoder=True,  # the row names this encoder; the verdict says so
                )
                for order in settings.orders
            ]


def run_rows(rows: Sequence[Row], settings: RowSettings, callback: Callback) -> list[Run]:
    """Make the runs behind rows, each once; runs that an earlier call finished are read, not repeated."""
    if not rows:
        return []
    from tpl.bench.run import execute_together
    from tpl.engine import RunLabel, labelled

    if len(set(settings.orders)) < len(settings.orders):
        raise TplError(f"A class order is named twice in {','.join(settings.orders)}.")
    batches: dict[tuple[Path, ...], list[RunSpec]] = {}  # several rows may need the same runs
    for row in rows:
        for specs in plan(row, settings):
            batches[tuple(settings.out / spec.directory_name() for spec in specs)] = specs
    made: list[Run] = []
    for number, (places, specs) in enumerate(batches.items()):
        first = specs[0]
        label = RunLabel(f"{first.method} on {first.benchmark}, {first.encoder}", number, len(batches))
        results = execute_together(specs, places, True, labelled(callback, label))
        made += [Run(place, result) for place, result in zip(places, results, strict=True)]
    return made
