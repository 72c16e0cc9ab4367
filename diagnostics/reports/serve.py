"""Show a folder of runs live in a browser: ``stepwrap serve``."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...runner.command.command import Options, mistake
from ...runner.failure import Terminated
from ...runner.rank_processes import raising_stops
from .page import as_json, page, plotly_source
from .run_files import Json, Run, find_runs

_LAST_PORT = 65535
_RESCAN_S = 3.0
# Number of runs whose records stay in memory; others are read again when they are shown.
_KEPT_RUNS = 24
_PLOTLY = '<script src="plotly.js"></script>'
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def run_serve(options: Options) -> int:
    """Serve the runs in a folder until Ctrl-C."""

    def fail(text: str) -> Exception:
        return mistake(f"stepwrap serve: {text}")

    root = Path(options.words[0])
    if not root.is_dir():
        raise fail(f"{root} is not a folder; give the folder that holds the run folders")
    if options.port > _LAST_PORT:
        raise fail(f"--port must be 0 to {_LAST_PORT}, got {options.port}")
    plotly = plotly_source(fail).encode()
    try:
        server = RunServer(options.host, options.port, Folder(root), plotly)
    except OSError as error:
        where = f"port {options.port} of {options.host}"
        if error.errno == errno.EADDRINUSE:
            other = options.port + (1 if options.port < _LAST_PORT else -1)
            hint = f"--port {other}, or --port 0 for any free one"
            raise fail(f"{where} is in use; choose another one with {hint}") from error
        raise fail(f"cannot listen on {where}: {error.strerror}") from error
    with server, raising_stops():
        try:
            print(f"serving {root} at {server.url} (stop with Ctrl-C)", flush=True)
            if not server.is_local:
                print("every host that reaches this address can read the runs", flush=True)
            server.serve_forever(poll_interval=0.2)
        except (KeyboardInterrupt, Terminated):
            print("stopped")
    return 0


class Folder:
    """The runs in a folder, which are read as they grow."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._lock = threading.Lock()
        self._places: dict[str, Path] = {}
        self._scan_due_s = 0.0
        # By id: the state of the run's files, and its entry in the list.
        self._glances: dict[str, tuple[str, Json]] = {}
        # By id, the least recently used one first.
        self._runs: dict[str, Run] = {}

    def entries(self) -> list[Json]:
        """Return a short description of each run."""
        with self._lock:
            if time.monotonic() >= self._scan_due_s:
                self._places = find_runs(self._root)
                self._scan_due_s = time.monotonic() + _RESCAN_S
            return [self._glance(name, path) for name, path in self._places.items()]

    def run(self, name: str, stamp: str) -> Json | None:
        """Return a run with the state of its files; None if that is still ``stamp``.

        Raises:
            KeyError: the run does not exist. Names are only looked up, never used as paths.
        """
        with self._lock:
            run = self._runs.pop(name, None) or Run(self._places[name], name, self._root)
            self._runs[name] = run
            while len(self._runs) > _KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            now = run.stamp()
            return None if now == stamp else {"stamp": now, "run": run.update().page_data()}

    def _glance(self, name: str, path: Path) -> Json:
        run = Run(path, name, self._root)
        stamp = run.stamp()
        if self._glances.get(name, ("",))[0] != stamp:
            self._glances[name] = (stamp, run.glance())
        return self._glances[name][1]


class RunServer(ThreadingHTTPServer):
    """An HTTP server for one folder of runs.

    Pages of other sites must not read the runs through the user's browser, even if their host name
    resolves to this machine (DNS rebinding). Therefore the Host header of a request must name this
    server. A server on loopback answers only processes of this machine.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, folder: Folder, plotly: bytes) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.folder, self.plotly = folder, plotly
        self._host = host.lower()
        self.is_local = _is_loopback(str(self.server_address[0]))

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the current error, unless the connection was closed by either side."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError) and getattr(error, "errno", None) != errno.EBADF:
            super().handle_error(request, client_address)

    def accepts(self, peer: str, host: str) -> bool:
        """Return whether to answer the address ``peer``, whose Host header is ``host``."""
        if self.is_local and not _is_loopback(peer):
            return False
        try:
            address = urlsplit(f"//{host}")
            name, port = address.hostname or "", address.port or 80
        except ValueError:
            return False
        if port != self.server_address[1]:
            return False
        # An address cannot be rebound, only a name.
        is_known = name in ("localhost", self._host) or _is_loopback(name)
        return is_known or (not self.is_local and _is_address(name))


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page, its script and the data of the runs."""

    server: RunServer
    server_version, sys_version = "stepwrap", ""
    # In seconds: a client that sends nothing must not hold a thread for longer.
    timeout = 20

    def do_GET(self) -> None:
        if not self.server.accepts(self.client_address[0], self.headers.get("Host", "")):
            text = "stepwrap serve answers only requests to its own address"
            self._reply(HTTPStatus.FORBIDDEN, "text/plain", text.encode())
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._reply(HTTPStatus.OK, "text/html", page(None, _PLOTLY).encode())
        elif address.path == "/plotly.js":
            self._reply(HTTPStatus.OK, "text/javascript", self.server.plotly, "max-age=86400")
        elif address.path == "/api/runs":
            self._reply_json(self.server.folder.entries())
        elif address.path == "/api/run":
            query = {name: values[-1] for name, values in parse_qs(address.query).items()}
            self._reply_run(query.get("id", ""), query.get("stamp", ""))
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"not found")

    def refuse(self) -> None:
        """Refuse a request that is not GET."""
        self._reply(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = refuse

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""

    def _reply_run(self, name: str, stamp: str) -> None:
        try:
            content = self.server.folder.run(name, stamp)
        except KeyError:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"no such run")
            return
        if content is None:
            self._reply(HTTPStatus.NO_CONTENT, "application/json", b"")
        else:
            self._reply_json(content)

    def _reply_json(self, content: Any) -> None:
        self._reply(HTTPStatus.OK, "application/json", as_json(content).encode())

    def _reply(self, status: HTTPStatus, kind: str, body: bytes, cache: str = "no-store") -> None:
        self.send_response(status)
        headers = {**_HEADERS, "Cache-Control": cache, "Content-Length": str(len(body))}
        for name, value in {**headers, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback
