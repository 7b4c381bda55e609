"""`tpl learn --preset` and `--time`: what is trained, what is said about it, and how a model goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import ask, call, refusal
from pictures import photos
from small_encoder import SMALL_VIT
from tpl import Learner, TplError
from tpl.advice import check
from tpl.answers import Measured
from tpl.cli import plan
from tpl.cli.plan import duration, parse_time


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("presets")
    photos(root / "pets", ["cat", "cow"])
    photos(root / "birds", ["hen", "owl"])
    return root


def learn(model: Path, folder: Path, *options: str) -> dict[str, object]:
    found: dict[str, object] = ask("learn", model, folder, "--encoder", SMALL_VIT, "--device", "cpu", *options)
    return found


def test_quick_trains_nothing_and_goes_on_without_training(place: Path, tmp_path: Path) -> None:
    first = learn(tmp_path / "m", place / "pets", "--preset", "quick")
    assert first["epochs"] is None and first["images"] == 20 and first["old_classes"] is None
    assert first["choice"]["method"] == "closed-form"  # type: ignore[index]
    second = learn(tmp_path / "m", place / "birds")
    assert second["epochs"] is None and second["accuracy"] is not None
    effect = second["old_classes"]
    assert effect["before"]["images"] == effect["after"]["images"] == 20 and effect["by"] == "model"  # type: ignore[index]
    model = Learner.load(tmp_path / "m", device="cpu")
    assert model.method.name == "closed-form" and model.preset == "quick" and len(model.classes_) == 4
    told = call("predict", tmp_path / "m", place / "pets" / "cat", "--reject", "0.001", "--device", "cpu")
    assert "extrapolation" in told.stderr
    assert "leave --preset out" in refusal("learn", tmp_path / "m", place / "pets", "--preset", "best")


def test_what_happened_to_older_classes_is_printed_with_counts_and_an_interval(place: Path, tmp_path: Path) -> None:
    learn(tmp_path / "m", place / "pets", "--preset", "quick")
    printed = call("learn", tmp_path / "m", place / "birds", "--device", "cpu").stdout
    assert "without training" in printed and "quick: closed-form, as nothing is trained." in printed
    assert "Older classes" in printed and "of 20 right before" in printed and " %)." in printed


def test_balanced_trains_if_that_fits_the_time(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpl.schedule.epochs_for", lambda method, images: 6)
    monkeypatch.setattr(plan, "seconds_per_image", lambda learner, given: 0.01)
    none = learn(tmp_path / "a", place / "pets", "--time", "1s")
    assert none["choice"]["method"] == "closed-form" and "more than 1 s" in none["choice"]["reason"]  # type: ignore[index]
    assert none["choice"]["adapted_blocks"] is None  # type: ignore[index]
    monkeypatch.setattr(plan, "seconds_per_image", lambda learner, given: 1e-5)
    trained = learn(tmp_path / "b", place / "pets")
    assert trained["choice"]["method"] == "tpl-plus" and trained["epochs"] == 6  # type: ignore[index]
    assert trained["choice"]["adapted_blocks"] == "all"  # type: ignore[index]
    monkeypatch.setattr(plan, "seconds_per_image", lambda learner, given: 0.01)
    fewer = learn(tmp_path / "b", place / "birds", "--time", "2s")
    assert 1 <= fewer["epochs"] < 6 and "6 epochs would take" in fewer["choice"]["reason"]  # type: ignore[index, operator]
    assert "leave --preset out" in refusal("learn", tmp_path / "b", place / "birds", "--preset", "quick")


def test_adapters_are_in_the_last_blocks_where_all_take_too_long_and_all_tasks_follow(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpl.schedule.epochs_for", lambda method, images: 6)
    monkeypatch.setattr(plan, "seconds_per_image", lambda learner, given: 0.01)
    model = tmp_path / "m"
    words = ["learn", model, place / "pets", "--time", "3s", "--encoder", SMALL_VIT, "--device", "cpu"]
    said = (
        "balanced: tpl-plus, as training the last 1 of 2 blocks for 6 epochs takes about 2 s, within 3 s; training all"
    )
    assert said in call(*words, "--dry-run").stdout and not model.exists()
    assert said in call(*words).stdout
    monkeypatch.setattr(plan, "seconds_per_image", lambda learner, given: 1e-5)
    second = learn(model, place / "birds")
    assert second["choice"]["adapted_blocks"] == 1 and second["epochs"] == 6  # type: ignore[index]
    loaded = Learner.load(model, device="cpu")
    assert loaded.preset == "balanced" and loaded.method.config.to_dict()["adapted_blocks"] == 1
    assert "adapted-blocks 1, which cannot change" in refusal("learn", model, place / "birds", "--adapted-blocks", "2")


@pytest.mark.parametrize(
    ("seconds", "blocks", "epochs"),
    [(140, "all", None), (139, "all", 20), (70, "all", 20), (69, 1, 20), (36, 1, 20), (35, None, None)],
)
def test_blocks_come_before_epochs_and_twenty_epochs_before_none(
    seconds: float, blocks: int | str | None, epochs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over all images takes a second: training takes 3.5 seconds an epoch in two blocks, and half of it in one.

    Ahead of the latter, the block below runs once, for half a second.
    """
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu")
    monkeypatch.setattr(plan, "seconds_per_image", lambda learner, given: 0.1)
    found = plan.choose_training(learner, None, 10, 40, seconds)  # type: ignore[arg-type]
    assert (found.adapted_blocks, found.epochs) == (blocks, epochs)
    assert found.method == ("closed-form" if blocks is None else "tpl-plus")


def test_the_usual_limit_grows_with_the_images_between_two_bounds() -> None:
    assert [plan.usual_limit(images) for images in (0, 40, 60, 100, 240, 5000)] == [30, 30, 30, 50, 120, 120]


def test_a_dry_run_says_what_would_be_chosen(place: Path, tmp_path: Path) -> None:
    words = ["learn", tmp_path / "m", place / "pets", "--dry-run", "--preset", "quick", "--encoder", SMALL_VIT]
    said = call(*words, "--device", "cpu").stdout
    assert "without training" in said and "quick: closed-form" in said and not (tmp_path / "m").exists()


def test_a_dry_run_without_training_holds_out_as_much_as_the_real_run(place: Path, tmp_path: Path) -> None:
    plan = learn(tmp_path / "m", place / "pets", "--preset", "quick", "--dry-run")
    real = learn(tmp_path / "m", place / "pets", "--preset", "quick")
    assert (plan["images"], plan["held_out"]) == (real["images"], real["held_out"]) == (20, 0)
    words = ["learn", tmp_path / "m", place / "birds", "--device", "cpu", "--dry-run"]
    told = call(*words, "--held-out", "0.3")
    assert "each is left out in turn" in told.stdout and "--held-out has no effect" in " ".join(told.stderr.split())
    assert "--held-out" not in call(*words).stderr


def test_an_option_of_task_models_says_which_method_it_chooses(place: Path, tmp_path: Path) -> None:
    told = learn(tmp_path / "m", place / "pets", "--memory", "8", "--dry-run")
    assert told["choice"]["method"] == "tpl-plus" and told["choice"]["preset"] is None  # type: ignore[index]
    words = ["learn", tmp_path / "m", place / "pets", "--memory", "8", "--dry-run", "--encoder", SMALL_VIT]
    assert "method: tpl-plus, as --memory is an option of task models" in call(*words, "--device", "cpu").stdout
    assert "choice" not in learn(tmp_path / "m", place / "pets", "--memory", "8", "--dry-run", "--method", "tpl")


@pytest.mark.parametrize(("option", "value"), [("--memory", "10"), ("--memory", "1MB"), ("--epochs", "3")])
def test_a_model_without_task_models_has_none_of_their_options(
    option: str, value: str, place: Path, tmp_path: Path
) -> None:
    learn(tmp_path / "m", place / "pets", "--preset", "quick")
    assert f"has no {option}: leave it out" in refusal("learn", tmp_path / "m", place / "birds", option, value)


def test_a_method_without_a_memory_says_so(place: Path, tmp_path: Path) -> None:
    learn(tmp_path / "m", place / "pets", "--method", "slda")
    assert "a model of slda, which has no --memory" in refusal(
        "learn", tmp_path / "m", place / "birds", "--memory", "10"
    )


def test_a_known_class_under_another_name_is_said_without_stored_images(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    learn(model, place / "pets", "--preset", "quick")
    again = photos(tmp_path / "again", ["cat", "hen"], seed=9)
    (again / "cat").rename(again / "moggy")
    report = learn(model, again)
    assert [(p["class"], p["known"]) for p in report["same_classes"]] == [("moggy", "cat")]  # type: ignore[attr-defined]


def test_few_images_are_not_compared_with_those_of_known_classes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be found is not said of fewer than five images."""
    model = tmp_path / "m"
    learn(model, place / "pets", "--preset", "quick")
    compared: list[object] = []

    def same_classes(*given: object) -> list[object]:
        compared.append(given)
        return []

    monkeypatch.setattr(check, "same_classes", same_classes)
    assert learn(model, photos(tmp_path / "few", ["hen", "owl"], count=4))["same_classes"] == [] and not compared
    assert learn(model, photos(tmp_path / "more", ["fox"], count=5))["same_classes"] == [] and len(compared) == 1


def test_nearly_equal_names_are_said_from_the_first_task_on(place: Path, tmp_path: Path) -> None:
    model, first = tmp_path / "m", photos(tmp_path / "first", ["Cat", "cat "], count=3)
    words = ["--encoder", SMALL_VIT, "--device", "cpu", "--preset", "quick"]
    told = call("learn", model, first, *words)
    assert "'Cat' and 'cat ' are almost the same name" in told.stderr
    assert learn(model, photos(tmp_path / "next", ["CAT", "hen"], count=3))["names_alike"] == [["CAT", "Cat", "cat "]]
    assert "almost the same name" not in call("learn", model, photos(tmp_path / "owl", ["owl"], 3)).stderr
    renamed = call("rename", model, "owl", "Hens")
    assert "'Hens' and 'hen' are almost the same name" in renamed.stderr and renamed.exit_code == 0
    assert ask("rename", model, "Hens", "owl")["names_alike"] == []


def test_one_class_has_no_accuracy(tmp_path: Path) -> None:
    one = photos(tmp_path / "one", ["cat"])
    words = ["learn", tmp_path / "m", one, "--preset", "quick", "--encoder", SMALL_VIT, "--device", "cpu"]
    said = call(*words).stdout
    assert "nothing to tell apart" in said and "Accuracy" not in said


def test_any_method_that_needs_no_old_data_can_be_chosen(place: Path, tmp_path: Path) -> None:
    found = learn(tmp_path / "m", place / "pets", "--method", "slda")
    assert "choice" not in found and Learner.load(tmp_path / "m", device="cpu").method.name == "slda"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "fast"], "--preset takes quick, balanced, best"),
        (["--preset", "quick", "--epochs", "3"], "leave out --epochs"),
        (["--preset", "best", "--method", "tpl"], "leave out --method"),
        (["--time", "soon"], "such as 90s or 5m"),
        (["--time", "5m", "--preset", "quick"], "--time is for --preset balanced"),
        (["--method", "tlp"], "Did you mean 'tpl'?"),
        (["--method", "joint"], "all tasks every time"),
    ],
)
def test_mistakes_are_explained(options: list[str], message: str, place: Path, tmp_path: Path) -> None:
    assert message in refusal("learn", tmp_path / "m", place / "pets", *options)


def test_times_are_read_and_written() -> None:
    assert [parse_time(text) for text in ("90s", "5m", "1h", "7", "1.5 min")] == [90, 300, 3600, 7, 90]
    assert [duration(seconds) for seconds in (0.2, 59, 60, 61, 600, 3601)] == [
        "1 s",
        "59 s",
        "1 min",
        "1 min 1 s",
        "10 min",
        "60 min",
    ]
    with pytest.raises(TplError, match="got '0s'"):
        parse_time("0s")


def test_an_interval_is_wide_for_few_images() -> None:
    low, high = Measured(3, 4).interval
    assert low == pytest.approx(0.3006, abs=1e-3) and high == pytest.approx(0.9544, abs=1e-3)
    assert Measured(0, 0).interval == (0.0, 1.0) and Measured(5, 5).interval[1] == 1.0


def test_an_update_says_what_it_brought_and_what_was_there_already(tmp_path: Path) -> None:
    data = photos(tmp_path / "photos", ["cat", "dog"], count=4)
    ask("learn", tmp_path / "model", data, "--preset", "quick")
    again = ask("learn", tmp_path / "model", data, "--update")
    assert again["repeated"] == 8 and again["old_classes"]["before"] == again["old_classes"]["after"]  # type: ignore[index]
    (data / "cat" / "0.png").unlink()
    printed = call("learn", tmp_path / "model", data, "--update").output
    assert "7 images are in the model already" in printed and "All classes, each image left out in turn: " in printed
