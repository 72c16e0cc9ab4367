"""Errors that explain why a step is not compiled."""


class NotCompilableError(Exception):
    """A step cannot be compiled with the same results; the text gives the reason."""


class NotReadyError(NotCompilableError):
    """A step cannot be compiled before it has run eagerly."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error; compilers add many more."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
