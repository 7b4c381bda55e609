"""All task models in one network, kept apart: what the TIL+OOD family (TPL, HAT, MORE, ROW, SupSup) is built on."""

from tpl.methods.bank.asking import Question
from tpl.methods.bank.bank import Bank, Outputs, within_tasks
from tpl.methods.bank.method import ENOUGH_TO_HOLD_OUT, BankMethod, HeldOut, Seen
from tpl.methods.bank.models import TaskModel
from tpl.methods.bank.replay import MemoryBank, MemoryConfig, ReplayBank

__all__ = [
    "ENOUGH_TO_HOLD_OUT",
    "Bank",
    "BankMethod",
    "HeldOut",
    "MemoryBank",
    "MemoryConfig",
    "Outputs",
    "Question",
    "ReplayBank",
    "Seen",
    "TaskModel",
    "within_tasks",
]
