"""Check images, figures and texts, and convert images to one format for all loggers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_NAME = re.compile(r"\w[\w .-]*(/\w[\w .-]*)*")


def checked_media(kind: str, name: str, content: Any) -> Any:
    """Check an item; return an image as a ``uint8`` array, a text as a ``str``, a figure unchanged.

    Args:
        kind: "image", "figure" or "text".
        name: the name of the item.
        content: the item.

    Raises:
        TypeError: a figure has no ``savefig``.
        ValueError: the name is not allowed in a file's path, or an image has another shape.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the name of the {kind} must consist of letters, digits, '_', '-', '.' and spaces, "
            f"with '/' between its parts, got {name!r}"
        )
    if kind == "image":
        return image_array(content)
    if kind == "figure" and not hasattr(content, "savefig"):
        raise TypeError(f"log_figure needs a matplotlib figure, got {type(content).__name__}")
    return str(content) if kind == "text" else content


def image_array(image: Any) -> NDArray[np.uint8]:
    """Return an image as a ``uint8`` array (height, width, channels) or (height, width).

    Args:
        image: a tensor (channels, height, width), an array (height, width, channels) or a PIL
            image; tensors and arrays may also be (height, width). There are 1, 3 or 4 channels.
            Floats are from 0 to 1, integers from 0 to 255.

    Raises:
        ValueError: the image has another shape.
    """
    if isinstance(image, Tensor):
        image = image.detach().float() if image.is_floating_point() else image.detach()
        array = image.cpu().numpy()
        array = array.transpose(1, 2, 0) if array.ndim == 3 else array
    else:
        array = np.asarray(image)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(
            "an image must be a tensor (channels, height, width), an array (height, width, "
            "channels) or either without channels, and have 1, 3 or 4 channels; got the shape "
            f"{tuple(image.shape) if hasattr(image, 'shape') else array.shape}"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array) * 255
    bounded: NDArray[np.uint8] = np.clip(np.round(array), 0, 255).astype(np.uint8)
    return bounded
