"""The tables of results on the front page, in results/README.md and the documentation, made from the runs in results/.

python recipes/result_tables.py            # write them into the pages, beneath their marks
python recipes/result_tables.py --check    # do they agree? Exits with 1 if not

A mark is a comment `<!-- table: NAME -->`; the table beneath it, up to the next empty line, is the recipe's. `PAGES`
says which page has which tables, `TABLES` which function makes a table. A row without a run says "not run".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial

from page_tables import baselines, digits, paper, plus, rivals, scores, scratch, study
from page_tables.runs import BENCHMARKS, ROOT

PAGES = {
    "results/README.md": (
        "digits",
        "digits-methods",
        "tpl",
        "family",
        "c10-5t",
        "c100-10t",
        "c100-20t",
        "c100-50t",
        "t-5t",
        "t-10t",
        "t-100t",
        "study-c100-10t",
        "study-c10-5t",
        "as-long",
        "everywhere",
        "small",
        "baselines",
        "scores",
        "betas",
        "scratch",
        "parts",
    ),
    "README.md": ("front",),
    "docs/not-reached.md": ("below", "never-run"),
    "docs/beyond.md": ("answers", "kinds", "inference"),
    "docs/which-method.md": ("overview", "digits", "family", "answers", "memory"),
}
TABLES: dict[str, Callable[[], list[str]]] = {
    "front": rivals.front_table,
    "overview": rivals.overview_table,
    "tpl": paper.tpl_table,
    "family": paper.family_table,
    "small": paper.small_table,
    "below": paper.below_table,
    "never-run": paper.never_run_table,
    "as-long": baselines.as_long_table,
    "everywhere": baselines.everywhere_table,
    "baselines": baselines.baselines_table,
    "digits": digits.digits_table,
    "digits-methods": digits.digits_methods_table,
    "answers": plus.answers_table,
    "kinds": plus.kinds_table,
    "inference": plus.inference_table,
    "memory": scores.memory_table,
    "scores": scores.scores_table,
    "betas": scores.betas_table,
    "parts": scores.parts_table,
    "scratch": scratch.scratch_table,
}
TABLES |= {benchmark: partial(rivals.benchmark_table, benchmark) for benchmark in BENCHMARKS}
TABLES |= {f"study-{benchmark}": partial(study.study_table, benchmark) for benchmark in study.STUDIES}


def filled(text: str, names: Sequence[str]) -> str:
    """A page with every one of these tables as the runs have it."""
    for name in names:
        pattern = re.compile(rf"(<!-- table: {name} -->\n)(?:\|.*\n)*")
        if not pattern.search(text):
            raise SystemExit(f"The page has no mark <!-- table: {name} -->.")
        lines = "".join(line.rstrip() + "\n" for line in TABLES[name]())
        text = pattern.sub(partial(_replaced, lines=lines), text)
    return text


def _replaced(match: re.Match[str], lines: str) -> str:
    return match[1] + lines


def main() -> None:
    """Write the tables, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page says otherwise")
    only_check = parser.parse_args().check
    wrong = []
    for name, tables in PAGES.items():
        page = ROOT / name
        before = page.read_text(encoding="utf-8")
        after = filled(before, tables)
        if after != before and only_check:
            wrong.append(name)
        elif after != before:
            page.write_text(after, encoding="utf-8")
    print(baselines.baselines_ranking().sentence, baselines.as_long_ranking().sentence, sep="\n")
    if wrong:
        sys.exit(f"{', '.join(wrong)}: not what the runs say. Run this without --check.")


if __name__ == "__main__":
    main()
