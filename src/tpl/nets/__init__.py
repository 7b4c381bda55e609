"""What sees the images: frozen timm trunks, adapters, HAT masks, weight files and their hashes."""

from tpl.nets.adapters import Adapters, AdapterStack, unstacked
from tpl.nets.encoder import Encoder
from tpl.nets.weights import ENCODERS, EncoderError, create_encoder

__all__ = ["ENCODERS", "AdapterStack", "Adapters", "Encoder", "EncoderError", "create_encoder", "unstacked"]
