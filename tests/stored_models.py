"""Models that earlier versions wrote, with the answers they gave then: what must still load and answer the same.

`python tests/stored_models.py NAME` adds `tests/models/NAME-tpl` and `NAME-tpl-plus`. Do that before a change of the
schema, never to make a failing test pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from handwriting import digits
from tpl import Learner, Task

PLACE = Path(__file__).parent / "models"
METHODS = ("tpl", "tpl-plus")
OPTIONS = {"epochs": 8, "latent": 8, "memory": 24, "lr": 0.05}
TASKS = (("zero", "one"), ("two", "three"), ("four", "five"))
PROBE = digits(range(8), 4, start=100)  # the last two classes are unknown to the models


def write(name: str) -> None:
    """Learn small models of digits and store them with their answers."""
    for method in METHODS:
        more = {"random_features": 48} if method == "tpl-plus" else {}
        learner = Learner(method, "compact", device="cpu", **OPTIONS, **more)  # type: ignore[arg-type]
        for t, names in enumerate(TASKS):
            learner.learn(Task(f"task {t}", names, digits(range(2 * t, 2 * t + 2), 40)), held_out=0.25)
        learner.save(PLACE / f"{name}-{method}" / "model")
        answers = [answer.to_dict() for answer in learner.answers(PROBE, top=6)]
        text = json.dumps({"classes": learner.classes_, "answers": answers}, indent=1)
        (PLACE / f"{name}-{method}" / "answers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1])
