"""Errors meant for the person at the keyboard: each message says what to do next."""


class TplError(Exception):
    """Something the user can mend. The command line prints it without a traceback and exits with 2."""
