# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI-compatible server: JSON over HTTP, retries, many at a time, errors with the URL."""

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
"""Longest wait for a connection; an answer may take `timeout`."""
LONGEST_PAUSE = 60.0
"""Longest wait before another attempt, in seconds, whatever the server's Retry-After says."""
AWAY = (None, 502, 503, 504)
"""Statuses of a server that is away: no connection, one that broke off, or a proxy that says so."""
HINTS = {
    401: "Give api_key the key that the server was started with.",
    403: "Give api_key the key that the server was started with.",
    404: "Check base_url (the API is at …/v1) and the name of the model.",
}
"""What to do about a status."""

T = TypeVar("T")


class ServerError(UserError):
    """What a server said or failed to say; the message names the URL, `status` is that of an HTTP answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _PassingError(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, message: str, *, status: int | None = None, pause: float | None = None) -> None:
        super().__init__(message)
        self.status, self.pause = status, pause


class ServerConnection:
    """Sends requests to one server.

    Connection errors, 429 and 5xx are tried again with pauses that double; every other failure is final, a
    server that stays silent for `timeout` included: it would be silent again. `absences` counts how often
    an attempt found the server away: it may have been started anew since.

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
        patience: seconds for which a server that has answered once may be away (no connection, 502, 503,
            504) while it is started anew, which counts as no attempt.

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
        self._address = _address(base_url)
        self.base_url = base_url
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.jitter, self.seed, self.deadline, self.patience = jitter, seed, deadline, patience
        self.absences, self._has_answered, self._is_told = 0, False, False
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise UserError(
                    "api_key holds characters that no HTTP header may hold, a line break perhaps. Give the "
                    "key alone."
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        # the system's certificates, as other clients take them
        self._tls = ssl.create_default_context() if base_url.startswith("https") else False

    def url(self, path: str) -> str:
        """The whole address of `path`, e.g. "completions"; "/health" stands at the server's root."""
        if path.startswith("/"):
            return str(httpx.URL(self._address).copy_with(raw_path=path.encode()))
        return f"{self._address}/{path}"

    def get(self, path: str) -> Mapping[str, Any]:
        """The JSON object at `path`; `ServerError` of any failure, after the retries, here and below."""
        return self._object(self._run(lambda client: self._send(client, "GET", path)), path)

    def tell(self, path: str, body: Mapping[str, Any]) -> None:
        """Post an object whose answer is its status alone."""
        self._run(lambda client: self._send(client, "POST", path, json.dumps(body).encode()))

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, parallel: int
    ) -> list[Mapping[str, Any]]:
        """The JSON objects of the answers to several requests, in their order, `parallel` under way at once
        at most; at the first failure the others are given up.
        """

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

        async def ask_all(client: httpx.AsyncClient) -> list[Mapping[str, Any] | ServerError]:
            room = asyncio.Semaphore(max(1, parallel))

            async def ask(index: int) -> Mapping[str, Any] | ServerError:
                try:
                    async with room:
                        payload = json.dumps(bodies[index]).encode()
                        return self._object(await self._send(client, "POST", path, payload, index), path)
                except ServerError as error:
                    return error

            tasks = [asyncio.create_task(ask(index)) for index in range(len(bodies))]
            try:
                for done in asyncio.as_completed(tasks):
                    answer = await done
                    if on_done is not None:
                        on_done(answer)
                return [task.result() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._run(ask_all)

    def _run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run in a thread's own event loop, since the caller may stand in one; it ends with the caller."""
        running: list[Callable[[], object]] = []

        async def main() -> T:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None  # inside asyncio.run
            running.append(lambda: loop.call_soon_threadsafe(task.cancel))
            async with httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=self._tls,
                trust_env=False,
            ) as client:
                return await work(client)

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(asyncio.run, main())
            try:
                return found.result()
            finally:
                if not found.done() and running:
                    running[0]()

    async def _send(
        self, client: httpx.AsyncClient, method: str, path: str, payload: bytes | None = None, index: int = 0
    ) -> bytes:
        draw = random.Random(self.seed * 1_000_003 + index)
        pause, attempts, failures, since = self.backoff, 0, 0, None
        while True:
            try:
                return await self._attempt(client, method, path, payload)
            except _PassingError as failure:
                attempts += 1
                since = self._away_since(since, failure)
                waits = since is not None and time.monotonic() - since < self.patience and self._has_answered
                failures += not waits
                if not waits and self.retries < (failures if since is None else attempts):
                    raise ServerError(
                        f"{method} {self.url(path)} failed {attempts} times, the last time so: {failure}. "
                        f"Check that the server runs, its log, and base_url ({self.base_url}).",
                        status=failure.status,
                    ) from failure
                asked_for = (
                    pause * (1 - self.jitter * draw.random()) if failure.pause is None else failure.pause
                )
                await asyncio.sleep(min(asked_for, LONGEST_PAUSE))
                pause *= 2

    def _away_since(self, since: float | None, failure: _PassingError) -> float | None:
        """When a request first found the server away, in monotonic seconds; None: it is there."""
        if failure.status not in AWAY:
            return None
        self.absences += 1
        if self.patience and self._has_answered and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{self.base_url} is away: {failure}. It is waited for, {self.patience:g} s at most "
                "(patience).",
                stacklevel=2,
            )
        return time.monotonic() if since is None else since

    async def _attempt(
        self, client: httpx.AsyncClient, method: str, path: str, payload: bytes | None
    ) -> bytes:
        """The body of an answer whose status says that all is well."""
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
            first = list(_causes(error))[-1]
            if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
                raise ServerError(
                    f"{self.url(path)} could not be reached over TLS: {first}. Check https or http in "
                    "base_url and the server's certificate."
                ) from error
            met = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = "no connection" if met else "the connection broke off"
            raise _PassingError(f"{what} ({_named(first)})") from error
        status = response.status_code
        if status not in AWAY:
            self._has_answered, self._is_told = True, False
        if response.is_success:
            return response.content
        said = f"{status} {response.reason_phrase}: {_complaint(response.content)}"
        if status == 429 or status >= 500:
            after = response.headers.get("Retry-After", "").strip()  # its other form, a date, is passed over
            raise _PassingError(said, status=status, pause=float(after) if after.isdigit() else None)
        hint = HINTS.get(status, "")
        raise ServerError(
            f"{method} {self.url(path)} answered {said}{' ' if hint else ''}{hint}", status=status
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


def _address(base_url: str) -> str:
    """A base URL, checked, without a slash at its end."""
    wrong = (
        f"base_url is {base_url!r}; it must be the http or https address of a server's API, e.g. "
        '"http://localhost:8000/v1".'
    )
    parts = urlsplit(base_url if isinstance(base_url, str) else "")
    try:
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{wrong} ({error}.)") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(wrong)
    if parts.query or parts.fragment or parts.username is not None:
        raise UserError(
            f"base_url for {parts.hostname} holds a user name, or something after ? or #. Leave these out; a "
            "key goes into api_key."
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _complaint(raw: bytes) -> str:
    """What an error answer says, from the places where servers put it."""
    try:
        read = json.loads(raw)
    except ValueError:
        return _short(raw)
    error = read.get("error", read) if isinstance(read, dict) else read
    if isinstance(error, dict):
        error = next((error[k] for k in ("message", "detail") if error.get(k)), error)
    return _short((error if isinstance(error, str) else json.dumps(error)).encode())


def _short(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace").strip()
    return text[:400] + " …" * (len(text) > 400) if text else "(nothing)"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, down to the system's own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _named(error: BaseException) -> str:
    said = str(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        said = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
