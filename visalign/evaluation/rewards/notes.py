# SPDX-License-Identifier: Apache-2.0
"""Sentences that a reader of an evaluation must know before believing its numbers."""

from __future__ import annotations

from typing import Any

from visalign.evaluation.statistics.agreement import HEADLINE

WITHOUT_TIES = "imscore_dropped"
"""The policy that leaves out predicted ties."""


def preference_notes(report: dict[str, Any]) -> list[str]:
    """Warnings that follow from the numbers of `evaluate_preferences`; none where nothing is wrong."""
    found = []
    counts, headline = report["counts"], report["agreement"][HEADLINE]["micro"]
    if counts["failed"]:
        share = counts["failed"] / counts["pairs"]
        found.append(
            f"{counts['failed']} of {counts['pairs']} pairs ({share:.1%}) could not be judged; they count "
            "nowhere."
        )
    if counts["judged"] and report["agreement"][WITHOUT_TIES]["micro"]["estimate"] is None:
        found.append(
            "The judge gives both images of every pair the same score: it tells none apart, and numbers that "
            "forgive ties say nothing of it."
        )
    if headline["high"] is not None and headline["high"] < 0.5:
        found.append(
            "The judge disagrees with people more often than chance: if lower is better for its scores, "
            "say so (--lower-is-better)."
        )
    control = report["generators"]
    if control:
        found += _control_notes(control)
    return found


def _control_notes(control: dict[str, Any]) -> list[str]:
    alone, judge = control["identity_alone"], control["judge_between"]
    within, against = control["judge_within"], control["judge_against"]
    found = []
    if alone["estimate"] is not None and judge["low"] is not None and alone["estimate"] >= judge["low"]:
        evidence = [
            f"{part['estimate']:.1%} of {part['pairs']} {what}"
            for part, what in (
                (within, "pairs of one generator"),
                (against, "pairs decided against the usual order"),
            )
            if part["estimate"] is not None
        ]
        rest = f" What it sees beyond that: it is right in {' and '.join(evidence)}." if evidence else ""
        found.append(
            f"The names of the generators alone predict {alone['estimate']:.1%} of the votes between "
            f"generators, the judge {judge['estimate']:.1%}: those pairs cannot tell a judge of images "
            f"from a detector of generators.{rest}"
        )
    if not within["pairs"] and not against["pairs"]:
        found.append(
            "No pair is of one generator, and none was decided against the usual order of the generators: "
            "the set cannot show that a judge looks at more than the generator."
        )
    return found
