# SPDX-License-Identifier: Apache-2.0
"""Provenance of scores: model, revision and identity of each reward, and its domain."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from visalign.data.assets import PACKAGED
from visalign.data.shapes.prompts import parse_prompt
from visalign.interfaces import PointwiseReward, with_capabilities
from visalign.rewards.base.identity import Identity


def provenance(reward: Any) -> str:
    """Describe a reward in a line: model, revision or fingerprint of the weights, digest of the identity."""
    identity = reward_identity(reward)
    toy = " (packaged: it knows only visalign's world of shapes)" if _packaged(identity.model) else ""
    return f"{identity.line}{toy}"


def domain_note(reward: Any, prompts: Iterable[str]) -> str | None:
    """Warn where a packaged reward is asked about prompts outside of the shapes world."""
    packaged = _packaged(reward_identity(reward).model)
    distinct = [prompt for prompt in dict.fromkeys(prompts) if packaged and prompt.strip()]
    outside = []
    for prompt in distinct:
        try:
            parse_prompt(prompt)
        except ValueError:
            outside.append(prompt)
    if not outside:
        return None
    return (
        f"Not of the world of shapes that {', '.join(packaged)} was trained on: {len(outside)} of {len(distinct)} "
        f"prompts, such as {outside[0][:60]!r}. These numbers mean nothing. Give published weights as model."
    )


def reward_identity(reward: Any) -> Identity:
    """Return a reward's own identity, or one from its name, unit, options, class and source file: all we know."""
    identity = with_capabilities(reward).identity
    if isinstance(identity, Identity):
        return identity
    layers = [reward]
    for layer in layers:  # Grows by the rewards inside, such as a user's function of frames
        rewards = getattr(layer, "rewards", None)
        inner = [getattr(layer, "reward", None), *(rewards.values() if isinstance(rewards, Mapping) else ())]
        layers += [judge for judge in inner if judge is not None]
    kind = "/".join(f"{type(layer).__module__}:{type(layer).__qualname__}" for layer in layers)
    options: dict[str, Any] = {"unit": reward.unit if isinstance(reward, PointwiseReward) else "probability"}
    options |= {name: value for layer in layers for name, value in getattr(layer, "loading_options", {}).items()}
    digest = hashlib.sha256()  # of the identities inside, the files of the classes, and of the user's function in it
    for identity in (getattr(layer, "identity", None) for layer in layers):
        digest.update(identity.digest.encode() if isinstance(identity, Identity) else b"")
    for part in (part for layer in layers for part in (type(layer), getattr(layer, "_function", None))):
        with suppress(TypeError, OSError):  # built in, or created on the fly: there is no file
            digest.update(Path(inspect.getfile(part)).read_bytes())  # type: ignore[arg-type]
    return Identity(judge=reward.name, model=kind, weights=digest.hexdigest(), options=options)


def _packaged(model: str) -> list[str]:
    """List the packaged models among those that an identity names."""
    words = model.replace("×", " ").replace("+", " ").replace("/", " ").split()
    return [name for name in PACKAGED if name in words]
