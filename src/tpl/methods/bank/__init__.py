"""All task models in one network, kept apart: what the TIL+OOD family (TPL, HAT, MORE, ROW, SupSup) is built on."""

from tpl.methods.bank.asking import Question
from tpl.methods.bank.bank import ENOUGH_TO_HOLD_OUT, Bank, BankMethod, HeldOut, Outputs, TaskModel, within_tasks
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
    "TaskModel",
    "within_tasks",
]
