"""What can go wrong with data: each message names the file or the option to change."""

from tpl.errors import TplError


class DataError(TplError):
    """The data set, its layout, its split into tasks or its class order cannot be used as given."""


class UnreadableImage(DataError):
    """One image cannot be decoded; the message names it."""


class TaskClosed(TplError):
    """The training data of an earlier task was asked for after the next task had begun."""
