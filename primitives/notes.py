"""Notes on errors."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, like ``BaseException.add_note``, which Python 3.10 does not have.

    Python 3.10 does not print notes itself; the command line does.
    """
    vars(error).setdefault("__notes__", []).append(text)
