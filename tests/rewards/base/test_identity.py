# SPDX-License-Identifier: Apache-2.0
"""The identity of a judge: what changes it, what does not, and the fingerprint of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from visalign.rewards.base.identity import Identity, fingerprint

ONE = Identity(judge="a", model="m", template="Is it {prompt}?", preprocessing={"size": (64, 64), "mean": [0.5]})


def test_equal_records_have_equal_digests():
    same = replace(ONE, preprocessing={"mean": (0.5,), "size": [64, 64]})
    assert same.digest == ONE.digest and ONE.differences(same) == []
    assert len(ONE.digest) == 64


def test_the_line_names_the_weights_with_their_adapters():
    lines = [replace(ONE, judge="a", weights="ab" * 16 + more).line for more in ("", "+cd", " ef")]
    weights = {line.split(", ")[1] for line in lines}
    assert len(weights) == 3 and lines[0].split(", ")[1] == "weights " + "ab" * 6
    assert "weights" not in replace(ONE, weights="+").line


def test_every_field_counts():
    changes: list[tuple[str, Any]] = [
        *[("judge", "b"), ("model", "n"), ("weights", "ff"), ("template", None), ("preprocessing", {})],
        *[("dtype", "bfloat16"), ("options", {"seed": 1})],
    ]
    for name, value in changes:
        other = replace(ONE, **{name: value})
        assert other.digest != ONE.digest and ONE.differences(other) == [name]


def test_fingerprint_follows_names_sizes_and_ends(tmp_path: Path):
    assert fingerprint(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    (tmp_path / "README.md").write_text("a card is no weight")
    first = fingerprint(tmp_path)
    assert len(first) == 32
    (tmp_path / "README.md").write_text("another card")
    assert fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"a" * 99 + b"b")
    assert fingerprint(tmp_path) != first
    (tmp_path / "model.safetensors").write_bytes(b"a" * (5 << 20))
    before = fingerprint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(5 << 19)  # in the middle, where a head's weights may stand
        file.write(b"b")
    assert fingerprint(tmp_path) != before
    (tmp_path / "more.bin").write_bytes(b"c")
    assert fingerprint(tmp_path) not in (first, fingerprint(tmp_path / "model.safetensors"))
    prints = {fingerprint(tmp_path)}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
        prints.add(fingerprint(tmp_path))
    assert len(prints) == 5, "what is read beside the weights moves scores, too"


def test_fingerprint_of_a_large_file_takes_samples_of_all_of_it(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(200 << 20)  # sparse: takes no room
    fingerprints = {fingerprint(path)}
    for offset in (0, 70 << 20, 150 << 20, (200 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"x" * (1 << 19) if offset < 190 << 20 else b"x")
        fingerprints.add(fingerprint(path))
    assert len(fingerprints) == 5
