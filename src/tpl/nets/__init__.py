"""Encoders: frozen timm trunks with adapters, a ResNet to train from scratch, and their weight files."""

from tpl.nets.base import Encoder, Trainable, Weights, unstacked
from tpl.nets.blocks import Adapters, AdapterStack, Part, TransposedTask
from tpl.nets.compiling import Compiled, import_compiler_ahead
from tpl.nets.resnet import ResNetEncoder, is_resnet
from tpl.nets.vit import TransposedTrunk, ViTEncoder, as_vit
from tpl.nets.weights import ENCODERS, EncoderError, check_encoder_name, create_encoder
from tpl.nets.whole import WholeViT

__all__ = [
    "ENCODERS",
    "AdapterStack",
    "Adapters",
    "Compiled",
    "Encoder",
    "EncoderError",
    "Part",
    "ResNetEncoder",
    "Trainable",
    "TransposedTask",
    "TransposedTrunk",
    "ViTEncoder",
    "Weights",
    "WholeViT",
    "as_vit",
    "check_encoder_name",
    "create_encoder",
    "import_compiler_ahead",
    "is_resnet",
    "unstacked",
]
