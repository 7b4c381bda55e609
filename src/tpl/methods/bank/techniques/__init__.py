"""Training-time techniques of OOD detection, one file each."""

from tpl.methods.bank.techniques.base import Technique
from tpl.methods.bank.techniques.cmg import CMG
from tpl.methods.bank.techniques.cutmix import CutMix
from tpl.methods.bank.techniques.logitnorm import LogitNorm
from tpl.methods.bank.techniques.mcdropout import MCDropout
from tpl.methods.bank.techniques.mixoe import MixOE
from tpl.methods.bank.techniques.mixup import Mixup
from tpl.methods.bank.techniques.oe import OE
from tpl.methods.bank.techniques.vos import VOS

TECHNIQUES: dict[str, type[Technique]] = {
    t.name: t for t in (Technique, CMG, VOS, OE, MixOE, LogitNorm, MCDropout, Mixup, CutMix)
}

__all__ = ["TECHNIQUES", "Technique"]
