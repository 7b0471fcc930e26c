# SPDX-License-Identifier: Apache-2.0
"""What is asked: from folders, tables and sets; what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from visalign.errors import UserError
from visalign.pipelines.collect.tasks import Form, gold_tasks, read_tasks


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.png" for name in "abcde"]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(path)
    return paths


def table(tmp_path: Path, *rows: dict) -> str:
    path = tmp_path / "table.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_a_folder_makes_pairs_that_show_each_image_as_often(images, tmp_path):
    tasks = read_tasks([str(tmp_path)], single=False, prompt="a cat", per_prompt=5)
    assert len(tasks) == 5 and {task.prompt for task in tasks} == {"a cat"}
    assert set(Counter(image for task in tasks for image in task.images).values()) == {2}
    assert len(read_tasks([str(tmp_path)], single=False, prompt="a cat", per_prompt=99)) == 10
    draws = [
        read_tasks([str(tmp_path)], single=False, prompt="a cat", per_prompt=5, seed=seed)
        for seed in range(20)  # there are 12 such sets of pairs
    ]
    assert len({frozenset(task.key for task in draw) for draw in draws}) > 2
    single = read_tasks([str(tmp_path)], single=True, prompt="a cat")
    assert [Path(task.images[0]).name for task in single] == [path.name for path in images]


def test_a_table_keeps_its_other_columns_and_forgets_what_was_said(images, tmp_path):
    row = {"prompt": "x", "image_left": "a.png", "image_right": "b.png", "label": 1, "generator_left": "m"}
    mirrored = {"prompt": "x", "image_left": "b.png", "image_right": "a.png"}
    (task,) = read_tasks([table(tmp_path, row, mirrored)], single=False)
    assert set(task.images) == {str(images[0]), str(images[1])}
    assert "label" not in task.extra
    (task,) = read_tasks([table(tmp_path, row)], single=False)
    assert task.extra == {"generator_left": "m"} and task.gold is None
    (gold,) = gold_tasks(table(tmp_path, row, row))
    assert gold.gold == "left" and gold.key != task.key
    with pytest.raises(UserError, match=r"Row 2 of .* has another answer to an earlier pair"):
        gold_tasks(table(tmp_path, row, {**row, "label": 0}))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"prompt": "x", "image_left": "a.png", "image_right": "a.png"}], "1 pairs show the same image twice"),
        ([{"prompt": "x", "image_left": "a.png", "image_right": "z.png"}], "1 images do not exist: .*z.png"),
        ([{"prompt": "x", "image_left": "a.png"}], "Row 1 of .* needs texts in prompt, image_left and image_right"),
    ],
)
def test_what_is_refused(images, tmp_path, rows, why):
    with pytest.raises(UserError, match=why):
        read_tasks([table(tmp_path, *rows)], single=False)


def test_single_of_pairs_split_gold_and_forms_are_refused(images, tmp_path):
    pair = {"prompt": "x", "image_left": "a.png", "image_right": "b.png", "votes": [2, 1, 0]}
    with pytest.raises(UserError, match="--single shows one image, and the set holds pairs"):
        read_tasks([table(tmp_path, pair)], single=True)
    with pytest.raises(UserError, match=r"Row 1 of .* is a split vote"):
        gold_tasks(table(tmp_path, pair))
    with pytest.raises(UserError, match="A slider has 2 to 11 words; got 1: bad"):
        Form(slider=("bad",))
    with pytest.raises(UserError, match="Words and questions are distinct; got red, red"):
        Form(checklist=("red", "red"))
    with pytest.raises(UserError, match=r"form\.checklist is .* at most 40 items"):
        Form(checklist=tuple(map(str, range(41))))


def sampled(folder: Path, seeds: range, prompts: tuple[str, ...] = ("x", "y"), *, table: bool = True) -> str:
    """A folder as `visalign sample` writes it, or with captions alone."""
    folder.mkdir()
    rows = []
    for number, prompt in enumerate(prompts):
        for seed in seeds:
            name = f"{number:04d}_{seed}"
            Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(prompt)
            rows.append({"image": f"{name}.png", "prompt": prompt, "seed": seed})
    if table:
        (folder / "images.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("table", [True, False])
def test_two_folders_make_pairs_across_them_of_one_prompt_and_seed(tmp_path, table):
    first = sampled(tmp_path / "sd", range(6), table=table)
    prompts = ("y", "x", "z") if table else ("x", "y", "z")  # captions have no seeds: there the names count
    second = sampled(tmp_path / "flux", range(2, 7), prompts, table=table)
    with pytest.warns(UserWarning, match="11 images have no counterpart"):  # 4 + 2 by their seed, 5 by their prompt
        draws = [read_tasks([first, f"{second}/"], single=False, seed=seed) for seed in range(3)]
    tasks = draws[0]
    assert len(tasks) == 8 and {task.prompt for task in tasks} == {"x", "y"}
    for task in tasks:
        models = [task.extra[f"generator_{side}"] for side in ("left", "right")]
        assert [Path(image).parent.name for image in task.images] == models and sorted(models) == ["flux", "sd"]
        assert len({Path(image).stem.split("_")[1] for image in task.images}) == 1
    # sides follow the seed and the folder's path: eight alike are one in 128, three times eight never
    assert {task.extra["generator_left"] for draw in draws for task in draw} == {"flux", "sd"}
    assert all(isinstance(task.extra.get("seed"), int) == table for task in tasks)


def test_folders_without_common_seeds_or_prompts(tmp_path):
    folders = [sampled(tmp_path / name, range(k, k + 2), ("x",)) for k, name in ((0, "a"), (5, "b"), (9, "c"))]
    tasks = read_tasks(folders, single=False, per_prompt=99)
    assert len(tasks) == 12 and len(read_tasks(folders, single=False)) == 10
    with pytest.raises(UserError, match=r"There is no folder, table or image 'nowhere'"):
        read_tasks([folders[0], "nowhere"], single=False)
    with pytest.raises(UserError, match=r"a, d share no prompt"):
        read_tasks([folders[0], sampled(tmp_path / "d", range(2), ("other",))], single=False)


@pytest.mark.parametrize("best_of", [None, 3])
def test_only_the_columns_that_are_equal_on_all_sides_describe_a_task(tmp_path, best_of):
    rows = [{"prompt": "2 + 2?", "completion": f"answer {n}", "model": f"m{n}", "answer": "4"} for n in range(3)]
    tasks = read_tasks([table(tmp_path, *rows)], single=False, best_of=best_of)
    assert len(tasks) == (1 if best_of else 3)
    assert all(task.extra == {"metadata": {"prompt": "2 + 2?", "answer": "4"}} for task in tasks)
