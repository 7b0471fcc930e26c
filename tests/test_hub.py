# SPDX-License-Identifier: Apache-2.0
"""A hub that cannot be reached is named within seconds."""

from __future__ import annotations

import socket
import time

import pytest
from huggingface_hub import constants

from visalign.hub import go_offline_if_unreachable, hub_message


@pytest.fixture
def _asked_again(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    go_offline_if_unreachable.cache_clear()
    yield
    go_offline_if_unreachable.cache_clear()


@pytest.mark.usefixtures("_asked_again")
def test_a_silent_hub_is_named_in_time(monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr("visalign.hub.WAIT", 0.2)
    begin = time.monotonic()
    message = hub_message("a/b", "model", OSError("nothing"))
    server.close()
    assert time.monotonic() - begin < 5 and constants.is_offline_mode()
    assert "The model a/b is not in the hub's cache" in message and "cannot be reached (" in message
    assert "hf download a/b --local-dir FOLDER" in message


@pytest.mark.usefixtures("_asked_again")
def test_a_missing_name_is_not_blamed_on_the_network(monkeypatch):
    monkeypatch.setattr("visalign.hub.go_offline_if_unreachable", lambda: "")
    message = hub_message("a/b", "dataset", OSError("404 Client Error\nand so on"))
    assert message.startswith("The hub has no dataset a/b for you (404 Client Error). Correct the name")
