"""The modules that mypy checks have all Python code of the README and of the pages."""

from collections import Counter

from page_modules import GIVEN, PAGES, page_modules
from pages import blocks, find_all


def test_every_line_of_code_has_the_same_number_in_a_module() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text()
        shown = [code for kind in ("python", "py") for code in blocks(text, kind)]
        expected = Counter(line for code in shown for line in code.splitlines() if line)
        lines = text.splitlines()
        for module in page_modules(page).values():
            # The first two lines have mypy's options and the names that the page does not define.
            for number, line in enumerate(module.splitlines()[2:], start=3):
                if line and line != lines[number - 1]:
                    wrong.append(f"{page}:{number}: {line}")
                expected[line] -= 1
        wrong += [f"{page}: {line}" for line in (+expected) if not find_all(r"^# \w+\.py$", line)]
    assert not wrong


def test_the_pages_use_the_names_that_they_do_not_define() -> None:
    code = {page.stem: "\n".join(page_modules(page).values()) for page in PAGES}
    unused = {
        (page, name)
        for page, names in GIVEN.items()
        for name in names.split(", ")
        if len(find_all(rf"\b{name}\b", code[page])) < 2
    }
    assert not unused
