# SPDX-License-Identifier: Apache-2.0
"""Composed prompts: new pairs, of which no part is held out."""

from __future__ import annotations

from visalign.data.shapes.composed import composed_prompts, contained_prompts, widened_prompts
from visalign.data.shapes.prompts import all_prompts, is_heldout, parse_prompt, train_prompts

WORLD = {record["prompt"] for record in all_prompts()}


def test_a_composed_prompt_contains_no_heldout_one_and_is_none_of_the_worlds_own() -> None:
    parts = contained_prompts(("big", "red", "circle"), "left of", ("small", "orange", "cross"))
    pairs = ["a big circle and a small cross", "a red circle and an orange cross"]
    relations = ["a circle left of a cross", "a red circle left of an orange cross"]
    assert parts == ["a big red circle", "a small orange cross", *pairs, *relations]
    assert contained_prompts((None, "red", "circle"), None, ("big", "red", "cross")) == [
        "a red circle",
        "a big red cross",
        "a circle and a big cross",
    ]
    records = composed_prompts(300, seed=2)
    assert len({record["prompt"] for record in records}) == 300 and not {r["prompt"] for r in records} & WORLD
    for record in records:
        target, subject = record["include"]
        first, second = (tuple(entry.get(key) for key in ("size", "color", "class")) for entry in (subject, target))
        relation = subject.get("position", [None])[0]
        first, second = (first, second) if relation else (second, first)
        assert not any(is_heldout(parse_prompt(part)) for part in contained_prompts(first, relation, second))
        assert (first[0] or second[0]) and (relation or first[1] or second[1])


def test_the_widened_list_is_that_of_training_and_composed_prompts_of_a_tag_of_their_own() -> None:
    records = widened_prompts()
    added = [record for record in records if record["tag"] == "composed"]
    assert records[: -len(added)] == train_prompts() and len(added) == 800
    assert all(parse_prompt(record["prompt"])["include"] == record["include"] for record in added)
