# SPDX-License-Identifier: Apache-2.0
"""Build completion requests, and check that a server's log-probs belong to the distribution it samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from visalign.errors import UserError
from visalign.remote import ServerConnection, ServerError
from visalign.text import Sampling, StoppingCriteria

from .completions import CompletionRequest

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
    """Raise if the server cannot give the log-probs of this kind of sampling.

    Args:
        sampling: Temperature, top_k and top_p.
        mode: Meaning of the server's log-probs.
        max_logprobs: Log-probs per token that the server lists at most.
    """
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
            "draws from another distribution: the off-policy correction would be wrong. "
            f"{_START_PROCESSED} and set logprobs_mode to 'processed_logprobs', or sample with temperature 1 "
            "and without top_k and top_p."
        )
    if sampling.truncates and not 1 <= sampling.top_k <= max_logprobs:
        setting = f"top_k={sampling.top_k}" if sampling.top_k else f"top_p={sampling.top_p} without top_k"
        raise UserError(
            f"{setting} leaves more tokens than the server lists (max_logprobs={max_logprobs}); the ratio "
            "needs all that could be sampled. Give a top_k below max_logprobs, with top_p if you like; or "
            "raise vLLM's --max-logprobs and max_logprobs; or sample without top_k and top_p."
        )


def request_body(
    request: CompletionRequest,
    *,
    model: str,
    sampling: Sampling,
    stopping: StoppingCriteria,
    ends: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """Build the body of one request to /v1/completions.

    `ends` replace the server's own end tokens. Settings that vLLM would otherwise take from the model's
    generation config are sent explicitly.
    """
    effective = Sampling(temperature=0.0) if sampling.greedy else sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "n": 1,
        "stream": False,
        "max_tokens": request.limit,
        "seed": seed,
        "temperature": effective.temperature,
        "top_p": effective.top_p,
        "top_k": effective.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stop": list(stopping.strings),
        "stop_token_ids": list(ends),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "add_special_tokens": False,
    }


def check_processed(connection: ServerConnection, model: str, prompt: Sequence[int]) -> bool:
    """Probe whether log-probs follow the temperature, by one token at temperature 1 and one at 2.

    Processed log-probs of two tokens differ half as much at temperature 2, raw ones equally.

    Returns:
        False if the probe cannot tell, because the tokens are about equally probable.

    Raises:
        ServerError: The log-probs are not processed.
    """
    request = CompletionRequest(
        url=connection.url("completions"), sample=0, prompt=prompt, limit=1, top_logprobs=_PROBE_TOP
    )
    bodies = [
        request_body(
            request,
            model=model,
            sampling=Sampling(temperature=temperature),
            stopping=StoppingCriteria(),
            ends=(),
            seed=0,
        )
        for temperature in (1.0, 2.0)
    ]
    cold, warm = (
        _top_log_probs(reply, request) for reply in connection.post_all("completions", bodies, parallel=2)
    )
    shared = sorted(cold.keys() & warm.keys(), key=lambda name: cold[name])
    if len(shared) < 2 or cold[shared[-1]] - cold[shared[0]] < _PROBE_MIN_GAP:
        return False
    ratio = (warm[shared[-1]] - warm[shared[0]]) / (cold[shared[-1]] - cold[shared[0]])
    if abs(ratio - 0.5) > 0.2:
        raise ServerError(
            f"{request.url} gives log-probs that do not follow the temperature (from 1 to 2 the "
            f"difference of two tokens changes by {ratio:.2f}; processed log-probs give 0.5), contrary to "
            f"logprobs_mode='processed_logprobs'. {_START_PROCESSED}."
        )
    return True


def _top_log_probs(reply: Mapping[str, Any], request: CompletionRequest) -> dict[str, float]:
    """Return name -> log-prob of the most probable first tokens, without those of probability 0."""
    try:
        top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        return {name: float(value) for name, value in top.items() if float(value) > -9000.0}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise request.error(
            "the probe's answer has no choices[0].logprobs.top_logprobs, so the meaning of its log-probs is "
            "unknown. Use vLLM, or sample with temperature 1 and without top_k and top_p."
        ) from error
