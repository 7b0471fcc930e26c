# SPDX-License-Identifier: Apache-2.0
"""Rows of a cache that somebody else has written or altered."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from visalign.rewards.base.identity import Identity
from visalign.rewards.cache import store
from visalign.rewards.cache.store import FILE, ScoreCache, key_of


def test_a_row_signed_without_the_users_key_is_not_believed(tmp_path: Path, monkeypatch):
    """Somebody who may write the folder puts in what they like, with a signature by a key of their own."""
    judge, key = Identity(judge="j", model="m"), key_of([b"x"], "p", None)
    monkeypatch.setenv("VISALIGN_CACHE_KEY", "mine")
    ScoreCache(tmp_path).put(judge, {key: {"value": 1.0}})
    assert ScoreCache(tmp_path).get(judge, [key]) == {key: {"value": 1.0}}
    monkeypatch.setenv("VISALIGN_CACHE_KEY", "another's")
    ScoreCache(tmp_path).put(judge, {key: {"value": 9.0}})
    monkeypatch.setenv("VISALIGN_CACHE_KEY", "mine")
    with pytest.warns(UserWarning, match="altered on the disk"):
        assert ScoreCache(tmp_path).get(judge, [key]) == {}
    for odd in ("NULL", "5", "2000000000000", "'x'"):
        with closing(sqlite3.connect(tmp_path / FILE)) as link, link:
            link.execute(f"UPDATE judgements SET sum = {odd}")
        with pytest.warns(UserWarning, match="altered on the disk"):
            assert ScoreCache(tmp_path).get(judge, [key]) == {}


def test_the_key_is_made_once_and_is_the_users_alone(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("VISALIGN_CACHE_KEY", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    store._secret.cache_clear()
    first = store._secret(None)
    store._secret.cache_clear()
    assert store._secret(None) == first and len(first) == 64
    (file,) = (tmp_path / "data" / "visalign").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(b"short")
    store._secret.cache_clear()
    with pytest.raises(OSError, match=r"cache\.key' is not whole"):
        ScoreCache(tmp_path / "cache")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data" / "visalign" / "cache.key"))
    with pytest.raises(OSError, match=r"cannot be read or made .*VISALIGN_CACHE_KEY"):
        ScoreCache(tmp_path / "cache")
    store._secret.cache_clear()
