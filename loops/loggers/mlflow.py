"""Log a run to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...registry import HOOKS
from ..state import LoopState
from .logger import LoggerHook, Package, Setting, run_id

# MLflow's limits for one request, and for the text of a parameter.
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 6000


@HOOKS.register_module()
class MLflowHook(LoggerHook):
    """Log records, metrics, settings and media to MLflow.

    The horizontal axis is the optimizer update. A resumed run continues the same run of MLflow,
    whose id is in ``<run_dir>/mlflow_id.txt``; settings that have changed keep their first value,
    because MLflow does not change parameters. Only rank 0 logs; nothing is logged if
    ``state.run_dir`` is None.

    Args:
        experiment: the experiment, which is created if it does not exist.
        name: the name of the run; default: the name of the run folder.
        tracking_uri: a server ("http://..."), a database ("sqlite:///mlflow.db") or a folder.
            Default: the environment variable MLFLOW_TRACKING_URI, or MLflow's default.

    Raises:
        ImportError: mlflow is not installed.
    """

    order = 73
    package = Package("mlflow", "MLflow", "mlflow")

    def __init__(
        self,
        *,
        experiment: str = "Default",
        name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        self._experiment, self._name, self._uri = experiment, name, tracking_uri
        self._client: Any = None
        self._id = ""

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._open(state)
        now_ms = int(time.time() * 1000)
        named = {f"{phase}/{name}": value for name, value in values.items()}
        metrics = [Metric(name, value, now_ms, state.step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def settings(
        self, state: LoopState, settings: Mapping[str, Setting], metrics: Mapping[str, float]
    ) -> None:
        from mlflow.entities import Param

        self._open(state)
        # `metrics` is not needed: `scalars` has logged these values.
        known_params = self._client.get_run(self._id).data.params
        params = [
            Param(name, str(value)[:_MAX_PARAM_LENGTH])
            for name, value in settings.items()
            if name not in known_params
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS])

    def media(self, state: LoopState, name: str, item: Any) -> None:
        self._open(state)
        file = f"media/{name}_{state.step}"
        if isinstance(item, str):
            self._client.log_text(self._id, item, f"{file}.txt")
        elif hasattr(item, "savefig"):
            self._client.log_figure(self._id, item, f"{file}.png")
        else:
            self._client.log_image(self._id, item, artifact_file=f"{file}.png")

    def close(self, failed: bool) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
            self._client = None

    def _open(self, state: LoopState) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        assert state.run_dir is not None
        client = MlflowClient(self._uri)
        self._id = run_id(state, "mlflow", lambda: self._create(client, state))
        try:
            client.update_run(self._id, status="RUNNING")
        except MlflowException as error:
            raise ValueError(
                f"{state.run_dir / 'mlflow_id.txt'} names a run that cannot be continued at "
                f"{client.tracking_uri}: {error}. Set tracking_uri as before, or delete the file "
                "to create another run"
            ) from error
        self._client = client

    def _create(self, client: Any, state: LoopState) -> str:
        experiment = client.get_experiment_by_name(self._experiment)
        number = (
            experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        )
        name = self._name or getattr(state.run_dir, "name", None)
        created: str = client.create_run(number, run_name=name).info.run_id
        return created
