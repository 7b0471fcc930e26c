# SPDX-License-Identifier: Apache-2.0
"""Read a completion server's answer: token ids, log-probs, the tokens that could be sampled, and the end.

Token ids are never recovered from text: a text has many tokenizations, and the log-probs belong to one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from visalign.remote import ServerError
from visalign.text import StopReason, StopStrings

_TOKEN_ID = re.compile(r"token_id:(\d+)")
_IMPOSSIBLE = -9000.0
"""Log-probs below this mean probability 0: vLLM writes −9999 for −∞, which JSON lacks."""
_ROUNDING = 1e-3
"""Largest log-prob that passes as rounding error."""
_TIE = 1e-4
"""Largest difference of equal log-probs."""
_SUM_TOLERANCE = 1e-3
"""Largest deviation from 1 of the summed probabilities of a token set."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Request of one completion; the answer is checked against it."""

    url: str
    sample: int
    """Index in the rollout, for messages."""
    prompt: Sequence[int]
    limit: int
    """Largest number of tokens."""
    top_logprobs: int
    """Number of most probable tokens requested at each position."""
    top_k: int = 0
    """Above 0, the token sets that could be sampled are required: k tokens, and ties with the k-th."""
    vocabulary: int | None = None
    """Number of token ids; None if unknown."""

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
    """Per position, log-probs of the token ids that could be sampled; empty unless top_k was above 0."""

    def entropy(self) -> list[float]:
        """Return the entropy of each token's distribution in nats, −Σ p ln p over its set."""
        return [-sum(math.exp(p) * p for p in token_set.values()) for token_set in self.sets]


def read_completion(reply: Mapping[str, Any], request: CompletionRequest) -> Completion:
    """Read ids and log-probs from one answer of /v1/completions.

    Raises:
        ServerError: Something is missing or contradicts itself or the request.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no list of"
        raise request.error(f"the answer has {count} choices; one was requested.")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise request.error(
            f'finish_reason is {finish!r}; only "stop" and "length" leave a completion to train on. '
            "The server's log says why it was cut off."
        )
    prompt = choice.get("prompt_token_ids")
    if isinstance(prompt, list) and prompt != list(request.prompt):
        raise request.error(
            f"the server read another prompt than it was sent: {len(prompt)} tokens instead of "
            f"{len(request.prompt)}. It must take token ids as they are, without a start token of its own."
        )
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise request.error(
            "the answer has no logprobs, and without them there is no ratio to correct with. Let the server "
            "return them (vLLM: --max-logprobs of at least 1)."
        )
    ids = _ids(choice, logprobs, request)
    log_prob = _log_probs(logprobs, ids, request)
    top = _top_logprobs(logprobs, ids, request)
    sets = [_read_set(listed, position, ids, request) for position, listed in enumerate(top)]
    return Completion(ids=ids, log_prob=log_prob, finish=finish, sets=sets)


def find_end(
    completion: Completion,
    request: CompletionRequest,
    *,
    ends: Sequence[int],
    strings: Sequence[str],
    decode: Callable[[list[int]], str],
) -> tuple[int, StopReason]:
    """Find where the completion ends by the rules of `StoppingCriteria`, even if the server sampled on.

    Cutting at the first end changes no probability, since it depends only on the tokens up to it.

    Args:
        completion: Sampled tokens.
        request: Its request, for messages.
        ends: Ids of end tokens.
        strings: Stop strings.
        decode: Converts ids to text, special tokens included.

    Returns:
        Number of tokens to keep, and the stop reason.

    Raises:
        ServerError: The server stopped, and its tokens show no reason.
    """
    ids = completion.ids
    end = next((position + 1 for position, token in enumerate(ids) if token in ends), len(ids) + 1)
    if strings and any(string in decode(ids) for string in strings):
        search = StopStrings(strings, decode)
        length = next((n for n in range(1, min(end, len(ids) + 1)) if search.found(ids[:n])), None)
        if length is not None:
            return length, "stop string"
    if end <= len(ids):
        return end, "eos"
    if completion.finish == "length":
        return len(ids), "length"
    raise request.error(
        f"the server stopped, but its {len(ids)} tokens end with {ids[-1]}, which is none of the end tokens "
        f"{list(ends)}, and contain no stop string of {list(strings)}. Either it omits the end token, so "
        "that its log-prob is lost, or it has another tokenizer, or it stops at tokens of its own: name them "
        "in eos_ids."
    )


def _ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any], request: CompletionRequest) -> list[int]:
    """Read token ids, from `token_ids` or from names like "token_id:5"; both must agree if both are given."""
    listed, names = choice.get("token_ids"), logprobs.get("tokens")
    ids_of_names = None
    if isinstance(names, list):
        matches = [_TOKEN_ID.fullmatch(name) if isinstance(name, str) else None for name in names]
        ids_of_names = [int(match[1]) for match in matches if match is not None]
        ids_of_names = ids_of_names if len(ids_of_names) == len(names) else None
    ids = listed if isinstance(listed, list) else ids_of_names
    if ids is None:
        raise request.error(
            "the answer has text but no token ids. Text is not tokenized again, since that may give other "
            "tokens than were sampled. Use a server that supports return_token_ids (vLLM from 0.10.2 on, "
            "SGLang)."
        )
    if ids_of_names is not None and ids != ids_of_names:
        raise request.error(
            f"token_ids ({len(ids)} tokens) and logprobs.tokens ({len(ids_of_names)}) disagree."
        )
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise request.error(f"token_ids is {ids!r:.200}; it must be a list of non-negative integers.")
    if not 1 <= len(ids) <= request.limit:
        raise request.error(f"the answer has {len(ids)} tokens; 1 to {request.limit} were requested.")
    largest = max(ids)
    if request.vocabulary is not None and largest >= request.vocabulary:
        raise request.error(
            f"the server sampled token {largest}, but the policy has {request.vocabulary} tokens: the server "
            "runs another model."
        )
    return ids


def _log_probs(logprobs: Mapping[str, Any], ids: Sequence[int], request: CompletionRequest) -> list[float]:
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list) or len(values) != len(ids):
        count = len(values) if isinstance(values, list) else "no"
        raise request.error(f"there are {count} token_logprobs for {len(ids)} tokens; give one per token.")
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise request.error(f"the log-prob of token {position} is missing ({value!r}).")
        if math.isnan(value):
            raise request.error(f"the log-prob of token {position} is NaN. Its weights may contain NaN.")
        if value > _ROUNDING:
            raise request.error(
                f"the log-prob of token {position} is {value:.4g}, above 0. The server gives logits: start "
                "vLLM with --logprobs-mode processed_logprobs."
            )
        if value < _IMPOSSIBLE:
            raise request.error(
                f"token {position} was sampled, but its log-prob is {value:.4g}: probability 0."
            )
    return [min(float(value), 0.0) for value in values]


def _top_logprobs(
    logprobs: Mapping[str, Any], ids: Sequence[int], request: CompletionRequest
) -> list[Mapping[str, Any]]:
    """Return name -> log-prob of the most probable tokens per position; empty unless top_k is above 0."""
    if request.top_k == 0:
        return []
    top = logprobs.get("top_logprobs")
    if (
        not isinstance(top, list)
        or len(top) != len(ids)
        or not all(isinstance(listed, dict) for listed in top)
    ):
        raise request.error(
            f"top_logprobs does not list the most probable tokens at each of the {len(ids)} tokens, which "
            "top_k and top_p need: they say what could be sampled. Sample without both, or use vLLM."
        )
    return top


def _read_set(
    listed: Mapping[str, Any], position: int, ids: Sequence[int], request: CompletionRequest
) -> dict[int, float]:
    """Return the log-probs of all tokens that could be sampled; their probabilities must sum to 1."""
    token_set: dict[int, float] = {}
    for name, value in listed.items():
        match = _TOKEN_ID.fullmatch(name)
        if match is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise request.error(
                f"top_logprobs of token {position} has {name!r}: {value!r}; with top_k tokens must be named "
                'by id, "token_id:5" (vLLM\'s return_tokens_as_token_ids), with a number each.'
            )
        if value > _IMPOSSIBLE:
            token_set[int(match[1])] = float(value)
    best = sorted(token_set.values(), reverse=True)
    total = sum(map(math.exp, best))
    beyond = len(best) > request.top_k and best[request.top_k - 1] - best[-1] > _TIE
    if beyond or not abs(total - 1) <= _SUM_TOLERANCE or ids[position] not in token_set:
        raise request.error(
            f"the {len(token_set)} tokens listed at token {position} have a total probability of "
            f"{total:.4f}; the {request.top_k} that could be sampled, and ties, have 1. Either the log-probs "
            "are not processed (start vLLM with --logprobs-mode processed_logprobs), or more tokens than the "
            f"{request.top_logprobs} listed could be sampled, since ties with the last are kept: raise "
            "vLLM's --max-logprobs and max_logprobs here, or lower top_k."
        )
    return dict(sorted(token_set.items()))
