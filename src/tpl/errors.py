"""Errors meant for the person at the keyboard: each message says what to do next."""


class TplError(Exception):
    """Something the user can mend. The command line prints it without a traceback and exits with 2."""


class DataError(TplError):
    """The data set, its layout, its split into tasks or its class order cannot be used as given."""


class UnreadableImage(DataError):
    """One image cannot be decoded; the message names it."""


class TaskClosed(TplError):
    """The training data of an earlier task was requested after the next task had begun."""
