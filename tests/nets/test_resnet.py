"""The ResNet to train from scratch: torchvision's network, with masks and gates that hold channels apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from tpl.errors import TplError
from tpl.nets import EncoderError, ResNetEncoder, create_encoder, resnet
from tpl.nets.resnet import Kernels, KernelStack, Layout


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_norms(encoder: ResNetEncoder, seed: int = 0) -> Tensor:
    """Norms with scales, shifts and statistics that all matter."""
    noise = torch.rand(4, encoder.layout.channels, generator=random(seed))
    return noise + torch.tensor([0.5, -0.5, -0.5, 0.5]).unsqueeze(1)


def some_mask(kernels: Kernels, seed: int = 0) -> Tensor:
    return (torch.rand(kernels.units, generator=random(seed)) > 0.4).float()


@pytest.fixture
def tiny() -> tuple[ResNetEncoder, Kernels, Tensor]:
    encoder = ResNetEncoder(8)
    return encoder, encoder.new_adapters(1, random()), torch.randn(4, 3, 32, 32, generator=random(1))


@pytest.mark.parametrize("learning", [False, True])
def test_it_is_torchvisions_resnet18_with_a_small_stem(learning: bool) -> None:
    reference = resnet18()
    reference.conv1, reference.maxpool, reference.fc = (
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.Identity(),
        nn.Identity(),
    )
    encoder = ResNetEncoder()
    kernels, norms = encoder.new_adapters(1, random()), some_norms(encoder)
    convs: list[nn.Module] = [reference.conv1]
    batch_norms: list[nn.Module] = [reference.bn1]
    for stage in (reference.layer1, reference.layer2, reference.layer3, reference.layer4):
        for block in stage:
            beside = list(block.downsample) if block.downsample is not None else []
            convs += [block.conv1, block.conv2, *beside[:1]]
            batch_norms += [block.bn1, block.bn2, *beside[1:]]
    with torch.no_grad():
        for conv, kernel in zip(convs, encoder.layout.kernels(kernels.kernels), strict=True):
            conv.weight.copy_(kernel)
        for norm, own in zip(batch_norms, norms.split([c.out for c in encoder.layout.convs], dim=1), strict=True):
            for there, here in zip((norm.weight, norm.bias, norm.running_mean, norm.running_var), own, strict=True):
                there.copy_(here)
        images = torch.randn(2, 3, 32, 32, generator=random(1))
        expected = reference.train(learning)(images)
        found = encoder(images, norms, kernels.weights, learning=learning)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        opened = encoder(images, norms, kernels.weights.fold(torch.ones(kernels.units)), learning=learning)
        assert torch.equal(opened, found)
    assert sum(k.numel() for k in kernels.parameters()) == sum(c.weight.numel() for c in convs)


def test_closed_masks_leave_nothing_and_one_closed_unit_is_zero(tiny: tuple[ResNetEncoder, Kernels, Tensor]) -> None:
    encoder, kernels, images = tiny
    norms, mask = some_norms(encoder), torch.ones(kernels.units)
    assert not bool(encoder(images, norms, kernels.weights.fold(0 * mask)).any())
    last = encoder.layout.groups[-1]
    mask[-last] = 0
    features = encoder(images, norms, kernels.weights.fold(mask))
    assert not bool(features[:, 0].any()) and bool(features[:, 1:].any(dim=0).all())


def test_soft_masks_scale_what_the_unit_says(tiny: tuple[ResNetEncoder, Kernels, Tensor]) -> None:
    """The last units stand in front of nothing but the mean over the picture."""
    encoder, kernels, images = tiny
    norms, mask = some_norms(encoder), torch.ones(kernels.units)
    whole = encoder(images, norms, kernels.weights.fold(mask))
    mask[-encoder.layout.groups[-1] :] = 0.3
    torch.testing.assert_close(encoder(images, norms, kernels.weights.fold(mask)), 0.3 * whole)


def test_gates_by_hand() -> None:
    """Entry by entry: frozen where the unit behind it and the unit before it are both in use."""
    layout = Layout(2)
    kernels = Kernels(layout, random())
    used = torch.stack([some_mask(kernels, seed) for seed in (0, 1)])
    found = KernelStack(layout, kernels.kernels.expand(2, -1)).gates(used).kernels
    assert found.shape == (2, kernels.kernels.numel())
    assert torch.equal(kernels.weights.gates(used[0]).kernels, found[0])
    starts = torch.tensor([0, *layout.groups]).cumsum(0).tolist()
    for network in (0, 1):
        for conv, gate in zip(layout.convs, layout.kernels(found[network]), strict=True):
            for out in range(conv.out):
                for into in range(conv.into):
                    held = bool(used[network, starts[conv.feeds] + out])
                    if conv.reads is not None:
                        held = held and bool(used[network, starts[conv.reads] + into])
                    assert gate[out, into].unique().tolist() == [0.0 if held else 1.0]


@pytest.mark.parametrize("learning", [False, True])
def test_a_task_looks_at_no_weight_that_its_gates_leave_free(
    tiny: tuple[ResNetEncoder, Kernels, Tensor], learning: bool
) -> None:
    """By autograd, the shortcuts included; and moving all free weights does not move one bit of the features."""
    encoder, kernels, images = tiny
    mask = some_mask(kernels)
    norms = encoder.reestimated_norms(some_norms(encoder), kernels.weights.fold(mask), [images], torch.float32)
    gate = kernels.weights.gates(mask).kernels
    features = encoder(images, norms, kernels.weights.fold(mask), learning=learning)
    slope = torch.randn(features.shape, generator=random(2))
    (gradient,) = torch.autograd.grad((features * slope).sum(), kernels.kernels)
    assert not bool(gradient[gate > 0].any())
    assert float((gradient[gate == 0] != 0).float().mean()) > 0.95  # what is frozen is what the task stands on
    moved = kernels.kernels.detach() + gate * torch.randn(gate.shape, generator=random(3))
    again = encoder(images, norms, KernelStack(encoder.layout, moved, mask), learning=learning)
    assert torch.equal(again, features)


def test_settled_statistics_are_those_of_the_batches(tiny: tuple[ResNetEncoder, Kernels, Tensor]) -> None:
    """With one batch, answers go by the very statistics that a training step would have used."""
    encoder, kernels, images = tiny
    norms, weights = some_norms(encoder), kernels.weights.fold(some_mask(kernels))
    settled = encoder.reestimated_norms(norms, weights, [images], torch.float32)
    assert torch.equal(settled[:2], norms[:2]) and not torch.equal(settled[2:], norms[2:])
    stepped = encoder(images, norms, weights, learning=True)
    torch.testing.assert_close(encoder(images, settled, weights), stepped, rtol=1e-3, atol=1e-4)
    # Over several batches, the stem's are the plain mean and variance of all images together.
    several = encoder.reestimated_norms(norms, weights, images.split(2), torch.float32)
    stem = nn.functional.conv2d(images, encoder.layout.kernels(kernels.kernels)[0], padding=1)
    torch.testing.assert_close(several[2, :8], stem.mean(dim=(0, 2, 3)).detach())
    torch.testing.assert_close(several[3, :8], stem.var(dim=(0, 2, 3), unbiased=False).detach())


def test_half_precision_comes_close(tiny: tuple[ResNetEncoder, Kernels, Tensor]) -> None:
    encoder, kernels, images = tiny
    norms, weights = encoder.new_norms(), kernels.weights.fold(some_mask(kernels))
    for learning in (False, True):
        exact = encoder(images, norms, weights, learning=learning).detach()
        rough = encoder(images.bfloat16(), norms, weights, dtype=torch.bfloat16, learning=learning).detach()
        assert rough.dtype == torch.float32
        assert float((rough - exact).abs().mean() / exact.abs().mean()) < 0.05


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_as_on_a_gpu_channels_come_last_from_end_to_end(
    tiny: tuple[ResNetEncoder, Kernels, Tensor],
    dtype: torch.dtype,
    close: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same numbers; and no convolution or norm, forward or backward, meets a tensor in another order."""
    encoder, kernels, images = tiny
    mask = some_mask(kernels).requires_grad_()
    plain = encoder(images.to(dtype), some_norms(encoder), kernels.weights.fold(mask), dtype=dtype, learning=True)
    monkeypatch.setattr(resnet, "channels_come_last", lambda images: True)
    last, orders = torch.channels_last, []

    def note(y: Tensor) -> None:
        orders.append(y.is_contiguous(memory_format=last))
        y.register_hook(lambda slope: orders.append(slope.is_contiguous(memory_format=last)))

    weights = kernels.weights.fold(mask)
    found = encoder(images.to(dtype), some_norms(encoder), weights, dtype=dtype, learning=True, watch=note)
    assert float(((found - plain).abs().mean() / plain.abs().mean()).detach()) < close
    slopes = [torch.autograd.grad(z.square().mean(), [kernels.kernels, mask]) for z in (plain, found)]
    assert len(orders) == 2 * len(encoder.layout.convs) and all(orders)
    if dtype == torch.float32:
        for here, there in zip(*slopes, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-5)


def test_names_and_fingerprints() -> None:
    usual, wide = create_encoder("resnet18"), create_encoder("resnet18:128")
    assert (usual.name, usual.dim, wide.name, wide.dim) == ("resnet18", 512, "resnet18:128", 1024)
    assert create_encoder("resnet18:64").name == "resnet18"
    assert usual.fingerprint == create_encoder("resnet18").fingerprint != wide.fingerprint
    kernels = [create_encoder("resnet18:2").new_adapters(1, random(seed)).state_dict()["kernels"] for seed in (0, 0, 1)]
    assert torch.equal(kernels[0], kernels[1]) and not torch.equal(kernels[0], kernels[2])
    for name in ("resnet18:", "resnet18:0", "resnet18:-8", "resnet18:wide"):
        with pytest.raises(TplError, match="resnet18:128"):
            create_encoder(name)
    with pytest.raises(EncoderError, match="takes no weight file"):
        create_encoder("resnet18", "weights.safetensors")
    with pytest.raises(TplError, match="no pre-trained features"):
        usual.plain(torch.zeros(1, 3, 32, 32))
