"""A ResNet-18 trained from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from page_tables.cells import auroc, mean, table
from page_tables.runs import runs_of
from tpl.bench.paper import find_rows

SCRATCH = "c100-10t", "c100-20t"
SCRATCH_ROWS = {  # a run, and what it is called
    "tpl": "TPL, changed (`scratch-rotations`)",
    "tpl-mirrored": "the same, `tta=flip`",
    "tpl-upright": "the same, `tta=none`",
    "tpl-rate": "`tta=none lr=0.1`",
    "tpl-plain": "TPL, trained as the paper describes (`scratch-plain`)",
    "row": "ROW",
    "more": "MORE",
    "hat": "HAT",
    "der": "DER",
    "replay": "replay",
    "finetune": "fine-tuning",
    "joint": "all classes at once",
}


def scratch_table() -> list[str]:
    """ResNet-18 from scratch, beside the paper's."""

    def rows() -> Iterator[list[str]]:
        printed = {row.name: f"{row.last:.1f}" for row in find_rows(["resnet18"])}
        for benchmark, (name, title) in product(SCRATCH, SCRATCH_ROWS.items()):
            paper = printed.get(f"resnet18/{name.removesuffix('-plain')}/{benchmark}", "–")
            for run in runs_of(f"{benchmark}-resnet18", name):
                found, used = run.summary, run.summary.get("capacity")
                keys = ("last", "aia", "til", "tp") if len(run.description["classes"]) > 1 else ("last",)
                cells = [f"{100 * found[key]:.2f}" for key in keys] + ["–"] * (4 - len(keys))
                full = [f"{100 * used[key]:.0f} %" for key in ("units", "frozen")] if used else ["–", "–"]
                kept = [mean(auroc([run]), 1), f"{found['drift']:g}"] if used else ["–", "–"]
                yield [benchmark.upper(), title, *cells, *kept, *full, paper]

    head = " | | Last | AIA | TIL | task prediction | AUROC | drift | units in use | kernels frozen | paper's Last"
    return table(head, rows(), 2)
