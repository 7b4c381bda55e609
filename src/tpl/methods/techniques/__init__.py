"""Training-time techniques of OOD detection, one file each."""

from tpl.methods.techniques.base import Technique
from tpl.methods.techniques.cmg import CMG
from tpl.methods.techniques.cutmix import CutMix
from tpl.methods.techniques.logitnorm import LogitNorm
from tpl.methods.techniques.mcdropout import MCDropout
from tpl.methods.techniques.mixoe import MixOE
from tpl.methods.techniques.mixup import Mixup
from tpl.methods.techniques.oe import OE
from tpl.methods.techniques.vos import VOS

TECHNIQUES: dict[str, type[Technique]] = {
    t.name: t for t in (Technique, CMG, VOS, OE, MixOE, LogitNorm, MCDropout, Mixup, CutMix)
}

__all__ = ["TECHNIQUES", "Technique"]
