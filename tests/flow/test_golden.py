# SPDX-License-Identifier: Apache-2.0
"""Sigma tables and stochastic steps against the frozen numbers of diffusers and the published samplers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_runner import load_families, read_file, run_case

HERE = Path(__file__).parents[1]
FAMILIES = load_families(HERE / "golden_families")


def cases(family: str):
    content = read_file(HERE / "golden" / f"{family}.json")
    assert content is not None
    return [pytest.param(FAMILIES[family], case, id=case.name) for case in content[1]]


@pytest.mark.parametrize(
    ("family", "case"), [*cases("E_sigma_tables"), *cases("E_sde_steps"), *cases("L_precise_steps")]
)
def test_golden(family, case):
    comparison = run_case(family, case)
    assert comparison is not None, "this variant is not known"
    assert comparison.ok, comparison
