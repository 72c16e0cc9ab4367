"""Are these values of the right kind? Told from the annotations, before anything is built."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from ..arguments import ArgumentProblem, signature_of, title
from ..errors import shown_value
from .typed import allowed_text, fits, is_plain, options_of


def value_problems(
    target: Callable[..., Any], given: Mapping[str, Any]
) -> Iterator[ArgumentProblem]:
    """Yield the numbers, texts, truth values and nulls that `target` cannot mean.

    Only arguments annotated with such kinds alone (a `Tensor` beside them counts for none) are
    looked at: anything else may take more than its annotation says.
    """
    hints = _hints(target)
    for name, value in given.items():
        if name not in hints or not (value is None or isinstance(value, (str, int, float))):
            continue
        options = [one for one in options_of(hints[name]) if title(one) != "Tensor"]
        if not options or not all(is_plain(option) for option in options):
            continue
        if isinstance(value, float) and value.is_integer() and int in options:
            # YAML reads 1e3 as a float.
            continue
        if not any(fits(value, option) for option in options):
            what = f"must be {allowed_text(tuple(options))}, got {shown_value(value)}"
            yield ArgumentProblem(name, f"{what} ({title(target)})")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations by argument, none where they cannot be read."""
    signature = signature_of(target)
    if signature is None:
        return {}
    parameters = signature.parameters.values()
    direct = {p.name: p.annotation for p in parameters if not isinstance(p.annotation, str)}
    found = {name: hint for name, hint in direct.items() if hint is not inspect.Parameter.empty}
    function = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    try:
        return {**found, **get_type_hints(function)}
    except (NameError, TypeError, AttributeError):
        return found
