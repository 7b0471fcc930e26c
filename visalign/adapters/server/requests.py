# SPDX-License-Identifier: Apache-2.0
"""What a completion server is asked for, and whether its log-probs are those of what it draws from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from visalign.errors import UserError
from visalign.remote import ServerConnection, ServerError
from visalign.text import Sampling, StoppingCriteria

from .completions import CompletionRequest

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""vLLM's names. "raw_logprobs": of the logits as the model gives them. "processed_logprobs": after
temperature, top_k and top_p."""

_LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""
_PROBED = 5
"""Tokens that the probe lists."""
_CLEAR = 0.1
"""Nats that the probe's tokens must lie apart for a verdict."""
_PROCESSED = "Start vLLM (0.10.2 or newer) with --logprobs-mode processed_logprobs"


def needs_processed(sampling: Sampling) -> bool:
    """Whether log-probs of the raw logits are not those of the draw."""
    return not sampling.greedy and (sampling.scale != 1 or sampling.truncates)


def check_sampling(sampling: Sampling, mode: LogprobsMode, max_logprobs: int) -> None:
    """Refuse ways of sampling whose log-probs the server does not give: `mode` says what its log-probs are
    of, `max_logprobs` the most that it lists per token.
    """
    if sampling.greedy:
        return
    if sampling.scale < _LEAST_TEMPERATURE:
        raise UserError(
            f"temperature is {sampling.temperature}; vLLM draws with {_LEAST_TEMPERATURE} instead. Give at "
            "least that, or 0 for greedy decoding."
        )
    if mode == "raw_logprobs" and needs_processed(sampling):
        raise UserError(
            f"The server's log-probs are of the raw logits (logprobs_mode='raw_logprobs'), and {sampling} "
            "draws from another distribution: the off-policy correction would be wrong. "
            f"{_PROCESSED} and set logprobs_mode to 'processed_logprobs', or sample with temperature 1 and "
            "without top_k and top_p."
        )
    if sampling.truncates and not 1 <= sampling.top_k <= max_logprobs:
        given = f"top_k={sampling.top_k}" if sampling.top_k else f"top_p={sampling.top_p} without top_k"
        raise UserError(
            f"{given} leaves more tokens than a server lists (max_logprobs={max_logprobs}), and all that "
            "could be drawn must be known for the ratio. Give a top_k below max_logprobs, beside top_p if "
            "wanted; or raise vLLM's --max-logprobs and max_logprobs; or sample without top_k and top_p."
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
    """The body of one request to /v1/completions. `ends` are sent as stop tokens, with the server's own
    switched off.

    What a server would take from the model's generation config if it were left out (vLLM does) is sent too.
    """
    drawn = Sampling(temperature=0.0) if sampling.greedy else sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "n": 1,
        "stream": False,
        "max_tokens": request.limit,
        "seed": seed,
        "temperature": drawn.temperature,
        "top_p": drawn.top_p,
        "top_k": drawn.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": request.listed,
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
    """Ask whether log-probs follow the temperature, by one token (behind any token ids) at temperature 1 and
    one at 2: an error if not, False if the probe cannot tell, because the tokens are about equally
    probable.

    Processed log-probs of two tokens lie half as far apart at temperature 2, raw ones equally far.
    """
    request = CompletionRequest(
        url=connection.url("completions"), sample=0, prompt=prompt, limit=1, listed=_PROBED
    )
    bodies = [
        request_body(
            request,
            model=model,
            sampling=Sampling(temperature=t),
            stopping=StoppingCriteria(),
            ends=(),
            seed=0,
        )
        for t in (1.0, 2.0)
    ]
    cold, warm = (_listed(reply, request) for reply in connection.post_all("completions", bodies, parallel=2))
    shared = sorted(cold.keys() & warm.keys(), key=lambda name: cold[name])
    if len(shared) < 2 or cold[shared[-1]] - cold[shared[0]] < _CLEAR:
        return False
    share = (warm[shared[-1]] - warm[shared[0]]) / (cold[shared[-1]] - cold[shared[0]])
    if abs(share - 0.5) > 0.2:
        raise ServerError(
            f"{request.url} gives log-probs that do not follow the temperature (from 1 to 2 two tokens' "
            f"distance becomes {share:.2f} of what it was, and processed log-probs have 0.5), against "
            f"logprobs_mode='processed_logprobs'. {_PROCESSED}."
        )
    return True


def _listed(reply: Mapping[str, Any], request: CompletionRequest) -> dict[str, float]:
    """Name -> log-prob of the most probable first tokens, those of probability 0 left out."""
    try:
        top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        return {name: float(value) for name, value in top.items() if float(value) > -9000.0}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise request.error(
            "the probe's answer has no choices[0].logprobs.top_logprobs, so nothing shows what its log-probs "
            "are of. Use vLLM, or sample with temperature 1 and without top_k and top_p."
        ) from error
