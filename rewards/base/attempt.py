# SPDX-License-Identifier: Apache-2.0
"""One call of a user's code, its error kept as a finding."""

from __future__ import annotations

from types import TracebackType


class Attempt:
    """Keeps the exception of a probed call, so that the report can name it instead of stopping there."""

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)
