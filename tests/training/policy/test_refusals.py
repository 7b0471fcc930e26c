# SPDX-License-Identifier: Apache-2.0
"""Every refusal of an algorithm, on images and on texts, advises something that is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from visalign.core import ASCENTS, NAMED, REGRESSIONS
from visalign.core.objective.decisions import EXTRA, ON_STEPS, ON_TOKENS
from visalign.errors import UserError
from visalign.training import DiffusionObjectiveSettings, TextObjectiveSettings

KINDS: dict[str, Any] = {"images": DiffusionObjectiveSettings, "text": TextObjectiveSettings}
ROWS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*NAMED, *REGRESSIONS, *ASCENTS)]
for _field, _value in (*ON_STEPS, *ON_TOKENS):
    _option = {"surrogate": "dppo", "surrogate_options": {"divergence": _value, "limit_low": 0.1, "limit_high": 0.1}}
    _number = _value if isinstance(_value, str) else 0.1
    _needed = {"surrogate_options": {"limit_low": 0.0, "limit_high": 0.0}} if _value == "cppo" else {}
    ROWS.append(("grpo", _option if "." in _field else {_field: _number, **_needed}))


def _advised(message: str) -> list[dict[str, Any]]:
    """Settings that the last sentence of a refusal names, one for each algorithm in quotes."""
    advice = message.rpartition("Take ")[2] or message.rpartition("Use ")[2]
    changes: dict[str, Any] = dict(re.findall(r"\b(ratio|kl_form|step_weight)='(\w+)'", advice))
    algorithms = [name for name in re.findall(r"(?<!=)'(\w+)'(?!:)", advice) if name not in ("scale", "batch")]
    assert algorithms or changes, f"nothing to take in: {message}"
    settings: list[dict[str, Any]] = []
    for name in algorithms or ["grpo"]:
        clause = re.split(r"(?<!=)'\w+'", advice.partition(f"'{name}'")[2])[0]
        more = {key: value for key, value in re.findall(r"objective\.(metric|credit)=(\w+)", clause)}
        kl = {key: float(value) for key, value in re.findall(r"\b(kl)=([\d.]+\d)", clause)}
        settings.append({"algorithm": name, "changes": {**changes, **kl}, **more})
    return settings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "changes"), ROWS, ids=[f"{n}-{'-'.join(map(str, c.values()))}" for n, c in ROWS])
def test_what_a_refusal_advises_is_accepted(kind: str, name: str, changes: dict[str, Any]) -> None:
    try:
        KINDS[kind](algorithm=name, changes=changes)
    except UserError as error:
        for settings in _advised(str(error)):
            assert KINDS[kind](**settings).algorithm == settings["algorithm"], f"advised by: {error}"


@pytest.mark.parametrize("field", EXTRA)
def test_a_loop_of_ones_own_is_advised_alike(field: str) -> None:
    """`check_decisions` names what a trainer would supply, and rows that need none of it."""
    for name in re.findall(r"'(\w+)'", EXTRA[field][1]):
        needs = {**NAMED[name].trajectory_needs(), **NAMED[name].output_needs()}
        assert not set(needs) & set(EXTRA) - {"metric"}
