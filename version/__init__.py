"""Wrap any PyTorch model once and train it under any parallelism.

This folder is the package ``stepwrap`` itself; the other source folders are its subpackages. The
repository's root cannot have this file: pytest would import the library twice.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
