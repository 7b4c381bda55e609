"""The paper's tables: numbers agree with each other as the paper's own arithmetic says, misprints excepted."""

from __future__ import annotations

import dataclasses

import pytest

from tpl import TplError
from tpl.bench.benchmarks import BENCHMARKS
from tpl.bench.paper import AVERAGE, FIVE, QUANTITIES, TABLES, Row, find_rows, load_rows, task_sizes
from tpl.methods import load_methods
from tpl.nets import ENCODERS

ROWS = {row.name: row for row in load_rows()}
AVERAGES = [row for row in ROWS.values() if row.benchmark == AVERAGE and row.table != "scores"]


def test_every_table_is_there_and_every_name_is_unique() -> None:
    assert {row.table for row in ROWS.values()} == set(TABLES)
    assert len(ROWS) == len(load_rows())
    for row in ROWS.values():
        assert row.name.split("/")[0] == row.table and row.name.split("/")[2] == row.benchmark
        assert row.values and set(row.values) <= set(QUANTITIES)
        assert row.label and row.method and row.encoder


def test_how_much_there_is() -> None:
    """As many lines as the paper's tables have: nothing is lost on loading."""
    lines = {table: len({row.name.split("/")[1] for row in ROWS.values() if row.table == table}) for table in TABLES}
    assert lines == {
        "main": 21, "encoders": 7, "small-memory": 12, "resnet18": 15, "forgetting": 17, "scores": 6, "beta": 25,
        "ood": 20, "imagenet380": 16, "sizes": 18, "times": 4,
    }  # fmt: skip
    for row in AVERAGES:
        assert all(row.name.removesuffix(AVERAGE) + name in ROWS for name in FIVE)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("main/tpl/c10-5t", {"last": (92.33, 0.32), "aia": (95.11, 0.44)}),
        ("main/tpl-pfi/t-10t", {"last": (83.87, 0.07), "aia": (87.40, 0.16)}),
        ("main/row/c100-20t", {"last": (74.60, 0.12), "aia": (83.12, 0.23)}),
        ("encoders/vit-tiny/c100-10t", {"last": (76.79, None), "til": (95.36, None)}),
        ("encoders/deit-tiny/c100-20t", {"last": (73.21, None), "til": (97.67, None)}),
        ("small-memory/tpl/c100-10t", {"last": (75.83, 0.28)}),
        ("resnet18/tpl/c100-10t", {"last": (62.2, 0.52)}),
        ("forgetting/tpl/t-5t", {"forgetting_last": (3.88, None), "forgetting_aia": (0.26, None)}),
        ("ood/vim/t-10t", {"auroc": (88.7, 0.07), "last": (63.1, 0.42), "til": (88.10, None)}),
        ("beta/0.6-17.5/c10-5t", {"last": (91.0, None)}),
        ("imagenet380/tpl/imagenet380-10t", {"last": (78.49, 0.89)}),
        ("sizes/beef/c100-20t", {"parameters": (82.3, None)}),
        ("times/hat/t-10t", {"minutes": (9.48, None)}),
        ("scores/msp/average", {"last": (71.32, None)}),
    ],
)
def test_numbers_typed_from_the_page(name: str, values: dict[str, tuple[float, float | None]]) -> None:
    assert {key: (v.mean, v.std) for key, v in ROWS[name].values.items()} == values


def test_numbers_are_shown_as_printed() -> None:
    assert str(ROWS["main/tpl/c100-10t"].values["aia"]) == "84.10 ± 0.34"
    assert str(ROWS["resnet18/owm/t-5t"].values["last"]) == "10.0 ± 0.55"
    assert ROWS["main/tpl/c10-5t"].last == 92.33 and ROWS["main/tpl/c10-5t"].til is None


@pytest.mark.parametrize("row", AVERAGES, ids=lambda row: row.name)
def test_averages_are_means_of_their_cells(row: Row) -> None:
    """To rounding of the average and of its cells (the paper averages unrounded ones)."""
    for key, printed in row.values.items():
        cells = [part.values[key] for part in row.parts()]
        mean = sum(cell.mean for cell in cells) / len(cells)
        digits = min(cell.decimals for cell in cells)  # MORE's forgetting has two cells of one digit
        room = 10**-printed.decimals if digits == printed.decimals else 0.5 * 10**-digits
        assert row.target(key) == pytest.approx(mean, abs=room + 1e-9)
        if key in row.corrected:
            assert printed.mean != pytest.approx(mean, abs=room)
            assert row.misprint is not None and str(printed.mean) in row.misprint
            assert str(row.corrected[key]) in row.misprint


def test_forgetting_is_what_is_lost_against_joint_training() -> None:
    for row in ROWS.values():
        if row.table != "forgetting":
            continue
        line = row.name.split("/")[1]
        bound = ROWS[f"main/non-cl{'-pfi' if line.endswith('pfi') else ''}/{row.benchmark}"]
        own = ROWS[f"main/{line}/{row.benchmark}"]
        for key in ("last", "aia"):
            lost = bound.values[key].mean - own.values[key].mean
            assert row.values[f"forgetting_{key}"].mean == pytest.approx(lost, abs=0.0301)  # 12.53 is printed 12.5


def test_tables_that_repeat_numbers_repeat_them() -> None:
    for benchmark in (*FIVE, AVERAGE):
        assert ROWS[f"encoders/deit-small-611/{benchmark}"].last == ROWS[f"main/tpl/{benchmark}"].last
        assert ROWS[f"encoders/deit-small/{benchmark}"].last == ROWS[f"main/tpl-pfi/{benchmark}"].last
        assert ROWS[f"encoders/deit-small-611/{benchmark}"].til == ROWS[f"ood/msp/{benchmark}"].til
        assert ROWS[f"ood/msp/{benchmark}"].last == pytest.approx(ROWS[f"main/hat/{benchmark}"].last, abs=0.051)
    assert ROWS["scores/tpl/average"].last == ROWS["main/tpl/average"].last
    assert ROWS["scores/hat/average"].target("last") == ROWS["main/hat/average"].last


def test_misprints_are_marked() -> None:
    marked = {row.name.rsplit("/", 1)[0] for row in ROWS.values() if row.misprint}
    assert marked == {
        "ood/kl-matching", "ood/odin", "ood/vos", "ood/mcdropout", "ood/mixup", "scores/hat", "imagenet380/foster",
        "forgetting/agem", "forgetting/icarl", "forgetting/der",
    }  # fmt: skip
    assert ROWS["forgetting/agem/c10-5t"].label == "iCaRL"
    assert ROWS["ood/odin/c10-5t"].misprint is None  # its cells are right
    assert ROWS["ood/odin/average"].target("auroc") == 89.8


def test_protocols_agree_with_the_benchmarks() -> None:
    for name in FIVE:
        benchmark, row = BENCHMARKS[name], ROWS[f"main/tpl/{name}"]
        assert set(task_sizes(name)) == {benchmark.per_task}
        assert row.required()["memory"] == benchmark.options["memory"]
        assert ROWS[f"small-memory/tpl/{name}"].required()["memory"] == benchmark.options["memory"] // 2
    larger = BENCHMARKS["imagenet380-10t"]
    assert set(task_sizes(larger.name)) == {larger.per_task}
    assert ROWS[f"imagenet380/tpl/{larger.name}"].required()["memory"] == larger.options["memory"]


def test_options_of_rows_are_options_of_their_method() -> None:
    """Those of methods that are here; and what TPL's rows need by default is TPL's default."""
    methods = load_methods()
    for row in ROWS.values():
        if row.method in methods and row.table != "ood":
            known = {f.name for f in dataclasses.fields(methods[row.method].config_class)}
            assert set(row.options) <= known, row.name
    config = methods["tpl"].config_class
    needed = ROWS["main/tpl/average"].required()
    assert config.parse(needed) == config()
    assert ROWS["beta/0.5-15.0/c10-5t"].required() | {"memory": 0} == needed | {
        "beta1": 0.5, "beta2": 300.0, "memory": 0, "memory_kind": "images",
    }  # fmt: skip


def test_encoders_of_the_encoder_table_are_known() -> None:
    encoders = {row.encoder for row in ROWS.values() if row.table == "encoders"}
    assert len(encoders) == 7 and encoders <= set(ENCODERS)


def test_rows_are_found_by_name_prefix_and_glob() -> None:
    assert [row.name for row in find_rows(["main/tpl/c10-5t"])] == ["main/tpl/c10-5t"]
    assert {row.name for row in find_rows(["encoders/*tiny/c100*"])} == {
        f"encoders/{encoder}/c100-{tasks}t" for encoder in ("vit-tiny", "deit-tiny") for tasks in (10, 20)
    }
    assert len(find_rows(["main/tpl"])) == 6  # not tpl-pfi
    assert len(find_rows(["main/tpl/", "main/tpl/*"])) == 6  # each once
    assert len(find_rows(["encoders/vit"])) == 24
    assert len(find_rows(["*"])) == len(ROWS)


def test_an_unknown_row_is_answered_with_close_ones() -> None:
    with pytest.raises(TplError, match=r"no row 'encoder/vit-tiny/c100-10t' \(near: encoders/vit-tiny/c100-10t"):
        find_rows(["encoder/vit-tiny/c100-10t"])
    with pytest.raises(TplError, match="near: encoders"):
        find_rows(["encodrs"])
    with pytest.raises(TplError, match="--list"):
        find_rows(["???"])


def test_an_average_stands_for_its_five_benchmarks() -> None:
    assert [part.name for part in ROWS["main/tpl/average"].parts()] == [f"main/tpl/{name}" for name in FIVE]
    parts = ROWS["scores/ebo/average"].parts()  # the paper prints the average alone
    assert [part.benchmark for part in parts] == list(FIVE)
    assert all(part.required()["logit_score"] == "ebo" for part in parts)
    assert [part.required()["memory"] for part in ROWS["small-memory/tpl/average"].parts()] == [100] + 4 * [1000]
