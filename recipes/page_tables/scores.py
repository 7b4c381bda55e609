"""TPL's task score taken apart: what `tpl ablate` measured on trained models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from page_tables.cells import table
from page_tables.runs import RESULTS, RUNS, SETTINGS, variants
from page_tables.scratch import SCRATCH


def scores_table() -> list[str]:
    """Every variant of TPL's score on the same trained models, natural order."""
    return table("variant | " + " | ".join(SETTINGS.values()), score_rows(ablations()), 1)


def memory_table() -> list[str]:
    """TPL's memory, cut down after training."""
    found = ablations()
    names = {"as trained": "2000", "memory = 50 %": "half", "memory = 25 %": "a quarter", "memory = 10 %": "a tenth"}
    cells = [[kept, *(f"{100 * each[name]['last']:.2f}" for each in found)] for name, kept in names.items()]
    return table("images kept | " + " | ".join(SETTINGS.values()), iter(cells), 0)


def parts_table() -> list[str]:
    """TPL's score taken apart, ResNet-18 from scratch."""
    names = [f"{benchmark}-resnet18-{run}-natural" for run, benchmark in product(("tpl", "tpl-plain"), SCRATCH)]
    head = "variant | changed, C100-10T | C100-20T | trained as the paper describes, C100-10T | C100-20T"
    return table(head, score_rows([variants(RUNS / name) for name in names]), 1)


def betas_table() -> list[str]:
    """TPL's two scales in the paper's range, in units of the encoder's own inverse means; natural order."""
    found = [variants(RESULTS / "choices/cifar100/betas" / benchmark) for benchmark in ("c100-10t", "c10-5t")]

    def rows() -> Iterator[list[str]]:
        for beta1 in ("0.78", "1", "1.3"):
            names = [
                "as trained" if beta1 == beta2 == "1" else f"beta1 = {beta1} and beta2 = {beta2} inverse means"
                for beta2 in ("0.78", "1", "1.3")
            ]
            yield [f"beta1 = {beta1}x", *(f"{100 * each[name]['last']:.2f}" for each in found for name in names)]

    columns = [f"{title}, beta2 = 0.78x | 1x | 1.3x" for title in ("C100-10T", "C10-5T")]
    return table(" | ".join(["Last", *columns]), rows(), 1)


def ablations() -> list[dict[str, dict[str, Any]]]:
    """What `tpl ablate` measured on TPL in every setting, natural order."""
    found = []
    for setting in SETTINGS:
        kept = RUNS / f"{setting}-tpl-ablated-natural"
        found.append(variants(kept if kept.is_dir() else RUNS / f"{setting}-tpl-natural"))
    return found


def score_rows(found: list[dict[str, dict[str, Any]]]) -> Iterator[list[str]]:
    """Last and AUROC of every variant, a column a model."""
    for name in found[0]:
        yield [name, *(f"{100 * each[name]['last']:.2f} / {100 * each[name]['auroc']:.1f}" for each in found)]
