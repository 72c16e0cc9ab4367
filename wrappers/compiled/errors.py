"""Why a step is not compiled."""


class NotCompilableError(Exception):
    """A step that would not do compiled what it does eagerly; the text says why."""


class NotReadyError(NotCompilableError):
    """A step that can be compiled once it has run."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without the pages that compilers add."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
