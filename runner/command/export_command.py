"""The command that exports a trained model."""

from __future__ import annotations

from pathlib import Path

from ..export import FORMATS, ExportError, check_export, export_model
from ..failure import as_mistakes_in
from ..parts import example_batch
from ..runner import load_model
from ..sections import read_sections
from .command import Options, mistake


def run_export(options: Options) -> int:
    """Export the model of a run, and print how much its outputs for a batch differ afterwards."""
    config = options.examined.config
    run = read_sections(options.examined)
    if options.to is None and options.out is None:
        raise mistake(f"stepwrap export: --to ({', '.join(FORMATS)}) or --out is required")
    path = Path(options.out or Path(run.run_dir, f"model.{options.to}"))
    try:
        if options.to not in (None, path.suffix.removeprefix(".")):
            raise ValueError(f"--to {options.to} and the suffix of {path.name} differ")
        check_export(path)
    except (ValueError, FileExistsError, ImportError) as error:
        raise mistake(f"stepwrap export: {error}") from error
    which = options.checkpoint if isinstance(options.checkpoint, str) else ""
    model = load_model(run.run_dir, which)
    with as_mistakes_in(config):
        batch = example_batch(run)
    try:
        export = export_model(model, path, batch)
    except ExportError as error:
        raise mistake(f"stepwrap export: {error}") from error
    print(f"exported: {path} ({path.stat().st_size / 1e6:.2f} MB)")
    for name, shape in export.inputs.items():
        print(f"input: {name} ({', '.join(map(str, shape))})")
    print(f"largest difference from the model: {export.difference:.2g}")
    return 0
