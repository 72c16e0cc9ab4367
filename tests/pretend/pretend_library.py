"""The compiled part of the pretend devices."""

from __future__ import annotations

import ctypes

import pretend_build
from pretend_kinds import KIND

library: ctypes.CDLL
device_count = 0


def load(path: str, count: int) -> None:
    """Load the compiled part and register ``count`` devices, before torch is imported."""
    global library, device_count
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(pretend_build.torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    library, device_count = ctypes.CDLL(path), min(count, KIND.most)
    for name, result, arguments in (
        ("pretend_install", None, [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]),
        ("pretend_has_room", ctypes.c_int, [ctypes.c_int, ctypes.c_size_t]),
        ("pretend_move", None, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]),
        ("pretend_owns", ctypes.c_int, [ctypes.c_void_p]),
        ("pretend_set_resident", None, [ctypes.c_void_p, ctypes.c_int]),
        ("pretend_allocated", ctypes.c_size_t, [ctypes.c_int]),
        ("pretend_peak", ctypes.c_size_t, [ctypes.c_int]),
        ("pretend_set_limit", None, [ctypes.c_int, ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.pretend_install(device_count, KIND.type.encode(), KIND.dlpack)
