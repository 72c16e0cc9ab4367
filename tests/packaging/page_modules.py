"""Write the Python code of the README and of the pages of docs/ as modules, which mypy checks.

`make check` runs it. The code blocks of a page form one module, ``page_<name>``. A block whose
first line names a file, such as ``# circle.py``, is a separate module, which every page can import.
A line has the same number in its module as on its page.
"""

import re
import sys
from pathlib import Path

from source_tree import ROOT

# Users need not annotate, and blocks of one page may define a name again.
OPTIONS = (
    "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, "
    "allow-untyped-decorators, allow-any-generics, allow-subclassing-any, no-warn-return-any, "
    'allow-redefinition, disable-error-code="no-redef"'
)
# The names that a page uses without defining them, because the text says what they are, or to stay
# short. page_names.pyi has their types. Import or define a name on the page rather than here.
GIVEN = {
    "README": "DistributedDataParallel, clip_grad_norm_, contextlib, cross_entropy, loader, net, "
    "torch",
    "configs": "clean_loader, model, noisy_loader",
    "custom_steps": "loader, model, optim",
    "lightning": "net, optimizer, train_loader, val_loader",
    "migrate": "collator, loader, model, optimizer, train, val",
    "rpc": "function, loss, lr_scheduler, make_net, model, observation, optimizer, other, parts, "
    "policy, tensor, value",
    "wrappers": "batch, batches, folder, make_model, model, optim_of, samples",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:python|py)\n(# (\w+)\.py\n)?(.*?)^```$", re.DOTALL | re.MULTILINE)


def page_modules(file: Path) -> dict[str, str]:
    """Return the modules of a page by name."""
    text, page_name = file.read_text(), f"page_{file.stem}"
    given = f"from page_names import {GIVEN[file.stem]}" if file.stem in GIVEN else ""
    modules: dict[str, str] = {}
    for block in BLOCK.finditer(text):
        name = block[2] or page_name
        header = f"{OPTIONS}\n{given if name == page_name else ''}\n"
        module = modules.get(name, header)
        blank_lines = text.count("\n", 0, block.start(3)) - module.count("\n")
        modules[name] = module + "\n" * blank_lines + block[3]
    return modules


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    for page in PAGES:
        for name, code in page_modules(page).items():
            if name in written:
                sys.exit(f"{page} and {written[name]} both have a file {name}.py: rename one")
            written[name] = page
            (folder / f"{name}.py").write_text(code)
    for file in folder.glob("*.py"):
        if file.stem not in written:
            file.unlink()


if __name__ == "__main__":
    main(ROOT / "build" / "pages")
