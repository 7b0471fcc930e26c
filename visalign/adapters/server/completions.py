# SPDX-License-Identifier: Apache-2.0
"""Requests to /v1/completions and their answers: token ids, log-probs and the tokens that could be sampled.

Token ids are never recovered from text: a text has many tokenizations, and the log-probs belong to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from visalign.remote import ServerError
from visalign.text import Sampling, StoppingCriteria, StopReason, StopStrings

IMPOSSIBLE = -9000.0
"""Log-probs below this mean probability 0: vLLM writes −9999 for −∞, which JSON lacks."""
_TIE = 1e-4
"""Largest difference of equal log-probs."""
_SUM_TOLERANCE = 1e-3
"""Largest deviation from 1 of the summed probabilities of a token set."""
_PREFIX = "token_id:"
"""How `return_tokens_as_token_ids` writes a token."""


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
    sample: int
    """Index in the rollout, for messages."""
    prompt: Sequence[int]
    limit: int
    """Largest number of tokens."""
    sampling: Sampling
    stopping: StoppingCriteria
    ends: Sequence[int]
    """Ids of end tokens, in place of the server's own."""
    seed: int
    top_logprobs: int = 1
    """Number of most probable tokens requested at each position."""
    vocabulary: int | None = None
    """Number of the policy's token ids; None skips the check."""

    def body(self) -> dict[str, Any]:
        """Build the request's body; all that vLLM would take from the model's generation config is sent."""
        return {
            "model": self.model,
            "prompt": list(self.prompt),
            "n": 1,
            "stream": False,
            "max_tokens": self.limit,
            "seed": self.seed,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p if self.sampling.truncates else 1.0,
            "top_k": (self.sampling.top_k if self.sampling.truncates else 0) or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": self.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stop": list(self.stopping.strings),
            "stop_token_ids": list(self.ends),
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "add_special_tokens": False,
        }

    def error(self, problem: str) -> ServerError:
        """Build an error that names the request."""
        return ServerError(f"{self.url}, sample {self.sample}: {problem}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Completion of n tokens as the server sampled it."""

    ids: list[int]
    log_prob: list[float]
    finish: str
    """Finish reason of the server, "stop" or "length"."""
    sets: list[dict[int, float]]
    """Per position, log-probs of the token ids that could be sampled; empty without top_k and top_p."""

    def entropy(self) -> list[float]:
        """Return the entropy of each token's distribution in nats, −Σ p ln p over its set."""
        return [-sum(math.exp(p) * p for p in token_set.values()) for token_set in self.sets]


def parse_choice(answer: Mapping[str, Any], request: CompletionRequest) -> _Choice:
    """Parse the one choice of an answer; raises `ServerError` if fields are missing or out of range."""
    try:
        return _Answer.model_validate(answer).choices[0]
    except ValidationError as error:
        first = error.errors()[0]
        raise request.error(
            f"the answer's {'.'.join(map(str, first['loc']))} is {first['input']!r:.100}. {first['msg']}. "
            "Use a server with token_ids and logprobs in its answers: vLLM from 0.10.2 on, started with "
            "--max-logprobs of at least 1 and, for any temperature but 1, top_k or top_p, with "
            "--logprobs-mode processed_logprobs. Its log says more."
        ) from error


def read_completion(answer: Mapping[str, Any], request: CompletionRequest) -> Completion:
    """Read ids and log-probs; raises `ServerError` if they contradict each other or the request."""
    choice = parse_choice(answer, request)
    ids, log_prob, sent = choice.token_ids, choice.logprobs.token_logprobs, list(request.prompt)
    top = (choice.logprobs.top_logprobs or []) if request.sampling.truncates else []
    vocabulary = math.inf if request.vocabulary is None else request.vocabulary
    for broken, problem in (
        (
            choice.prompt_token_ids not in (None, sent),
            "the server read another prompt than it was sent. It must take token ids as they are, without a "
            "start token of its own",
        ),
        (
            not 1 <= len(ids) <= request.limit,
            f"the answer has {len(ids)} tokens; 1 to {request.limit} were requested",
        ),
        (
            any(token >= vocabulary for token in ids),
            f"the server sampled token {max(ids, default=0)}, but the policy has {request.vocabulary}: the "
            "server runs another model",
        ),
        (
            len(log_prob) != len(ids) or len(top) != len(ids) * request.sampling.truncates,
            f"there are {len(log_prob)} token_logprobs and {len(top)} top_logprobs for {len(ids)} tokens",
        ),
    ):
        if broken:
            raise request.error(f"{problem}.")
    sets = [_read_set(listed, position, ids, request) for position, listed in enumerate(top)]
    log_prob = [min(value, 0.0) for value in log_prob]
    return Completion(ids=ids, log_prob=log_prob, finish=choice.finish_reason, sets=sets)


def _read_set(
    listed: Mapping[str, float], position: int, ids: Sequence[int], request: CompletionRequest
) -> dict[int, float]:
    """Return the log-probs of all tokens that could be sampled; their probabilities must sum to 1."""
    try:
        tokens = {int(name.removeprefix(_PREFIX)): p for name, p in listed.items() if p > IMPOSSIBLE}
    except ValueError as error:
        raise request.error(
            f'top_logprobs of token {position} must name tokens by id, "{_PREFIX}5" (vLLM\'s '
            f"return_tokens_as_token_ids): {error}."
        ) from error
    best, top_k = sorted(tokens.values(), reverse=True), request.sampling.top_k
    total = sum(map(math.exp, best))
    beyond = len(best) > top_k and best[top_k - 1] - best[-1] > _TIE
    if beyond or not abs(total - 1) <= _SUM_TOLERANCE or ids[position] not in tokens:
        raise request.error(
            f"the {len(tokens)} tokens listed at token {position} have a total probability of {total:.4f}; "
            f"the {top_k} that could be sampled, and ties, have 1. Either the log-probs are not processed "
            "(start vLLM with --logprobs-mode processed_logprobs), or more tokens than the "
            f"{request.top_logprobs} listed could be sampled, since ties with the last are kept: raise "
            "vLLM's --max-logprobs and max_logprobs here, or lower top_k."
        )
    return dict(sorted(tokens.items()))


def find_end(
    completion: Completion, request: CompletionRequest, decode: Callable[[list[int]], str]
) -> tuple[int, StopReason]:
    """Return the number of tokens to keep and the stop reason, by the rules of `StoppingCriteria`, even if
    the server sampled on; `decode` converts ids to text, special tokens included.

    Cutting at the first end changes no probability, since it depends only on the tokens up to it.
    """
    ids, strings = completion.ids, request.stopping.strings
    end = next((n for n, token in enumerate(ids, 1) if token in request.ends), len(ids) + 1)
    if any(string in decode(ids) for string in strings):
        search = StopStrings(strings, decode)
        length = next((n for n in range(1, min(end, len(ids) + 1)) if search.found(ids[:n])), None)
        if length is not None:
            return length, "stop string"
    if end <= len(ids):
        return end, "eos"
    if completion.finish == "length":
        return len(ids), "length"
    raise request.error(
        f"the server stopped, but its {len(ids)} tokens end with {ids[-1]}, none of the end tokens "
        f"{list(request.ends)}, and contain no stop string of {list(strings)}. Either it omits the end "
        "token, so that its log-prob is lost, or it has another tokenizer, or it stops at tokens of its own: "
        "name them in StoppingCriteria.eos_ids."
    )
