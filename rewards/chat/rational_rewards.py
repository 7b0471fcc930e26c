# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""RationalRewards: a vision-language model judges an image by aspects, each with a score from 1 to 4.

Source: Wang et al., "RationalRewards", arXiv 2604.11626; checkpoints TIGER-Lab/RationalRewards-8B-T2I and
-Edit (Qwen3-VL, Apache-2.0), whose cards hold the questions below, letter by letter. Upstream scores a
judgement without a number 0; here its image is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import (
    RATIONAL_ASPECTS,
    RATIONAL_EDIT_ASPECTS,
    rational_mean,
    rational_scores,
)
from visalign.rewards.vlm.template import Template

from .judge import ChatJudge, check_choice
from .messages import Reply

Mode = Literal["generation", "edit"]
ASPECTS = {"generation": RATIONAL_ASPECTS, "edit": RATIONAL_EDIT_ASPECTS}

_RUBRICS = {
    "text_faithfulness": """(How accurately does the output follow the instruction?)
- **4 (Full match):** All key elements (objects, colors, actions) are represented exactly as described. No hallucinations or unrequested changes.
- **3 (Minor mismatch):** Most key elements are present, but minor details are missing, incorrect, or slightly inaccurate.
- **2 (Some mismatch):** Some key elements are missing, altered, or interpreted incorrectly.
- **1 (Major deviations):** Key elements are completely missing, altered, or contradicted. Instruction is ignored.""",
    "image_faithfulness": """(How well are the non-edited parts and key input elements preserved?)
- **4 (Uses input fully):** All relevant elements from the input (background, style, lighting, identity) are accurately preserved or transformed as instructed.
- **3 (Minor mismatch):** Most relevant elements are preserved, but a few aspects (e.g., background details, lighting consistency) are missing or incorrectly handled.
- **2 (Partial mismatch):** Some elements are carried over, but key aspects of the original image are lost or distorted.
- **1 (Fails to use input):** Key elements of the input image are ignored, misinterpreted, or destroyed.""",
    "physical_quality": """(Technical errors, composition, realism, and physics)
- **4 (No noticeable flaws):** The image is physically plausible (correct lighting, shadows, geometry, anatomy). No visible artifacts (seams, blurring, noise).
- **3 (Minor flaws):** Small inaccuracies that are noticeable but not strongly disruptive (e.g., slight lighting mismatch, minor texture issues).
- **2 (Some flaws):** Clear physical or visual errors that disrupt the image (e.g., incorrect perspective, "floating" objects, wrong shadow direction, obvious seams).
- **1 (Severe flaws):** Major physical/visual errors (e.g., impossible geometry, distorted anatomy, garbled objects, severe artifacts).""",
    "text_rendering": """(Only if the instruction involves generating text)
- **4 (Full match):** Text is correct, legible, and integrated well.
- **3 (Mostly match):** Minor misspellings or inconsistent capitalization.
- **2 (Partial match):** Major misspellings or distorted text.
- **1 (Major deviations):** Text is unreadable, severely distorted, or missing. (Use N/A if no text generation is required).""",
}
_WORDS = {
    "generation": {
        "judged": "a generated image based on a user instruction",
        "improves": "image generation",
        "before": "",
        "count": "three",
        "recalls": "the initial user request and",
        "of": "the generated image",
        "stop": ".",
        "for": "generation",
    },
    "edit": {
        "judged": "an edited image based on a source image and a user instruction",
        "improves": "image edits",
        "before": "Give your analysis and judgement following guidelines in the system prompt. \n\n",
        "count": "four",
        "recalls": "the initial user request, source image and",
        "of": "each image",
        "stop": " .",
        "for": "editing",
    },
}


def wording(mode: Mode) -> tuple[str, str]:
    """Return the system message and the text behind the images of the published question."""
    words, aspects = _WORDS[mode], ASPECTS[mode].items()
    kind = {"generation": "generation", "edit": "editing"}[mode]
    system = (
        f"You are an expert image {kind} evaluator. Your task is to evaluate the quality of {words['judged']}. Afterwards, "
        f"you need to suggest how to refine the original user request to produce better {words['improves']} (if any)."
    )
    rubrics = "\n\n".join(f"**{n}. {name}** {_RUBRICS[key]}" for n, (key, name) in enumerate(aspects, 1))
    forms = []
    for n, (key, name) in enumerate(aspects, 1):
        how = "Similar to above. Analysis and assessment."
        if key == "text_faithfulness":
            how = "Analysis of the user request and the assessment of the resulting generation. How it comes to a final score."
        score = "float score or N/A" if key == "text_rendering" else "float score"
        forms.append(f"{n}. {name}:\n## Justification: [ {how} ]\n## Score: [ {score} ]\n")
    text = f"""

{words["before"]}To do this, you must first assess the image on {words["count"]} critical aspects, provide justifications and absolute scores in 1-4 scale.

### Critical Aspects & Scoring Rubric
{rubrics}

### Scoring Methodology (CRITICAL)
During assessment for each aspect, recall {words["recalls"]} the scoring rubrics of the aspect, provide scores with detailed justifications for {words["of"]} and reflect fine-grained preferences.
1. **Anchor:** Have a global inspection based on the user request and the resulting generation. Determine the rough integer score level (1, 2, 3, or 4) according to the definitions provided{words["stop"]}
2. **Justify and Adjust:** Do careful visual analysis and identify specific flaws in generation. Justify the score with concrete evidence and scoring logic. Fine-tune this anchor score into a float value. Add small increments for exceptional execution or deduct points for specific flaws.
   - *Example:* deduct points from 4.0 for slight flaws if the assessed dimension is close to satisfaction. add increments from 1.0 or 2.0 based on severity of flaws.

Afterwards, try to construct a refined user request that helps the visual generation model to produce better {words["improves"]}.
Think of the weaknesses identified in the judgement, then map them to instruction details and apply specific fixes.
Provide a final new user request that enrich the initial user request.

Output your evaluation in the following format:
# User Request Analysis
[ understanding the user request, try to analyze or decompose the user request deeper. Think of what the request might imply or what needs to be inferred to successfully execute the request. ]
# Detailed Judgement
{"".join(forms)}# Summary: [ Summary of the evaluation ]

# User Request Refinement:
## Refinement Comments: [Specific suggestions for improving the user request]
## Refined Request: [The improved, more specific user request for {words["for"]} like a standard user instruction]"""
    return system, text


def _template(mode: Mode) -> Template:
    system, text_behind = wording(mode)
    image = {"type": "image"}
    if mode == "edit":
        first = "User Instruction: {prompt}\nYou are provided with two images:\n1. Source Image "
        texts = [first, "\n2. Edited Image "]
    else:
        texts = ["User Instruction: {prompt}\nYou are provided with one image:\n1. Generated Image "]
    content = [part for text in texts for part in ({"type": "text", "text": text}, image)]
    content.append({"type": "text", "text": text_behind})
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    return Template(name=f"rational_rewards_{mode}", messages=messages)


class RationalRewards(ChatJudge):
    """(m − 1)/3, from 0 to 1, with m the mean of the aspects' scores, each clipped to [1, 4].

    "generation": faithfulness to the text, physical and visual quality, rendering of text. "edit": also
    faithfulness to the source image, which is the record's "source". An aspect that does not apply ("N/A")
    is left out of the mean and NaN among the parts; a judgement that skips an aspect is a failure. The
    judgement is in `text`.

    Args:
        mode: "generation" or "edit".
        **options: of `ChatJudge`, as are the others; upstream samples at temperature 0.1.
    """

    name = "rational_rewards"
    unit = "(points from 1 to 4 − 1) / 3"
    range = (0.0, 1.0)
    higher_is_better = True
    default_max_new_tokens = 2048

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        mode: Mode = "generation",
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        check_choice(self.name, "mode", mode, ASPECTS)
        self.mode: Mode = mode
        self.default_template = _template(mode)
        super().__init__(base_url, model, device=device, **options)
        self.identity = self.make_identity(mode=mode, **self.sampling)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; of the metadata only an edit's "source" is read."""
        request = read_request(self.name, images, prompts, metadata)
        return self.score_answers(request, self._read, self.unit, source=self.mode == "edit")

    def _read(self, reply: Reply) -> dict[str, float]:
        aspects = ASPECTS[self.mode]
        scores = rational_scores(reply.text, aspects)
        if missing := [aspects[key] for key, score in scores.items() if score is None]:
            raise AnswerError(f"the judgement gives no score for {', '.join(missing)}")
        parts = {key: score if isinstance(score, float) else math.nan for key, score in scores.items()}
        return {"value": rational_mean(scores), **parts}
