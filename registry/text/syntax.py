"""Explain errors of YAML's syntax: the line with the mistake, and its remedy."""

import re
from collections.abc import Iterator

import yaml

from ...primitives.suggestions import join_choices
from ..errors import shortened

_HINTS = {
    "mapping values are not allowed": "does text with a colon need quotes?",
    "'\\t' that cannot start": "indent with spaces, not with tabs",
    "that cannot start any token": "text that starts with it needs quotes",
    "undefined alias": "text that starts with * needs quotes",
    "expected ',' or": "is a bracket or a comma missing?",
    "found '}'": "no bracket is open here",
    "found ']'": "no bracket is open here",
    "found '<scalar>'": "is a quote closed too early?",
}
# A key at the start of a line, after the dashes of a list.
_KEY = re.compile(r"""([ ]*(?:-[ ]+)*)([^\s#:'"{}\[\],&*-][^:#]*):(?:\s|$)""")
_NO_SPACE = re.compile(r"\s*(?:-[ ]+)*([\w.]+:)(?!//)[^\s:]")
_BRACKETS = re.compile(r"""[,{}\[\]'"]""")


def explain(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """Return the line of a syntax error, counted from 0, and a message."""
    problem = " ".join((error.problem or error.context or "").split())
    mark, start = error.problem_mark or error.context_mark, error.context_mark
    if mark is None:
        return 0, problem
    rows = [*text.splitlines(), ""]
    if start is not None and "expected ',' or" in problem:
        return _unclosed(rows, start, mark)
    if start is not None and "unexpected end of stream" in problem:
        return start.line, f"the quote in column {start.column + 1} is not closed"
    if start is not None and "could not find expected ':'" in problem:
        key = shortened(rows[start.line].strip())
        return start.line, f"a colon with a space is missing in `{key}`"
    if "expected <block end>" in problem or "mapping values" in problem:
        mistake = _missing_character(rows, mark.line) or _indentation(rows, mark.line)
        if mistake is not None:
            return mistake
    hint = next((hint for words, hint in _HINTS.items() if words in problem), "")
    return mark.line, problem + (f" ({hint})" if hint else "")


def _unclosed(rows: list[str], start: yaml.Mark, mark: yaml.Mark) -> tuple[int, str]:
    """Explain a bracket that is still open, or a missing comma after it."""
    line = mark.line
    if line > start.line and not _BRACKETS.search(rows[line][: mark.column]):
        # The line is complete in itself, so that the mistake is at the end of the one before.
        line = max(start.line, _line_before(rows, line))
    bracket = rows[start.line][start.column : start.column + 1]
    where = f"column {start.column + 1}" + (
        f" of line {start.line + 1}" if start.line < line else ""
    )
    return line, f"the {bracket} in {where} is not closed, or a comma is missing"


def _line_before(rows: list[str], line: int) -> int:
    """Return the last line before ``line`` that is neither empty nor a comment, -1 if none is."""
    lines = (n for n in range(line - 1, -1, -1) if rows[n].strip(" ")[:1] not in ("", "#"))
    return next(lines, -1)


def _missing_character(rows: list[str], line: int) -> tuple[int, str] | None:
    """Explain a dash without a space, or a colon that lacks in the line before, or its space."""
    if re.match(r"\s*-[^\s-]", rows[line]):
        return line, f"a space is missing after the dash of `{shortened(rows[line].strip())}`"
    before = _line_before(rows, line)
    if before < 0:
        return None
    if match := _NO_SPACE.match(rows[before]):
        return before, f"a space is missing after `{shortened(match[1])}`"
    if _KEY.match(rows[line]) and re.fullmatch(r"\s*\w+( [^:]*)?", rows[before]):
        return before, f"a colon with a space is missing in `{shortened(rows[before].strip())}`"
    return None


def _indentation(rows: list[str], line: int) -> tuple[int, str] | None:
    """Explain a key that is not aligned with a key above it."""
    match = _KEY.match(rows[line])
    above = list(_keys_above(rows, line))
    if match is None or not above or len(match[1]) in [column for column, _, _ in above]:
        return None
    aligned = [f"{n + 1} like `{shortened(key)}` in line {at + 1}" for n, key, at in above]
    return line, (
        f"`{shortened(match[2])}` begins in column {len(match[1]) + 1}, but it must be aligned "
        f"with a key above it: column {join_choices(aligned)}"
    )


def _keys_above(rows: list[str], line: int) -> Iterator[tuple[int, str, int]]:
    """Yield column, name and line of the keys whose sections are open, the innermost first."""
    lowest: float = float("inf")
    for at in range(line - 1, -1, -1):
        match = _KEY.match(rows[at])
        if match is not None and len(match[1]) < lowest:
            lowest = len(match[1])
            yield int(lowest), match[2], at
