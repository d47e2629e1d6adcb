"""An S3 server on loopback (moto's) that counts what is asked of it, and fails as told."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

ACCESS_KEY, SECRET = "AKIDEXAMPLEKEYOFTESTS", "a-secret-that-nobody-may-ever-see"


@dataclass
class Request:
    """One request as the server saw it, and its answer."""

    method: str
    path: str
    query: str
    received_bytes: int
    status: int = 0
    sent_bytes: int = 0

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.query


@dataclass
class Fault:
    """What happens to the next `times` requests that `applies` to.

    Kinds: an HTTP status ("500", "503", "403"); "reset": the connection breaks before anything is done; "lost": it is
    done, and the answer never comes; "cut": half of the answer comes; "hang": nothing comes for `seconds`, then the
    connection breaks; "slow": it is done `seconds` later.
    """

    kind: str
    applies: Callable[[Request], bool] = lambda request: True
    times: int = 1
    seconds: float = 0.0


_CODES = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}


@dataclass
class S3Server:
    """Runs until `close`; `requests` and `faults` may be changed at any time."""

    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    most_at_once: int = 0  # slow requests

    def __post_init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def connection_dropped(self, *arguments: Any) -> None:
                self.close_connection = True

            def log_request(self, *arguments: Any) -> None: ...
            def log_error(self, *arguments: Any) -> None: ...

        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._waiting = 0
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Forgets requests and faults; what is stored stays."""
        self.requests, self.faults, self.most_at_once = [], [], 0

    def of(self, method: str, part: str = "") -> list[Request]:
        """The requests so far with this method and with `part` in path or query."""
        return [one for one in self.requests if one.method == method and part in f"{one.path}?{one.query}"]

    def _next_fault(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.applies(request):
                    fault.times -= 1
                    return fault
        return None

    def _wait(self, seconds: float) -> None:
        with self._lock:
            self._waiting += 1
            self.most_at_once = max(self.most_at_once, self._waiting)
        time.sleep(seconds)
        with self._lock:
            self._waiting -= 1

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""), size)
        self.requests.append(request)
        fault = self._next_fault(request)
        connection: socket.socket = environ["werkzeug.socket"]
        if fault is not None and fault.kind == "slow":
            self._wait(fault.seconds)
        if fault is not None and fault.kind == "hang":
            time.sleep(fault.seconds)
            _break(connection)
        if fault is not None and fault.kind == "reset":
            _break(connection)
        if fault is not None and fault.kind in _CODES:
            environ["wsgi.input"].read(size)
            request.status = int(fault.kind)
            body = f"<Error><Code>{_CODES[fault.kind]}</Code><Message>as the test wants it</Message></Error>".encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            start_response(f"{fault.kind} as told", headers)
            return [body if request.method != "HEAD" else b""]
        answer: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers, *rest: answer.extend((status, headers))))
        request.status, request.sent_bytes = int(answer[0].split()[0]), len(body)
        if fault is not None and fault.kind == "lost":
            _break(connection)
        start_response(*answer)
        return _half(body, connection) if fault is not None and fault.kind == "cut" else [body]


def _half(body: bytes, connection: socket.socket) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    _break(connection)


def _break(connection: socket.socket) -> None:
    """The client gets a reset, once the handler closes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ConnectionResetError("as the test wants it")
