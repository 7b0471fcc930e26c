# SPDX-License-Identifier: Apache-2.0
"""`key=value` options of a reward, as written on a command line."""

from __future__ import annotations

from typing import Any

from visalign.errors import UserError


def parse_options(items: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` items as options, the value read as YAML.

    Args:
        items: as typed.

    Raises:
        UserError: an item without a name or "=", or a value that is no YAML.

    >>> parse_options(["quality=90", "prefer=smaller"])
    {'quality': 90, 'prefer': 'smaller'}
    """
    import yaml

    found: dict[str, Any] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"--option is {item!r}; write NAME=VALUE, e.g. --option quality=90.")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--option {item!r}: the value cannot be read ({error}). Quote it.") from error
    return found
