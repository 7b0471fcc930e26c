# SPDX-License-Identifier: Apache-2.0
"""Triples of ICT-HP: pairs of images, and a third one drawn from a prompt that a language model made richer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visalign.data.sets.checks import check_preferences
from visalign.data.sets.columns import usual_names
from visalign.data.sets.image_references import absolute_reference
from visalign.data.sets.records import PreferencePair, PreferenceSet
from visalign.data.sets.sources import is_named_set, load_source
from visalign.data.sets.tables import first_row
from visalign.errors import UserError
from visalign.interfaces import PointwiseReward
from visalign.rewards.chat.judge import connect
from visalign.rewards.chat.language import load_language_model
from visalign.rewards.chat.messages import Reply
from visalign.rewards.chat.text_judge import REFUSAL
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import question

from .job import SampleSettings, check_folder, sample_images, write_lines

TRIPLES = "triples.jsonl"
REFINE = question(
    "refine_prompt",
    "This is a prompt for an image generator:\n{prompt}\n\nWrite a richer prompt for the same scene. Keep all that it "
    "asks for, and add details of the objects, the composition, the light and the style. Answer with the new prompt "
    "alone, in one paragraph.",
    images=(),
)


def load_pairs(source: str) -> PreferenceSet | None:
    """Load a set of pairs; None where the source holds prompts alone."""
    if not is_named_set(source):
        first = first_row(Path(source))
        if "image_left" not in first and "image_left" not in usual_names(first, {}, is_judged=True):
            return None
    pairs = load_source(source)
    if not isinstance(pairs, PreferenceSet):
        raise UserError(f"'{source}' holds single rated images; --refine adds a third image to pairs, or to prompts.")
    check_preferences(pairs)
    return pairs


def sample_triples(
    prompts: PreferenceSet | Sequence[Mapping[str, Any]],
    refiner: str,
    settings: SampleSettings,
    output: Path,
    *,
    rewards: Mapping[str, PointwiseReward],
) -> list[dict[str, Any]]:
    """Write triples I1 < I2 < I3 to `TRIPLES` in the output folder, and return them.

    I1 and I2 are the worse and the better image of each pair; of prompts alone, the images of all seeds are drawn,
    and the rewards choose the worst and the best. I3 is drawn from the refined prompt with the first seed; that it is
    better is an assumption of ICT-HP, arXiv 2507.19002, section 3. Ties and prompts not refined are left out.
    """
    check_folder(output)
    drawn = not isinstance(prompts, PreferenceSet)
    if drawn and (not rewards or len(settings.seeds) < 2):
        raise UserError("--refine on prompts chooses the better image: give two seeds and a reward (-r), or pairs.")
    easy = [record["prompt"] for record in prompts] if drawn else [p.prompt for p in prompts.pairs if p.label != 0.5]
    refined, failures = refine_prompts(refiner, list(dict.fromkeys(easy)), settings.device)
    if not refined:
        raise UserError(f"--refine {refiner} made none of {len(failures)} prompts richer. {failures[0]}")
    if drawn:
        records = [record for record in prompts if record["prompt"] in refined]
        rows = sample_images(records, settings, output / "easy", rewards=rewards)
        pairs = _worst_and_best(rows, output / "easy", rewards, failures)
    else:
        pairs = [pair for pair in prompts.pairs if pair.label != 0.5 and pair.prompt in refined]
    if not pairs:
        raise UserError(f"No prompt has a better and a worse image. {failures[0]}")
    texts = list(dict.fromkeys(refined[pair.prompt] for pair in pairs))
    best = replace(settings, seeds=settings.seeds[:1])
    images = sample_images([{"prompt": text} for text in texts], best, output / "refined", rewards=rewards)
    third = {row["prompt"]: f"refined/{row['image']}" for row in images}
    triples = []
    for pair in pairs:
        prompt, sides = refined[pair.prompt], {"image_left": pair.image_left, "image_right": pair.image_right}
        absolute = {name: absolute_reference(reference) for name, reference in sides.items()}
        triples.append({**pair.to_row(), **absolute, "image_refined": third[prompt], "prompt_refined": prompt})
    write_lines(output / TRIPLES, triples)
    if failures:
        warnings.warn(f"{len(failures)} prompts have no triple. {failures[0]}", stacklevel=2)
    return triples


def refine_prompts(model: str, prompts: Sequence[str], device: str) -> tuple[dict[str, str], list[str]]:
    """Ask a language model for richer prompts; return prompt -> refined prompt, and why others have none.

    The model is loaded here, or served at VISALIGN_JUDGE_URL.
    """
    server = connect("--refine", None, None, model, {}, device=device, load_local=load_language_model)

    def read(reply: Reply) -> str:
        text = " ".join(reply.text.rpartition("</think>")[2].split()).strip("\"'“”")
        if not text or REFUSAL.match(text):
            raise AnswerError(f"it answered {text!r}")
        return text

    answers = server.ask(REFINE, [Query(images=[], prompt=prompt) for prompt in prompts], read=read)
    refined, failures = dict[str, str](), list[str]()
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        if isinstance(answer, AnswerError):
            failures.append(f"{prompt!r}: {str(answer).rstrip('.')}.")
        elif answer.casefold() == prompt.casefold():
            failures.append(f"{prompt!r}: it answered with the same prompt.")
        else:
            refined[prompt] = answer
    return refined, failures


def _worst_and_best(
    rows: Sequence[Mapping[str, Any]], folder: Path, rewards: Mapping[str, Any], failures: list[str]
) -> list[PreferencePair]:
    """Pair the images of each prompt with the lowest and the highest sum of rewards."""
    by_prompt: dict[str, list[tuple[float, str]]] = {}
    signs = {name: 1 if reward.higher_is_better else -1 for name, reward in rewards.items()}
    for row in rows:
        scored = by_prompt.setdefault(row["prompt"], [])
        if all(row[name] is not None for name in signs):
            scored.append((sum(sign * row[name] for name, sign in signs.items()), str(folder / row["image"])))
    pairs = []
    for prompt, scored in by_prompt.items():
        if not scored or min(scored)[0] == max(scored)[0]:
            failures.append(f"{prompt!r}: the rewards prefer none of its images.")
        else:
            best, worst = max(scored)[1], min(scored)[1]
            pairs.append(PreferencePair(prompt=prompt, image_left=best, image_right=worst, label=1.0))
    return pairs
