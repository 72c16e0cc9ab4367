"""Errors that explain why a step is not compiled."""


class NotCompilableError(Exception):
    """Raised if a step cannot be compiled with the same results; the text gives the reason."""


class NotReadyError(NotCompilableError):
    """Raised if a step cannot be compiled yet, because it must run eagerly first."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; compilers add many more lines."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
