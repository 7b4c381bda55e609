"""Adapters in the last blocks alone: the blocks below are the same for all tasks, and are computed once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_queries import TASKS, assert_close, by_bank, by_loop, new_bank, small_vit, some_pixels
from torch import Tensor

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import Recipe, Samples, compute, no_callback
from tpl.errors import TplError
from tpl.methods.bank import Bank, Query, training
from tpl.methods.bank import bank as bank_module
from tpl.methods.bank.bank import CPUInference, RowInference
from tpl.methods.bank.techniques import TECHNIQUES
from tpl.methods.bank.training import TrainingJob, run_jobs, with_tokens
from tpl.methods.tpl import TPL
from tpl.migrate import current_options
from tpl.nets import ViTEncoder, as_vit, create_encoder
from tpl.stream import Stream

OPTIONS: dict[str, Any] = {"encoder": SMALL_VIT, "latent": 16, "epochs": 4, "batch_size": 16, "lr": 0.05, "memory": 24}
BLOCKS = 1  # of the two that the small encoder has


def tpl_learner(method: str = "tpl", **options: Any) -> tuple[Learner, TPL]:
    learner = Learner(method, device="cpu", **(OPTIONS | {"adapted_blocks": BLOCKS} | options))
    assert isinstance(learner.method, TPL)
    return learner, learner.method


@contextmanager
def calls_of(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first arguments that a method is called with."""
    seen: list[Any] = []
    plain = getattr(owner, name)

    def noted(self: Any, first: Any, *rest: Any, **named: Any) -> Any:
        seen.append(first)
        return plain(self, first, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, noted)
        yield seen


# What a task has


def test_only_the_last_blocks_and_the_last_norm_belong_to_a_task() -> None:
    encoder = create_encoder("compact")  # six blocks
    whole, part = (new_bank(encoder, adapted_blocks=blocks) for blocks in ("all", 2))
    assert whole.adapters.units == 3 * part.adapters.units
    assert [len(bank.adapters.weights.down_bias) for bank in (whole, part)] == [12, 4]
    assert [len(bank.tasks[0].norms) for bank in (whole, part)] == [13, 5]
    torch.testing.assert_close(encoder.new_norms(4), encoder.new_norms()[8:], rtol=0, atol=0)


def test_all_blocks_by_number_are_all_blocks() -> None:
    pixels = some_pixels(5)
    by_name, by_number = (new_bank(create_encoder("compact"), adapted_blocks=blocks) for blocks in ("all", 6))
    assert all(torch.equal(a, b) for a, b in zip(by_bank(by_name, pixels), by_bank(by_number, pixels), strict=True))


def test_with_closed_masks_and_its_own_norms_a_task_has_the_encoder_s_features() -> None:
    encoder = create_encoder("compact")
    bank = new_bank(encoder, adapted_blocks=2)
    model = bank.tasks[0]
    with torch.no_grad():
        model.embedding.fill_(-1)
        model.norms.copy_(encoder.new_norms(bank.below))
    pixels = some_pixels(6)
    plain = encoder.plain(bank.normalise(pixels)).detach()
    assert torch.equal(encoder(bank.normalise(pixels), model.norms, bank.weights(0)).detach(), plain)
    assert_close([bank.outputs(pixels, 0).features, bank.encoder_features(pixels)], [plain, plain])


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (0, -1, "some", "1.5"):
        with pytest.raises(TplError, match="adapted_blocks must be all or a number"):
            tpl_learner(adapted_blocks=wrong)
    with pytest.raises(TplError, match="has 2 blocks"):
        tpl_learner(adapted_blocks=3)
    with pytest.raises(TplError, match="adapted_blocks=all"):
        tpl_learner(encoder="resnet18:4")


def test_options_of_earlier_models_are_those_of_all_blocks() -> None:
    assert current_options("tpl", {"latent": 8}) == {"latent": 8, "adapted_blocks": "all"}
    assert current_options("tpl", {"adapted_blocks": 3}) == {"adapted_blocks": 3}


# Queries: the blocks below once per image


@pytest.mark.parametrize("how", [CPUInference, RowInference])
@pytest.mark.parametrize("options", [{}, {"protect": "supsup"}, {"masks": "soft"}])
def test_every_task_says_what_it_says_in_a_loop(
    how: type[CPUInference | RowInference], options: dict[str, Any]
) -> None:
    encoder = create_encoder("compact")
    assert isinstance(encoder, ViTEncoder)
    bank = new_bank(encoder, adapted_blocks=2, **options)
    bank._inference = how(bank, encoder)
    pixels = some_pixels(9)
    found = by_bank(bank, pixels)
    assert_close(found, by_loop(bank, pixels))
    assert float((found[0] - found[1]).abs().max()) > 0.1  # each by its own model
    assert_close([bank.encoder_features(pixels)], [encoder.plain(bank.normalise(pixels))])
    assert bank.encoder_features(pixels[:0]).shape == (0, 128)


@pytest.mark.parametrize("changes", [{"init_values": 0.3}, {"global_pool": "avg"}, {"qk_norm": True}])
def test_other_transformers(changes: dict[str, Any]) -> None:
    bank = new_bank(small_vit(**changes), adapted_blocks=1)
    pixels = some_pixels(5)
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))
    assert_close([bank.encoder_features(pixels)], [bank.encoder.plain(bank.normalise(pixels))])


def test_a_pair_has_the_same_answer_in_any_company() -> None:
    """Up to rounding, and in the same company every time: bit for bit."""
    bank, pixels = new_bank(small_vit(), adapted_blocks=1), some_pixels(261)
    together = by_bank(bank, pixels)
    assert all(torch.equal(a, b) for a, b in zip(by_bank(bank, pixels), together, strict=True))
    for i in (0, 7, 255, 260):
        assert_close([a[0] for a in by_bank(bank, pixels[i : i + 1])], [b[i] for b in together])
    rows = torch.tensor([3, 200, 258])
    assert_close([bank.query(pixels, [Query(1, rows)])[0].features], [together[1][rows]])


@pytest.mark.parametrize("how", [CPUInference, RowInference])
def test_within_one_answer_the_blocks_below_run_once(
    how: type[CPUInference | RowInference], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, pixels = small_vit(), some_pixels(300)
    bank = new_bank(encoder, adapted_blocks=1)
    bank._inference = how(bank, encoder)
    apart = [bank.outputs(pixels, 0).features, bank.outputs(pixels, 2).features, bank.encoder_features(pixels)]
    with calls_of(how, "tokens", monkeypatch) as computed, bank.sharing(pixels), bank.sharing(pixels):
        shared = [bank.outputs(pixels, 0).features, bank.outputs(pixels, 2).features, bank.encoder_features(pixels)]
        assert [len(block) for block in computed] == [256, 44]
        bank.outputs(pixels[:4], 1)  # others are computed for themselves
        assert [len(block) for block in computed] == [256, 44, 4]
    assert all(torch.equal(a, b) for a, b in zip(apart, shared, strict=True))
    with calls_of(how, "tokens", monkeypatch) as computed:
        bank.outputs(pixels, 0)
        assert len(computed) == 2  # nothing is kept for later
    monkeypatch.setattr(bank_module, "MOST_SHARED", 0)
    with calls_of(how, "tokens", monkeypatch) as computed, bank.sharing(pixels):
        again = [bank.outputs(pixels, task).features for task in (0, 2)]
        assert len(computed) == 4
    assert all(torch.equal(a, b) for a, b in zip(apart, again, strict=False))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tpl", {}),
        ("tpl", {"memory_kind": "features"}),
        ("tpl-plus", {"expert_views": "first"}),
        ("tpl-plus", {"expert_views": "first", "passes": "1"}),
    ],
)
def test_an_answer_of_a_method_runs_the_blocks_below_once(
    method: str, options: dict[str, Any], small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = tpl_learner(method, epochs=1, **({"random_features": 64} if method == "tpl-plus" else {}) | options)
    for task in small_stream[:2]:
        learner.learn(task)
    pixels = learner.prepare(small_stream[1].train)
    with calls_of(CPUInference, "tokens", monkeypatch) as computed:
        learner.method.answer(pixels)
    assert [len(block) for block in computed] == [len(pixels)]


def test_a_task_is_learned_with_the_blocks_below_run_once_for_its_images(
    small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, statistics and the expert use the same tokens; so it is for the memory's images before and after."""
    learner, method = tpl_learner("tpl-plus", random_features=64, memory=10, expert_views="first")
    for task in small_stream[:2]:
        before = [len(method.memory)] if len(method.memory) else []  # what is replayed
        with calls_of(CPUInference, "tokens", monkeypatch) as computed:
            learner.learn(task, held_out=0)
        # One image tells how large tokens are.
        assert [len(images) for images in computed] == [1, len(task.train), *before, len(method.memory)]
        assert not method.bank._shared._shared  # nothing is kept behind it


def test_all_shared_tokens_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, pixels, others = small_vit(), some_pixels(8), some_pixels(6)
    bank = new_bank(encoder, adapted_blocks=1)
    bank.share_too(pixels)
    assert not bank._shared._shared  # not without a context
    monkeypatch.setattr(bank_module, "MOST_SHARED", bank.tokens(pixels).nbytes)
    with calls_of(CPUInference, "tokens", monkeypatch) as computed, bank.sharing(pixels):
        bank.share_too(others)
        for _ in range(2):
            bank.outputs(pixels, 0)
            bank.outputs(others, 0)
    assert [len(images) for images in computed] == [8, 6, 6]


# Training on tokens


def job_of(bank: Bank, seed: int = 0, technique: str = "none", **options: Any) -> TrainingJob:
    """Fifty new images of three classes and twenty replayed ones."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (70, 3, 32, 32), generator=generator, dtype=torch.uint8)
    device = bank.compute.device
    new = Samples(pixels[:50].to(device), (torch.arange(50) % 3).to(device))
    replay = Samples(pixels[50:].to(device), torch.full((20,), 3).to(device))
    recipe = Recipe(**({"epochs": 3, "batch_size": 16, "lr": 0.01} | options))
    return TrainingJob(bank, new, replay, 3, 4, recipe, generator, no_callback)


def trained(count: int, device: str = "cpu", precision: str = "fp32", **options: Any) -> list[Tensor]:
    """All that banks have after training one more task side by side."""
    encoder = small_vit()
    banks = [new_bank(encoder, device, precision, adapted_blocks=1) for _ in range(count)]
    run_jobs([job_of(bank, seed, **options) for seed, bank in enumerate(banks)])
    return [
        tensor.detach()
        for bank in banks
        for tensor in (*bank.adapters.weights, *(p for p in bank.tasks[-1].parameters()))
    ]


@pytest.mark.parametrize(
    "changes", [{}, {"init_values": 0.3, "qkv_bias": False}, {"global_pool": "avg"}, {"qk_norm": True}]
)
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_class_token_alone_has_the_same_features_and_gradients(changes: dict[str, Any], blocks: int) -> None:
    bank = new_bank(small_vit(**changes), adapted_blocks=blocks)
    encoder = as_vit(bank.encoder)
    tokens = encoder.tokens(bank.normalise(some_pixels(5)), torch.float32, bank.below)
    found = []
    for run in (encoder.from_tokens, encoder.class_token_from):
        norms = bank.tasks[0].norms.clone().requires_grad_()
        weights = [w.detach().clone().requires_grad_() for w in bank.weights(0)]
        features = run(tokens, norms, weights)
        features.square().sum().backward()
        found.append([features.detach(), *(parameter.grad for parameter in (norms, *weights))])
    assert_close(*found, precision=1e-4)


def no_room(patch: pytest.MonkeyPatch) -> None:
    """Nothing is so small that it fits."""
    patch.setattr(compute, "SHARE_FOR_IMAGES", 0.0)


@pytest.mark.parametrize("augment", ["none", "flip"])
@pytest.mark.parametrize("count", [1, 2])
def test_training_on_tokens_is_training_on_images(augment: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 3 * 4  # with the epochs
    with calls_of(ViTEncoder, "tokens", monkeypatch) as computed:
        on_tokens = trained(count, augment=augment)
        once = len(computed)
        assert once < steps
        with monkeypatch.context() as patch:
            no_room(patch)
            on_images = trained(count, augment=augment)
        assert len(computed) - once >= steps
    for a, b in zip(on_tokens, on_images, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    other = trained(count, augment="none" if augment == "flip" else "flip")
    assert max(float((a - b).abs().max()) for a, b in zip(on_tokens, other, strict=True)) > 1e-2  # it could fail


def test_tokens_are_those_of_the_images_and_of_the_flipped_ones() -> None:
    bank = new_bank(small_vit(), adapted_blocks=1)
    job = job_of(bank, augment="flip")
    found = with_tokens([job])
    assert found is not None
    for given, made in ((job.samples, found[0].samples), (job.replay, found[0].replay)):
        assert given is not None and made is not None
        assert made.with_flipped and len(made) == len(given) and len(made.pixels) == 2 * len(given)
        both = torch.cat([given.pixels, given.pixels.flip(-1)])
        assert_close([made.pixels], [bank.encoder.tokens(bank.normalise(both), torch.float32, 1)])


@pytest.mark.parametrize(
    ("blocks", "changes"),
    [("all", {}), (1, {"augment": "crop"}), (1, {"epochs": 1}), (1, {"epochs": 2, "augment": "flip"})],
)
def test_images_stay_where_tokens_would_differ_or_save_nothing(blocks: Any, changes: dict[str, Any]) -> None:
    assert with_tokens([job_of(new_bank(small_vit(), adapted_blocks=blocks), **changes)]) is None


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_that_mixes_images_is_given_images(name: str) -> None:
    bank = new_bank(small_vit(), adapted_blocks=1)
    bank.technique = TECHNIQUES[name]
    assert (with_tokens([job_of(bank)]) is None) == (name in ("mixup", "cutmix", "mixoe"))


def test_tokens_are_in_the_computer_s_memory_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(new_bank(small_vit(), adapted_blocks=1))
    replayed = job.replay and len(job.replay) * job.bank.tokens(job.samples.pixels[:1]).nbytes
    assert replayed
    monkeypatch.setattr(compute.Compute, "room_for", lambda self, size: size <= replayed)
    asked: list[int] = []
    monkeypatch.setattr(training, "host_has_room_for", lambda size: asked.append(size) or True)
    assert with_tokens([job]) is not None and asked == [replayed * 50 // 20]
    monkeypatch.setattr(training, "host_has_room_for", lambda size: False)
    assert with_tokens([job]) is None


def test_free_memory_where_the_system_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "meminfo"
    monkeypatch.setattr(compute, "MEMORY_INFO", info)
    monkeypatch.setattr(compute, "CONTROL_GROUP", tmp_path)
    usual = compute.free_host_memory()
    assert usual > 0
    for text in ("", "MemAvailable: kB", "no colon"):
        info.write_text(text)
        assert compute.free_host_memory() == usual
    info.unlink()
    info.mkdir()  # as if it could not be read
    assert compute.free_host_memory() == usual


def test_free_memory_is_what_the_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    monkeypatch.setattr(compute, "MEMORY_INFO", info)
    monkeypatch.setattr(compute, "CONTROL_GROUP", tmp_path)
    assert compute.free_host_memory() == 4000 * 1024
    for limit, left in (("max", 4000 * 1024), ("1000000", 400_000), ("100000000", 4000 * 1024)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("600000\n")
        assert compute.free_host_memory() == left
    assert compute.host_has_room_for(1_600_000) and not compute.host_has_room_for(1_700_000)


# Whole models


def test_old_tasks_drift_by_exactly_nothing(small_stream: Stream) -> None:
    learner, method = tpl_learner(weight_decay=0.01, nesterov=True)
    probe = learner.prepare(small_stream[0].train)
    features: list[Tensor] = []
    for task in small_stream:
        learner.learn(task)
        features.append(method.bank.outputs(probe, 0).features)
    assert all(torch.equal(features[0], later) for later in features[1:])


def test_a_model_keeps_nothing_of_the_blocks_below(small_stream: Stream, tmp_path: Path) -> None:
    sizes = {}
    for blocks in ("all", BLOCKS):
        learner, method = tpl_learner(adapted_blocks=blocks, epochs=1)
        learner.learn(small_stream[0])
        learner.save(tmp_path / str(blocks))
        state = method.state()
        sizes[blocks] = {k: v.numel() for k, v in (state.shared | state.tasks[0]).items()}
        assert Learner.load(tmp_path / str(blocks), device="cpu").method.config.adapted_blocks == blocks
    for name in ("adapters.down_weight", "adapters.up_bias", "embedding"):
        assert sizes["all"][name] == 2 * sizes[BLOCKS][name]
    assert [sizes[blocks]["norms"] for blocks in ("all", BLOCKS)] == [5 * 2 * 32, 3 * 2 * 32]


def test_models_with_other_adapted_blocks_are_not_merged(small_stream: Stream) -> None:
    (a, _), (b, _) = (tpl_learner(adapted_blocks=blocks, epochs=1) for blocks in ("all", BLOCKS))
    a.learn(small_stream[0])
    b.learn(small_stream[1])
    with pytest.raises(TplError, match="adapted_blocks"):
        a.merge(b)
    c, method = tpl_learner(epochs=1)
    c.learn(small_stream[2])
    pixels = c.prepare(small_stream[0].train)
    before = method.bank.outputs(pixels, 0).features
    b.merge(c)
    assert isinstance(b.method, TPL)
    assert torch.equal(b.method.bank.outputs(pixels, 1).features, before)


def test_removed_classes_and_views_of_removed_tasks(small_stream: Stream) -> None:
    learner, method = tpl_learner("tpl-plus", expert_views="first", epochs=1, random_features=64)
    for task in small_stream[:2]:
        learner.learn(task)
    for name in small_stream[0].classes:
        learner.remove(name)
    assert len(method.bank.tasks) == 1 and len(method.models) == 2  # the first task's model is a view
    p = method.log_probabilities(learner.prepare(small_stream[1].train)).exp()
    torch.testing.assert_close(p.sum(dim=1), torch.ones(len(p), dtype=torch.float64))


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("protect", ["hat", "supsup"])
def test_on_a_gpu_too_a_pair_has_the_same_bits_in_any_company(precision: str, protect: str) -> None:
    bank, pixels = (
        new_bank(create_encoder("compact"), "cuda", precision, protect=protect, adapted_blocks=2),
        some_pixels(261),
    )
    tolerance = 1e-3 if precision == "fp32" else 0.05
    with bank.sharing(pixels):
        together, plain = by_bank(bank, pixels), bank.encoder_features(pixels)
    assert_close(together, by_loop(bank, pixels), tolerance)
    assert_close([plain], [bank.encoder.plain(bank.normalise(pixels.cuda()), bank.compute.dtype)], tolerance)
    for t in range(TASKS):
        assert torch.equal(bank.outputs(pixels, t).features, together[t])
    alone = pixels[258:259]
    assert all(torch.equal(a[0], b[258]) for a, b in zip(by_bank(bank, alone), together, strict=True))
    assert torch.equal(bank.encoder_features(alone)[0], plain[258])
    rows = torch.tensor([0, 9, 260])
    assert torch.equal(bank.query(pixels, [Query(1, rows)])[0].features, together[1][rows.cuda()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("augment", ["none", "flip"])
@pytest.mark.parametrize("count", [1, 2])
def test_on_a_gpu_training_on_tokens_is_training_on_images(
    precision: str, augment: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device, and sent to it batch by batch from the computer's memory."""

    def only_replay(self: Any, size: int) -> bool:
        return size < 30 * 2 * count * 5 * 192 * 4

    ways: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: None,
        lambda patch: patch.setattr(compute.Compute, "room_for", only_replay),
        no_room,
    ]
    found = []
    for way in ways:
        with monkeypatch.context() as patch:
            way(patch)
            found.append(trained(count, "cuda", precision, augment=augment))
    for other in found[:2]:
        for a, b in zip(other, found[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3 if precision == "bf16" else 1e-4)
