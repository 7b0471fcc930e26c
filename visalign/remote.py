# SPDX-License-Identifier: Apache-2.0
"""Client for OpenAI-compatible servers, with retries and parallel requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import ssl
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal

from visalign.errors import UserError

CONNECT_SECONDS = 10.0  # Longest wait for a connection, in seconds; an answer may take `timeout`
MAX_BACKOFF = 60.0  # Longest wait before a retry, in seconds, whatever the server's Retry-After says
JITTER = 0.5  # Random share of a pause
UNAVAILABLE = (None, 502, 503, 504)
"""Statuses of an unavailable server: no or a broken connection (None), or a proxy's word."""

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
        deadline: Seconds for one whole attempt, against servers that trickle bytes; None for no limit.
        retries: Attempts after the first.
        backoff: Seconds before the second attempt, doubled each time. Retry-After takes precedence.
        patience: Seconds for which a server that has answered may be away without using up a retry (restarts).
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        deadline: float | None = None,
        retries: int = 4,
        backoff: float = 1.0,
        patience: float = 0.0,
    ) -> None:
        self._address = _api_address(base_url)
        self.base_url = base_url
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.deadline, self.patience = deadline, patience
        self.outages, self._has_answered, self._warned = 0, False, False
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):  # httpx would print it in its error
                raise UserError("api_key contains characters that no HTTP header can carry. Give the key alone.")
            self._headers["Authorization"] = f"Bearer {api_key}"
        # the system's certificates, as other clients use them
        self._tls = ssl.create_default_context() if self._address.scheme == "https" else False

    def url(self, path: str) -> str:
        """Return the full address of `path`; one with a leading slash is relative to the server's root."""
        return str(self._address.join(path))

    def get(self, path: str) -> Mapping[str, Any]:
        """Return the JSON object at `path`."""
        return self._parse_object(self._run(lambda client: self._send(client, "GET", path)), path)

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Post an object and ignore the answer's body."""
        self._run(lambda client: self._send(client, "POST", path, json.dumps(body).encode()))

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]], *, parallel: int) -> list[Mapping[str, Any]]:
        """Post several objects, `parallel` at once; the first failure cancels the rest and is raised."""

        def raise_failure(answer: Mapping[str, Any] | ServerError) -> None:
            if isinstance(answer, ServerError):
                raise answer

        return self.post_each(path, bodies, parallel=parallel, on_done=raise_failure)  # type: ignore[return-value]

    def post_each(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        *,
        parallel: int,
        on_done: Callable[[Mapping[str, Any] | ServerError], object] = lambda _: None,
    ) -> list[Mapping[str, Any] | ServerError]:
        """Post several objects, `parallel` at once, and return the answer or error of each, in their order.

        `on_done` gets each as it arrives, in any order; if it raises, the remaining requests are cancelled.
        """

        async def post_bodies(client: httpx.AsyncClient) -> list[Mapping[str, Any] | ServerError]:
            slots = asyncio.Semaphore(max(1, parallel))

            async def post_body(index: int) -> Mapping[str, Any] | ServerError:
                try:
                    async with slots:
                        payload = json.dumps(bodies[index]).encode()
                        return self._parse_object(await self._send(client, "POST", path, payload), path)
                except ServerError as error:
                    return error

            tasks = [asyncio.create_task(post_body(index)) for index in range(len(bodies))]
            try:
                for finished in asyncio.as_completed(tasks):
                    on_done(await finished)
                return [task.result() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._run(post_bodies)

    def _run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run in an event loop of its own thread, since the caller may already be inside one."""

        async def main() -> T:
            async with httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=self._tls,
                trust_env=False,
            ) as client:
                return await work(client)

        with start_blocking_portal() as portal:  # cancels the requests of a caller that is interrupted
            return portal.call(main)

    async def _send(self, client: httpx.AsyncClient, method: str, path: str, payload: bytes | None = None) -> bytes:
        """Send until there is an answer, and return its body."""
        pause, failures, outage_start = self.backoff, 0, None
        for attempt in itertools.count(1):
            try:
                return await self._attempt(client, method, path, payload)
            except _RetryableError as failure:
                waiting = False
                if failure.status in UNAVAILABLE:
                    self.outages += 1
                    outage_start = outage_start or time.monotonic()
                    waiting = self._has_answered and time.monotonic() - outage_start < self.patience
                if waiting and not self._warned:
                    self._warned = True
                    limit = f"Waiting for at most {self.patience:g} s (patience)."
                    warnings.warn(f"{self.base_url} is unavailable: {failure}. {limit}", stacklevel=2)
                failures += not waiting
                if failures > self.retries:
                    raise ServerError(
                        f"{method} {self.url(path)} failed {attempt} times, the last time with: {failure}. "
                        f"Check that the server runs, its log, and base_url ({self.base_url}).",
                        status=failure.status,
                    ) from failure
                # requests that failed together must not return together; Python's own draws stay as they are
                jittered = pause * (1 - JITTER * random.SystemRandom().random())
                await asyncio.sleep(min(jittered if failure.pause is None else failure.pause, MAX_BACKOFF))
                pause *= 2
        raise AssertionError("unreachable")

    async def _attempt(self, client: httpx.AsyncClient, method: str, path: str, payload: bytes | None) -> bytes:
        """Send once and return the body of a successful answer."""
        request = f"{method} {self.url(path)}"
        try:
            async with asyncio.timeout(self.deadline):
                response = await client.request(method, self.url(path), content=payload)
        except TimeoutError as error:
            raise ServerError(
                f"{request} had not answered after {self.deadline:g} s. Raise deadline, or lower max_new_tokens."
            ) from error
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise ServerError(
                f"{request} was silent for {self.timeout:g} s. Raise timeout, or lower max_new_tokens."
            ) from error
        except httpx.TransportError as error:
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            cause: BaseException = error
            while inner := cause.__cause__ or cause.__context__:  # httpx's own text names no reason
                cause = inner
            problem = "no connection" if refused else "the connection broke off"
            raise _RetryableError(f"{problem} ({type(cause).__name__}: {cause})") from error
        status = response.status_code
        if status not in UNAVAILABLE:
            self._has_answered, self._warned = True, False
        if response.is_success:
            return response.content
        message = f"{status} {response.reason_phrase}: {_shorten(response.text)}"
        if status == 429 or status >= 500:
            after = response.headers.get("Retry-After", "").strip()  # its other form, a date, is ignored
            raise _RetryableError(message, status=status, pause=float(after) if after.isdigit() else None)
        raise ServerError(
            f"{request} answered {message}. Check base_url (…/v1), model, api_key and the server's log.", status=status
        )

    def _parse_object(self, raw: bytes, path: str) -> Mapping[str, Any]:
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        answer = _shorten(raw.decode("utf-8", "replace"))
        raise ServerError(
            f"{self.url(path)} did not answer with a JSON object: {answer}. Check that base_url is the API of an "
            "OpenAI-compatible server."
        )


def _api_address(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UserError(  # the address may hold a password or a key
            f"base_url {url.scheme}://{url.host} must be the http or https address of a server's API, such "
            'as "http://localhost:8000/v1", without a user name, ? or #. A key goes into api_key.'
        )
    return url.copy_with(path=(url.path.rstrip("/") or "/v1") + "/")


def _shorten(text: str) -> str:
    text = text.strip()
    return text[:400] + " …" * (len(text) > 400) if text else "(nothing)"
