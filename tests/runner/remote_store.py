"""A store of S3 in a process of its own, and a proxy that cuts, holds and delays requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from ports import free_port

from stepwrap.runner.command import run_commands
from stepwrap.runner.remote import locks, stores

BUCKET = "bucket"


class Bucket:
    """The objects of a bucket, read and written without any client library."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            # The server looks for a signature, and does not check it.
            credential = "Credential=key/20260101/us-east-1/s3/aws4_request"
            headers = {"Authorization": f"AWS4-HMAC-SHA256 {credential}"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def get(self, name: str) -> bytes | None:
        status, body = self.request("GET", f"/{BUCKET}/{name}")
        return body if status == 200 else None

    def put(self, name: str, content: bytes) -> None:
        assert self.request("PUT", f"/{BUCKET}/{name}", content)[0] == 200

    def delete(self, name: str) -> None:
        self.request("DELETE", f"/{BUCKET}/{name}")

    def names(self, prefix: str = "") -> list[str]:
        query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix})
        text = self.request("GET", f"/{BUCKET}?{query}")[1].decode()
        return re.findall("<Key>(.*?)</Key>", text)

    def checkpoints(self, run: str) -> list[str]:
        """Return the published checkpoints of a run."""
        pattern = re.compile(rf"{run}/checkpoints/(\w+step_[\w-]+|step_[\w-]+)/checkpoint.json")
        return [match[1] for name in self.names(f"{run}/") if (match := pattern.fullmatch(name))]


# Status, headers and content.
Answer: TypeAlias = tuple[int, dict[str, str], bytes]


class Proxy:
    """Pass requests on to a store.

    Attributes:
        cut: whether to close the connection of a request instead, by its method and path.
        hold: requests that wait until `released` is set.
        held: set when a request waits.
        listings: if a dict, the first answer to each listing is repeated.
        seen: method and path of all requests.
    """

    def __init__(self, port: int) -> None:
        self.cut: Callable[[str, str], bool] = lambda method, path: False
        self.hold: Callable[[str, str], bool] = lambda method, path: False
        self.held, self.released = threading.Event(), threading.Event()
        self.listings: dict[str, Answer] | None = None
        self.seen: list[tuple[str, str]] = []
        self._target = port
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        """Return the answer to a request; None if its connection is to be closed."""
        self.seen.append((method, path))
        if self.hold(method, path):
            self.held.set()
            self.released.wait()
        if self.cut(method, path):
            return None
        if self.listings is None or method != "GET" or "list-type" not in path:
            return self._fetch(method, path, headers, body)
        if path not in self.listings:
            self.listings[path] = self._fetch(method, path, headers, body)
        return self.listings[path]

    def _fetch(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._target)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: Proxy, *args: Any) -> None:
        self._proxy = proxy
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def pass_on(self) -> None:
        headers = {k: v for k, v in self.headers.items() if k != "Transfer-Encoding"}
        answer = self._proxy.answer(self.command, self.path, headers, self._body())
        if answer is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        # The answer to HEAD names the length of a content that does not follow.
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Run a store of S3, and return its port."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            assert process.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def bucket(s3_port: int) -> Bucket:
    """Return an empty bucket."""
    bucket = Bucket(s3_port)
    for name in bucket.names():
        bucket.delete(name)
    bucket.request("PUT", f"/{BUCKET}")
    return bucket


def use_store(patch: pytest.MonkeyPatch, port: int, cache: Path) -> None:
    """Let commands find the store at a port, and a cache; requests are not repeated for long.

    Curves are not drawn, which takes longer than a run.
    """
    from s3fs import S3FileSystem

    settings = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "STEPWRAP_CACHE": str(cache),
    }
    for name, value in settings.items():
        patch.setenv(name, value)
    patch.setattr(S3FileSystem, "retries", 1)
    patch.setattr(stores, "PAUSES_S", (0.0,))
    patch.setattr(locks, "SETTLE_S", 0.0)
    patch.setattr(run_commands, "plots_available", lambda: False)
    forget_connections()


def forget_connections() -> None:
    """Have the next command read the settings of the store again."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Let commands find the store, with an empty cache; return the bucket."""
    use_store(monkeypatch, bucket.port, tmp_path / "cache")
    return bucket


@pytest.fixture
def proxy(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Let commands reach the store through a proxy."""
    proxy = Proxy(s3.port)
    use_store(monkeypatch, proxy.port, Path(os.environ["STEPWRAP_CACHE"]))
    yield proxy
    proxy.close()
