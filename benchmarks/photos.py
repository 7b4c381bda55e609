"""`tpl learn` against what a user would do instead, on any class folders.

    python benchmarks/photos.py photos/
    python benchmarks/photos.py photos/ --encoder vit_tiny_patch16_224 --weights FILE --json out.json
    python benchmarks/photos.py photos/ --encoder photos --fits --seeds 20     # many trials in minutes

A trial draws some classes, N training photos of each, other photos of them to test on, and photos of further classes as
unknown ones. The product learns the classes task by task with the command `tpl learn`, once for each `--product`. Its
rivals get the same encoder's features, which are computed once: logistic regression on the photos of all tasks
together, the nearest class mean, linear discriminant analysis with a shrunk covariance, and RanPAC without adaptation.
Prints a table in Markdown: accuracy after the last task, seconds (of all commands; for a rival: loading the encoder
once, features and fit), and the area under the ROC curve of known against unknown photos. With `--fits` no command is
run: the closed form of `tpl learn` is fitted to the same features as its rivals, which are computed once for all
trials; seconds are those of the fits.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from typer.main import get_command

from tpl import Learner
from tpl.cli import app
from tpl.methods.base import seeded
from tpl.methods.parts.closed_form import ClosedForm
from tpl.methods.parts.ridge import RandomRidge
from tpl.methods.ranpac import RanPACConfig
from tpl.nets import create_encoder
from tpl.stream import MixedImages, is_image_name

Array = NDArray[Any]
COMMANDS = get_command(app)
MOST_UNKNOWN = 10  # classes that are not learned


class Trial(NamedTuple):
    """The photos of one trial: training photos task by task, then class by class; test photos and unknown ones."""

    tasks: list[dict[str, list[Path]]]
    test: dict[str, list[Path]]
    unknown: list[Path]

    @property
    def train(self) -> dict[str, list[Path]]:
        """The training photos of all tasks, by class in the order of arrival."""
        return {name: files for task in self.tasks for name, files in task.items()}


class Row(NamedTuple):
    """What one way of learning reached in one trial."""

    accuracy: float
    seconds: float
    auroc: float


def sizes(classes: int, tasks: int) -> list[int]:
    """The number of classes of each task: all later ones alike, the first one larger."""
    later = max(classes // (tasks + 1), 1)
    return [classes - later * (tasks - 1), *[later] * (tasks - 1)]


def drawn(
    folders: dict[str, list[Path]], classes: int, tasks: int, each: int, most: int, test: int, seed: int
) -> Trial:
    """A trial. For one seed, those with few training photos are parts of those with many; test photos are the same."""
    rng = np.random.default_rng(seed)
    usable = [name for name, files in folders.items() if len(files) >= most + 5]
    if len(usable) < classes:
        sys.exit(f"{len(usable)} classes have {most + 5} photos or more, {classes} are needed; lower --classes.")
    chosen = [usable[i] for i in rng.permutation(len(usable))[:classes]]
    others = [name for name in folders if name not in chosen]
    order = {name: [folders[name][i] for i in rng.permutation(len(folders[name]))] for name in chosen}
    unknown: list[Path] = []
    for i in rng.permutation(len(others))[:MOST_UNKNOWN]:
        files = folders[others[i]]
        unknown += [files[j] for j in rng.permutation(len(files))[:test]]
    bounds = np.cumsum([0, *sizes(classes, tasks)])
    split = [chosen[a:b] for a, b in pairwise(bounds)]
    learned = [{name: order[name][:each] for name in names} for names in split]
    return Trial(learned, {name: order[name][most : most + test] for name in chosen}, unknown)


def result(
    names: Sequence[str], truth: Sequence[str], log_p: Array, known: Array, strange: Array, seconds: float
) -> Row:
    """Accuracy from one column of `log_p` for each of `names`; AUROC from how well known each photo looks."""
    right = np.array(names)[log_p.argmax(axis=1)] == np.array(truth)
    labels = np.repeat([1, 0], [len(known), len(strange)])
    auroc = roc_auc_score(labels, np.concatenate([known, strange])) if len(strange) else float("nan")
    return Row(float(right.mean()), seconds, float(auroc))


# The product


def product(trial: Trial, options: Sequence[str]) -> Row:
    """`tpl learn` for every task, each from a CSV list."""
    with tempfile.TemporaryDirectory() as place:
        model, seconds = Path(place) / "model", 0.0
        for number, task in enumerate(trial.tasks, start=1):
            table = Path(place) / f"task {number}.csv"
            with table.open("w", newline="") as file:
                csv.writer(file).writerows((str(path.resolve()), name) for name, own in task.items() for path in own)
            started = time.perf_counter()
            with quiet():
                COMMANDS.main(["learn", str(model), str(table), "--json", *options], standalone_mode=False)
            seconds += time.perf_counter() - started
        learner = Learner.load(model, device="cpu")
        test = [path for own in trial.test.values() for path in own]
        truth = [name for name, own in trial.test.items() for _ in own]
        log_p = learner.log_probabilities(test).numpy()
        known, strange = (-learner.unknown_score(part) for part in (test, trial.unknown))
        return result(learner.classes_, truth, log_p, known, strange, seconds)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what a command prints to itself, unless it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            yield
        except BaseException:
            print(printed.getvalue(), file=sys.__stderr__)
            raise


# Rivals: features of all training photos, their classes, and the tasks' bounds, to a predictor of log P and knownness

Predictor = Callable[[Array], tuple[Array, Array]]


def logistic_regression(x: Array, y: Array, bounds: Sequence[int]) -> Predictor:
    """On the photos of all tasks at once; the probability of the answer says how well known a photo looks."""
    model = LogisticRegression(max_iter=2000).fit(x, y)
    return lambda z: (model.predict_log_proba(z), model.predict_proba(z).max(axis=1))


def nearest_class_mean(x: Array, y: Array, bounds: Sequence[int]) -> Predictor:
    """By the cosine to the class means of unit features."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    means = np.stack([unit[y == c].mean(axis=0) for c in range(int(y.max()) + 1)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)

    def predict(z: Array) -> tuple[Array, Array]:
        cosines = z / np.linalg.norm(z, axis=1, keepdims=True) @ means.T
        return cosines, cosines.max(axis=1)

    return predict


def shrunk_lda(x: Array, y: Array, bounds: Sequence[int]) -> Predictor:
    """With Ledoit and Wolf's covariance; the Mahalanobis distance says how well known a photo looks."""
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(x, y)
    inverse = np.linalg.pinv(model.covariance_)

    def predict(z: Array) -> tuple[Array, Array]:
        apart = z[:, None] - model.means_
        return model.predict_log_proba(z), -np.einsum("ncd,de,nce->nc", apart, inverse, apart).min(axis=1)

    return predict


def ranpac(x: Array, y: Array, bounds: Sequence[int]) -> Predictor:
    """The package's own classifier, task by task, on the encoder's features."""
    z, labels, generator = torch.from_numpy(x), torch.from_numpy(y), torch.Generator().manual_seed(0)
    ridge = RandomRidge.drawn_for(z[: bounds[1]], RanPACConfig(adapt="none"), generator)
    for a, b in pairwise(bounds):
        ridge.learn(z[a:b], labels[a:b], generator)

    def predict(other: Array) -> tuple[Array, Array]:
        log_p = ridge.log_probabilities(torch.from_numpy(other)).numpy()
        return log_p, log_p.max(axis=1)

    return predict


def closed_form(x: Array, y: Array, bounds: Sequence[int]) -> Predictor:
    """What `tpl learn --preset quick` fits, task by task."""
    z, labels = torch.from_numpy(x).float(), torch.from_numpy(y)
    model = ClosedForm.drawn(x.shape[1], 0, seeded(0, 0, "closed form"), torch.device("cpu"))
    for a, b in pairwise(bounds):
        model.learn(z[a:b], labels[a:b])

    def predict(other: Array) -> tuple[Array, Array]:
        new = torch.from_numpy(other).float()
        return model.log_probabilities(new).numpy(), -model.unknown_scores(new).numpy()

    return predict


FITS = {"closed form of tpl learn": closed_form}
RIVALS = {
    "logistic regression, all data": logistic_regression,
    "nearest class mean": nearest_class_mean,
    "shrunk LDA": shrunk_lda,
    "RanPAC": ranpac,
}


def fitted(
    trial: Trial,
    prepare: Callable[[], object],
    features: Callable[[Sequence[Path]], Array],
    fits: dict[str, Callable[..., Predictor]],
) -> dict[str, Row]:
    """What each of `fits` reaches on one trial; `prepare` and the training photos' features count for each."""
    names = list(trial.train)
    test = features([path for own in trial.test.values() for path in own])
    strange = features(trial.unknown)
    truth = [name for name, own in trial.test.items() for _ in own]
    started = time.perf_counter()
    prepare()
    x = features([path for own in trial.train.values() for path in own])
    encoding = time.perf_counter() - started
    y = np.repeat(np.arange(len(names)), [len(own) for own in trial.train.values()])
    bounds = np.cumsum([0, *(sum(map(len, task.values())) for task in trial.tasks)]).tolist()
    found = {}
    for name, fit in fits.items():
        started = time.perf_counter()
        predict = fit(x, y, bounds)
        seconds = time.perf_counter() - started
        log_p, known = predict(test)
        unknown = predict(strange)[1] if len(strange) else np.empty(0)
        found[name] = result(names, truth, log_p, known, unknown, encoding + seconds)
    return found


# The table


def photos_in(place: Path, leave_out: Sequence[str]) -> dict[str, list[Path]]:
    """The photos of every class folder."""
    folders = sorted(path for path in place.iterdir() if path.is_dir() and path.name not in leave_out)
    found = {folder.name: sorted(p for p in folder.rglob("*") if is_image_name(p.name)) for folder in folders}
    return {name: files for name, files in found.items() if files}


def table(rows: dict[tuple[int, str], list[Row]]) -> str:
    """Means over seeds, one line for each way of learning and one group of columns for each number of photos."""
    counts = sorted({each for each, _ in rows})
    heads = [f"{n} a class: accuracy % | s | AUROC %" for n in counts]
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " ---: |" * (3 * len(counts))]
    for name in dict.fromkeys(name for _, name in rows):
        cells = []
        for n in counts:
            accuracy, seconds, auroc = np.mean(rows[n, name], axis=0)
            cells += [f"{100 * accuracy:.1f}", f"{seconds:.1f}", f"{100 * auroc:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="class folders")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--per-class", type=int, nargs="+", default=[3, 10, 30], help="training photos of a class")
    parser.add_argument("--test", type=int, default=20, help="test photos of a class, at most")
    parser.add_argument("--seeds", type=int, default=3, help="trials for each number of photos")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="CLASS", help="folders that are no class")
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument(
        "--product", nargs="+", default=[""], metavar="OPTIONS", help="options of `tpl learn`, a row for each"
    )
    parser.add_argument("--fits", action="store_true", help="fit the product's closed form instead of running commands")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every row to this file")
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")
    method = Learner("slda", wanted.encoder, wanted.weights, device="cpu").method

    def computed(paths: Sequence[Path]) -> Array:
        found: Array = method.encoder_features(method.preprocess.batch(MixedImages(list(paths)))).double().numpy()
        return found

    known = dict[Path, Array]()

    def remembered(paths: Sequence[Path]) -> Array:
        if missing := list(dict.fromkeys(path for path in paths if path not in known)):
            known.update(zip(missing, computed(missing), strict=True))
        return np.stack([known[path] for path in paths]) if paths else np.empty((0, method.encoder.dim))

    def load() -> None:
        create_encoder(wanted.encoder, wanted.weights)

    prepare, features, ways = (lambda: None, remembered, FITS | RIVALS) if wanted.fits else (load, computed, RIVALS)

    common = ["--encoder", wanted.encoder, "--device", "cpu"]
    common += ["--weights", str(wanted.weights)] if wanted.weights else []
    folders, rows = photos_in(wanted.folder, wanted.leave_out), dict[tuple[int, str], list[Row]]()
    # The first calls prepare things: start-up is left out for all.
    features([next(iter(folders.values()))[0]])
    products = [] if wanted.fits else wanted.product
    if products:
        product(drawn(folders, 4, 2, 3, 3, 1, 0), [*common, "--preset", "quick"])
    for seed in range(wanted.first_seed, wanted.first_seed + wanted.seeds):
        for each in wanted.per_class:
            trial = drawn(folders, wanted.classes, wanted.tasks, each, max(wanted.per_class), wanted.test, seed)
            found = {f"tpl learn {own}".strip(): product(trial, common + shlex.split(own)) for own in products}
            for name, row in (found | fitted(trial, prepare, features, ways)).items():
                rows.setdefault((each, name), []).append(row)
                print(f"seed {seed}, {each} a class, {name}: {row}", file=sys.stderr, flush=True)
            if wanted.json:
                _write(wanted, rows)
    print(table(rows))


def _write(wanted: argparse.Namespace, rows: dict[tuple[int, str], list[Row]]) -> None:
    options = {name: value for name, value in vars(wanted).items() if name not in ("folder", "json", "weights")}
    found = [
        {"per_class": each, "name": name, "seed": seed} | {k: round(v, 4) for k, v in row._asdict().items()}
        for (each, name), own in rows.items()
        for seed, row in enumerate(own, start=wanted.first_seed)
    ]
    wanted.json.write_text(json.dumps({"photos": wanted.folder.name, "options": options, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
