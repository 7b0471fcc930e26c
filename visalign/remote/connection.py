# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI-compatible server: JSON over HTTP, retries, many at a time, errors with the URL."""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from typing import Any

from visalign.errors import UserError

from .calls import Calls, PassingError, ServerError, shut
from .messages import HINTS, address, complaint, named, seconds, short

CONNECT_SECONDS = 10.0
"""Longest wait for a connection; an answer may take `timeout`."""
LONGEST_PAUSE = 60.0
"""Longest wait before another attempt, in seconds, whatever the server's Retry-After says."""


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
        jitter: share of a pause that is drawn at random, 0 to 1, so that many requests that failed together
            do not come back together.
        seed: of that draw.
        deadline: seconds that one attempt may take in all, for a server that sends a byte now and then; None
            leaves it to `timeout`.

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
        jitter: float = 0.0,
        seed: int = 0,
        deadline: float | None = None,
    ) -> None:
        for name, value, least in (
            ("timeout", timeout, 0.001),
            ("retries", retries, 0),
            ("backoff", backoff, 0),
            ("jitter", jitter, 0),
            ("deadline", timeout if deadline is None else deadline, 0.001),
        ):
            if not value >= least:
                raise UserError(f"{name} is {value}; it must be at least {least}.")
        if jitter > 1:
            raise UserError(f"jitter is {jitter}; it is a share of a pause, 0 to 1.")
        self._secure, self._host, self._port, self._prefix = address(base_url)
        self.base_url = base_url
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.jitter, self.seed, self.deadline = jitter, seed, deadline
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
        """The JSON object at `path`."""
        return self._object(self._send("GET", path, None, Calls()), path)

    def tell(self, path: str, body: Mapping[str, Any]) -> None:
        """Post an object whose answer is its status alone."""
        self._send("POST", path, json.dumps(body).encode(), Calls())

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, parallel: int
    ) -> list[Mapping[str, Any]]:
        """The JSON objects of the answers to several requests, in their order, `parallel` under way at once
        at most; at the first failure the others are given up.
        """
        calls = Calls()
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

    def post_each(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        *,
        parallel: int,
        on_done: Callable[[Mapping[str, Any] | ServerError], object] | None = None,
    ) -> list[Mapping[str, Any] | ServerError]:
        """Post several objects, some at a time; a failure is the answer of its request and stops no other.

        Args:
            path: e.g. "chat/completions".
            bodies: one per request.
            parallel: requests under way at once, at most.
            on_done: gets each answer or error as it comes, in no set order; what it raises ends the call,
                and the requests still under way are given up.

        Returns:
            The JSON object or the error of each request, in the order of the requests.
        """
        calls = Calls()
        answers: list[Mapping[str, Any] | ServerError] = [ServerError("not asked")] * len(bodies)
        with ThreadPoolExecutor(max(1, min(parallel, len(bodies)))) as pool:
            try:
                pending = {
                    pool.submit(self._answer, path, body, calls, index): index
                    for index, body in enumerate(bodies)
                }
                for call in as_completed(pending):
                    answers[pending[call]] = call.result()
                    if on_done is not None:
                        on_done(call.result())
                return answers
            finally:
                calls.give_up()
                pool.shutdown(wait=False, cancel_futures=True)

    def _answer(
        self, path: str, body: Mapping[str, Any], calls: Calls, index: int
    ) -> Mapping[str, Any] | ServerError:
        try:
            return self._object(self._send("POST", path, json.dumps(body).encode(), calls, index), path)
        except ServerError as error:
            return error

    def _send(self, method: str, path: str, payload: bytes | None, calls: Calls, index: int = 0) -> bytes:
        draw = random.Random(self.seed * 1_000_003 + index)
        pause = self.backoff
        for attempt in range(self.retries + 1):
            try:
                return self._attempt(method, path, payload, calls)
            except PassingError as failure:
                if attempt == self.retries or calls.over.is_set():
                    raise ServerError(
                        f"{method} {self.url(path)} failed {attempt + 1} times, the last time so: {failure}. "
                        f"Check that the server runs, its log, and base_url ({self.base_url}).",
                        status=failure.status,
                    ) from failure
                asked_for = (
                    pause * (1 - self.jitter * draw.random()) if failure.pause is None else failure.pause
                )
                calls.over.wait(min(asked_for, LONGEST_PAUSE))
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, method: str, path: str, payload: bytes | None, calls: Calls) -> bytes:
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
            raise PassingError(f"no connection ({named(error)})") from error
        line = connection.sock
        line.settimeout(self.timeout)
        try:
            calls.add(line)
            with self._until_deadline(line, path):
                connection.request(method, f"{self._prefix}/{path}", payload, self._headers)
                response = connection.getresponse()
                raw = response.read()
            return self._judged(method, path, response, raw)
        except TimeoutError as error:
            raise ServerError(
                f"{method} {self.url(path)} was silent for {self.timeout:g} s (timeout). Answers that take "
                "longer need a larger timeout or a smaller max_new_tokens; many at once, a smaller parallel."
            ) from error
        except (http.client.HTTPException, OSError) as error:
            raise PassingError(f"the connection broke off ({named(error)})") from error
        finally:
            calls.remove(line)
            connection.close()

    @contextmanager
    def _until_deadline(self, line: socket.socket, path: str) -> Iterator[None]:
        """Hangs up when the deadline is over, and says that this was why."""
        if self.deadline is None:
            yield
            return
        late = threading.Event()

        def hang_up() -> None:
            late.set()
            shut(line)

        timer = threading.Timer(self.deadline, hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (http.client.HTTPException, OSError) as error:
            if late.is_set():
                raise self._too_late(path) from error
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise self._too_late(path)

    def _too_late(self, path: str) -> ServerError:
        return ServerError(
            f"POST {self.url(path)} had not answered in full after {self.deadline:g} s (deadline). Answers "
            "that take longer need a larger deadline, or fewer tokens."
        )

    def _judged(self, method: str, path: str, response: http.client.HTTPResponse, raw: bytes) -> bytes:
        """The body of an answer whose status says that all is well."""
        if 200 <= response.status < 300:
            return raw
        said = f"{response.status} {response.reason}: {complaint(raw)}"
        if response.status == 429 or response.status >= 500:
            raise PassingError(said, status=response.status, pause=seconds(response.getheader("Retry-After")))
        hint = HINTS.get(response.status, "")
        raise ServerError(
            f"{method} {self.url(path)} answered {said}{' ' if hint else ''}{hint}", status=response.status
        )

    def _object(self, raw: bytes, path: str) -> Mapping[str, Any]:
        try:
            read = json.loads(raw)
        except ValueError as error:
            raise ServerError(
                f"{self.url(path)} answered with what is no JSON ({error}): {short(raw)}. Check that "
                f"base_url ({self.base_url}) is the API of an OpenAI-compatible server."
            ) from error
        if isinstance(read, dict):
            return read
        raise ServerError(f"{self.url(path)} answered with no JSON object: {short(raw)}.")
