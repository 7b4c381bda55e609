"""Ways to keep tasks apart that share one set of adapters, one file each."""

from tpl.methods.bank.protect.base import ProtectConfig, Protection
from tpl.methods.bank.protect.hat import Hat
from tpl.methods.bank.protect.supsup import SupSup

PROTECTIONS: dict[str, type[Protection]] = {p.name: p for p in (Hat, SupSup)}

__all__ = ["PROTECTIONS", "ProtectConfig", "Protection"]
