"""All task models in one network, kept apart: what the TIL+OOD family (TPL, HAT, MORE, ROW, SupSup) is built on.

bank.py        the task models, and queries to them in batches
method.py      the base class of the family: memory, held-out images, answers, storage
training.py    training jobs, one or several side by side
protect.py     HAT and SupSup: how tasks share adapters and leave each other in peace
techniques/    training-time techniques of OOD detection
heads.py       on features that stand still: distances to every task's classes, and training heads
imageless.py   what stands in for stored images where none may be kept
"""

from tpl.methods.bank.bank import Bank, Outputs, Query, TaskModel, within_tasks
from tpl.methods.bank.method import ENOUGH_TO_HOLD_OUT, BankMethod, HeldOut, MemoryConfig, Seen

__all__ = [
    "ENOUGH_TO_HOLD_OUT",
    "Bank",
    "BankMethod",
    "HeldOut",
    "MemoryConfig",
    "Outputs",
    "Query",
    "Seen",
    "TaskModel",
    "within_tasks",
]
