# SPDX-License-Identifier: Apache-2.0
"""The cache of scores: repeated requests, what is never mixed, damage, interruption, many writers."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visalign.interfaces import Preferences, RewardCapabilities, Scores
from visalign.rewards import check_reward, load_reward
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.cache.reward import CachedJudge, CachedReward, content_digest
from visalign.rewards.cache.store import FILE, ScoreCache, key_of

PIXELS = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PROMPTS = ["a", "b", "c", "d"]


class Mean:
    """Mean pixel plus the prompt's length; dark images are refused."""

    name, unit, range, higher_is_better = "mean", "levels", (0.0, 300.0), True

    def __init__(self, version: int = 1, floor: float = 0.0) -> None:
        self.identity = Identity(judge="mean", model="none", options={"version": version})
        self.asked = 0
        self.floor = floor

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        self.asked += len(request)
        means = torch.tensor([float("nan") if i is None else i.mean().item() for i in request.images.images])
        reasons = [
            why or ("too dark" if mean < self.floor else None)
            for why, mean in zip(request.images.reasons, means.tolist(), strict=True)
        ]
        lengths = [float("nan" if prompt == "nan" else len(prompt)) for prompt in request.prompts]
        value = means * 255 + torch.tensor(lengths)
        scores = make_scores(value, reasons, self.unit, parts={"mean": means}, text=[p * 2 for p in prompts])
        return Scores(**{**vars(scores), "std": torch.where(scores.valid, 0.5, torch.nan)})


class Left:
    name = "left"
    identity = Identity(judge="left", model="none")

    def __init__(self) -> None:
        self.asked = 0

    def compare(self, left: Any, right: Any, prompts: Any, metadata: Any = None) -> Preferences:
        one, two = (read_request(self.name, side, prompts, None).images for side in (left, right))
        self.asked += len(one)
        valid = one.valid & two.valid
        gap = torch.tensor(
            [
                (a.mean() - b.mean()).item() if a is not None and b is not None else float("nan")
                for a, b in zip(one.images, two.images, strict=True)
            ]
        )
        reasons = [a or b for a, b in zip(one.reasons, two.reasons, strict=True)]
        return Preferences(prob=gap.sigmoid(), valid=valid, log_odds=gap, parts={"gap": gap}, reason=reasons)


def same(one: Scores, two: Scores) -> None:
    torch.testing.assert_close(one.value, two.value, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(one.valid, two.valid) and one.unit == two.unit
    assert list(one.reason or []) == list(two.reason or [])


def files(folder: Path) -> list[Path]:
    paths = []
    for number, image in enumerate(PIXELS):
        paths.append(folder / f"{number}.png")
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1])
    return paths


def test_the_second_time_nothing_is_asked_and_all_is_equal(tmp_path: Path):
    reward = Mean()
    first = CachedReward(reward, ScoreCache(tmp_path)).score(PIXELS, PROMPTS)
    assert reward.asked == 4
    again = CachedReward(reward, ScoreCache(tmp_path))
    second = again.score(PIXELS.flip(0), PROMPTS[::-1])
    assert reward.asked == 4
    same(second, Scores(**{**vars(first), "value": first.value.flip(0), "valid": first.valid.flip(0)}))
    same(first, reward.score(PIXELS, PROMPTS))
    assert second.std is not None and second.std.tolist() == [0.5] * 4
    assert second.parts["mean"].tolist() == first.parts["mean"].tolist()[::-1]
    assert second.text == ["dd", "cc", "bb", "aa"]


def test_equal_content_is_asked_once_in_a_call(tmp_path: Path):
    reward = Mean()
    scores = CachedReward(reward, ScoreCache(tmp_path)).score(PIXELS[[0, 0, 1, 0]], ["a", "a", "a", "bb"])
    assert reward.asked == 3 and scores.value[0] == scores.value[1] != scores.value[3]


def test_everything_that_matters_is_in_the_address(tmp_path: Path):
    reward, cache = Mean(), ScoreCache(tmp_path)
    cached = CachedReward(reward, cache)
    base = (PIXELS[:1], ["a"], [{"x": 1}])
    changed = PIXELS[:1].clone()
    changed[0, 0, 0, 0] ^= 1
    for images, prompts, records in (
        base,
        (changed, ["a"], [{"x": 1}]),
        (PIXELS[:1], ["A"], [{"x": 1}]),
        (PIXELS[:1], ["a"], [{"x": 2}]),
        (PIXELS[:1], ["a"], None),
        (PIXELS[:1].float() / 255, ["a"], [{"x": 1}]),
    ):
        before = reward.asked
        cached.score(images, prompts, records)
        assert reward.asked == before + 1
    later = Mean(version=2)
    CachedReward(later, cache).score(*base)
    assert later.asked == 1, "another version of the judge has other scores"
    assert len(cache) == 7
    assert key_of([b"ab"], "c", None) != key_of([b"a"], "bc", None)


def test_files_are_known_by_their_bytes(tmp_path: Path):
    reward, paths = Mean(), files(tmp_path)
    cached = CachedReward(reward, ScoreCache(tmp_path / "cache"))
    first = cached.score(paths, PROMPTS)
    copy = tmp_path / "copy.png"
    copy.write_bytes(paths[0].read_bytes())
    same(cached.score([copy, *map(str, paths[1:])], PROMPTS), first)
    assert reward.asked == 4
    Image.new("RGB", (8, 8), "white").save(copy)
    assert cached.score([copy], ["a"]).value[0] == 256 and reward.asked == 5


def test_failures_are_not_kept_and_harm_no_other(tmp_path: Path):
    reward, paths = Mean(), files(tmp_path)
    cached = CachedReward(reward, ScoreCache(tmp_path / "cache"))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    images = [paths[0], tmp_path / "none.png", broken, paths[0], broken, paths[0]]
    for round_ in range(2):
        scores = cached.score(images, ["a"] * 5 + ["nan"])
        assert scores.valid.tolist() == [True, False, False, True, False, False]
        reasons = list(scores.reason or [])
        assert "no such image file" in str(reasons[1]) and "cannot be decoded" in str(reasons[2])
        assert reasons[2] == reasons[4] and reasons[0] is None and "nan, which is no score" in str(reasons[5])
        assert reward.asked == (4, 7)[round_]
    assert len(cached.cache) == 1
    dark = Mean(floor=2.0)
    assert not CachedReward(dark, ScoreCache(tmp_path / "dark")).score(PIXELS, PROMPTS).valid.any()


def test_preferences_are_kept_by_order(tmp_path: Path):
    judge = Left()
    cached = CachedJudge(judge, ScoreCache(tmp_path))
    first = cached.compare(PIXELS[:2], PIXELS[2:], ["a", "b"])
    again = cached.compare(PIXELS[:2], PIXELS[2:], ["a", "b"])
    assert judge.asked == 2 and torch.equal(first.prob, again.prob)
    assert again.log_odds is not None and torch.equal(again.log_odds, again.parts["gap"])
    back = cached.compare(PIXELS[2:], PIXELS[:2], ["a", "b"])
    assert judge.asked == 4 and torch.allclose(back.prob, 1 - first.prob)
    bad = cached.compare(["none.png"], ["none.png"], ["a"])
    assert not bad.valid[0] and "no such image file" in str((bad.reason or [""])[0])


def test_many_writers_at_once(tmp_path: Path):
    ScoreCache(tmp_path)

    def work(start: int) -> int:
        reward = Mean()
        cached = CachedReward(reward, ScoreCache(tmp_path))
        for n in range(10):
            images = torch.full((1, 3, 4, 4), (start + n) % 25, dtype=torch.uint8)
            value = float(cached.score(images, ["a"]).value[0])
            assert value == pytest.approx((start + n) % 25 + 1, abs=1e-4)
        return reward.asked

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(0, 40, 5)))
    assert len(ScoreCache(tmp_path)) == 25


def test_a_killed_writer_leaves_a_whole_cache(tmp_path: Path):
    code = (
        "import os, torch\n"
        "from visalign.rewards.cache.store import ScoreCache\n"
        "from visalign.rewards.base.identity import Identity\n"
        f"cache = ScoreCache({str(tmp_path)!r})\n"
        "one = Identity(judge='mean', model='none')\n"
        "cache.put(one, {b'k': {'columns': {'main': 1.0}, 'text': None}})\n"
        "connection = cache._connect()\n"
        "connection.execute('BEGIN IMMEDIATE')\n"
        "connection.execute('INSERT INTO scores VALUES (?, ?, ?)', (one.digest, b'half', '{}'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert process.returncode == -9
    cache = ScoreCache(tmp_path)
    assert len(cache) == 1
    assert list(cache.get(Identity(judge="mean", model="none"), [b"k", b"half"])) == [b"k"]


def test_numbers_come_back_as_they_were(tmp_path: Path):
    cache, one = ScoreCache(tmp_path), Identity(judge="a", model="m")
    numbers = {"main": 0.1 + 0.2, "part.inf": float("inf"), "part.nan": float("nan")}
    cache.put(one, {b"k": {"columns": numbers, "text": "é"}})
    entry = cache.get(one, [b"k"])[b"k"]
    assert str(entry["columns"]) == str(numbers) and entry["text"] == "é"
    assert cache.get(Identity(judge="b", model="m"), [b"k"]) == {}


def test_a_file_that_cannot_be_opened_is_refused_and_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with sqlite3.connect(tmp_path / FILE) as link:
        link.execute("PRAGMA user_version = 1")
    link.close()
    plain = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: plain(path, timeout=0.01))
    holder = plain(tmp_path / FILE)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OSError, match=r"cannot be opened: database is locked. Remove it"):
        ScoreCache(tmp_path)
    holder.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert len(ScoreCache(tmp_path)) == 0


def test_refused(tmp_path: Path):
    cache = ScoreCache(tmp_path)

    class Nameless:
        name, unit, range, higher_is_better = "nameless", "1", (0.0, 1.0), True

        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Any: ...

    with pytest.raises(RewardError, match=r"'nameless' has no identity.*Give identity=Identity"):
        CachedReward(Nameless(), cache)
    CachedReward(Nameless(), cache, identity=Identity(judge="nameless", model="1"))
    grouped: Any = Mean()
    grouped.capabilities = RewardCapabilities(needs_group=True)
    with pytest.raises(RewardError, match=r"against each other\. Cache the judge"):
        CachedReward(grouped, cache)
    with pytest.raises(ValueError, match="4 images and 1 prompts"):
        CachedReward(Mean(), cache).score(PIXELS, ["a"])
    with pytest.raises(TypeError, match="prompts is a str"):
        CachedReward(Mean(), cache).score(PIXELS, "abcd")
    with sqlite3.connect(tmp_path / FILE) as link:
        link.execute("PRAGMA user_version = 9")
    link.close()
    with pytest.raises(ValueError, match="of version 9, after our 5"):
        ScoreCache(tmp_path)


def test_a_cached_reward_keeps_the_contract(tmp_path: Path):
    check_reward(CachedReward(load_reward("sharpness"), ScoreCache(tmp_path)))


def test_the_images_of_a_record_count_by_their_content(tmp_path: Path):
    reward, file = Mean(), tmp_path / "before.png"
    cached = CachedReward(reward, ScoreCache(tmp_path))
    frames = torch.zeros(2, 3, 40, 40)  # whose `repr` shows the corners alone
    frames[1, :, 20, 20] = 1
    for level in (0, 0, 90, 200):
        Image.new("L", (8, 8), level).save(file)
        for source in (str(file), [file], Image.open(file)):
            cached.score(PIXELS[:1], ["a"], [{"source": source}])
    cached.score(PIXELS[[0, 0]], ["a", "a"], [{"references": [frame]} for frame in frames])
    assert reward.asked == 6 + 2, "a path and the image in memory differ, as everywhere"
    cached.score(PIXELS[:1], ["a"], [{"source": float("nan")}])
    with pytest.raises(TypeError, match=r"images\[0\] is a bytes"):
        cached.score([b"GIF89a"], ["a"])


def test_content_of_every_form():
    image = Image.fromarray(PIXELS[0].permute(1, 2, 0).numpy())
    digests = [content_digest(content) for content in (PIXELS[0], PIXELS[0].numpy(), image, PIXELS[1])]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert content_digest(PIXELS[0].numpy().astype(np.float32)) != digests[0]
    turned = image.copy()
    turned.getexif()[0x0112] = 6
    assert content_digest(turned) != digests[2]
    red, green = Image.new("P", (8, 8)), Image.new("P", (8, 8))
    red.putpalette([255, 0, 0])
    green.putpalette([0, 255, 0])
    assert red.tobytes() == green.tobytes() and content_digest(red) != content_digest(green)


@pytest.mark.parametrize(
    "entry", ["'{'", *(f'\'{{"columns": {{"main": {n}}}, "text": null, "reason": null}}\'' for n in ('"a"', "NaN"))]
)
def test_a_row_that_cannot_be_read_is_computed_again(tmp_path: Path, entry: str):
    reward = Mean()
    cached = CachedReward(reward, ScoreCache(tmp_path))
    expected = cached.score(PIXELS, PROMPTS)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"UPDATE scores SET entry = {entry}")
    connection.close()
    for _ in range(2):
        same(cached.score(PIXELS, PROMPTS), expected)
    assert reward.asked == 8


@pytest.mark.parametrize("harm", ["damaged", "removed", "locked"])
def test_a_file_that_fails_costs_no_score_and_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str):
    reward = Mean()
    cached = CachedReward(reward, ScoreCache(tmp_path))
    expected = cached.score(PIXELS, PROMPTS)
    if harm == "damaged":
        for ending in ("-wal", "-shm"):
            (tmp_path / f"{FILE}{ending}").unlink(missing_ok=True)
        (tmp_path / FILE).write_bytes(b"no database" * 999)
    elif harm == "removed":
        (tmp_path / FILE).unlink()
    else:

        def locked(*_: Any, **__: Any) -> Any:
            raise sqlite3.OperationalError("database is locked")

        monkeypatch.setattr(sqlite3, "connect", locked)
    with pytest.warns(UserWarning, match=r"cannot be used \(.*scores are computed and not stored") as warned:
        for _ in range(2):
            same(cached.score(PIXELS, PROMPTS), expected)
    assert len(warned) == 1 and reward.asked == 12


@pytest.mark.parametrize("kind", ["reward", "judge"])
def test_a_step_in_the_middle_of_scoring_is_kept_for_neither(tmp_path: Path, kind: str):
    judge: Any = Mean() if kind == "reward" else Left()
    name = "score" if kind == "reward" else "compare"
    plain = getattr(judge, name)

    def stepping(*arguments: Any) -> Any:
        judge.identity = Identity(judge=judge.name, model="none", weights=f"step {judge.asked}")
        return plain(*arguments)

    setattr(judge, name, stepping)
    cache = ScoreCache(tmp_path)
    if kind == "reward":
        CachedReward(judge, cache).score(PIXELS, PROMPTS)
    else:
        CachedJudge(judge, cache).compare(PIXELS, PIXELS.flip(0), PROMPTS)
    assert judge.asked == 4 and len(cache) == 0
