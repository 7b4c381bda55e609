"""Many tasks asked at once: what a loop over tasks says, to rounding, and the same bits in any company."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from elsewhere import ELSEWHERE, elsewhere
from tpl.engine import choose_compute
from tpl.methods.bank import Bank, Query
from tpl.methods.bank import bank as bank_module
from tpl.methods.bank.bank import CPUInference, PerTaskInference, QueryPart, RowInference, _filled_up, _grouped
from tpl.methods.bank.protect import ProtectConfig
from tpl.nets import Encoder, ResNetEncoder, ViTEncoder, create_encoder
from tpl.stream.preprocess import Preprocess

TASKS = 3


def small_vit(**changes: Any) -> ViTEncoder:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0, **changes)
    return ViTEncoder(vit, "small", "0" * 64, resolve_data_config(model=vit))


def new_bank(encoder: Encoder, device: str = "cpu", precision: str = "fp32", **options: Any) -> Bank:
    """Random tasks: masks, norms and heads of their own."""
    compute, generator = choose_compute(device, precision, "off"), torch.Generator().manual_seed(0)
    normalise = Preprocess(encoder.data_config).normaliser(compute.device, compute.dtype)
    bank = Bank(encoder.to(compute.device), ProtectConfig(latent=16, **options), compute, normalise, generator)
    for _ in range(TASKS):
        add_task(bank, generator)
    return bank


def add_task(bank: Bank, generator: torch.Generator) -> None:
    model = bank.new_task(3, 4, generator)
    with torch.no_grad():
        model.norms.mul_(1 + 0.2 * torch.rand(model.norms.shape, generator=generator).to(model.norms.device))
    if bank.config.protect == "supsup":
        kept = bank.protection.kept(bank.adapters.weights, model.embedding.detach())
        model.embedding = nn.Parameter(kept, requires_grad=False)
    bank.add(model)


def grow(bank: Bank) -> None:
    """Each task gets a set of adapters of its own, with other weights."""
    for number, model in enumerate(bank.tasks[1:], start=1):
        bank.sets.append(copy.deepcopy(bank.adapters))
        model.adapter_set = number
        with torch.no_grad():
            for parameter in bank.sets[-1].parameters():
                parameter.mul_(1 + number)


def some_pixels(count: int, size: int = 32) -> Tensor:
    shape = (count, 3, size, size)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def by_loop(bank: Bank, pixels: Tensor) -> list[Tensor]:
    """One plain forward pass a task."""
    with torch.no_grad():
        images = bank.normalise(pixels.to(bank.compute.device))
        pairs = enumerate(bank.tasks)
        return [bank.encoder(images, own.norms, bank.weights(t), dtype=bank.compute.dtype) for t, own in pairs]


def by_bank(bank: Bank, pixels: Tensor) -> list[Tensor]:
    return [outputs.features for outputs in bank.query(pixels, [Query(t) for t in range(len(bank.tasks))])]


def assert_close(found: list[Tensor], expected: list[Tensor], precision: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < precision


@pytest.fixture(scope="module")
def compact() -> Bank:
    return new_bank(create_encoder("compact"))


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return some_pixels(261)  # two blocks of images, the second no multiple of four


def test_every_task_says_what_it_says_in_a_loop(compact: Bank, pixels: Tensor) -> None:
    assert isinstance(compact._inference, CPUInference)
    found = by_bank(compact, pixels[:21])
    assert_close(found, by_loop(compact, pixels[:21]))
    assert float((found[0] - found[1]).abs().max()) > 0.1  # each by its own model


@pytest.mark.parametrize("how", [CPUInference, RowInference])
@pytest.mark.parametrize("options", [{"protect": "supsup"}, {"masks": "soft"}])
def test_with_other_masks_too(how: type[CPUInference | RowInference], options: dict[str, Any], pixels: Tensor) -> None:
    encoder = create_encoder("compact")
    assert isinstance(encoder, ViTEncoder)
    bank = new_bank(encoder, **options)
    bank._inference = how(bank, encoder)
    assert_close(by_bank(bank, pixels[:5]), by_loop(bank, pixels[:5]))


def test_a_pair_has_the_same_answer_in_any_company(compact: Bank, pixels: Tensor) -> None:
    """Up to rounding, and in the same company every time: bit for bit."""
    together = by_bank(compact, pixels)
    assert all(torch.equal(a, b) for a, b in zip(by_bank(compact, pixels), together, strict=True))
    assert_close([compact.outputs(pixels, 1).features], together[1:2])
    for i in (0, 7, 255, 260):
        alone = pixels[i : i + 1]
        assert_close([a[0] for a in by_bank(compact, alone)], [b[i] for b in together])
        assert_close([compact.outputs(alone, 1).features[0]], [together[1][i]])
    rows = [torch.tensor([3, 4, 200, 258]), torch.tensor([], dtype=torch.long), torch.tensor([260])]
    asked = compact.query(pixels, [Query(t, own) for t, own in enumerate(rows)])
    filled = [t for t, own in enumerate(rows) if len(own)]
    assert_close([asked[t].features for t in filled], [together[t][rows[t]] for t in filled])
    assert [len(seen.logits) for seen in asked] == [4, 0, 1]


def test_no_images_are_no_answers(compact: Bank, pixels: Tensor) -> None:
    (seen,) = compact.query(pixels[:0], [Query(1)])
    assert seen.features.shape == (0, 128) and seen.logits.shape == (0, 3)


def test_without_queries_there_are_no_answers() -> None:
    """Also before the first task, where a pass would have nothing to gather from."""
    encoder = small_vit()
    bank = new_bank(encoder)
    bank._inference = RowInference(bank, encoder)
    bank.tasks.clear()
    assert bank.query(some_pixels(3), []) == []


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"init_values": 0.3}, CPUInference),  # layer scales
        ({"global_pool": "avg"}, CPUInference),  # all tokens count to the end
        ({"qkv_bias": False, "reg_tokens": 2}, CPUInference),
        ({"qk_norm": True}, RowInference),  # blocks that are not standard are asked as they are
    ],
)
def test_other_transformers(changes: dict[str, Any], how: type) -> None:
    bank = new_bank(small_vit(**changes))
    assert type(bank._inference) is how
    pixels = some_pixels(5)
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))


def test_rows_that_gather_norms_and_masks_are_those_of_the_loop(pixels: Tensor) -> None:
    """What a GPU does, less the recording."""
    encoder = small_vit()
    bank = new_bank(encoder)
    bank._inference = RowInference(bank, encoder)
    assert_close(by_bank(bank, pixels[:90]), by_loop(bank, pixels[:90]))  # 270 pairs: two passes


@pytest.mark.parametrize(("replayed", "large"), [(False, False), (True, False), (True, True)])
def test_tasks_with_adapters_of_their_own_share_passes(
    replayed: bool, large: bool, pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes are replays of a CUDA graph, a few rows of every set fill one; elsewhere a set has its own.

    So it has if a set is too large for several copies.
    """
    monkeypatch.setattr(bank_module, "ROWS", 32)
    if large:
        monkeypatch.setattr(bank_module, "MOST_GATHERED", 1)
    with elsewhere(recording=replayed):
        encoder = small_vit()
        bank = new_bank(encoder, ELSEWHERE.type)
        grow(bank)
        inference = bank._inference
        assert isinstance(inference, RowInference)
        few = [QueryPart(t, t, torch.arange(2 + t)) for t in range(TASKS)]
        assert len(list(inference.batches(few, 5))) == (1 if replayed and not large else TASKS)
        if replayed:
            assert inference._group == (32 if large else 8)
        asked = pixels[:21].to(ELSEWHERE)
        found, expected = by_bank(bank, asked), by_loop(bank, asked)
        assert_close([each.cpu() for each in found], [each.cpu() for each in expected])
        if replayed:
            (some,) = bank.query(asked, [Query(1, torch.tensor([3, 20]))])
            assert torch.equal(some.features.cpu(), found[1].cpu()[[3, 20]])


def test_a_network_from_scratch_is_asked_task_by_task() -> None:
    bank = new_bank(ResNetEncoder(8))
    for model in bank.tasks:
        model.embedding.add_(1)  # more units open: something must come through untrained kernels
    assert isinstance(bank._inference, PerTaskInference)
    pixels = some_pixels(8)
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))
    (some,) = bank.query(pixels, [Query(2, torch.tensor([1, 5]))])
    torch.testing.assert_close(some.features, by_bank(bank, pixels)[2][[1, 5]])


@pytest.mark.parametrize("how", [CPUInference, RowInference])
def test_what_was_prepared_follows_every_change_of_a_task(how: type[CPUInference | RowInference]) -> None:
    encoder, pixels = small_vit(), some_pixels(4)
    bank = new_bank(encoder)
    bank._inference = how(bank, encoder)
    by_bank(bank, pixels)
    with torch.no_grad():
        bank.adapters.down_weight.mul_(3)
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))
    with torch.no_grad():
        bank.tasks[1].norms.mul_(1.5)
        bank.tasks[2].embedding.neg_()
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))
    bank.retire(0)
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))
    add_task(bank, torch.Generator().manual_seed(5))
    assert_close(by_bank(bank, pixels), by_loop(bank, pixels))


def test_passes_are_filled_up_and_nothing_is_lost() -> None:
    pieces = [QueryPart(0, 0, torch.arange(5)), QueryPart(1, 2, torch.arange(3)), QueryPart(2, 1, torch.arange(1))]
    groups = [[(p.number, p.task, p.rows.tolist()) for p in group] for group in _grouped(pieces, 4)]
    assert groups == [[(0, 0, [0, 1, 2, 3])], [(0, 0, [4]), (1, 2, [0, 1, 2])], [(2, 1, [0])]]
    assert [len(part.rows) for part in _filled_up(pieces, 4)] == [5, 3, 1, 3]
    assert _filled_up(pieces, 3) == pieces


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("protect", ["hat", "supsup", "hat, grown"])
def test_on_a_gpu_too_a_pair_has_the_same_bits_in_any_company(precision: str, protect: str, pixels: Tensor) -> None:
    bank = new_bank(create_encoder("compact"), "cuda", precision, protect=protect.split(",")[0])
    alone = bank.outputs(pixels, 0).features
    if protect.endswith("grown"):
        grow(bank)
        assert torch.equal(bank.outputs(pixels, 0).features, alone)  # nor does it change with growth
    together = by_bank(bank, pixels)
    assert_close(together, by_loop(bank, pixels), 1e-3 if precision == "fp32" else 0.05)
    for t in range(TASKS):
        assert torch.equal(bank.outputs(pixels, t).features, together[t])
    assert all(torch.equal(a[0], b[258]) for a, b in zip(by_bank(bank, pixels[258:259]), together, strict=True))
    rows = torch.tensor([0, 9, 260])
    (some,) = bank.query(pixels, [Query(1, rows)])
    assert torch.equal(some.features, together[1][rows.cuda()])
