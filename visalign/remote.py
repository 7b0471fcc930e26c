# SPDX-License-Identifier: Apache-2.0
"""Client for OpenAI-compatible servers, with retries and parallel requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from visalign.errors import UserError

CONNECT_SECONDS = 10.0
"""Longest wait for a connection, in seconds; an answer may take `timeout`."""
MAX_BACKOFF = 60.0
"""Longest wait before a retry, in seconds, whatever the server's Retry-After says."""
UNAVAILABLE = (None, 502, 503, 504)
"""Statuses of an unavailable server: no or a broken connection (None), or a proxy's word."""
HINTS = {
    401: "Give api_key the key that the server was started with.",
    403: "Give api_key the key that the server was started with.",
    404: "Check base_url (the API is at …/v1) and the name of the model.",
}
"""Advice by HTTP status."""

T = TypeVar("T")


class ServerError(UserError):
    """Failure of a server; the message names the URL, `status` is the HTTP status if there was an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _RetryableError(Exception):
    """Failure that a retry may not meet; `pause` is the server's Retry-After in seconds."""

    def __init__(self, message: str, *, status: int | None = None, pause: float | None = None) -> None:
        super().__init__(message)
        self.status, self.pause = status, pause


class ServerConnection:
    """Send requests to one server.

    Connection errors, 429 and 5xx are retried with doubling pauses. All other failures are final, and so is a
    server that stays silent for `timeout`: it would be silent again. `outages` counts attempts that found the
    server unavailable, after which it may have been restarted.

    Args:
        base_url: As for OpenAI clients, "http://host:8000/v1"; a URL without a path gets "/v1".
        api_key: Bearer token; never part of a message.
        timeout: Seconds that the server may be silent.
        retries: Attempts after the first.
        backoff: Seconds before the second attempt, doubled each time. Retry-After takes precedence.
        jitter: Random share of a pause, 0 to 1, so that requests that failed together do not return together.
        seed: Seed of the jitter.
        deadline: Seconds for one whole attempt, against servers that trickle bytes; None for no limit.
        patience: Seconds for which a server that has answered once may be unavailable while it restarts,
            without using up a retry.

    Raises:
        UserError: Invalid address, key or number.
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
        patience: float = 0.0,
    ) -> None:
        for name, value, least in (
            ("timeout", timeout, 0.001),
            ("retries", retries, 0),
            ("backoff", backoff, 0),
            ("jitter", jitter, 0),
            ("deadline", timeout if deadline is None else deadline, 0.001),
            ("patience", patience, 0),
        ):
            if not value >= least:
                raise UserError(f"{name} is {value}; it must be at least {least}.")
        if jitter > 1:
            raise UserError(f"jitter is {jitter}; it is a share of a pause, 0 to 1.")
        self._address = _check_address(base_url)
        self.base_url = base_url
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.jitter, self.seed, self.deadline, self.patience = jitter, seed, deadline, patience
        self.outages, self._has_answered, self._warned = 0, False, False
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise UserError(
                    "api_key contains characters that no HTTP header can carry, such as a line break. Give "
                    "the key alone."
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        # the system's certificates, as other clients use them
        self._tls = ssl.create_default_context() if base_url.startswith("https") else False

    def url(self, path: str) -> str:
        """Return the full address of `path`; one with a leading slash is relative to the server's root."""
        if path.startswith("/"):
            return str(httpx.URL(self._address).copy_with(raw_path=path.encode()))
        return f"{self._address}/{path}"

    def get(self, path: str) -> Mapping[str, Any]:
        """Return the JSON object at `path`; raises `ServerError` once the retries are spent."""
        return self._parse_object(self._run(lambda client: self._send(client, "GET", path)), path)

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Post an object and ignore the answer's body; raises `ServerError` for a status of failure."""
        self._run(lambda client: self._send(client, "POST", path, json.dumps(body).encode()))

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, parallel: int
    ) -> list[Mapping[str, Any]]:
        """Post several objects, `parallel` at once; the first failure cancels the rest and is raised."""

        def raise_failure(answer: Mapping[str, Any] | ServerError) -> None:
            if isinstance(answer, ServerError):
                raise answer

        answers: list[Any] = self.post_each(path, bodies, parallel=parallel, on_done=raise_failure)
        return answers

    def post_each(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        *,
        parallel: int,
        on_done: Callable[[Mapping[str, Any] | ServerError], object] | None = None,
    ) -> list[Mapping[str, Any] | ServerError]:
        """Post several objects in parallel; a failed request does not affect the others.

        Args:
            path: For example "chat/completions".
            bodies: One JSON object per request.
            parallel: Largest number of requests in flight.
            on_done: Called with each answer or error as it arrives, in any order; if it raises, the remaining
                requests are cancelled.

        Returns:
            JSON object or error of each request, in the order of `bodies`.
        """

        async def ask_all(client: httpx.AsyncClient) -> list[Mapping[str, Any] | ServerError]:
            slots = asyncio.Semaphore(max(1, parallel))

            async def ask(index: int) -> Mapping[str, Any] | ServerError:
                try:
                    async with slots:
                        payload = json.dumps(bodies[index]).encode()
                        return self._parse_object(
                            await self._send(client, "POST", path, payload, index), path
                        )
                except ServerError as error:
                    return error

            tasks = [asyncio.create_task(ask(index)) for index in range(len(bodies))]
            try:
                for finished in asyncio.as_completed(tasks):
                    answer = await finished
                    if on_done is not None:
                        on_done(answer)
                return [task.result() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._run(ask_all)

    def _run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run in an event loop of its own thread, since the caller may already be inside one."""
        cancel: list[Callable[[], object]] = []

        async def main() -> T:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None  # inside asyncio.run
            cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
            async with httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=self._tls,
                trust_env=False,
            ) as client:
                return await work(client)

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(asyncio.run, main())
            try:
                return future.result()
            finally:  # an interrupted caller must not leave requests running
                if not future.done() and cancel:
                    cancel[0]()

    async def _send(
        self, client: httpx.AsyncClient, method: str, path: str, payload: bytes | None = None, index: int = 0
    ) -> bytes:
        draw = random.Random(self.seed * 1_000_003 + index)
        pause, attempts, failures, outage_start = self.backoff, 0, 0, None
        while True:
            try:
                return await self._attempt(client, method, path, payload)
            except _RetryableError as failure:
                attempts += 1
                outage_start = self._note_outage(outage_start, failure)
                waited = 0.0 if outage_start is None else time.monotonic() - outage_start
                patient = outage_start is not None and self._has_answered and waited < self.patience
                failures += not patient
                if not patient and self.retries < (failures if outage_start is None else attempts):
                    raise ServerError(
                        f"{method} {self.url(path)} failed {attempts} times, the last time with: {failure}. "
                        f"Check that the server runs, its log, and base_url ({self.base_url}).",
                        status=failure.status,
                    ) from failure
                jittered = pause * (1 - self.jitter * draw.random())
                await asyncio.sleep(min(jittered if failure.pause is None else failure.pause, MAX_BACKOFF))
                pause *= 2

    def _note_outage(self, start: float | None, failure: _RetryableError) -> float | None:
        """Return when this request first found the server unavailable (monotonic seconds), or None."""
        if failure.status not in UNAVAILABLE:
            return None
        self.outages += 1
        if self.patience and self._has_answered and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.base_url} is unavailable: {failure}. Waiting for at most {self.patience:g} s "
                "(patience).",
                stacklevel=2,
            )
        return time.monotonic() if start is None else start

    async def _attempt(
        self, client: httpx.AsyncClient, method: str, path: str, payload: bytes | None
    ) -> bytes:
        """Send once and return the body of a successful answer."""
        try:
            async with asyncio.timeout(self.deadline):
                response = await client.request(method, self.url(path), content=payload)
        except TimeoutError as error:
            raise ServerError(
                f"{method} {self.url(path)} had not answered in full after {self.deadline:g} s (deadline). "
                "Answers that take longer need a larger deadline, or fewer tokens."
            ) from error
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise ServerError(
                f"{method} {self.url(path)} was silent for {self.timeout:g} s (timeout). Answers that take "
                "longer need a larger timeout or a smaller max_new_tokens; many at once, a smaller parallel."
            ) from error
        except httpx.TransportError as error:
            causes = list(_causes(error))
            if any(isinstance(cause, ssl.SSLError) for cause in causes):
                raise ServerError(
                    f"{self.url(path)} could not be reached over TLS: {causes[-1]}. Check https or http in "
                    "base_url and the server's certificate."
                ) from error
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            problem = "no connection" if refused else "the connection broke off"
            raise _RetryableError(f"{problem} ({_describe(causes[-1])})") from error
        status = response.status_code
        if status not in UNAVAILABLE:
            self._has_answered, self._warned = True, False
        if response.is_success:
            return response.content
        message = f"{status} {response.reason_phrase}: {_error_text(response.content)}"
        if status == 429 or status >= 500:
            after = response.headers.get("Retry-After", "").strip()  # its other form, a date, is ignored
            raise _RetryableError(message, status=status, pause=float(after) if after.isdigit() else None)
        hint = HINTS.get(status, "")
        raise ServerError(
            f"{method} {self.url(path)} answered {message}{' ' if hint else ''}{hint}", status=status
        )

    def _parse_object(self, raw: bytes, path: str) -> Mapping[str, Any]:
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise ServerError(
                f"{self.url(path)} did not answer with JSON ({error}): {_shorten(raw)}. Check that "
                f"base_url ({self.base_url}) is the API of an OpenAI-compatible server."
            ) from error
        if isinstance(value, dict):
            return value
        raise ServerError(f"{self.url(path)} did not answer with a JSON object: {_shorten(raw)}.")


def _check_address(base_url: str) -> str:
    """Return the base URL without a trailing slash."""
    invalid = (
        f"base_url is {base_url!r}; it must be the http or https address of a server's API, e.g. "
        '"http://localhost:8000/v1".'
    )
    parts = urlsplit(base_url if isinstance(base_url, str) else "")
    try:
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{invalid} ({error}.)") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(invalid)
    if parts.query or parts.fragment or parts.username is not None:
        raise UserError(
            f"base_url for {parts.hostname} contains a user name, or something after ? or #. Leave these "
            "out; a key goes into api_key."
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _error_text(raw: bytes) -> str:
    """Extract the message of an error answer from the fields in which servers put it."""
    try:
        value = json.loads(raw)
    except ValueError:
        return _shorten(raw)
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        error = next((error[key] for key in ("message", "detail") if error.get(key)), error)
    return _shorten((error if isinstance(error, str) else json.dumps(error)).encode())


def _shorten(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace").strip()
    return text[:400] + " …" * (len(text) > 400) if text else "(nothing)"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, down to the operating system's."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _describe(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        text = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
