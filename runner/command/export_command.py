"""The command that exports a trained model."""

from __future__ import annotations

from pathlib import Path

from ...registry import Config, Examination, RunSections
from ..export import FORMATS, Export, ExportError, check_export, export_adapter, export_model
from ..failure import as_mistakes_in
from ..parts import example_batch
from ..pretrained.load import build_base, load_run_model
from ..sections import read_sections
from .command import Options, mistake


def run_export(examined: Examination, options: Options) -> int:
    """Export a run's model; print the difference between its outputs and the export's."""
    run = read_sections(examined)
    if options.to is None and options.out is None:
        raise mistake(f"stepwrap export: --to ({', '.join(FORMATS)}) or --out is required")
    name = "peft" if options.to == "peft" else f"model.{options.to}"
    path = Path(options.out or Path(run.run_dir, name))
    try:
        if options.to not in (None, "peft", path.suffix.removeprefix(".")):
            raise ValueError(f"--to {options.to} and the suffix of {path.name} differ")
        if options.to == "peft" and run.adapter is None:
            raise ValueError("--to peft writes an adapter, and this run has none; use safetensors")
        check_export(path, "peft" if options.to == "peft" else "")
    except (ValueError, FileExistsError, ImportError) as error:
        raise mistake(f"stepwrap export: {error}") from error
    try:
        export = _export(examined.config, run, path, options=options)
    except ExportError as error:
        raise mistake(f"stepwrap export: {error}") from error
    files = [path] if path.is_file() else [*path.iterdir()]
    print(f"exported: {path} ({sum(file.stat().st_size for file in files) / 1e6:.2f} MB)")
    for name, shape in export.inputs.items():
        print(f"input: {name} ({', '.join(map(str, shape))})")
    print(f"largest difference from the model: {export.difference:.2g}")
    return 0


def _export(config: Config, run: RunSections, path: Path, *, options: Options) -> Export:
    which = options.checkpoint if isinstance(options.checkpoint, str) else ""
    model, adapter = load_run_model(Path(run.run_dir), which)
    with as_mistakes_in(config):
        batch = example_batch(run)
        base = build_base(config.to_dict()) if options.to == "peft" else None
    if adapter is None:
        return export_model(model, path, batch)
    if base is None:
        # Compare with the model as it was trained: a merge may have other outputs.
        live, _ = load_run_model(Path(run.run_dir), which)
        return export_model(adapter.merge(), path, batch, live=live)
    export = export_adapter(adapter, base, path, batch)
    print(f"load it with: peft.PeftModel.from_pretrained({adapter.net or 'model'}, {str(path)!r})")
    return export
