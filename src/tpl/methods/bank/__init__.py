"""All task models in one network, protected from each other: the base of TPL, HAT, MORE, ROW and SupSup.

bank.py        the task models, and queries to them in batches
method.py      the base class of the family: memory, held-out images, predictions, storage
training.py    training jobs, one or several at once
protect.py     HAT and SupSup: how tasks share adapters without interfering
techniques.py  training-time techniques of OOD detection
heads.py       on frozen features: distances to every task's classes, and training heads
imageless.py   statistics in place of stored images
"""

from tpl.methods.bank.bank import Bank, Outputs, Query, TaskModel, within_tasks
from tpl.methods.bank.method import BankMethod, ForwardPass, HeldOut, MemoryConfig
from tpl.stream import ENOUGH_TO_HOLD_OUT

__all__ = [
    "ENOUGH_TO_HOLD_OUT",
    "Bank",
    "BankMethod",
    "ForwardPass",
    "HeldOut",
    "MemoryConfig",
    "Outputs",
    "Query",
    "TaskModel",
    "within_tasks",
]
