# SPDX-License-Identifier: Apache-2.0
"""Which row of its file a record is, for messages."""

from __future__ import annotations

from visalign.data.sets.records import PreferenceSet, QualitySet


def row_number(given: PreferenceSet | QualitySet, number: int) -> int:
    """The row of record 0, 1, 2, ... of a set, as its file counts them; from 1 where it says nothing."""
    return given.rows[number] if given.rows else number + 1


def row_name(given: PreferenceSet | QualitySet, number: int) -> str:
    """The same in words."""
    return f"row {row_number(given, number)} of '{given.name}'"
