"""The settings of the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .draft import Draft, Section

_NO_STRATEGIES = "has no counterpart: wrapper, mesh and optim_wrapper say how ranks work together"
_NO_TTA = "has no counterpart: average the predictions in the model's own test_step"
_LAUNCHED = "ranks are started by launch.nproc, --nproc or torchrun"


def convert_run(draft: Draft, top: Section) -> None:
    """Translate what is no part: names, seeds, folders, processes."""
    top.drop("default_scope")
    top.accept(log_level="INFO", runner_type="Runner")
    for key, what in (("strategy", _NO_STRATEGIES), ("tta_model", _NO_TTA)):
        if top.take(key) is not None:
            draft.miss(key, what)
    if top.take("launcher", "none") != "none":
        draft.miss("launcher", _LAUNCHED)
    for key in ("log_level", "runner_type"):
        if top.take(key) is not None:
            draft.miss(key)
    _imports(draft, top)
    name, folder = top.take("experiment_name"), top.take("work_dir")
    if name is not None:
        draft.sections["name"] = name
    if folder is not None:
        draft.sections["run_dir"] = folder
    _randomness(draft, top)
    _environment(draft, top)
    _resuming(draft, top)
    _compiling(draft, top)


def _imports(draft: Draft, top: Section) -> None:
    section = top.below("custom_imports")
    if section is None:
        return
    given = section.take("imports") or []
    draft.sections["imports"] = [given] if isinstance(given, str) else list(given)
    section.accept(allow_failed_imports=False)
    section.close("is not possible: every import must succeed")


def _randomness(draft: Draft, top: Section) -> None:
    section = top.below("randomness")
    if section is None:
        return
    seed = section.take("seed")
    if seed is not None:
        draft.sections["seed"] = seed
    if section.take("deterministic", False):
        draft.sections["deterministic"] = True
    # Ranks draw different numbers anyway, once the model is built.
    section.drop("diff_rank_seed")
    section.close()


def _environment(draft: Draft, top: Section) -> None:
    section = top.below("env_cfg")
    if section is None:
        return
    section.accept(cudnn_benchmark=False)
    workers = section.below("mp_cfg")
    if workers is not None:
        workers.accept(mp_start_method="fork", opencv_num_threads=0)
        workers.close()
    processes = section.below("dist_cfg")
    if processes is not None:
        launch: dict[str, Any] = {}
        # nccl is mmengine's default, also where there is no GPU; ours follows the device.
        processes.accept(backend="nccl")
        if processes.peek("backend") is not None:
            launch["backend"] = processes.take("backend")
        if processes.peek("timeout") is not None:
            launch["timeout_s"] = processes.take("timeout")
        processes.close()
        if launch:
            draft.sections["launch"] = launch
    section.close()


def _resuming(draft: Draft, top: Section) -> None:
    resume, path = top.take("resume", False), top.take("load_from")
    if resume and path is None:
        draft.sections["resume"] = True
    if path is not None:
        what = "a checkpoint of mmengine is no run of ours; its weights can be loaded by"
        draft.miss("load_from", f"{what} init_cfg=dict(type='Pretrained', ...): docs/migrate.md")


def _compiling(draft: Draft, top: Section) -> None:
    given = top.take("compile", False)
    if given is True:
        draft.sections["compile"] = True
    elif isinstance(given, Mapping) and given.get("enable", True):
        section = Section(draft, given, "compile")
        section.drop("enable")
        section.accept(target="forward")
        options = {key: section.take(key) for key in section if key != "target"}
        section.close()
        draft.sections["compile"] = options or True
