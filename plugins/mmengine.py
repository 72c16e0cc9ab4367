"""Our optimizer wrappers in mmengine's `Runner` and under its schedulers.

Those take instances of mmengine's own classes alone. Once this module is imported, ours count as
such (`abc.ABCMeta.register`): they are handed over as they are, or named in a config::

    optim_wrapper = dict(type="stepwrap.plugins.mmengine.OptimWrapper", optimizer=dict(...))
"""

from __future__ import annotations

from ..wrappers import AmpOptimWrapper, OptimWrapper, OptimWrapperDict

try:
    from mmengine import optim as _theirs
except ImportError as error:
    raise ImportError(
        f"stepwrap.plugins.mmengine needs mmengine ({error}): pip install 'stepwrap[mmengine]'"
    ) from error

__all__ = ["AmpOptimWrapper", "OptimWrapper", "OptimWrapperDict"]

_theirs.OptimWrapper.register(OptimWrapper)
_theirs.OptimWrapperDict.register(OptimWrapperDict)
