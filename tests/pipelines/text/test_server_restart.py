# SPDX-License-Identifier: Apache-2.0
"""A run whose server is started anew: it waits, hands the weights over again, and is the run without it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate import Accelerator

from tests.support.servers.completions import TinyServer, serving
from tests.support.training.metric_families import without_times
from tests.support.training.text import Letters, toy_policy, toy_text_trainer
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.server.generator import ServerGenerator
from visalign.adapters.server.weights import replace_weights
from visalign.pipelines.text.config import ServerConfig
from visalign.pipelines.text.parts import syncing
from visalign.remote import ServerConnection, ServerError
from visalign.training.loop.metrics import read_metrics

ASKED = "/v1/completions"
OFF_POLICY = {"changes": {"kl": 0.0, "importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}}
Dies = Callable[[TinyServer], Callable[[str, int], bool]]


class Kept(Letters):
    """Keeps what it judges."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Any:
        """The letters' score."""
        self.texts += completions
        return super().score(completions, prompts, metadata)


def policy(full: bool) -> Any:
    """A policy trained in full, or by adapters."""
    return toy_policy() if full else toy_policy(lora=text_lora(rank=2, alpha=4.0))


def run(folder: Path, full: bool, dies: Dies) -> tuple[list[str], list[dict[str, Any]], TinyServer]:
    """Completions and metrics of three iterations of 8 completions each, and the server.

    The server of whole models starts on a copy of the folder that the run writes to, so that the weights of a
    start are always those of the first.
    """
    trained, drawing, reward, served = policy(full), policy(full), Kept(), folder / "served"
    accelerator = Accelerator(cpu=True)
    trained.save(served)
    shutil.copytree(served, folder / "start")
    with serving(drawing) as server:
        if full:
            server.folder, server.start = served, lambda: drawing.load(folder / "start")
        server.dies = dies(server)
        generator = ServerGenerator(trained, server.url, "tiny", backoff=0.05, patience=100.0)
        settings = ServerConfig(base_url=server.url, model="tiny", model_folder=str(served) if full else None)
        config = cast(Any, SimpleNamespace(server=settings))
        trainer = toy_text_trainer(
            folder,
            policy=trained,
            reward=reward,
            generator=generator,
            after_update=syncing(config, trained, generator, folder, accelerator),
            accelerator=accelerator,
            objective=OFF_POLICY,
            rollout={"prompts_per_iteration": 2, "group_size": 4},
            optimizer={"lr": 3e-2},
        )
        trainer.train()
    return reward.texts, [without_times(record) for record in read_metrics(folder / "metrics.jsonl")], server


@pytest.fixture(scope="module", params=["adapters", "whole"])
def steady(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whether whole models are handed over, and the run whose server stays."""
    full = request.param == "whole"
    texts, metrics, server = run(tmp_path_factory.mktemp("steady"), full, lambda _: lambda path, count: False)
    assert server.starts == 1 and len(texts) == 24 and len(metrics) == 3
    return full, texts, metrics


@pytest.mark.filterwarnings("ignore:.*is unavailable")
@pytest.mark.parametrize(("event", "number"), [(ASKED, 17), ("hand over", 2)])
def test_a_run_is_that_of_a_server_that_stayed(steady: Any, event: str, number: int, tmp_path: Path) -> None:
    """Killed among an iteration's completions, before its first, or as it gets new weights."""
    full, texts, metrics = steady
    handover = "/collective_rpc" if full else "/v1/load_lora_adapter"
    died: list[int] = []

    def dies(server: TinyServer) -> Callable[[str, int], bool]:
        def now(path: str, count: int) -> bool:
            due = (path, count) == ((event if event == ASKED else handover), number) and not died
            died.extend([1] if due else [])
            return due

        return now

    completions, measured, server = run(tmp_path, full, dies)
    assert server.starts == 2
    assert completions == texts and measured == metrics


def test_an_adapter_that_stays_unknown_ends_the_call(tmp_path: Path) -> None:
    trained = policy(False)
    trained.save(tmp_path)
    with serving(policy(False)) as server:
        source = ServerGenerator(trained, server.url, "tiny")
        source.sync(tmp_path)
        server.dies = lambda path, count: path == ASKED and server.start() is not None
        with pytest.raises(ServerError, match=r"404 .*The model `visalign-\w+` does not exist"):
            source.generate(["b c"], seeds=0)


@pytest.mark.parametrize(("status", "patience", "waits"), [(503, 60.0, True), (503, 0.0, False), (500, 60.0, False)])
def test_a_server_that_answered_once_is_waited_for(status: int, patience: float, waits: bool) -> None:
    with serving(policy(False)) as server:
        link = ServerConnection(server.url, retries=1, backoff=0.01, patience=patience)
        link.get("models")
        server.folder = Path()
        server.failures = [(status, "loading", {})] * 6
        if waits:
            with pytest.warns(UserWarning, match=r"is unavailable: 503 .*: loading\. Waiting for at most 60 s"):
                link.post("/reset_prefix_cache", {})
            return
        with pytest.raises(ServerError, match="failed 2 times"):
            link.post("/reset_prefix_cache", {})


def test_what_never_answered_is_not_waited_for_and_patience_ends() -> None:
    with serving(policy(False)) as server:
        server.failures = [(503, "loading", {})] * 99
        with pytest.raises(ServerError, match="failed 2 times"):
            ServerConnection(server.url, retries=1, backoff=0.01, patience=60.0).post("/reset_prefix_cache", {})
        link = ServerConnection(server.url, retries=1, backoff=0.01, patience=0.2)
        link.get("models")
        begin = time.monotonic()
        with pytest.warns(UserWarning, match="is unavailable"), pytest.raises(ServerError, match=r"failed \d+ times"):
            link.post("/reset_prefix_cache", {})
        assert time.monotonic() - begin >= 0.2


def test_weights_are_renamed_into_their_folder(tmp_path: Path) -> None:
    """What is left of a killed process, of a model in parts, and of links to a cache."""
    folder, cache = tmp_path / "served", tmp_path / "cache"
    (folder / ".writing").mkdir(parents=True)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", ".writing/x"):
        (folder / name).write_text("old")
    cache.write_text("kept")
    (folder / "model.safetensors").symlink_to(cache)
    with pytest.raises(KeyboardInterrupt), replace_weights(folder) as aside:
        (aside / "model.safetensors").write_text("ha")
        raise KeyboardInterrupt
    assert (folder / "model.safetensors").read_text() == "kept"
    with replace_weights(folder) as aside:
        assert not any(aside.iterdir())
        (aside / "model.safetensors").write_text("new")
        (aside / "templates").mkdir()
        (aside / "templates/one").write_text("new")
    assert {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()} == {
        "config.json": "old",
        "model.safetensors": "new",
        "templates/one": "new",
    }
    assert cache.read_text() == "kept"
