# SPDX-License-Identifier: Apache-2.0
"""Messages of a plugin without its host, and refusals to a host that lacks something."""

from __future__ import annotations

import importlib
import sys

import pytest

from visalign.core import NAMED
from visalign.integrations.hosts import fitting, refuse_what_is_missing, required_inputs


@pytest.mark.parametrize(
    ("module", "host", "mend"),
    [
        ("verl", "verl", "python -m pip install verl==0.9.1"),
        ("verl_rewards", "verl", "python -m pip install verl==0.9.1"),
        ("trl", "trl", "python -m pip install trl==1.16.0"),
        ("flow_factory", "flow_factory", "from github.com/X-GenGroup/Flow-Factory"),
        ("unirl", "unirl", "from github.com/Tencent-Hunyuan/UniRL"),
    ],
)
def test_a_plugin_without_its_host_says_where_it_is(
    module: str, host: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.partition(".")[0] == host:
                raise ModuleNotFoundError(f"No module named {host!r}", name=host)

    for loaded in [name for name in sys.modules if name.partition(".")[0] == host]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=f"works inside {host}, which is not installed.*{mend}"):
        importlib.import_module(f"visalign.integrations.{module}")


def test_another_missing_module_keeps_its_own_message(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/trl.py", "w") as file:
        file.write("import no_such_part\n")
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_part'$"):
        importlib.import_module("visalign.integrations.trl")


def test_what_rows_ask_for() -> None:
    assert required_inputs(NAMED["dapo"]) == {}
    assert required_inputs(NAMED["grpo"]) == {"ref_log_prob": "kl=0.04"}
    assert required_inputs(NAMED["ppo_ptx"]).keys() == {"value", "ref_log_prob", "ptx_weight"}
    assert required_inputs(NAMED["flow_dppo"]) == {"divergence": "divergence='exact'"}
    assert required_inputs(NAMED["siren"]).keys() == {"nucleus_entropy", "entropy_before"}
    assert required_inputs(NAMED["ares"]).keys() == {"entropy", "entropy_before"}
    assert required_inputs(NAMED["entrocraft"]).keys() == {"entropy", "iteration", "ref_log_prob"}
    assert required_inputs(NAMED["clip_cov"]) == {"uniform": "selection='clip_cov'"}


def test_a_host_refuses_what_it_lacks() -> None:
    assert "dapo" in fitting([]) and "grpo" not in fitting([]) and "flow_grpo" not in fitting(["ref_log_prob"])
    refuse_what_is_missing("grpo", NAMED["grpo"], ["ref_log_prob"], "here")
    with pytest.raises(ValueError, match=r"'remax' has advantage='remax', which needs greedy_reward.*\(.*dapo"):
        refuse_what_is_missing("remax", NAMED["remax"], [], "here")
    with pytest.raises(ValueError, match="no meaning on tokens"):
        refuse_what_is_missing("flow_grpo", NAMED["flow_grpo"], ["ref_log_prob"], "here")
