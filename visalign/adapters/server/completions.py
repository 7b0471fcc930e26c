# SPDX-License-Identifier: Apache-2.0
"""Requests to /v1/completions and their answers: token ids, log-probs and the tokens that could be sampled.

Token ids are never recovered from text: a text has many tokenizations, and the log-probs belong to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError

from visalign.adapters.causal_lm.generation import Completion
from visalign.remote import ServerConnection, ServerError
from visalign.settings import refuse
from visalign.text import Sampling, StoppingCriteria, StopReason, StopStrings

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""vLLM's names: log-probs of the model's logits, or after temperature, top_k and top_p."""
IMPOSSIBLE = -9000.0  # log-probs below mean probability 0: vLLM writes −9999 for −∞, which JSON lacks
_TIE = 1e-4  # largest difference of equal log-probs
_SUM_TOLERANCE = 1e-3  # largest deviation from 1 of the summed probabilities of a token set
_PREFIX = "token_id:"  # how `return_tokens_as_token_ids` writes a token
_MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this value
_PROBE_TOP = 5  # log-probs that the probe asks for
_PROBE_MIN_GAP = 0.1  # smallest spread of the probe's log-probs, in nats, that allows a verdict
_START_PROCESSED = "Start vLLM (0.10.2 or newer) with --logprobs-mode processed_logprobs"


# not strict: servers write whole log-probs as integers; above 0 they are logits, up to rounding
class _Logprobs(BaseModel):
    token_logprobs: list[Annotated[float, Field(le=1e-3, gt=IMPOSSIBLE)]]
    top_logprobs: list[dict[str, float]] | None = None


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    token_ids: list[Annotated[int, Field(ge=0)]]
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Request of one completion; the answer is checked against it."""

    url: str
    model: str
    sample: int  # Index in the rollout, for messages
    prompt: Sequence[int]
    limit: int  # Largest number of tokens
    sampling: Sampling
    stopping: StoppingCriteria
    ends: Sequence[int]  # Ids of end tokens, in place of the server's own
    seed: int
    top_logprobs: int = 1  # Number of most probable tokens requested at each position
    vocabulary: float = math.inf  # Number of the policy's token ids

    def body(self) -> dict[str, Any]:
        """Build the request's body; all that vLLM would take from the model's generation config is sent."""
        truncates = self.sampling.truncates
        return {
            "model": self.model,
            "prompt": list(self.prompt),
            "n": 1,
            "max_tokens": self.limit,
            "seed": self.seed,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p if truncates else 1.0,
            "top_k": (self.sampling.top_k if truncates else 0) or -1,
            "repetition_penalty": 1.0,
            **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0),
            "logprobs": self.top_logprobs,
            "stop": list(self.stopping.strings),
            "stop_token_ids": list(self.ends),
            "ignore_eos": True,  # the server's own end token, which may be another
            **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output"), True),
            **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"), False),
            "stream": False,
        }

    def error(self, problem: str) -> ServerError:
        return ServerError(f"{self.url}, sample {self.sample}: {problem}")


def _parse_choice(answer: Mapping[str, Any], request: CompletionRequest) -> _Choice:
    try:
        return _Answer.model_validate(answer).choices[0]
    except ValidationError as error:
        first = error.errors()[0]
        raise request.error(
            f"the answer's {'.'.join(map(str, first['loc']))} is {first['input']!r:.100}. {first['msg']}. Use vLLM "
            "from 0.10.2 on, with --max-logprobs of at least 1 and, for temperatures but 1, top_k or top_p, "
            "--logprobs-mode processed_logprobs."
        ) from error


def read_completion(
    answer: Mapping[str, Any], request: CompletionRequest, decode: Callable[[list[int]], str]
) -> Completion:
    """Read a completion and cut it at its end; raises `ServerError` if its parts contradict each other or the
    request. `decode` converts ids to text, special tokens included. Unknown numbers are NaN.
    """
    choice, truncates = _parse_choice(answer, request), request.sampling.truncates
    ids, log_prob = choice.token_ids, choice.logprobs.token_logprobs
    top = (choice.logprobs.top_logprobs or []) if truncates else []
    problems = {
        "the server read another prompt than it was sent, such as one with a start token of its own": (
            choice.prompt_token_ids not in (None, list(request.prompt))
        ),
        f"the answer has {len(ids)} tokens, not 1 to {request.limit}": not 1 <= len(ids) <= request.limit,
        f"the server sampled token {max(ids, default=0)}, but the policy has {request.vocabulary}: the server runs "
        "another model": max(ids, default=0) >= request.vocabulary,
        f"there are {len(log_prob)} token_logprobs and {len(top)} top_logprobs for {len(ids)} tokens": (
            len(log_prob) != len(ids) or len(top) != len(ids) * truncates
        ),
    }
    if problem := next((problem for problem, is_broken in problems.items() if is_broken), None):
        raise request.error(f"{problem}.")
    sets = [_read_set(listed, position, ids, request) for position, listed in enumerate(top)]
    n, reason = find_end(ids, choice.finish_reason, request, decode)
    log_probs, unknown = torch.tensor(log_prob[:n]).clamp(max=0.0), torch.full((n,), math.nan)
    entropy = [-sum(math.exp(p) * p for p in token_set.values()) for token_set in sets[:n]]  # −Σ p ln p
    return Completion(
        ids=ids[:n],
        reason=reason,
        log_prob=log_probs,
        full_log_prob=unknown if truncates else log_probs,
        entropy=torch.tensor(entropy) if truncates else unknown,
        kept=[torch.tensor(list(token_set)) for token_set in sets[:n]],
    )


def _read_set(
    listed: Mapping[str, float], position: int, ids: Sequence[int], request: CompletionRequest
) -> dict[int, float]:
    """Return the log-probs of all tokens that could be sampled; their probabilities must sum to 1."""
    try:
        tokens = {int(name.removeprefix(_PREFIX)): p for name, p in listed.items() if p > IMPOSSIBLE}
    except ValueError as error:
        raise request.error(
            f'top_logprobs of token {position} must name tokens by id, "{_PREFIX}5" (return_tokens_as_token_ids): '
            f"{error}."
        ) from error
    best, top_k = sorted(tokens.values(), reverse=True), request.sampling.top_k
    total = sum(map(math.exp, best))
    beyond = len(best) > top_k and best[top_k - 1] - best[-1] > _TIE
    if beyond or not abs(total - 1) <= _SUM_TOLERANCE or ids[position] not in tokens:
        raise request.error(
            f"the {len(tokens)} tokens listed at token {position} have a total probability of {total:.4f}; "
            f"the {top_k} that could be sampled, and ties, have 1. {_START_PROCESSED}; raise its --max-logprobs "
            f"and max_logprobs above {request.top_logprobs} for ties with the last token, or lower top_k."
        )
    return dict(sorted(tokens.items()))


def find_end(
    ids: list[int], finish: str, request: CompletionRequest, decode: Callable[[list[int]], str]
) -> tuple[int, StopReason]:
    """Return the number of tokens to keep and the stop reason, by `StoppingCriteria`; `finish` is the server's.

    A token's probability depends on earlier ones alone, so cutting changes none.
    """
    strings = request.stopping.strings
    end = next((n for n, token in enumerate(ids, 1) if token in request.ends), len(ids) + 1)
    if any(string in decode(ids) for string in strings):
        search = StopStrings(strings, decode)
        length = next((n for n in range(1, min(end, len(ids) + 1)) if search.found(ids[:n])), None)
        if length is not None:
            return length, "stop string"
    if end <= len(ids):
        return end, "eos"
    if finish == "length":
        return len(ids), "length"
    raise request.error(
        f"the server stopped, but its {len(ids)} tokens end with {ids[-1]}, none of the end tokens "
        f"{list(request.ends)}, and contain no stop string of {list(strings)}. If it stops at tokens of its own, "
        "name them in StoppingCriteria.eos_ids; else it omits the end token or has another tokenizer."
    )


def needs_processed(sampling: Sampling) -> bool:
    """Return True if log-probs of the raw logits differ from those of the sampled distribution."""
    return not sampling.greedy and (sampling.scale != 1 or sampling.truncates)


def check_sampling(sampling: Sampling, mode: LogprobsMode, max_logprobs: int) -> None:
    """Raise if the server cannot give the log-probs of this kind of sampling."""
    if sampling.greedy:
        return
    setting = f"top_k={sampling.top_k}" if sampling.top_k else f"top_p={sampling.top_p} without top_k"
    problems = {
        f"temperature is {sampling.temperature}; vLLM samples with {_MIN_TEMPERATURE} instead. Give that or 0.": (
            sampling.scale < _MIN_TEMPERATURE
        ),
        f"logprobs_mode is 'raw_logprobs', of the raw logits, and {sampling} draws from another distribution. "
        f"{_START_PROCESSED} and set logprobs_mode to 'processed_logprobs', or sample with temperature 1 alone.": (
            mode == "raw_logprobs" and needs_processed(sampling)
        ),
        f"{setting} leaves more tokens than the server lists (max_logprobs={max_logprobs}); the ratio needs all of "
        "them. Give a top_k below max_logprobs, or raise vLLM's --max-logprobs and max_logprobs.": (
            sampling.truncates and not 1 <= sampling.top_k <= max_logprobs
        ),
    }
    refuse(message for message, is_broken in problems.items() if is_broken)


def check_processed(connection: ServerConnection, model: str, prompt: list[int]) -> bool:
    """Probe whether log-probs follow the temperature (1 and 2); False if two tokens are about equally probable.

    Processed log-probs of two tokens differ half as much at temperature 2, raw ones equally.
    """
    request = CompletionRequest(
        url=connection.url("completions"),
        model=model,
        sample=0,
        prompt=prompt,
        limit=1,
        sampling=Sampling(),
        stopping=StoppingCriteria(),
        ends=(),
        seed=0,
        top_logprobs=_PROBE_TOP,
    )
    bodies = [{**request.body(), "temperature": temperature} for temperature in (1.0, 2.0)]
    answers = connection.post_all("completions", bodies, parallel=2)
    tops = [_parse_choice(answer, request).logprobs.top_logprobs for answer in answers]
    cold, warm = ({name: value for name, value in (top or [{}])[0].items() if value > IMPOSSIBLE} for top in tops)
    shared = sorted(cold.keys() & warm.keys(), key=cold.__getitem__)
    if len(shared) < 2 or cold[shared[-1]] - cold[shared[0]] < _PROBE_MIN_GAP:
        return False
    ratio = (warm[shared[-1]] - warm[shared[0]]) / (cold[shared[-1]] - cold[shared[0]])
    if abs(ratio - 0.5) > 0.2:
        raise ServerError(
            f"{request.url} gives log-probs that do not follow the temperature (from 1 to 2 the difference of two "
            f"tokens changes by {ratio:.2f}; processed log-probs give 0.5). {_START_PROCESSED}."
        )
    return True
