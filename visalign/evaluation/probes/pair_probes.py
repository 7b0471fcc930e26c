# SPDX-License-Identifier: Apache-2.0
"""What a judge that compares is tried with: each change against the unchanged picture, and the judge itself.

Only comparing can depend on the places of the two pictures, and only comparing can go in circles.
"""

from __future__ import annotations

from dataclasses import replace

from . import changes
from .catalogue import PROBES
from .changes import EXAGGERATED, Level, Probe

_OF_THE_JUDGE = (
    Probe(
        name="identical",
        title="A picture against itself",
        wanted="same",
        why="Between equal pictures the answer is one half; whatever it is beyond that, a place is paid for.",
        levels=(Level("the same picture twice"),),
    ),
    Probe(
        name="position",
        title="Left and right exchanged",
        wanted="steady",
        why="The mean of the log-odds of both orders is what a place is worth; asked in one order, as "
        "published pipelines do, rewards would follow it.",
        levels=(Level("two real pictures"),),
    ),
    Probe(
        name="swap",
        title="Winners in both orders",
        wanted="consistent",
        why="A winner that depends on the order is none. Chance keeps one half.",
        levels=(Level("two real pictures"),),
    ),
    Probe(
        name="transitivity",
        title="Circles among three pictures",
        wanted="acyclic",
        why="A over B, B over C and C over A: no score and no ranking says what such a judge says, and "
        "win rates depend on who else is in the group.",
        levels=(Level("three real pictures"),),
    ),
    Probe(
        name="empty_among_real",
        title="Empty pictures against real ones",
        wanted="loss",
        why="The win rate is what a model that paints nothing would be paid in a group of others.",
        levels=tuple(Level(name) for name in ("white", "black", "grey", "mean", "noise", "scattered pixels")),
        change=changes.emptied,
        versus_real=True,
    ),
    Probe(
        name="changed_among_real",
        title="Exaggerated pictures against real ones",
        wanted="no gain",
        why="The win rate is what the change would be paid in a group of others.",
        levels=tuple(Level(name) for name in EXAGGERATED),
        change=changes.exaggerated,
        versus_real=True,
    ),
)
_WHYS = {
    "mirror": "The answer depends on which way things face. Prompts that name sides or writing are left out.",
    "destroyed": "The answer would come from statistics of pixels, not from what can be seen.",
    "spelling": "Between two real pictures, the answer depends on how their prompt is written. A response "
    "below 0 weakens the lead of the one that had it.",
    "other_prompt": "Between two real pictures, a judge that looks at the prompt changes its answer or gets "
    "less sure: the response falls. One that only looks at the pictures keeps it.",
    "neighbours": "The answer depends on what else is asked at the same time, and all responses on this page "
    "are distorted.",
    "form": "Answers depend on how the pictures are handed over.",
}

PAIR_PROBES: tuple[Probe, ...] = (
    *_OF_THE_JUDGE,
    *(replace(probe, why=_WHYS.get(probe.name, probe.why)) for probe in PROBES),
)
"""All probes of a judge that compares, in the order of the page; those of `PROBES` under the same names."""
