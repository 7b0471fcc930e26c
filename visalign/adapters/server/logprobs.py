# SPDX-License-Identifier: Apache-2.0
"""Check that a server's log-probs belong to the distribution it samples from."""

from __future__ import annotations

from typing import Literal

from visalign.errors import UserError
from visalign.remote import ServerConnection, ServerError
from visalign.text import Sampling, StoppingCriteria

from .completions import IMPOSSIBLE, CompletionRequest, parse_choice

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""vLLM's names: log-probs of the model's logits, or after temperature, top_k and top_p."""

_MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value."""
_PROBE_TOP = 5
"""Log-probs that the probe asks for."""
_PROBE_MIN_GAP = 0.1
"""Smallest spread of the probe's log-probs, in nats, that allows a verdict."""
_START_PROCESSED = "Start vLLM (0.10.2 or newer) with --logprobs-mode processed_logprobs"


def needs_processed(sampling: Sampling) -> bool:
    """Return True if log-probs of the raw logits differ from those of the sampled distribution."""
    return not sampling.greedy and (sampling.scale != 1 or sampling.truncates)


def check_sampling(sampling: Sampling, mode: LogprobsMode, max_logprobs: int) -> None:
    """Raise if the server cannot give the log-probs of this kind of sampling."""
    if sampling.greedy:
        return
    if sampling.scale < _MIN_TEMPERATURE:
        raise UserError(
            f"temperature is {sampling.temperature}; vLLM samples with {_MIN_TEMPERATURE} instead. Give at "
            "least that, or 0 for greedy decoding."
        )
    if mode == "raw_logprobs" and needs_processed(sampling):
        raise UserError(
            f"The server's log-probs are of the raw logits (logprobs_mode='raw_logprobs'), and {sampling} "
            f"draws from another distribution. {_START_PROCESSED} and set logprobs_mode to "
            "'processed_logprobs', or sample with temperature 1 and without top_k and top_p."
        )
    if sampling.truncates and not 1 <= sampling.top_k <= max_logprobs:
        setting = f"top_k={sampling.top_k}" if sampling.top_k else f"top_p={sampling.top_p} without top_k"
        raise UserError(
            f"{setting} leaves more tokens than the server lists (max_logprobs={max_logprobs}); the ratio "
            "needs all that could be sampled. Give a top_k below max_logprobs, with top_p if you like; or "
            "raise vLLM's --max-logprobs and max_logprobs; or sample without top_k and top_p."
        )


def check_processed(connection: ServerConnection, model: str, prompt: list[int]) -> bool:
    """Probe whether log-probs follow the temperature, by one token at temperature 1 and one at 2; False if
    the tokens are about equally probable, so that the probe cannot tell.

    Processed log-probs of two tokens differ half as much at temperature 2, raw ones equally.
    """
    requests = [
        CompletionRequest(
            url=connection.url("completions"),
            model=model,
            sample=0,
            prompt=prompt,
            limit=1,
            sampling=Sampling(temperature=temperature),
            stopping=StoppingCriteria(),
            ends=(),
            seed=0,
            top_logprobs=_PROBE_TOP,
        )
        for temperature in (1.0, 2.0)
    ]
    answers = connection.post_all("completions", [request.body() for request in requests], parallel=2)
    tops = [parse_choice(answer, requests[0]).logprobs.top_logprobs for answer in answers]
    cold, warm = ({name: value for name, value in (top or [{}])[0].items() if value > IMPOSSIBLE} for top in tops)
    shared = sorted(cold.keys() & warm.keys(), key=cold.__getitem__)
    if len(shared) < 2 or cold[shared[-1]] - cold[shared[0]] < _PROBE_MIN_GAP:
        return False
    ratio = (warm[shared[-1]] - warm[shared[0]]) / (cold[shared[-1]] - cold[shared[0]])
    if abs(ratio - 0.5) > 0.2:
        raise ServerError(
            f"{requests[0].url} gives log-probs that do not follow the temperature (from 1 to 2 the "
            f"difference of two tokens changes by {ratio:.2f}; processed log-probs give 0.5), contrary to "
            f"logprobs_mode='processed_logprobs'. {_START_PROCESSED}."
        )
    return True
