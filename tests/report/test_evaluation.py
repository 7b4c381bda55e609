"""The page of `tpl evaluate --report`: what it says follows from the answers, and what is not there has no heading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from commands import ask
from pictures import photos
from tpl import Learner
from tpl.report.evaluation import Wrong, calibration, calibration_error, small_picture, write_evaluation

HOSTILE = "<script>alert(1)</script>"


def report_of(right: int, images: int, **more: Any) -> dict[str, Any]:
    unknown = {"images": 0, "classes": [], "auroc": None, "reject": 0.05, "rejected": {"known": None, "unknown": None}}
    row = {"images": images, "right": right, "accuracy": right / images}
    found = {"model": "model", "source": "test", "accuracy": right / images, "right": right, "images": images}
    found |= {"interval": (0.5, 0.9), "classes": {HOSTILE: row}, "confusion": {HOSTILE: {HOSTILE: right}}}
    return found | {"unknown": unknown, "unreadable": []} | more


def headings(file: Path) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", file.read_text(encoding="utf-8"))


def test_points_of_the_curve_hold_as_many_images_each_and_their_error_is_the_mean_distance() -> None:
    probabilities = [0.5] * 20 + [1.0] * 20
    right = [True, False] * 10 + [True] * 16 + [False] * 4
    points = calibration(probabilities, right)
    assert [point.measured.images for point in points] == [10] * 4
    assert [point.probability for point in points] == [0.5, 0.5, 1.0, 1.0]
    assert calibration_error(points) == pytest.approx((0 + 4) / 40)
    assert calibration(probabilities[:19], right[:19]) == []  # too few


def test_sections_without_content_are_left_out_and_names_are_text(tmp_path: Path) -> None:
    file = tmp_path / "new" / "page.html"
    write_evaluation(report_of(3, 3), [0.9] * 3, [True] * 3, [], file)
    assert headings(file) == ["Classes"]
    picture = small_picture(Image.new("RGB", (400, 300)))
    wrong = [Wrong(f"{HOSTILE}.jpg", HOSTILE, "cat", 0.8, picture)]
    rejected = {"known": {"count": 1, "images": 30, "share": 1 / 30}, "unknown": {"count": 2, "images": 2, "share": 1}}
    unknown = report_of(3, 3)["unknown"] | {"images": 2, "classes": [HOSTILE], "auroc": 0.9, "rejected": rejected}
    write_evaluation(report_of(29, 30, unknown=unknown), [0.9] * 30, [True] * 29 + [False], wrong, file)
    assert headings(file) == ["Classes", "Wrong names", "Calibration", "Unknown images"]
    text = file.read_text(encoding="utf-8")
    assert "2 of these 2 are rejected (100" in text and "1 of 30 known ones (3.3" in text
    assert HOSTILE not in text and "&lt;script&gt;" in text and "http" not in text.replace("http://www.w3.org/", "")


def test_the_command_shows_the_pictures_that_the_model_got_wrong(tmp_path: Path) -> None:
    learner = Learner("slda", device="cpu").learn(photos(tmp_path / "photos", ["cat", "dog", "fox"], count=6))
    learner.save(tmp_path / "model")
    test = photos(tmp_path / "test", ["cat", "dog", "fox"], count=4, seed=1)
    (test / "cat" / "0.png").rename(test / "dog" / "misplaced.png")
    page = tmp_path / "page.html"
    found = ask("evaluate", tmp_path / "model", test, "--report", page, "--device", "cpu")
    assert found["report"] == str(page) and found["interval"][0] < found["accuracy"] < found["interval"][1]
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r'<img src="data:image/jpeg;base64,', text)) == found["images"] - found["right"] >= 1
    assert "misplaced.png" in text and f"{found['right']} of {found['images']}" in text
