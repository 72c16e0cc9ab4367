"""`stepwrap serve`: accepted requests, their answers, the start and end of the command."""

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from ports import free_port
from run_folders import lines, record, two_runs, write_folder
from runner_parts import Command

from stepwrap.diagnostics.reports.serve import Folder, RunServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunServer]:
    two_runs(tmp_path / "runs" / "nested")
    write_folder(tmp_path / "secret", [record(1, loss=1.0)])
    with RunServer("127.0.0.1", 0, Folder(tmp_path / "runs"), b"code") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: RunServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Host": f"127.0.0.1:{port}" if host is None else host.replace("PORT", str(port))}
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in reply.headers
    connection.close()
    return reply.status, text


def test_runs_and_records(server: RunServer, tmp_path: Path) -> None:
    status, text = ask(server, "/api/runs")
    entries = {entry["id"]: entry for entry in json.loads(text)}
    assert status == 200
    assert set(entries) == {"nested/slow", "nested/fast"}
    assert entries["nested/slow"]["step"] == 100

    def get(stamp: str) -> tuple[int, str]:
        return ask(server, f"/api/run?{urlencode({'id': 'nested/slow', 'stamp': stamp})}")

    data: dict[str, Any] = json.loads(get("")[1])
    assert data["run"]["metrics"]["val/accuracy"]["last"] == 0.98
    assert get(data["stamp"]) == (204, "")
    with (tmp_path / "runs/nested/slow/metrics.jsonl").open("a") as file:
        file.write(lines([record(150, "val", accuracy=0.5)]))
    status, text = get(data["stamp"])
    assert status == 200
    assert json.loads(text)["run"]["metrics"]["val/accuracy"]["last"] == 0.5


def test_the_page_and_its_script(server: RunServer) -> None:
    status, text = ask(server, "/")
    assert status == 200
    assert '<script src="plotly.js"></script>' in text
    assert 'id="data">null</script>' in text
    assert ask(server, "/plotly.js") == (200, "code")


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT", "[::1]:PORT"])
def test_own_names_are_answered(host: str, server: RunServer) -> None:
    assert ask(server, "/api/runs", host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("rebound.test:PORT", "rebound.test", "localhost", "localhost:1", "192.0.2.1:PORT", ""),
        *("localhost:PORT@rebound.test", "localhost.rebound.test:PORT", "[::1", "a:b:c"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/plotly.js"])
def test_other_names_are_refused(host: str, path: str, server: RunServer) -> None:
    """A page of another site, whose name resolves to this machine, sends that name."""
    status, text = ask(server, path, host=host)
    assert status == 403
    assert "slow" not in text


def test_other_peers_are_refused(server: RunServer) -> None:
    port = server.server_address[1]
    assert server.accepts("127.0.0.1", f"localhost:{port}")
    assert not server.accepts("192.0.2.7", f"localhost:{port}")


def test_a_server_for_the_network_accepts_addresses_only() -> None:
    with RunServer("0.0.0.0", 0, Folder(Path()), b"") as server:
        port = server.server_address[1]
        assert not server.is_local
        assert server.accepts("192.0.2.7", f"192.0.2.1:{port}")
        assert not server.accepts("192.0.2.7", f"rebound.test:{port}")


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret/metrics.jsonl", "/nested/slow/metrics.jsonl", "/api/run?id=../secret"),
        *("/api/run?id=", "/api/run?id=/etc", "/api/run", "/%2e%2e/secret", "//secret"),
    ],
)
def test_nothing_else_is_served(path: str, server: RunServer) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get(method: str, server: RunServer) -> None:
    assert ask(server, "/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), pytest.param(15, 0, marks=pytest.mark.slow)]
)
def test_the_command_ends_with_a_signal(
    number: int, code: int, start: Callable[..., Command], tmp_path: Path
) -> None:
    two_runs(tmp_path / "runs")
    port = free_port()
    command = start("serve", "runs", "--port", str(port))
    assert command.process.stdout is not None
    line = command.process.stdout.readline()
    assert line == f"serving runs at http://127.0.0.1:{port}/ (stop with Ctrl-C)\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        # Closing it resets the connection, as a browser may do.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with urlopen(f"http://127.0.0.1:{port}/") as response:
        assert response.status == 200
    with socket.create_connection(("127.0.0.1", port)):
        # An open connection does not keep the server from ending.
        command.process.send_signal(number)
        assert command.finish() == (code, "stopped\n", "")


def test_a_port_in_use_is_an_error_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepwrap.runner.command.cli import main

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
    message = rf"port {port} of 127\.0\.0\.1 .*in use.* --port {port + 1}, .*--port 0 "
    assert re.search(message, capsys.readouterr().err)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", 65535)))
        assert main(["serve", str(tmp_path), "--port", "65535"]) == 2
    assert "--port 65534" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--port", "65536"]) == 2
    assert "--port must be 0 to 65535, got 65536" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "cannot listen on port 0 of 192.0.2.1" in capsys.readouterr().err
