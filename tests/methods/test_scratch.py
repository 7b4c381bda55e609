"""Learning without pre-training: the bank's promises over a network whose every kernel is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tpl import Learner, Task
from tpl.engine import Compute, Event, no_callback
from tpl.errors import TplError
from tpl.methods import learn_together, load_methods
from tpl.methods.bank import BankMethod
from tpl.methods.derpp import DERpp
from tpl.methods.foster import FOSTER
from tpl.methods.parts.expansion import ExpandedNetwork
from tpl.methods.parts.network import Network
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import ResNetEncoder, create_encoder
from tpl.nets.resnet import network
from tpl.stream import Stream

ENCODER = "resnet18:8"
OPTIONS = {"epochs": 2, "batch_size": 6, "lr": 0.05}
TURNED = {"rotation_classes": True, "tta": "both"}


@pytest.fixture(scope="module")
def stream(small_stream: Stream) -> Stream:
    """Half of the images of the common checks; batches of six do not divide them."""
    tasks = []
    for task in small_stream:
        assert task.test is not None
        halves = (images.select(np.arange(len(images)) % 2 == 0) for images in (task.train, task.test))
        tasks.append(Task(task.name, task.classes, *halves))
    return Stream(tasks)


def learner_for(method: str, **options: object) -> Learner:
    known = load_methods()[method].config_class.__dataclass_fields__
    chosen = OPTIONS | ({"memory": 12} if "memory" in known else {}) | options
    return Learner(method, ENCODER, device="cpu", **chosen)  # type: ignore[arg-type]


def probes(learner: Learner, stream: Stream) -> Tensor:
    return torch.cat([learner.prepare(task.test) for task in stream if task.test is not None])


class Trained:
    """TPL over three tasks with everything on that could move an old task, and what was seen on the way."""

    def __init__(self, stream: Stream) -> None:
        self.learner = learner_for("tpl", augment="crop", weight_decay=0.05, nesterov=True, **TURNED)
        assert isinstance(self.learner.method, TPL)
        self.bank = self.learner.method.bank
        self.probe = probes(self.learner, stream)
        self.seen: list[list[tuple[Tensor, ...]]] = []  # by stage, every task's features and logits
        self.owned: list[list[dict[str, Tensor]]] = []  # by stage, what every task owns
        self.kernels: list[Tensor] = []
        for task in stream:
            self.learner.learn(task, held_out=0)
            tasks = self.bank.tasks
            self.seen.append([tuple(self.bank.outputs(self.probe, t)) for t in range(len(tasks))])
            self.owned.append([{k: v.clone() for k, v in model.state_dict().items()} for model in tasks])
            self.kernels.append(self.bank.adapters.state_dict()["kernels"].clone())


@pytest.fixture(scope="module")
def trained(stream: Stream) -> Trained:
    return Trained(stream)


def test_old_features_are_the_same_bit_for_bit(trained: Trained) -> None:
    """After one and after two later tasks: weight decay, momentum, Nesterov and moved images notwithstanding."""
    for stage in (1, 2):
        for old, new in zip(trained.seen[stage - 1], trained.seen[stage], strict=False):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert all(bool(features.any()) for features, _ in trained.seen[2])
    assert not torch.equal(trained.seen[2][0][0], trained.seen[2][1][0])  # and tasks do differ


def test_a_finished_tasks_norms_and_statistics_stand_still_and_are_its_own(trained: Trained) -> None:
    for stage in (1, 2):
        for before, after in zip(trained.owned[stage - 1], trained.owned[stage], strict=False):
            assert all(torch.equal(before[k], after[k]) for k in before)
    first, second, third = (own["norms"] for own in trained.owned[2])
    fresh = trained.bank.encoder.new_norms()
    for norms, other in ((first, second), (second, third), (third, first)):
        for row in range(4):
            assert not torch.equal(norms[row], other[row]) and not torch.equal(norms[row], fresh[row])


def test_free_kernels_move_and_protected_ones_do_not(trained: Trained) -> None:
    first = trained.bank.protection.unit_mask(trained.bank.tasks[0].embedding)
    assert first is not None
    gate = trained.bank.adapters.weights.gates(first)
    (closed,) = (g == 0 for g in gate)
    before, after = trained.kernels[0], trained.kernels[1]
    assert torch.equal(before[closed], after[closed]) and not bool((before == after)[~closed].any())
    units, frozen = trained.bank.capacity().values()
    assert 0 < frozen < units < 1


def test_answers_do_not_depend_on_the_batch(trained: Trained) -> None:
    for t in range(3):
        alone = torch.cat([trained.bank.outputs(image, t).features for image in trained.probe[::5].split(1)])
        torch.testing.assert_close(alone, trained.seen[2][t][0][::5], rtol=1e-4, atol=1e-5)


def test_saved_and_loaded_it_answers_the_same_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    trained.learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu")
    assert again.method.encoder.name == ENCODER
    before, after = (each.method.log_probabilities(trained.probe) for each in (trained.learner, again))
    assert torch.equal(before, after)
    assert isinstance(again.method, TPL)
    for t in range(3):
        assert torch.equal(again.method.bank.outputs(trained.probe, t).features, trained.seen[2][t][0])


def test_methods_over_one_bank_train_once_and_other_seeds_one_after_the_other(stream: Stream) -> None:
    """Side by side or alone, the numbers are the same to the last bit: there is no pass that networks could share."""
    names = ("tpl", "more", "row", "hat")
    together = [learner_for(name, epochs=1) for name in names]
    together.append(learner_for("tpl", epochs=1, seed=1))
    for task in stream[:2]:
        learn_together([each.method for each in together], [task] * 5, [no_callback] * 5)
    kernels = []
    for each in together:
        assert isinstance(each.method, BankMethod)
        kernels.append(each.method.bank.adapters.state_dict()["kernels"])
        probabilities = each.method.log_probabilities(probes(each, stream)).exp()
        torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(len(probabilities), dtype=torch.float64))
    assert torch.equal(kernels[0], kernels[1]) and torch.equal(kernels[0], kernels[2])
    assert not torch.equal(kernels[0], kernels[3]) and not torch.equal(kernels[0], kernels[4])
    alone = learner_for("tpl", epochs=1)
    for task in stream[:2]:
        alone.learn(task, held_out=0)
    assert isinstance(alone.method, TPL)
    assert torch.equal(alone.method.bank.adapters.state_dict()["kernels"], kernels[0])


WANTED = {
    "foster": {"compression": 4.0},  # its student learns last of all
    "hal": {"anchor_steps": 3},
    "agem": {"epochs": 5, "lr": 0.02},  # large steps and projections do not go together, here as elsewhere
}
NETWORKS = sorted(n for n, m in load_methods().items() if m.from_scratch and not issubclass(m, BankMethod))


@pytest.mark.parametrize("method", NETWORKS)
def test_single_networks_learn_save_and_answer_image_by_image(method: str, stream: Stream, tmp_path: Path) -> None:
    stream = Stream(stream[:2])
    newest = stream[1].test
    assert newest is not None
    for seed in range(3):  # on so few images some networks learn nothing: one of three seeds must
        learner = learner_for(method, augment="crop", seed=seed, **WANTED.get(method, {}))
        for t, task in enumerate(stream):
            learner.learn(stream.union(t) if learner.method.cumulative else task, held_out=0)
        log_p = learner.log_probabilities(newest)
        if np.mean(log_p[:, 2:].argmax(dim=1).numpy() == newest.labels) > 0.7:
            break
    else:
        pytest.fail("the classes of the newest task are not told apart")
    pixels = learner.prepare(newest)
    alone = torch.cat([learner.method.log_probabilities(image) for image in pixels.split(1)])
    torch.testing.assert_close(alone, log_p, rtol=1e-4, atol=1e-4)
    learner.save(tmp_path / "model")
    assert torch.equal(Learner.load(tmp_path / "model", device="cpu").log_probabilities(newest), log_p)


def test_foster_distils_answers_that_do_not_depend_on_the_batch(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both extractors of the teacher answer by settled statistics, as the old network does in its place."""
    teachers = list[Network]()
    compress = FOSTER.compress

    def watched(self: FOSTER, teacher: ExpandedNetwork, *rest: object) -> None:
        teachers.append(teacher)
        compress(self, teacher, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FOSTER, "compress", watched)
    learner = learner_for("foster", epochs=1)
    for task in stream[:2]:
        learner.learn(task, held_out=0)
    (teacher,) = teachers
    images = learner.method.normalise(probes(learner, stream)[:6])
    alone = torch.cat([teacher(image) for image in images.split(1)])
    torch.testing.assert_close(alone, teacher(images), rtol=1e-4, atol=1e-4)
    fresh = learner.method.encoder.new_norms()[2:]
    assert not any(torch.equal(norms[2:], fresh) for norms in (teacher.norms, learner.method.network.norms))  # type: ignore[attr-defined]


def test_derpp_notes_logits_as_the_network_would_answer(stream: Stream) -> None:
    """After the one epoch that there is, by statistics of that moment and not of the beginning."""
    learner = learner_for("derpp", epochs=1, memory=8)
    learner.learn(stream[0], held_out=0)
    method = learner.method
    assert isinstance(method, DERpp)
    pixels = method.memory.pixels(method.preprocess, method.compute.device)
    now = method.logits(pixels)
    with torch.no_grad():
        method.network.norms[2:] = method.encoder.new_norms()[2:]
    stale = method.logits(pixels)
    # Statistics of a few batches of six, drawn by lot, are not quite the same twice.
    assert (method.stored_logits - now).abs().max() < 0.3 * (stale - now).abs().max()


@pytest.mark.parametrize("left", [0, 1])
def test_a_full_network_warns_and_still_learns(left: int, stream: Stream) -> None:
    """With hardly a unit left, or none: a task has its own norms, mask and head, and no weight in use moves.

    Whether such a network tells the classes apart is luck: two seeds of three do. That its loss falls is not: with no
    unit left, to at most 0.84 of the first epoch's in each of sixteen runs, with one left in seven of eight.
    """
    assert any(_loss_when_full(left, stream, seed) < 0.9 for seed in range(3))


def _loss_when_full(left: int, stream: Stream, seed: int) -> float:
    """The last epoch's loss over the first's, for a task that finds `left` free units; checks what must not change."""
    options = {"epochs": 8, "batch_size": 8, "lr": 0.03, "memory": 12, "weight_decay": 5e-4}
    learner = Learner("tpl", "resnet18:4", device="cpu", seed=seed, **options)
    assert isinstance(learner.method, TPL)
    bank, events = learner.method.bank, list[Event]()
    learner.method.learn(stream[0], events.append)
    assert not [event for event in events if event.kind == "warning"]
    own = bank.unit_mask(0)
    assert own is not None
    bank.used = torch.ones_like(own)
    bank.used[(own == 0).nonzero()[:left]] = 0
    kernels, probe = bank.adapters.state_dict()["kernels"], probes(learner, stream[:1])
    before, seen = kernels.clone(), bank.outputs(probe, 0)
    (closed,) = (gate == 0 for gate in bank.adapters.weights.gates(bank.used))
    learner.method.learn(stream[1], events.append)
    (warning,) = [event.data["text"] for event in events if event.kind == "warning"]
    assert "a wider network" in warning and f"{float(closed.float().mean()):.1%}" in warning
    assert torch.equal(kernels[closed], before[closed]) and bool(closed.all()) == (not left)
    assert all(torch.equal(a, b) for a, b in zip(bank.outputs(probe, 0), seen, strict=True))
    assert all(bool(t.isfinite().all()) for t in learner.method.state().tasks[1].values())
    newest = stream[1].test
    assert newest is not None
    log_p = learner.log_probabilities(newest)
    torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(len(log_p), dtype=torch.float64))
    losses = [event.data["loss"] for event in events if event.kind == "epoch"][-8:]
    return float(losses[-1] / losses[0])


def test_compiling_is_for_large_images_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *given: function(*given))
    for small_too in (False, True):
        encoder = create_encoder(ENCODER)
        assert isinstance(encoder, ResNetEncoder)
        compute = Compute(torch.device("cpu"), bf16=False, compiled=True, small_too=small_too)
        TPL(encoder, TPLConfig(), compute)
        assert encoder.fused == small_too == (encoder.run is not network)


def test_what_needs_pre_training_says_so() -> None:
    for method in ("slda", "l2p", "ranpac", "tpl-plus", "supsup", "owm", "afc"):
        with pytest.raises(TplError, match=f"'{method}' needs a pre-trained encoder.* by agem, .*finetune.*tpl"):
            Learner(method, ENCODER, device="cpu")
    with pytest.raises(TplError, match="protect=hat"):
        learner_for("tpl", protect="supsup")
