# SPDX-License-Identifier: Apache-2.0
"""Completions of a text policy drawn by vLLM or another OpenAI-compatible server, for off-policy training.

The server is the rollout policy μ: `rollout.log_prob` holds its log-probs, the policy under training computes
its own (`rescored`), and their ratio corrects for what lies between the two: kernels, precision, weights.
That holds if the server's log-probs are of the distribution it drew from, which this file sees to:

- vLLM gives log-probs of the raw logits by default (`--logprobs-mode raw_logprobs`). They are those of the
  draw at temperature 1 without top_k and top_p, and no others: temperature divides logits, so it cannot be
  put into a log-prob afterwards. For all else the server must run with `--logprobs-mode processed_logprobs`
  (vLLM from 0.10.2 on) and `logprobs_mode` must say so; one probe of two tokens checks it.
- The tokens that top_k and top_p left are read from the server's list of the most probable tokens, which is
  whole if its probabilities add up to 1. Hence top_p goes with a top_k of at most `max_logprobs` only.
- Everything that the server would take from its own defaults (penalties, min_p, end tokens) is sent.

What a server does not say is NaN: the entropy, or with top_k `full_log_prob`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from visalign.adapters.causal_lm.batches import PromptBatch, check_counts, check_lengths
from visalign.adapters.causal_lm.chat import PromptEncoder
from visalign.adapters.causal_lm.loading import check_options, end_tokens
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError, suggestion
from visalign.remote import ServerConnection, ServerError
from visalign.seeds import sample_seed
from visalign.text import Prompt, Sampling, StoppingCriteria, TextRollout, check_seeds, draw_seeds

from .completions import Completion, CompletionRequest, read_completion
from .requests import LogprobsMode, check_processed, check_sampling, needs_processed, request_body
from .rollout import server_rollout
from .weights import adapter_name, load_adapter, reload_weights, served_models, unload_adapter


class ServerGenerator:
    """Generates completions on a server, with the signature of `TextPolicy.generate`; sends nothing before.

    Args:
        base_url: as OpenAI clients take it, "http://host:8000/v1".
        model: the name under which the server serves the policy's model (vLLM: --served-model-name).
        tokenizer: of the model.
        api_key: sent as a bearer token.
        prompts: how prompts become tokens; by default as `CausalLMPolicy` does it.
        logprobs_mode: what the server's log-probs are of; vLLM's default unless it was started otherwise.
        max_logprobs: log-probs per token that the server lists at most (vLLM: --max-logprobs). Beside a
            top_k it should leave some room, since tokens that tie with the k-th can be drawn too.
        eos_ids: end tokens of the model; by default the tokenizer's. `StoppingCriteria.eos_ids` goes before.
        vocabulary: tokens of the policy; an id beyond is an error. None does not look.
        context_length: tokens of prompt and completion together; by default what the server says.
        max_prompt_tokens: longest prompt; None is what the context leaves for one token more.
        long_prompts: a longer prompt is an error ("refuse"), or gives masked samples with the stop
            reason "prompt too long" ("mask").
        parallel: requests under way at once; each is one sample.
        timeout: seconds that the server may be silent.
        retries: attempts after the first, for connection errors, 429 and 5xx alone.
        backoff: seconds before the second attempt, doubled from one to the next.
        patience: seconds for which a server that has answered once may be away, as it is while it is
            started anew. It then gets again what `sync` or `reload` gave it.

    Raises:
        UserError: an argument out of range.
    """

    given: str | None = None
    """The folder, as the server sees it, of the weights that it was given; None: those of its start."""

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        api_key: str | None = None,
        prompts: PromptEncoder | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        max_logprobs: int = 20,
        eos_ids: Sequence[int] | None = None,
        vocabulary: int | None = None,
        context_length: int | None = None,
        max_prompt_tokens: int | None = None,
        long_prompts: Literal["refuse", "mask"] = "refuse",
        parallel: int = 64,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
        patience: float = 0.0,
    ) -> None:
        check_options(1, 1, max_prompt_tokens, long_prompts)
        for name, size in (("max_logprobs", max_logprobs), ("parallel", parallel)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(f"{name} is {size!r}; it must be a whole number of at least 1.")
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise UserError(
                f'logprobs_mode is {logprobs_mode!r}; it must be "raw_logprobs" (vLLM\'s default) or '
                '"processed_logprobs", as the server was started. Its other modes give no log-probs.'
            )
        self._connection = ServerConnection(
            base_url, api_key=api_key, timeout=timeout, retries=retries, backoff=backoff, patience=patience
        )
        self.base_model = self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts or PromptEncoder(tokenizer)
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.max_logprobs, self.parallel = max_logprobs, parallel
        self.eos_ids = None if eos_ids is None else tuple(eos_ids)
        self.vocabulary = vocabulary
        self.max_prompt_tokens, self.long_prompts = max_prompt_tokens, long_prompts
        self._context, self._looked, self._probed = context_length, False, False

    @classmethod
    def for_policy(cls, policy: CausalLMPolicy, base_url: str, model: str, **options: Any) -> ServerGenerator:
        """A generator that tokenizes, ends and limits as the policy does.

        Args:
            policy: under training.
            base_url: of the server.
            model: its name there.
            **options: of the constructor: logprobs_mode, api_key, ...

        Raises:
            UserError: an option out of range, or no end token.
        """
        embedding: Any = policy.model.get_input_embeddings()
        own: dict[str, Any] = {
            "prompts": policy.prompts,
            "vocabulary": embedding.weight.shape[0],
            "context_length": policy.context_length,
            "max_prompt_tokens": policy.max_prompt_tokens,
            "long_prompts": policy.long_prompts,
        }
        if "eos_ids" not in options:
            own["eos_ids"] = end_tokens(policy.model, policy.tokenizer, StoppingCriteria())
        return cls(base_url, model, policy.tokenizer, **{**own, **options})

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: int | Sequence[int],
        num_generations: int = 1,
        sampling: Sampling | None = None,
        stopping: StoppingCriteria | None = None,
        group: Sequence[Hashable] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
        after: Sequence[Sequence[int]] | None = None,
    ) -> TextRollout:
        """Complete P prompts G times each, as `CausalLMPolicy.generate` does; images are refused.

        Each sample is a request with its own seed; how far a seed repeats its completion is up to the server.

        Returns:
            The rollout. NaN where the server does not say: `entropy` without top_k, `full_log_prob` with it;
            `rescored` gives the policy's entropy.

        Raises:
            UserError: counts that do not fit, a prompt that cannot be encoded or is too long, no end token,
                or a way of sampling whose log-probs this server does not give.
            ServerError: what the server said, or that it said nothing; with the URL.
        """
        if images is not None:
            raise UserError("Generation by a server sends token ids and reads no images. Leave images out.")
        sampling, stopping = sampling or Sampling(), stopping or StoppingCriteria()
        count = check_counts(prompts, num_generations, seeds, group, after)
        check_sampling(sampling, self.logprobs_mode, self.max_logprobs)
        ends, ids = self._ends(stopping), self.prompts.encode(prompts)
        context = self._context_length()
        longest = _smallest(self.max_prompt_tokens, None if context is None else context - 1)
        if self.long_prompts == "refuse":
            check_lengths(ids, longest, context)
        batch = PromptBatch(
            prompts=prompts,
            ids=ids,
            group=list(range(len(prompts))) if group is None else list(group),
            generations=num_generations,
            seeds=draw_seeds(seeds, count) if isinstance(seeds, int) else check_seeds(seeds),
            after=after,
        )
        found = self._completions(batch, sampling, stopping, ends, longest, context)
        return server_rollout(
            found, batch, self.tokenizer, sampling=sampling, stopping=stopping, ends=ends, longest=longest
        )

    def sync(self, folder: str | Path, *, server_folder: str | None = None) -> str:
        """Let a vLLM server load the LoRA adapter that `policy.save(folder)` wrote, and generate with it.

        The adapter before is unloaded. The folder stays as it is until the next `sync`: a server that was
        started anew is given it again.

        Args:
            folder: with adapter_config.json and the adapter's weights.
            server_folder: the same folder as the server sees it, where that is another path.

        Returns:
            The adapter's name on the server, from now on `model`.

        Raises:
            UserError: a folder without an adapter.
            ServerError: the server refused; says how it must be started.
        """
        name = adapter_name(Path(folder))
        if name == self.model:
            return name
        self.given = server_folder or str(Path(folder).resolve())
        load_adapter(self._connection, name, self.given)
        before, self.model = self.model, name
        if before != self.base_model:
            unload_adapter(self._connection, before)
        return name

    def reload(self, folder: str | Path) -> None:
        """Let a vLLM server read the whole model anew that was saved into the folder it was started on.

        Raises:
            UserError: a folder without a model's weights.
            ServerError: the server refused; says how it must be started.
        """
        if not any(Path(folder).glob("*.safetensors")):
            raise UserError(
                f"{folder} holds no weights (*.safetensors). Save the model there and start the server on it."
            )
        self.given = str(folder)
        reload_weights(self._connection)

    def _completions(
        self,
        batch: PromptBatch,
        sampling: Sampling,
        stopping: StoppingCriteria,
        ends: Sequence[int],
        longest: int | None,
        context: int | None,
    ) -> dict[int, tuple[CompletionRequest, Completion]]:
        """Sample -> its request and the completion, for every sample whose prompt is not too long."""
        requests = []
        for sample in range(len(batch.seeds)):
            ids = batch.ids[sample // batch.generations]
            begun = batch.begun(sample)
            room = stopping.max_new_tokens if context is None else context - len(ids)
            room = min(stopping.max_new_tokens, room) - len(begun)
            if (longest is not None and len(ids) > longest) or room < 1:
                continue
            requests.append(
                CompletionRequest(
                    url=self._connection.url("completions"),
                    sample=sample,
                    prompt=[*ids, *begun],
                    limit=room,
                    listed=self.max_logprobs if sampling.truncates else 1,
                    top_k=sampling.top_k if sampling.truncates else 0,
                    vocabulary=self.vocabulary,
                )
            )
        bodies = [
            request_body(
                a,
                model=self.model,
                sampling=sampling,
                stopping=stopping,
                ends=ends,
                seed=_seed(batch, a.sample),
            )
            for a in requests
        ]
        probe = requests[0].prompt if requests and needs_processed(sampling) else None
        replies = self._answers(bodies, probe)
        return {a.sample: (a, read_completion(reply, a)) for a, reply in zip(requests, replies, strict=True)}

    def _answers(
        self, bodies: Sequence[Mapping[str, Any]], probe: Sequence[int] | None
    ) -> list[Mapping[str, Any]]:
        """The answers to all requests, each under the weights that the server was given.

        A server that was started anew does not know its adapter (404); that it reads a whole model anew shows
        by its having been away. It gets the weights again, and all requests, once more.
        """
        absences, is_whole = self._connection.absences, self.model == self.base_model
        try:
            answers = self._asked(bodies, probe)
            if self.given is None or not is_whole or self._connection.absences == absences:
                return answers
        except ServerError as error:
            if self.given is None or is_whole or error.status != 404:
                raise
        if is_whole:
            reload_weights(self._connection)
        else:
            load_adapter(self._connection, self.model, str(self.given))
        return self._asked(bodies, probe)

    def _asked(
        self, bodies: Sequence[Mapping[str, Any]], probe: Sequence[int] | None
    ) -> list[Mapping[str, Any]]:
        """The answers to all requests, behind the probe's of the log-probs."""
        if probe is not None and not self._probed:
            self._probed = check_processed(self._connection, self.model, probe)
        return self._connection.post_all("completions", bodies, parallel=self.parallel)

    def _ends(self, stopping: StoppingCriteria) -> tuple[int, ...]:
        """The tokens that end a completion."""
        if stopping.eos_ids is not None:
            return stopping.eos_ids
        if self.eos_ids is not None:
            return self.eos_ids
        own: Any = self.tokenizer.eos_token_id
        if own is None:
            raise UserError(
                "The tokenizer has no end-of-sequence token, so no completion would end by itself. Give "
                "eos_ids, or StoppingCriteria(eos_ids=()) if completions end by stop strings and length "
                "alone."
            )
        return (own,)

    def _context_length(self) -> int | None:
        """Tokens of prompt and completion together, asked for once; the model must be one that is served."""
        if not self._looked:
            cards = served_models(self._connection)
            if cards and self.base_model not in cards:
                raise ServerError(
                    f"{self._connection.url('models')} lists {', '.join(map(repr, sorted(cards)))} and not "
                    f"{self.base_model!r}. {suggestion(self.base_model, cards)}Give one of them as model."
                )
            card = cards.get(self.base_model, {})
            said = card.get("max_model_len") or cards.get(str(card.get("parent")), {}).get("max_model_len")
            self._context = _smallest(self._context, said if isinstance(said, int) else None)
            self._looked = True
        return self._context


def _seed(batch: PromptBatch, sample: int) -> int:
    """Of what is drawn behind the tokens that it begins with: not with the numbers that these came of."""
    begun, seed = len(batch.begun(sample)), batch.seeds[sample]
    return sample_seed(seed, begun) if begun else seed


def _smallest(*limits: int | None) -> int | None:
    """The smallest of the limits that there are."""
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None
