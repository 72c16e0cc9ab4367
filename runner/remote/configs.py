"""Read the config of a remote run for a command."""

from __future__ import annotations

import json

from ...loops import CheckpointError
from ...registry import ConfigError, Problem
from ...registry.local_paths import remote_url
from .copies import settings_copy
from .stores import RemoteError

_FILE = "/config.yaml"


def fetch_config(word: str) -> tuple[str, str]:
    """Return the file with the config of a remote run, and the override that sets its folder.

    Args:
        word: the URL of the run folder, or of the config.yaml in it.

    Raises:
        ConfigError: the URL names another file, or cannot be read.
    """
    url = remote_url(word).removesuffix(_FILE)
    if url.endswith((".yaml", ".yml", ".py")):
        raise ConfigError(
            [
                Problem(
                    "", f"a config must be a path on this machine, or the URL of a run, got {url}"
                )
            ]
        )
    try:
        path = settings_copy(url)
    except (CheckpointError, RemoteError) as error:
        raise ConfigError([Problem("", str(error))]) from error
    if path is None:
        raise ConfigError([Problem("", f"{url} is not the folder of a run: it has no config.yaml")])
    return str(path), f"run_dir={json.dumps(url)}"
