# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what comes back, what is refused and how, and what survives a failed write."""

from __future__ import annotations

import errno
import json
import resource

import pytest
import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from visalign.training.loop import checkpoint
from visalign.training.loop.checkpoint import (
    CheckpointError,
    load,
    newest_intact,
    not_finite,
    save,
    step_folder,
    verify,
)
from visalign.training.loop.sharding import local_shard

CONFIG = {"seed": 0, "optimizer": {"lr": 1e-3}, "run": {"iterations": 10}}


def _save(root, step, value=1.0, **arguments):
    tensors = {"trainable": {"a.weight": torch.full((3, 2), value)}, "optimizer": {"a.step": torch.tensor(2.0)}}
    return save(root, step, tensors, {"iteration": step, "seconds": 1.5}, CONFIG, **arguments)


def test_round_trip(tmp_path):
    folder = _save(tmp_path, 7, 0.1)
    loaded = load(folder, CONFIG)
    assert folder.name == "step_000007" and loaded.step == 7
    assert loaded.state == {"iteration": 7, "seconds": 1.5}
    assert torch.equal(loaded.tensors["trainable"]["a.weight"], torch.full((3, 2), 0.1))
    assert loaded.tensors["optimizer"]["a.step"].shape == ()
    assert not list(tmp_path.glob(".*"))


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        _save(tmp_path, step, keep=2)
    assert [f.name for f in checkpoint.folders(tmp_path)] == ["step_000003", "step_000010"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    _save(tmp_path, 10)
    _cut(_save(tmp_path, 20) / "trainable.safetensors")
    newest_intact(tmp_path)
    _save(tmp_path, 12, keep=1)
    assert [f.name for f in checkpoint.folders(tmp_path)] == ["step_000012"]
    assert newest_intact(tmp_path) == (step_folder(tmp_path, 12), [])
    (_save(tmp_path, 13, keep=2) / "manifest.json").unlink()
    _save(tmp_path, 14, keep=2)
    assert [f.name for f in checkpoint.folders(tmp_path)] == ["step_000012", "step_000014"]


def _cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("trainable.safetensors", _cut, r"trainable\.safetensors has \d+ bytes instead of \d+"),
        ("optimizer.safetensors", _flip, r"optimizer\.safetensors has changed \(SHA-256"),
        ("manifest.json", lambda path: path.write_text("[]"), r"manifest\.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_older_one_offered(tmp_path, name, damage, message):
    older, newer = _save(tmp_path, 1), _save(tmp_path, 2)
    damage(newer / name)
    with pytest.raises(CheckpointError, match=message + r".*Delete this folder and resume: the newest whole"):
        load(newer, CONFIG)
    folder, passed = newest_intact(tmp_path)
    assert folder == older
    assert len(passed) == 1 and "step_000002" in passed[0]


def test_another_format_is_refused(tmp_path):
    folder = _save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99; this version reads format 2"):
        verify(folder)


def test_another_configuration_is_refused_key_by_key(tmp_path):
    folder = _save(tmp_path, 1)
    other = {"seed": 0, "optimizer": {"lr": 1e-2}, "run": {"iterations": 20}, "new": 1}
    with pytest.raises(CheckpointError) as caught:
        load(folder, other, free=["run.iterations"])
    text = str(caught.value)
    assert "optimizer.lr: 0.001 there, 0.01 now" in text and "new: '(absent)' there, 1 now" in text
    assert "run.iterations" not in text and "Set them back to resume, or start a new run" in text
    later = {**CONFIG, "run": {"iterations": 99}, "new": None}  # a setting that the version before lacked
    assert load(folder, later, free=["run.iterations"]).step == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch, error, message):
    previous = _save(tmp_path, 1)

    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoint, "_sync_and_describe", fail)
    with pytest.raises(CheckpointError, match=f"{message}.*earlier checkpoints are untouched.*--resume"):
        _save(tmp_path, 2, keep=1)
    assert not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    assert load(previous, CONFIG).step == 1


@pytest.fixture
def divided():
    """A [3, 2] divided among the processes, of which this is the only one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    distributed.destroy_process_group()


def test_what_is_divided_is_written_divided_and_read_whole_or_divided(tmp_path, divided):
    moments = {"w.step": torch.tensor(2.0), "w.exp_avg": divided + 1}
    tensors = {"trainable": {"w": divided, "rest": torch.ones(2)}, "optimizer": moments}
    folder = save(tmp_path, 1, tensors, {}, CONFIG)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    shards = {f"sharded/shard-00001-model-0000{stem}-of-00002.safetensors" for stem in (1, 2)}
    assert written == {"trainable.safetensors", "optimizer.safetensors", "state.json", "manifest.json"} | shards
    undivided, parts = load(folder, CONFIG).tensors, load(folder, CONFIG, divided={"w": divided}).tensors
    for loaded, kind in ((undivided, torch.Tensor), (parts, DTensor)):
        assert type(loaded["trainable"]["w"]) is type(loaded["optimizer"]["w.exp_avg"]) is kind
        assert torch.equal(local_shard(loaded["trainable"]["w"]), divided.to_local())
        assert torch.equal(local_shard(loaded["optimizer"]["w.exp_avg"]), divided.to_local() + 1)
        assert loaded["optimizer"]["w.step"] == 2 and torch.equal(loaded["trainable"]["rest"], torch.ones(2))
    _flip(folder / min(shards))
    with pytest.raises(CheckpointError, match=r"sharded/shard-00001-model-00001.* has changed"):
        load(folder, CONFIG)


def test_a_part_that_cannot_be_written_leaves_the_previous_checkpoint(tmp_path, divided):
    previous = save(tmp_path, 1, {"trainable": {"w": divided}}, {}, CONFIG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step_000002: .*process 0: .*earlier checkpoints are untou"):
            save(tmp_path, 2, {"trainable": {"w": divided}}, {}, CONFIG, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert load(previous, CONFIG).step == 1


def test_a_weight_that_is_not_finite_is_found_where_it_is(divided):
    assert not_finite({"w": divided, "v": torch.ones(2)}) == []
    assert not_finite({"w": divided.log(), "v": torch.ones(2)}) == ["w"]


def test_the_rests_of_a_killed_write_are_swept_away(tmp_path):
    (tmp_path / ".writing_000003").mkdir()
    (tmp_path / ".writing_000003" / "trainable.safetensors").write_bytes(b"half")
    assert newest_intact(tmp_path) == (None, [])
    _save(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]
