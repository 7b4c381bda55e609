"""L2P: prompts are chosen image by image, prepended to a frozen trunk, and only they and the head learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.bench.spec import RunSpec
from tpl.engine import Samples
from tpl.errors import TplError
from tpl.methods.l2p import L2P, L2PConfig, PromptLoss, choose
from tpl.nets.vit import prompted
from tpl.stream import Stream

OPTIONS = {"epochs": 1, "batch_size": 16, "lr": 0.01, "prompt_pool": 6, "prompt_length": 2, "prompts_per_image": 3}


def new_method(**options: object) -> L2P:
    method = Learner("l2p", device="cpu", **({"encoder": SMALL_VIT} | OPTIONS | options)).method
    assert isinstance(method, L2P)
    return method


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_prompts_are_chosen_as_by_brute_force() -> None:
    queries, keys = random(9, 5), random(7, 5, seed=1)
    similarity, numbers = choose(queries, keys, 3)
    for row, query in enumerate(queries):
        cosines = [float(query @ key / query.norm() / key.norm()) for key in keys]
        best = sorted(range(7), key=lambda m: -cosines[m])[:3]
        assert numbers[row].tolist() == best
        assert similarity[row].tolist() == pytest.approx([cosines[m] for m in best], abs=1e-6)


@pytest.mark.parametrize("encoder", [SMALL_VIT, "compact"])
def test_prompts_pass_through_timms_own_blocks(encoder: str) -> None:
    method = new_method(encoder=encoder)
    vit, images, prompts = method.encoder.vit, random(2, 3, 32, 32), random(2, 4, method.encoder.dim, seed=1)
    with torch.no_grad():
        tokens = torch.cat([prompts, vit._pos_embed(vit.patch_embed(images))], dim=1)
        expected = vit.norm(vit.blocks(tokens))[:, :4].mean(dim=1)
        torch.testing.assert_close(prompted(method.encoder, images, method.norms, prompts), expected)


def test_each_image_looks_through_the_prompts_it_chose() -> None:
    method = new_method()
    images, pool = random(5, 3, 32, 32), method.pool
    with torch.no_grad():
        features, similarity = method.prompted_features(images, pool.keys, pool.prompts)
        for row, image in enumerate(images.split(1)):
            best, numbers = choose(method.encoder.plain(image), pool.keys, 3)
            own = torch.cat([pool.prompts[m] for m in numbers[0].tolist()]).unsqueeze(0)
            alone = prompted(method.encoder, image, method.norms, own)
            torch.testing.assert_close(features[row : row + 1], alone, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(similarity[row : row + 1], best, rtol=1e-4, atol=1e-5)


def test_the_loss_by_hand() -> None:
    method = new_method(key_weight=0.3)
    method.pool.grow(5, torch.Generator().manual_seed(0))
    images, nothing, pool = random(3, 3, 32, 32), torch.zeros(()), method.pool
    loss = PromptLoss(method, old=2).losses(images, torch.tensor([[2, 0, -100]]), nothing, nothing)
    features, similarity = method.prompted_features(images[:2], pool.keys, pool.prompts)
    new = F.linear(features, pool.head_weight, pool.head_bias)[:, 2:].log_softmax(dim=1)
    expected = -(new[0, 2] + new[1, 0]) / 2 - 0.3 * similarity.sum() / 2
    torch.testing.assert_close(loss[0], expected)
    loss.backward()  # type: ignore[no-untyped-call]
    assert pool.head_weight.grad is not None and pool.prompts.grad is not None and pool.keys.grad is not None
    assert not pool.head_weight.grad[:2].any()  # old classes take no part
    used = set(choose(method.encoder.plain(images), pool.keys, 3)[1].flatten().tolist())
    moved = {m for m in range(6) if pool.prompts.grad[m].any()}
    assert moved and moved <= used and len(used) < 6


def test_a_task_of_five_thousand_images_takes_the_published_number_of_steps() -> None:
    samples = Samples(torch.zeros(5000, 1), torch.zeros(5000).long())
    config = L2PConfig()
    batches = config.batches(samples, None, torch.Generator())
    assert config.epochs * batches.steps == 5 * 313


def test_an_answer_does_not_depend_on_the_batch_and_the_trunk_does_not_move(small_stream: Stream) -> None:
    learner = Learner("l2p", SMALL_VIT, device="cpu", **OPTIONS)
    method = learner.method
    assert isinstance(method, L2P)
    trunk = {k: v.clone() for k, v in method.encoder.state_dict().items()}
    before = method.pool.prompts.detach().clone()
    for task in small_stream[:2]:
        method.learn(task)
    assert not torch.equal(method.pool.prompts, before)
    assert all(torch.equal(v, trunk[k]) for k, v in method.encoder.state_dict().items())
    pixels = torch.cat([learner.prepare(task.train)[::12] for task in small_stream])  # of several tasks
    together = method.log_probabilities(pixels)
    alone = torch.cat([method.log_probabilities(part) for part in pixels.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    # The trap: one task's images alone must not get another answer than in mixed company.
    torch.testing.assert_close(method.log_probabilities(pixels[:4]), together[:4], rtol=1e-5, atol=1e-5)


def test_a_class_can_go(small_stream: Stream) -> None:
    learner = Learner("l2p", SMALL_VIT, device="cpu", **OPTIONS)
    learner.learn(small_stream[0])
    pixels = learner.prepare(small_stream[0].train)[::6]
    before = learner.method.log_probabilities(pixels)
    learner.learn(small_stream[1]).remove("class 0")
    assert isinstance(learner.method, L2P)
    assert learner.method.pool.head_weight.shape == (3, learner.method.encoder.dim)
    assert learner.method.log_probabilities(pixels).shape == (len(before), 3)


def test_impossible_choices_are_explained() -> None:
    with pytest.raises(TplError, match="cannot choose 5 prompts of 4"):
        new_method(prompt_pool=4, prompts_per_image=5)
    with pytest.raises(TplError, match="trained by Adam"):
        new_method(nesterov=True)


def test_a_benchmarks_schedule_is_not_for_adam() -> None:
    for benchmark in ("digits-5t", "c100-10t"):
        spec = RunSpec(benchmark, "l2p")
        options = spec.all_options()
        assert (options["lr"], options["epochs"], options["batch_size"]) == (L2PConfig().lr, 5, 16)
        assert "l2p has its own: epochs=5, batch_size=16, lr=0.001875" in spec.benchmark_note()
    given = RunSpec("digits-5t", "l2p", options={"lr": 0.01, "epochs": 2})
    assert (given.all_options()["lr"], given.all_options()["epochs"]) == (0.01, 2)
    assert "its own: batch_size=16 " in given.benchmark_note()
    assert RunSpec("digits-5t", "replay").all_options()["lr"] == 0.05
