# SPDX-License-Identifier: Apache-2.0
"""Packs: what is shared, where rows are read, at which positions, and what sees what."""

from typing import Any

import torch

from visalign.rewards.vlm.packing import attention_mask, batch_packs, collate, pack_rows
from visalign.rewards.vlm.requests import SeenImage, TokenRow
from visalign.vision.positions import rotary_positions

IMAGE, MERGE = 5, 2


def shown(digest: str, grid: tuple[int, int, int] = (1, 4, 6)) -> SeenImage:
    return SeenImage(digest, grid, grid[1] * grid[2] // MERGE**2, torch.zeros(3, 1, 1))


def row(digest: str, tail: list[int]) -> TokenRow:
    image = shown(digest)
    return TokenRow((1, 2, *[IMAGE] * image.tokens, 3, 3, *tail), (image,))


ROWS = [row("a", [7, 8, 9]), row("b", [7]), row("a", [7, 8, 10, 11]), row("a", [6]), row("a", [7, 8, 9, 9])]


def test_rows_of_an_image_share_their_beginning() -> None:
    packs = pack_rows(ROWS, IMAGE)
    assert [sorted(pack.numbers) for pack in packs] == [[0, 2, 3, 4], [1]]
    assert packs[0].shared == 10 and packs[1].shared == len(ROWS[1].ids)
    assert packs[0].length == 10 + sum(len(ROWS[n].ids) - 10 for n in (0, 2, 3, 4))
    separate = pack_rows(ROWS, IMAGE, share=False)
    assert sorted(pack.numbers for pack in separate) == [(n,) for n in range(5)]


def test_a_row_that_is_the_beginning_of_another_keeps_its_last_token() -> None:
    one, two = row("a", [7, 8]), row("a", [7, 8, 9])
    pack = pack_rows([one, two], IMAGE)[0]
    assert pack.shared == len(one.ids) - 1
    batch = collate([pack], IMAGE, 0, MERGE)
    for (line, at), number in zip(batch.ends.tolist(), batch.numbers, strict=True):
        assert int(batch.ids[line, at]) == (one, two)[number].ids[-1]


def test_rows_that_differ_between_their_images_do_not_share() -> None:
    two = (shown("a"), shown("b"))
    rows = [TokenRow((*[1] * 9, *[IMAGE] * 6, word, *[IMAGE] * 6, 3, 4), two) for word in (7, 8)]
    assert len(pack_rows(rows, IMAGE)) == 2
    same = [TokenRow((*rows[0].ids[:-1], word), two) for word in (4, 6)]
    assert [pack.shared for pack in pack_rows(same, IMAGE)] == [23]


def test_marked_places_positions_and_segments() -> None:
    packs = pack_rows(ROWS, IMAGE)
    batch = collate(packs, IMAGE, 0, MERGE)
    assert batch.positions is not None and batch.segments is not None
    for (line, at), number in zip(batch.ends.tolist(), batch.numbers, strict=True):
        own = torch.tensor([ROWS[number].ids])
        images: Any = [ROWS[number].images]
        expected, _ = rotary_positions(own == IMAGE, torch.ones_like(own), images, MERGE)
        assert int(batch.ids[line, at]) == ROWS[number].ids[-1]
        segment = int(batch.segments[line, at])
        visible = (batch.segments[line] == segment) | (batch.segments[line] == 0)
        visible &= torch.arange(len(visible)) <= at
        assert tuple(batch.ids[line, visible].tolist()) == ROWS[number].ids
        assert torch.equal(batch.positions[:, line, visible], expected[:, 0])
        mask = attention_mask(batch.segments, torch.float32)[line, 0, at]
        assert torch.equal(mask == 0, visible)
    assert batch.mask.sum() == sum(pack.length for pack in packs)
    assert int(batch.image_mask.sum()) == 6 + 6


def test_plain_positions_count_tokens() -> None:
    batch = collate(pack_rows(ROWS, IMAGE), IMAGE, 0, 0)
    assert batch.positions is not None and batch.segments is not None and batch.positions.ndim == 2
    for (line, at), number in zip(batch.ends.tolist(), batch.numbers, strict=True):
        assert int(batch.positions[line, at]) == len(ROWS[number].ids) - 1
    assert collate(pack_rows(ROWS, IMAGE, share=False), IMAGE, 0, 0).positions is None


def test_batches_keep_to_their_tokens() -> None:
    packs = pack_rows([row(f"{n}", [7] * (1 + n % 9)) for n in range(40)], IMAGE)
    for limit in (1, 50, 400):
        batches = batch_packs(packs, limit)
        assert sum(map(len, batches)) == 40
        for batch in batches:
            assert len(batch) == 1 or max(pack.length for pack in batch) * len(batch) <= limit


def test_long_packs_are_split() -> None:
    rows = [row("a", [7 + n, *[8] * 300]) for n in range(10)]
    packs = pack_rows(rows, IMAGE)
    assert 1 < len(packs) < 10 and all(pack.length <= 1024 for pack in packs)
    assert sorted(n for pack in packs for n in pack.numbers) == list(range(10))
