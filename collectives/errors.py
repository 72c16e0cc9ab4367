"""The error of this folder: a collective that failed or could not finish."""


class CollectiveError(RuntimeError):
    """A collective failed on some rank, or a rank died, left or did not arrive in time."""
