"""Encoders by name, weights from timm, from a local file or from the package, each with its hash."""

from __future__ import annotations

import hashlib
import socket
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from importlib.resources.abc import Traversable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlparse
from urllib.request import Request, getproxies, urlopen

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from tpl.errors import TplError
from tpl.files import sha256_of
from tpl.nets import compact, photos, resnet
from tpl.nets.base import Encoder
from tpl.nets.patch16 import PATCH16, Patch16
from tpl.nets.plain import PlainViT
from tpl.nets.vit import ViTEncoder, check_supported, hash_tensors
from tpl.pretraining import DEIT_611, packaged_record

if TYPE_CHECKING:  # timm takes seconds to import, and the encoders of this package do without it
    from timm.models.vision_transformer import VisionTransformer

# The encoders of the paper's tables; any other ViT or DeiT of timm works by its name as well.
ENCODERS: dict[str, str] = {
    compact.NAME: "ViT for 32 px, 1.3 M parameters, CIFAR-100 pre-training; ships with the package, needs no download",
    photos.NAME: "ViT-Ti/16 for photos at 128 px, from vit_tiny_patch16_224; ships with the package, needs no download",
    "vit_tiny_patch16_224": "ViT-Ti/16, ImageNet-21k to 1k, supervised",
    "vit_small_patch16_224": "ViT-S/16, ImageNet-21k to 1k, supervised",
    "deit_tiny_patch16_224": "DeiT-Ti/16, ImageNet-1k, supervised",
    "deit_small_patch16_224": "DeiT-S/16, ImageNet-1k, supervised (the paper's TPL_PFI rows)",
    "vit_small_patch16_224.dino": "ViT-S/16, ImageNet-1k, self-supervised DINO",
    "vit_base_patch16_224.mae": "ViT-B/16, ImageNet-1k, self-supervised MAE",
    DEIT_611: "DeiT-S/16, 611 ImageNet classes (the paper's main table); needs --weights FILE: MORE's checkpoint",
    resnet.NAME: "ResNet-18 for 32 px, trained from scratch under masks; resnet18:128 is twice as wide",
}


_AT_ONCE = 2.0  # seconds in which it must answer if nobody has asked for it
_PATIENCE = 5.0  # seconds in which a hub should answer
_ARCHITECTURES = {DEIT_611: "deit_small_patch16_224"}  # names that are not timm's, over a network that is


class Packaged(NamedTuple):
    """An encoder whose weights are in the package."""

    create: Callable[[], PlainViT]
    data_config: dict[str, Any]
    weights: Traversable


PACKAGED: dict[str, Packaged] = {
    compact.NAME: Packaged(compact.create_compact, compact.DATA_CONFIG, compact.WEIGHTS),
    photos.NAME: Packaged(photos.create_photos, photos.DATA_CONFIG, photos.WEIGHTS),
}


MOST_KEPT = 100e6  # bytes of weights that a model keeps beside what it has learned


class EncoderError(TplError):
    """The encoder or its weights are not available."""


def create_encoder(name: str = compact.NAME, weights: Path | str | None = None, download: bool = True) -> Encoder:
    """The encoder `name`: frozen, with its pre-trained weights, or a network to train from scratch.

    `weights` is a local `.safetensors` file or a state dict saved by torch; without it timm downloads its weights of
    that name, and `compact` and `photos` use those in the package. Without `download`, timm's weights must have been
    downloaded before, and no hub is contacted.
    """
    if resnet.is_resnet(name):
        if weights is not None:
            raise EncoderError(f"'{name}' is trained from scratch and takes no weight file; leave --weights out.")
        return resnet.create_resnet(name)
    if name in PACKAGED:
        if weights is None:
            return _packaged(name)
        model, data_config = _empty(name), dict(PACKAGED[name].data_config)
        return _from_file(name, model, data_config, Path(weights), remembered=Path(weights))
    if weights is not None:
        path = Path(weights)
        _refuse_small_file(name, path)
        model = _without_weights(name)
        return _from_file(name, model, _data_config(name, model), path, remembered=path)
    if name in _ARCHITECTURES:
        raise EncoderError(
            f"'{name}' cannot be downloaded by this program: get the checkpoint that the public code of MORE links to "
            "(best_checkpoint.pth, a DeiT-S/16 with 611 classes) and pass it with --weights FILE."
        )
    model = _from_hub_cache(name)
    if model is None:
        if download:
            _refuse_unsuitable(name)
        if download and not can_be_had(name):
            raise EncoderError(_not_downloaded(name, "the hub cannot be reached"))
        try:
            model = _pretrained(name, overlay=None if download else _downloaded(name))
        except EncoderError:
            raise
        except Exception as error:
            raise EncoderError(_not_downloaded(name, type(error).__name__)) from error
    return ViTEncoder(model, name, hash_tensors(model.state_dict()), _data_config(name, model), weights=None)


def _not_downloaded(name: str, why: str) -> str:
    """What to do without the weights."""
    return (
        f"The weights of '{name}' could not be downloaded ({why}). Two ways out: connect to the network once so that "
        f"timm can fetch them, or pass a local file with --weights FILE. Without either: --encoder {photos.NAME} for "
        f"photos and --encoder {compact.NAME} for 32 pixels (CIFAR-100, on which it was pre-trained, aside) need no "
        f"download, and --encoder {resnet.NAME} trains from scratch."
    )


def can_be_had(name: str) -> bool:
    """Whether weights are on this machine, or where timm gets them answers; the hub's own client tries for a minute."""
    from huggingface_hub import constants

    try:
        _downloaded(name)
        return True
    except EncoderError:
        pass
    if getproxies():
        return True  # which the client knows how to use
    hub = urlparse(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=_PATIENCE).close()
        return True
    except OSError:
        return False


def hub_answers() -> bool:
    """Whether the hub that timm gets its weights from can be reached at once, and the user has not forbidden it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    found: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        try:
            with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_AT_ONCE):
                found.put(True)
        except (OSError, HTTPException, ValueError):  # no network, a proxy that says no, an address that is none
            found.put(False)

    Thread(target=ask, daemon=True).start()  # a name may take longer to look up than any time limit
    try:
        return found.get(timeout=_AT_ONCE)
    except Empty:
        return False


def check_encoder_name(name: str) -> None:
    """Refuse a name that is no network's, here or in timm."""
    if name in ENCODERS or resnet.is_resnet(name):
        return
    import timm

    if timm.is_model(name.split(".")[0]):
        return
    near = timm.list_models(f"*{name.split('_')[0]}*patch16_224*")[:5]
    also = f" In timm: {', '.join(near)}, ..." if near else ""
    raise EncoderError(f"There is no encoder '{name}' in timm. Known here: {', '.join(ENCODERS)}.{also}")


def _downloaded(name: str) -> dict[str, Any] | None:
    """Where timm finds the weights that it has downloaded before; None if this network needs no download."""
    if (file := _in_hub_cache(name)) is not None:
        return {"file": str(file), "custom_load": False}
    import timm
    from huggingface_hub import try_to_load_from_cache

    check_encoder_name(name)
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        return None
    names = (config.hf_hub_filename or "model.safetensors", "pytorch_model.bin")
    hub = config.hf_hub_id.partition("@") if config.hf_hub_id else None
    found = [try_to_load_from_cache(hub[0], file, revision=hub[2] or None) for file in names] if hub else []
    cached = [Path(file) for file in found if isinstance(file, str)]
    if config.url:
        old = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(config.url).path).name
        cached += [old] if old.is_file() and not cached else []
    if not cached:
        raise EncoderError(
            f"The weights of '{name}' are not on this machine, and loading a model contacts no hub. Set TPL_DOWNLOAD=1 "
            "to let timm fetch them, or pass a local file with --weights FILE."
        )
    _refuse_small_file(name, cached[0])
    return {"file": str(cached[0]), "custom_load": cached[0].suffix == ".npz"}


class Download(NamedTuple):
    """Weights that timm has to fetch."""

    bytes: int
    licence: str


def download_of(name: str) -> Download | None:
    """What `create_encoder` would download; None if the weights are here already, or are not timm's."""
    if name in PACKAGED or name in _ARCHITECTURES or resnet.is_resnet(name) or _in_hub_cache(name) is not None:
        return None
    import timm

    check_encoder_name(name)
    config, network = timm.get_pretrained_cfg(name), network_shapes(name)
    if config is None or not config.has_weights or network is None:
        return None
    try:
        _downloaded(name)
        return None
    except EncoderError:
        size = sum(4 * p.numel() for p in network.parameters())
        return Download(size, (config.license or "not stated by timm").capitalize())


def network_shapes(name: str) -> Any:
    """A network without memory for its weights; None for one of somebody's own that cannot be built so."""
    if (plain := _patch16(name)) is not None:
        with torch.device("meta"):
            return plain.create()
    import timm

    try:
        with torch.device("meta"):
            return timm.create_model(_ARCHITECTURES.get(name, name), num_classes=0)
    except (RuntimeError, NotImplementedError):
        return None


def _refuse_unsuitable(name: str) -> None:
    """Refuse a network that adapters cannot be put into before its weights are downloaded."""
    check_encoder_name(name)
    if name not in ENCODERS and (network := network_shapes(name)) is not None:
        check_supported(_as_vit(name, network), name)


def _refuse_small_file(name: str, file: Path) -> None:
    """Refuse a file with less than a byte per weight before memory is taken for the network."""
    check_encoder_name(name)
    if not file.is_file():
        raise EncoderError(f"There is no weight file {file}.")
    network = network_shapes(name)
    count = 0 if network is None else _numbers(network)
    if file.stat().st_size < count:
        raise EncoderError(f"{file} is too small to hold the weights of '{name}' ({count} numbers).")


def _patch16(name: str) -> Patch16 | None:
    """The network, if it is one that needs no timm."""
    return PATCH16.get(_ARCHITECTURES.get(name, name))


def _without_weights(name: str) -> VisionTransformer:
    """A network for weights that are here."""
    if _patch16(name) is not None:
        network: VisionTransformer = network_shapes(name)
        return network
    import timm

    return _as_vit(name, timm.create_model(name, num_classes=0))


def _pretrained(name: str, overlay: dict[str, Any] | None) -> VisionTransformer:
    """timm's network with timm's weights, downloaded unless `overlay` says where they are."""
    import timm

    more = {"pretrained_cfg_overlay": overlay} if overlay else {}
    return _as_vit(name, timm.create_model(name, pretrained=True, num_classes=0, **more))


def _from_hub_cache(name: str) -> VisionTransformer | None:
    """A network whose weights timm has downloaded before, if it needs no timm; None if timm should look for them."""
    file = _in_hub_cache(name)
    try:
        return None if file is None else _loaded(name, _without_weights(name), file)
    except EncoderError:  # a later timm may store them in another form
        return None


def _in_hub_cache(name: str) -> Path | None:
    """The weights that timm has downloaded of a network that needs no timm."""
    plain = PATCH16.get(name)
    if plain is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(plain.hub, "model.safetensors")
    return Path(file) if isinstance(file, str) else None


def _as_vit(name: str, network: Any) -> VisionTransformer:
    """The network, if it is a ViT."""
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(network, VisionTransformer):
        raise EncoderError(
            f"'{name}' is a {type(network).__name__}; only ViT and DeiT encoders can carry adapters, such as "
            "vit_tiny_patch16_224."
        )
    return network


def _data_config(name: str, model: VisionTransformer) -> dict[str, Any]:
    if (plain := _patch16(name)) is not None:
        return plain.data_config
    from timm.data import resolve_data_config

    config: dict[str, Any] = resolve_data_config(model=model)
    return config


def _empty(name: str) -> Any:
    """A network of the package without random weights: those of a file replace them."""
    with torch.device("meta"):
        return PACKAGED[name].create()


def _packaged(name: str) -> Encoder:
    """An encoder with the weights in the package, whose fingerprint is the recorded one if their sha256 is.

    Hashed is what is loaded: the file is read once.
    """
    packaged, made = PACKAGED[name], packaged_record(name)
    content = packaged.weights.read_bytes()
    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(hashlib.sha256, content)  # on another core, while the network is made
        try:
            state = _as_float32(load(content))
        except SafetensorError as error:
            raise EncoderError(f"{packaged.weights} cannot be read as weights: {error}") from error
        network = _with_weights(name, _empty(name), state, packaged.weights)
        sha256 = hashing.result().hexdigest()
    return ViTEncoder(
        network,
        name,
        sha256,
        dict(packaged.data_config),
        fingerprint=made["fingerprint"] if sha256 == made["sha256"] else None,
    )


def _from_file(
    name: str, model: VisionTransformer, data_config: dict[str, Any], file: Path, remembered: Path | None
) -> Encoder:
    return ViTEncoder(_loaded(name, model, file), name, sha256_of(file), data_config, weights=remembered)


def _loaded(name: str, model: VisionTransformer, file: Path) -> VisionTransformer:
    """The network with the weights of a file, and all of them."""
    state = {k: v for k, v in read_weights(file).items() if not k.startswith(("head.", "head_dist."))}
    return _with_weights(name, model, state, file)


def _with_weights(
    name: str, model: VisionTransformer, state: dict[str, Tensor], file: Path | Traversable
) -> VisionTransformer:
    """The network with these weights of a file, and all of them."""
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:  # right names, other shapes
        detail = str(error).splitlines()[-1].strip()
        raise EncoderError(f"{file} does not hold the weights of '{name}' ({detail}).") from error
    if missing or unexpected:
        detail = "; ".join(
            f"{what}: {', '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}"
            for what, keys in (("missing", missing), ("unexpected", unexpected))
            if keys
        )
        raise EncoderError(f"{file} does not hold the weights of '{name}' ({detail}).")
    return model


def weights_in_a_row(encoder: Encoder) -> Tensor | None:
    """All weights of a network that was downloaded, float32 `[n]`; None for any other, and for a large one.

    A model that keeps them needs no network on the next machine.
    """
    if not isinstance(encoder, ViTEncoder) or encoder.name in PACKAGED or encoder.weights is not None:
        return None
    try:
        check_encoder_name(encoder.name)
    except EncoderError:  # a network of somebody's own, which a name does not bring back
        return None
    parts = list(encoder.vit.state_dict().values())
    if any(part.dtype != torch.float32 for part in parts) or sum(part.nbytes for part in parts) > MOST_KEPT:
        return None
    return torch.cat([part.detach().flatten().cpu() for part in parts])


def encoder_from_row(name: str, row: Tensor) -> Encoder:
    """The encoder whose `weights_in_a_row` these are."""
    wrong = EncoderError(f"What is stored as the weights of '{name}' does not fit that network.")
    if name in PACKAGED or resnet.is_resnet(name):  # never stored
        raise wrong
    check_encoder_name(name)
    shapes = network_shapes(name)  # counted before memory is taken
    if row.dtype != torch.float32 or row.dim() != 1 or (shapes is not None and _numbers(shapes) != len(row)):
        raise wrong
    model = _without_weights(name)
    if _numbers(model) != len(row):
        raise wrong
    state = model.state_dict()
    parts = row.split([part.numel() for part in state.values()])
    model.load_state_dict(
        {key: part.view(state[key].shape).clone() for key, part in zip(state, parts, strict=True)}, assign=True
    )
    return ViTEncoder(model, name, hash_tensors(model.state_dict()), _data_config(name, model), weights=None)


def _numbers(network: VisionTransformer) -> int:
    return sum(part.numel() for part in network.state_dict().values())


def read_weights(file: Path) -> dict[str, Tensor]:
    """Tensors by name from safetensors or a torch state dict; never executes pickled code."""
    if not file.is_file():
        raise EncoderError(f"There is no weight file {file}.")
    try:
        if file.suffix == ".safetensors":
            state: Any = load_file(file)
        else:
            # Training programs store their options beside the weights: attributes only, nothing is executed.
            with torch.serialization.safe_globals([Namespace]):
                state = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise EncoderError(f"{file} cannot be read as weights: {error}") from error
    except Exception as error:  # torch's UnpicklingError: the file has more than tensors
        raise EncoderError(f"{file} holds more than tensors and was not loaded; save it as safetensors.") from error
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]  # checkpoints of the DeiT family wrap the state dict
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise EncoderError(f"{file} is no plain state dict: it must map names to tensors.")
    return _as_float32(state)


def _as_float32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in full precision: safetensors maps a file into memory, and a file may change."""
    return {k: v.to(torch.float32 if v.is_floating_point() else v.dtype, copy=True) for k, v in state.items()}
