# SPDX-License-Identifier: Apache-2.0
"""What a completion server's answer says: token ids, log-probs, what could be drawn, where it ends.

Nothing is guessed: ids that the server does not give are not made from its text, since a text has many
tokenizations and the log-probs belong to one of them.
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
"""Below it a log-prob means probability 0: vLLM writes −9999 for −∞, which JSON has not."""
_ABOVE_ZERO = 1e-3
"""A log-prob may be this much above 0 by rounding."""
_TIE = 1e-4
"""Log-probs that differ by less are equal."""
_WHOLE = 1e-3
"""How far from 1 the probabilities of all tokens that could be drawn may add up."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """What a completion was asked for; what its answer is held against."""

    url: str
    sample: int
    """Its place in the rollout, for messages."""
    prompt: Sequence[int]
    limit: int
    """Tokens at most."""
    listed: int
    """Most probable tokens that were asked for at each token."""
    top_k: int = 0
    """Above 0 the tokens that could be drawn are wanted: this many, and those that tie with the last."""
    vocabulary: int | None = None
    """Ids are below it; None is unknown."""

    def error(self, what: str) -> ServerError:
        """An error that names the request."""
        return ServerError(f"{self.url}, sample {self.sample}: {what}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a server drew for one sample; n tokens."""

    ids: list[int]
    log_prob: list[float]
    finish: str
    """"stop" or "length", the server's word."""
    sets: list[dict[int, float]]
    """Per token the ids that could be drawn with their log-probs; empty where they were not wanted."""

    def entropy(self) -> list[float]:
        """Nats per token, from the sets."""
        return [-sum(math.exp(p) * p for p in held.values()) for held in self.sets]


def read_completion(reply: Mapping[str, Any], request: CompletionRequest) -> Completion:
    """Ids and log-probs of one answer of /v1/completions as the server gave them; `ServerError` where
    something is missing, or contradicts itself or the request.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no list of"
        raise request.error(f"the answer has {count} choices, and one was asked for.")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise request.error(
            f'finish_reason is {finish!r}; only "stop" and "length" leave a completion to train on. '
            "The server's log says why it was cut off."
        )
    shown = choice.get("prompt_token_ids")
    if isinstance(shown, list) and shown != list(request.prompt):
        raise request.error(
            f"the server read another prompt than it was sent: {len(shown)} tokens instead of "
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
    sets = [_could_be_drawn(held, place, ids, request) for place, held in _listed(logprobs, ids, request)]
    return Completion(ids=ids, log_prob=log_prob, finish=finish, sets=sets)


def first_end(
    completion: Completion,
    request: CompletionRequest,
    *,
    ends: Sequence[int],
    strings: Sequence[str],
    decode: Callable[[list[int]], str],
) -> tuple[int, StopReason]:
    """(tokens that stay, why it ended there): where the completion ends by the rules of `StoppingCriteria`,
    whatever the server went on to draw. A stop that its tokens do not show is a `ServerError`.

    Cutting at the first end changes no probability: whether a token ends the completion follows from the
    tokens up to it. `decode` takes ids to text, special tokens included.
    """
    ids = completion.ids
    end = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids) + 1)
    if strings and any(string in decode(ids) for string in strings):
        search = StopStrings(strings, decode)
        found = next((n for n in range(1, min(end, len(ids) + 1)) if search.found(ids[:n])), None)
        if found is not None:
            return found, "stop string"
    if end <= len(ids):
        return end, "eos"
    if completion.finish == "length":
        return len(ids), "length"
    raise request.error(
        f"the server stopped, and its {len(ids)} tokens end with {ids[-1]}, which is none of the end tokens "
        f"{list(ends)}, and hold no stop string of {list(strings)}. Either it leaves the end token out, so "
        "that its log-prob is lost, or its tokenizer is another, or it stops at tokens of its own: name them "
        "in eos_ids."
    )


def _ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any], request: CompletionRequest) -> list[int]:
    """The ids as such, or from names of the form "token_id:5"; both must agree where both are there."""
    listed, names = choice.get("token_ids"), logprobs.get("tokens")
    named = None
    if isinstance(names, list):
        found = [_TOKEN_ID.fullmatch(name) if isinstance(name, str) else None for name in names]
        named = [int(match[1]) for match in found if match is not None]
        named = named if len(named) == len(names) else None
    ids = listed if isinstance(listed, list) else named
    if ids is None:
        raise request.error(
            "the answer has text and no token ids. Text is not tokenized again, since that may give other "
            "tokens than were drawn. Use a server that knows return_token_ids (vLLM from 0.10.2 on, SGLang)."
        )
    if named is not None and ids != named:
        raise request.error(f"token_ids ({len(ids)} tokens) and logprobs.tokens ({len(named)}) disagree.")
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise request.error(f"token_ids holds {ids!r:.200}, which are no token ids.")
    if not 1 <= len(ids) <= request.limit:
        raise request.error(
            f"the answer has {len(ids)} tokens; at least 1 and at most {request.limit} were asked for."
        )
    largest = max(ids)
    if request.vocabulary is not None and largest >= request.vocabulary:
        raise request.error(
            f"the server drew token {largest}, and the policy has {request.vocabulary} tokens: the server "
            "has another model."
        )
    return ids


def _log_probs(logprobs: Mapping[str, Any], ids: Sequence[int], request: CompletionRequest) -> list[float]:
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list) or len(values) != len(ids):
        count = len(values) if isinstance(values, list) else "no"
        raise request.error(
            f"there are {count} token_logprobs for {len(ids)} tokens; one per token is needed."
        )
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise request.error(f"the log-prob of token {place} is missing ({value!r}).")
        if math.isnan(value):
            raise request.error(
                f"the log-prob of token {place} is NaN. The weights that it serves may hold NaN."
            )
        if value > _ABOVE_ZERO:
            raise request.error(
                f"the log-prob of token {place} is {value:.4g}, above 0. The server gives logits: start vLLM "
                "with --logprobs-mode processed_logprobs."
            )
        if value < _IMPOSSIBLE:
            raise request.error(f"token {place} was drawn, and its log-prob is {value:.4g}: probability 0.")
    return [min(float(value), 0.0) for value in values]


def _listed(
    logprobs: Mapping[str, Any], ids: Sequence[int], request: CompletionRequest
) -> list[tuple[int, Mapping[str, Any]]]:
    """(place, name -> log-prob of the most probable tokens), where they are wanted."""
    if request.top_k == 0:
        return []
    top = logprobs.get("top_logprobs")
    if not isinstance(top, list) or len(top) != len(ids) or not all(isinstance(held, dict) for held in top):
        raise request.error(
            f"top_logprobs does not list the most probable tokens at each of the {len(ids)} tokens, and with "
            "top_k or top_p they are needed: they say what could be drawn. Sample without both, or use vLLM."
        )
    return list(enumerate(top))


def _could_be_drawn(
    held: Mapping[str, Any], place: int, ids: Sequence[int], request: CompletionRequest
) -> dict[int, float]:
    """The tokens of positive probability, checked to be all of them: they add up to 1."""
    found: dict[int, float] = {}
    for name, value in held.items():
        match = _TOKEN_ID.fullmatch(name)
        if match is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise request.error(
                f"top_logprobs of token {place} holds {name!r}: {value!r}; with top_k tokens must be named "
                'by id, "token_id:5" (vLLM\'s return_tokens_as_token_ids), with a number each.'
            )
        if value > _IMPOSSIBLE:
            found[int(match[1])] = float(value)
    best = sorted(found.values(), reverse=True)
    total = sum(map(math.exp, best))
    beyond = len(best) > request.top_k and best[request.top_k - 1] - best[-1] > _TIE
    if beyond or not abs(total - 1) <= _WHOLE or ids[place] not in found:
        raise request.error(
            f"the {len(found)} tokens listed at token {place} have the probability {total:.4f} together; "
            f"those that could be drawn are {request.top_k} and ties, and have 1. Either the log-probs are "
            "not processed (start vLLM with --logprobs-mode processed_logprobs), or more tokens than the "
            f"{request.listed} that are listed could be drawn, as ties with the last stay in: raise vLLM's "
            "--max-logprobs and max_logprobs here, or lower top_k."
        )
    return dict(sorted(found.items()))
