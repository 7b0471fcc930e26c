# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI-compatible server: JSON over HTTP, retries, many at a time, errors with the URL."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

from visalign.errors import UserError

CONNECT_SECONDS = 10.0
"""Longest wait for a connection; an answer may take `timeout`."""
LONGEST_PAUSE = 60.0
"""Longest wait before another attempt, in seconds, whatever the server's Retry-After says."""

_HINTS = {
    401: "Give api_key the key that the server was started with.",
    403: "Give api_key the key that the server was started with.",
    404: "Check base_url (the API is at …/v1) and the name of the model.",
}


class ServerError(UserError):
    """What a generation server said or failed to say; the message names the URL.

    Args:
        message: for the user.
        status: of the HTTP answer, where there was one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _PassingError(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, message: str, *, status: int | None = None, pause: float | None = None) -> None:
        super().__init__(message)
        self.status, self.pause = status, pause


class _Calls:
    """The requests of one call, to be given up together."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            if self.over.is_set():
                raise _PassingError("given up, because another request of the call failed")
            self._open.add(connection)

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)

    def give_up(self) -> None:
        """Wake those that wait for another attempt, and hang up on the server."""
        self.over.set()
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the server was faster
                    continue


class ServerConnection:
    """Sends requests to one server.

    Connection errors, 429 and 5xx are tried again with pauses that double; every other failure is final, a
    server that stays silent for `timeout` included: it would be silent again.

    Args:
        base_url: as OpenAI clients take it, "http://host:8000/v1"; a URL without a path gets "/v1".
        api_key: sent as a bearer token; never part of a message.
        timeout: seconds that the server may be silent.
        retries: attempts after the first.
        backoff: seconds before the second attempt; doubled from one to the next. Retry-After goes before.

    Raises:
        UserError: an address that is none, or a number out of range.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
    ) -> None:
        for name, value, least in (
            ("timeout", timeout, 0.001),
            ("retries", retries, 0),
            ("backoff", backoff, 0),
        ):
            if not value >= least:
                raise UserError(f"{name} is {value}; it must be at least {least}.")
        self._secure, self._host, self._port, self._prefix = _address(base_url)
        self.base_url = base_url
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise UserError(
                    "api_key holds characters that no HTTP header may hold, a line break perhaps. Give the "
                    "key alone."
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    def url(self, path: str) -> str:
        """The whole address of `path`, e.g. "completions"."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = "" if self._port is None else f":{self._port}"
        return f"http{'s' if self._secure else ''}://{host}{port}{self._prefix}/{path}"

    def get(self, path: str) -> Mapping[str, Any]:
        """The JSON object at `path`.

        Raises:
            ServerError: any failure, after the retries.
        """
        return self._object(self._send("GET", path, None, _Calls()), path)

    def tell(self, path: str, body: Mapping[str, Any]) -> None:
        """Post an object whose answer is its status alone.

        Raises:
            ServerError: any failure, after the retries.
        """
        self._send("POST", path, json.dumps(body).encode(), _Calls())

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, parallel: int
    ) -> list[Mapping[str, Any]]:
        """Post several objects, some at a time; at the first failure the others are given up.

        Args:
            path: e.g. "completions".
            bodies: one per request.
            parallel: requests under way at once, at most.

        Returns:
            The JSON objects of the answers, in the order of the requests.

        Raises:
            ServerError: any failure, after the retries.
        """
        calls = _Calls()
        with ThreadPoolExecutor(max(1, min(parallel, len(bodies)))) as pool:
            try:
                pending = [
                    pool.submit(self._send, "POST", path, json.dumps(body).encode(), calls) for body in bodies
                ]
                done, _ = wait(pending, return_when=FIRST_EXCEPTION)
                for call in pending:
                    if call in done:
                        call.result()  # raises what it met
                return [self._object(call.result(), path) for call in pending]
            finally:
                calls.give_up()
                pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, method: str, path: str, payload: bytes | None, calls: _Calls) -> bytes:
        pause = self.backoff
        for attempt in range(self.retries + 1):
            try:
                return self._attempt(method, path, payload, calls)
            except _PassingError as failure:
                if attempt == self.retries or calls.over.is_set():
                    raise ServerError(
                        f"{method} {self.url(path)} failed {attempt + 1} times, the last time so: {failure}. "
                        f"Check that the server runs, its log, and base_url ({self.base_url}).",
                        status=failure.status,
                    ) from failure
                calls.over.wait(min(pause if failure.pause is None else failure.pause, LONGEST_PAUSE))
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, method: str, path: str, payload: bytes | None, calls: _Calls) -> bytes:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(CONNECT_SECONDS, self.timeout))
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            if isinstance(error, ssl.SSLError):
                raise ServerError(
                    f"{self.url(path)} could not be reached over TLS: {error}. Check https or http in "
                    "base_url and the server's certificate."
                ) from error
            raise _PassingError(f"no connection ({_named(error)})") from error
        line = connection.sock
        line.settimeout(self.timeout)
        try:
            calls.add(line)
            connection.request(method, f"{self._prefix}/{path}", payload, self._headers)
            response = connection.getresponse()
            return self._judged(method, path, response, response.read())
        except TimeoutError as error:
            raise ServerError(
                f"{method} {self.url(path)} was silent for {self.timeout:g} s (timeout). Answers that take "
                "longer need a larger timeout or a smaller max_new_tokens; many at once, a smaller parallel."
            ) from error
        except (http.client.HTTPException, OSError) as error:
            raise _PassingError(f"the connection broke off ({_named(error)})") from error
        finally:
            calls.remove(line)
            connection.close()

    def _judged(self, method: str, path: str, response: http.client.HTTPResponse, raw: bytes) -> bytes:
        """The body of an answer whose status says that all is well."""
        if 200 <= response.status < 300:
            return raw
        said = f"{response.status} {response.reason}: {_complaint(raw)}"
        if response.status == 429 or response.status >= 500:
            raise _PassingError(
                said, status=response.status, pause=_seconds(response.getheader("Retry-After"))
            )
        hint = _HINTS.get(response.status, "")
        raise ServerError(
            f"{method} {self.url(path)} answered {said}{' ' if hint else ''}{hint}", status=response.status
        )

    def _object(self, raw: bytes, path: str) -> Mapping[str, Any]:
        try:
            read = json.loads(raw)
        except ValueError as error:
            raise ServerError(
                f"{self.url(path)} answered with what is no JSON ({error}): {_short(raw)}. Check that "
                f"base_url ({self.base_url}) is the API of an OpenAI-compatible server."
            ) from error
        if isinstance(read, dict):
            return read
        raise ServerError(f"{self.url(path)} answered with no JSON object: {_short(raw)}.")


def _address(base_url: str) -> tuple[bool, str, int | None, str]:
    """(TLS, host, port, path) of a base URL."""
    wrong = (
        f"base_url is {base_url!r}; it must be the http or https address of a server's API, e.g. "
        '"http://localhost:8000/v1".'
    )
    parts = urlsplit(base_url if isinstance(base_url, str) else "")
    try:
        port = parts.port
    except ValueError as error:
        raise UserError(f"{wrong} ({error}.)") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(wrong)
    if parts.query or parts.fragment or parts.username is not None:
        raise UserError(
            f"base_url for {parts.hostname} holds a user name, or something after ? or #. Leave these out; a "
            "key goes into api_key."
        )
    return parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/") or "/v1"


def _complaint(raw: bytes) -> str:
    """What an error answer says, from the places where servers put it."""
    try:
        read = json.loads(raw)
    except ValueError:
        return _short(raw)
    error = read.get("error", read) if isinstance(read, dict) else read
    said = (
        next((error[k] for k in ("message", "detail") if error.get(k)), error)
        if isinstance(error, dict)
        else error
    )
    return _short((said if isinstance(said, str) else json.dumps(said)).encode())


def _short(raw: bytes, limit: int = 400) -> str:
    text = raw.decode("utf-8", "replace").strip()
    return text[:limit] + " …" * (len(text) > limit) if text else "(nothing)"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is passed over."""
    return float(header) if header is not None and header.strip().isdigit() else None
