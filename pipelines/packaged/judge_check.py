# SPDX-License-Identifier: Apache-2.0
"""How good the embedded vision-language model is on held-out prompts: yes/no, pairs, ratings."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.data.shapes.preferences import CLEAR, ShapesPreferences
from visalign.data.shapes.prompts import CATEGORIES, Record
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene

from .judge_data import BETTER, NO, RATE, SHOWS, YES, Question
from .judge_inputs import TOKENS, answer_states, pack_questions, see

CHECK_SEED = 77
_NEAR_TRIES = 50


@torch.no_grad()
def answer_logits(model: Any, tokenizer: Any, asked: list[list[Question]], features: Tensor) -> list[Tensor]:
    """[V] float32 logits of the answer's first token, for each question in turn."""
    pictures = features.shape[1] // TOKENS
    packed = pack_questions(tokenizer, asked, pictures, TOKENS)
    hidden = answer_states(model, packed, features)
    first = (packed.labels != -100) & (packed.labels.roll(1, 1) == -100)
    return list(model.lm_head(hidden[first]).float())


@torch.no_grad()
def answer_accuracy(
    model: Any, tokenizer: Any, *, pictures: int = 300, pairs: int = 300, seed: int = CHECK_SEED
) -> dict[str, float]:
    """Held-out accuracy of yes/no by category, of pairs with a clear truth; error and order of ratings.

    Args:
        model: the model in evaluation mode.
        tokenizer: its tokenizer.
        pictures: undistorted pictures, each asked for its own prompt and for a neighbour that is not true.
        pairs: clear pairs, each asked in both orders.
        seed: of the draws.
    """
    world = ShapesPreferences(seed, split="heldout")
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in (YES, NO))
    rng = np.random.default_rng(seed)
    hits: dict[str, list[float]] = defaultdict(list)
    for start in range(0, pictures, 50):
        scenes, asked, tags = [], [], []
        for _ in range(start, min(start + 50, pictures)):
            record = world.record(rng)
            scene = sample_scene(record, rng)
            other = _untrue(world, scene, record, rng)
            scenes.append(scene)
            tags.append(record["tag"])
            asked.append(
                [
                    Question(text=SHOWS.replace("{prompt}", record["prompt"]), answer=YES),
                    Question(text=SHOWS.replace("{prompt}", other["prompt"]), answer=NO),
                ]
            )
        logits = answer_logits(model, tokenizer, asked, see(model, render_many(scenes)))
        for number, row in enumerate(logits):
            hit = float((row[yes] > row[no]) == (number % 2 == 0))
            hits["yes/no"].append(hit)
            hits[tags[number // 2]].append(hit)
    found = {name: float(np.mean(hits[name])) for name in ("yes/no", *CATEGORIES) if hits[name]}
    found["pair"] = _pair_accuracy(model, tokenizer, world, pairs, yes, no)
    found["rating error"], found["rating order"] = _ratings(model, tokenizer, world, pictures)
    return found


def _untrue(world: ShapesPreferences, scene: Scene, record: Record, rng: np.random.Generator) -> Record:
    """A prompt that is not true of the picture: one word from its own if there is such a one."""
    for attempt in itertools.count():
        other = world.near(record, rng) if attempt < _NEAR_TRIES else world.record(rng)
        if not verify_scene(scene, other).correct:
            return other
    raise AssertionError("unreachable: some prompt is untrue of any picture")


def _pair_accuracy(
    model: Any, tokenizer: Any, world: ShapesPreferences, pairs: int, yes: int, no: int
) -> float:
    clear = (pair for pair in (world.pair(n) for n in range(10**9)) if pair.is_clear)
    hits = []
    for start in range(0, pairs, 50):
        chosen = [next(clear) for _ in range(start, min(start + 50, pairs))]
        odds = torch.zeros(len(chosen))
        for sign, order in ((1, (0, 1)), (-1, (1, 0))):
            shown = render_many([(pair.left, pair.right)[side] for pair in chosen for side in order])
            features = see(model, shown).reshape(len(chosen), 2 * TOKENS, -1)
            asked = [[Question(text=BETTER.replace("{prompt}", pair.prompt), answer=YES)] for pair in chosen]
            rows = torch.stack(answer_logits(model, tokenizer, asked, features))
            odds += sign * (rows[:, yes] - rows[:, no])
        hits += [
            bool(odd > 0) == (pair.utility[1] > pair.utility[0])
            for odd, pair in zip(odds, chosen, strict=True)
        ]
    return float(np.mean(hits))


def _ratings(model: Any, tokenizer: Any, world: ShapesPreferences, pictures: int) -> tuple[float, float]:
    """Mean |expected rating − 1 − 4·quality|, and the share of clear pairs of pictures in the right order."""
    scenes = [world.quality(number).scene for number in range(pictures)]
    features = see(model, render_many(scenes))
    # the answer's first token is its tag, so the digit is asked for behind it
    asked = [[Question(text=RATE, answer="<answer>3</answer>")] for _ in scenes]
    digits = tokenizer.convert_tokens_to_ids(["1", "2", "3", "4", "5"])
    packed = pack_questions(tokenizer, asked, 1, TOKENS)
    hidden = answer_states(model, packed, features)
    where = torch.tensor(digits)[:, None, None] == packed.labels
    prob = model.lm_head(hidden[where.any(0)]).float()[:, digits].softmax(-1)
    expected = prob @ torch.arange(1.0, 6.0)
    truth = torch.tensor([1.0 + 4.0 * scene.quality for scene in scenes])
    clear = truth[:, None] - truth >= 4.0 * CLEAR
    return float((expected - truth).abs().mean()), float((expected[:, None] > expected)[clear].float().mean())
