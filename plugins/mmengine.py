"""Use stepwrap's optimizer wrappers in mmengine's ``Runner`` and with its schedulers.

mmengine accepts only instances of mmengine's classes. Importing this module registers stepwrap's
optimizer wrappers as virtual subclasses of these (``abc.ABCMeta.register``). Pass them as objects,
or name them in a config::

    optim_wrapper = dict(type="stepwrap.plugins.mmengine.OptimWrapper", optimizer=dict(...))
"""

from __future__ import annotations

from ..wrappers import AmpOptimWrapper, OptimWrapper, OptimWrapperDict

try:
    from mmengine import optim as _mmengine
except ImportError as error:
    raise ImportError(
        f"stepwrap.plugins.mmengine needs mmengine ({error}): pip install 'stepwrap[mmengine]'"
    ) from error

__all__ = ["AmpOptimWrapper", "OptimWrapper", "OptimWrapperDict"]

_mmengine.OptimWrapper.register(OptimWrapper)
_mmengine.OptimWrapperDict.register(OptimWrapperDict)
