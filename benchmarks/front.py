"""What the methods on the front page cost on a CPU: seconds to learn a task, milliseconds an answer, megabytes.

Every method learns digits-5t, the bundled digits in five tasks, on one thread, and answers with all five tasks learned.
Seconds and milliseconds are of the processor; on a shared machine they still differ by up to a half between two runs.
A row is one method, with its options, and seed, and says what it was measured with; rows that the file has already are
measured again. `recipes/result_tables.py` makes the front page's table of it, with the least of all seeds.

python benchmarks/front.py                                 # all rows, seeds 0, 1 and 2: 20 minutes on one core
python benchmarks/front.py --rows slda tpl-plus --seeds 0
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "front-cpu.json"
ROWS = (  # what is measured: methods, with options as `tpl run` takes them
    "joint-ridge", "joint", "tpl-plus", "tpl-plus --set passes=0", "tpl", "anacp", "ranpac",
    "ranpac --set ridge_criterion=entropy", "slca", "klda", "slda", "replay", "ease", "finetune",
)  # fmt: skip
ALONE, REPEATS = 20, 5  # images that are asked about one by one; times that 64 are asked about together


def main() -> None:
    """Measure, and write each row into the file as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, default=FILE)
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.exists() else []
        rows = {(row["row"], row["seed"]): row for row in known}
    except (KeyError, TypeError, ValueError) as error:
        parser.error(f"{options.json} holds no rows of this benchmark ({error!r}): choose another file or delete it.")
    import torch

    torch.set_num_threads(1)
    for name in options.rows:
        for seed in options.seeds:
            rows[name, seed] = measured(name, seed)
            print(json.dumps(rows[name, seed]), flush=True)
            ordered = sorted(rows.values(), key=lambda row: (ROWS.index(row["row"]), row["seed"]))
            options.json.write_text('{"rows": [\n' + ",\n".join(map(json.dumps, ordered)) + "\n]}\n", encoding="utf-8")


def measured(name: str, seed: int) -> dict[str, Any]:
    """One row: accuracy and costs of a method on digits-5t."""
    from tpl.bench.spec import RunSpec

    method, *words = name.split()
    options = dict(word.split("=") for word in words if word != "--set")
    spec = RunSpec("digits-5t", method, seed=seed, device="cpu", options=options)
    stream, learner = spec.stream(), spec.learner()
    everything = stream.union(len(stream) - 1)
    tasks = iter([everything]) if learner.method.cumulative else stream.once()
    seconds = sum(timed(partial(learner.learn, task, held_out=0)) for task in tasks)
    assert everything.test is not None
    whole = learner.prepare(everything.test)
    truth = [everything.classes[label] for label in everything.test.labels]
    right = statistics.mean(a.name == name for a, name in zip(learner.answers_of(whole), truth, strict=True))
    single = [timed(partial(learner.answers_of, whole[i : i + 1])) for i in range(ALONE)]
    together = min(timed(partial(learner.answers_of, whole[:64])) for _ in range(REPEATS))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        learner.save(model, versions=0)
        disk = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
    return {
        "row": name,
        "seed": seed,
        "last": round(right, 6),
        "seconds_to_learn": round(seconds, 2),
        "ms_alone": round(1e3 * statistics.median(single), 2),
        "ms_together": round(1e3 * together / 64, 3),
        "disk_bytes": disk,
        "network_and_memory_bytes": learner.method.size()[1] + learner.method.memory_bytes,
        "environment": environment(),
    }


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the processor."""
    started = time.process_time()
    work()
    return time.process_time() - started


def environment() -> dict[str, Any]:
    """Versions and the kind of processor."""
    import torch

    from tpl.bench.results import describe_environment

    return describe_environment(torch.device("cpu"))


if __name__ == "__main__":
    main()
