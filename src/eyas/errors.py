"""The one exception a user is meant to see."""


class EyasError(Exception):
    """A fault in what the user gave us: one line that says what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


class OtherRankGone(EyasError):
    """This rank can only end, because another one has: that one says why."""
