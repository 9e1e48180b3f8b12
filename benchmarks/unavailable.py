"""What a benchmark raises where the machine cannot run it."""


class Unavailable(RuntimeError):
    """The message is one line that says what is missing and how to get it."""
