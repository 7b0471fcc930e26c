# SPDX-License-Identifier: Apache-2.0
"""The code sandbox as tests run it: isolated where the system can, else by saying so, as users must."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from visalign.rewards import CodeTests, RewardError
from visalign.rewards.code.sandbox import SandboxLimits, run_python

QUICK = SandboxLimits(wall_seconds=1.5, cpu_seconds=1, memory_mb=256, file_mb=2)


def kernel_isolates() -> bool:
    """Whether namespaces can be had; elsewhere the tests say isolation="process", as users must."""
    try:
        return run_python("", limits=QUICK).isolation == "namespaces"
    except RewardError:
        return False


HERE = "namespaces" if sys.platform == "linux" and kernel_isolates() else "process"
KERNEL = pytest.mark.skipif(HERE == "process", reason="user namespaces are not permitted here")
ISOLATIONS = (pytest.param("auto", marks=KERNEL), "process")


def judge(code, tests, isolation=HERE, **options) -> Any:
    """(value or the reason, remark) of one sample with the code in a fenced block."""
    reward = CodeTests(limits=QUICK, isolation=isolation, **options)
    scores = reward.score([f"So:\n```python\n{code}\n```\n"], ["?"], [{"tests": tests}])
    return (scores.reason or [None])[0] or scores.value.item(), (scores.text or [""])[0]
