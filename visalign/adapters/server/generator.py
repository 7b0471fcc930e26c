# SPDX-License-Identifier: Apache-2.0
"""Sample completions on vLLM or another OpenAI-compatible server, for off-policy training.

The server is the rollout policy μ: `rollout.log_prob` holds its log-probs, the policy under training computes
its own (`rescored`), and their ratio corrects for different kernels, precision and weights. That is valid
only if the server's log-probs belong to the distribution it samples from:

- By default vLLM gives log-probs of the raw logits (`--logprobs-mode raw_logprobs`). They are right only at
  temperature 1 without top_k and top_p, and a log-prob cannot be rescaled afterwards. Otherwise the server
  must run with `--logprobs-mode processed_logprobs` (vLLM 0.10.2 or later) and `logprobs_mode` must say so; a
  probe of two tokens checks it.
- The tokens that top_k and top_p keep are read from the server's list of most probable tokens, which is
  complete if its probabilities sum to 1. So top_p needs a top_k of at most `max_logprobs`.
- Everything that the server would take from its own defaults (penalties, min_p, end tokens) is sent.

Unknown numbers are NaN: the entropy, or with top_k `full_log_prob`.
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
    """Generate completions on a server, with the signature of `TextPolicy.generate`.

    Args:
        base_url: As for OpenAI clients, "http://host:8000/v1".
        model: Name of the policy's model on the server (vLLM: --served-model-name).
        tokenizer: Tokenizer of the model.
        api_key: Bearer token.
        prompts: Encoder of prompts; by default that of `CausalLMPolicy`.
        logprobs_mode: Meaning of the server's log-probs, as it was started.
        max_logprobs: Log-probs per token that the server lists at most (vLLM: --max-logprobs). Leave some
            room above top_k, since tokens that tie with the k-th can be sampled too.
        eos_ids: End tokens; by default the tokenizer's. `StoppingCriteria.eos_ids` takes precedence.
        vocabulary: Number of the policy's token ids, beyond which an id is an error. None skips the check.
        context_length: Tokens of prompt and completion together; by default the server's.
        max_prompt_tokens: Longest prompt; None leaves room for one token in the context.
        long_prompts: "refuse" raises for a longer prompt; "mask" gives masked samples with the stop reason
            "prompt too long".
        parallel: Requests in flight, one per sample.
        timeout: Seconds that the server may be silent.
        retries: Attempts after the first, for connection errors, 429 and 5xx.
        backoff: Seconds before the second attempt, doubled each time.
        patience: Seconds for which a server that has answered once may be unavailable while it restarts; it
            is then given its weights again.

    Raises:
        UserError: Argument out of range.
    """

    weights_folder: str | None = None
    """Folder, as the server sees it, of the weights last sent; None: those it was started with."""

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
        self._context, self._asked_context, self._probed = context_length, False, False

    @classmethod
    def for_policy(cls, policy: CausalLMPolicy, base_url: str, model: str, **options: Any) -> ServerGenerator:
        """Create a generator with the policy's tokenizer, end tokens and limits.

        Args:
            policy: Policy under training.
            base_url: Address of the server.
            model: Name of the model on the server.
            **options: Other arguments of the constructor.

        Raises:
            UserError: Option out of range, or no end token.
        """
        embedding: Any = policy.model.get_input_embeddings()
        defaults: dict[str, Any] = {
            "prompts": policy.prompts,
            "vocabulary": embedding.weight.shape[0],
            "context_length": policy.context_length,
            "max_prompt_tokens": policy.max_prompt_tokens,
            "long_prompts": policy.long_prompts,
        }
        if "eos_ids" not in options:
            defaults["eos_ids"] = end_tokens(policy.model, policy.tokenizer, StoppingCriteria())
        return cls(base_url, model, policy.tokenizer, **{**defaults, **options})

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

        Each sample is a request with its own seed; whether a seed repeats its completion is up to the server.

        Returns:
            Rollout of B samples. NaN: `entropy` without top_k, `full_log_prob` with it; `rescored` gives the
            policy's entropy.

        Raises:
            UserError: Mismatched counts, a prompt that cannot be encoded or is too long, no end token, or
                sampling whose log-probs this server does not give.
            ServerError: Failure of the server, with the URL.
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
        completed = self._complete(batch, sampling, stopping, ends, longest, context)
        return server_rollout(
            completed, batch, self.tokenizer, sampling=sampling, stopping=stopping, ends=ends, longest=longest
        )

    def sync(self, folder: str | Path, *, server_folder: str | None = None) -> str:
        """Let a vLLM server load the LoRA adapter that `policy.save(folder)` wrote, and generate with it.

        The previous adapter is unloaded. Keep the folder until the next `sync`: a restarted server is given
        it again.

        Args:
            folder: Folder with adapter_config.json and the adapter's weights.
            server_folder: Path of the same folder on the server, if it differs.

        Returns:
            Name of the adapter on the server, from now on `model`.

        Raises:
            UserError: No adapter in the folder.
            ServerError: The server refused; says how it must be started.
        """
        name = adapter_name(Path(folder))
        if name == self.model:
            return name
        self.weights_folder = server_folder or str(Path(folder).resolve())
        load_adapter(self._connection, name, self.weights_folder)
        previous, self.model = self.model, name
        if previous != self.base_model:
            unload_adapter(self._connection, previous)
        return name

    def reload(self, folder: str | Path) -> None:
        """Let a vLLM server reload the whole model from the folder that it was started on.

        Raises:
            UserError: No weights in the folder.
            ServerError: The server refused; says how it must be started.
        """
        if not any(Path(folder).glob("*.safetensors")):
            raise UserError(
                f"{folder} contains no weights (*.safetensors). Save the model there and start the server on "
                "it."
            )
        self.weights_folder = str(folder)
        reload_weights(self._connection)

    def _complete(
        self,
        batch: PromptBatch,
        sampling: Sampling,
        stopping: StoppingCriteria,
        ends: Sequence[int],
        longest: int | None,
        context: int | None,
    ) -> dict[int, tuple[CompletionRequest, Completion]]:
        """Return request and completion by sample, for every sample whose prompt is not too long."""
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
                    top_logprobs=self.max_logprobs if sampling.truncates else 1,
                    top_k=sampling.top_k if sampling.truncates else 0,
                    vocabulary=self.vocabulary,
                )
            )
        bodies = [
            request_body(
                request,
                model=self.model,
                sampling=sampling,
                stopping=stopping,
                ends=ends,
                seed=_completion_seed(batch, request.sample),
            )
            for request in requests
        ]
        probe = requests[0].prompt if requests and needs_processed(sampling) else None
        replies = zip(requests, self._post(bodies, probe), strict=True)
        return {request.sample: (request, read_completion(reply, request)) for request, reply in replies}

    def _post(
        self, bodies: Sequence[Mapping[str, Any]], probe: Sequence[int] | None
    ) -> list[Mapping[str, Any]]:
        """Post all requests; a server that restarted meanwhile gets the weights and all requests again.

        A restarted server answers 404 for its adapter; with a whole model only the outage shows.
        """
        outages, is_whole = self._connection.outages, self.model == self.base_model
        try:
            answers = self._post_once(bodies, probe)
            if self.weights_folder is None or not is_whole or self._connection.outages == outages:
                return answers
        except ServerError as error:
            if self.weights_folder is None or is_whole or error.status != 404:
                raise
        if is_whole:
            reload_weights(self._connection)
        else:
            load_adapter(self._connection, self.model, str(self.weights_folder))
        return self._post_once(bodies, probe)

    def _post_once(
        self, bodies: Sequence[Mapping[str, Any]], probe: Sequence[int] | None
    ) -> list[Mapping[str, Any]]:
        if probe is not None and not self._probed:
            self._probed = check_processed(self._connection, self.model, probe)
        return self._connection.post_all("completions", bodies, parallel=self.parallel)

    def _ends(self, stopping: StoppingCriteria) -> tuple[int, ...]:
        """Return the ids that end a completion."""
        if stopping.eos_ids is not None:
            return stopping.eos_ids
        if self.eos_ids is not None:
            return self.eos_ids
        eos: Any = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(
                "The tokenizer has no end-of-sequence token, so no completion would end by itself. Give "
                "eos_ids, or StoppingCriteria(eos_ids=()) to end by stop strings and length only."
            )
        return (eos,)

    def _context_length(self) -> int | None:
        """Return the context length, asking the server once; raises if it does not serve the model."""
        if not self._asked_context:
            cards = served_models(self._connection)
            if cards and self.base_model not in cards:
                raise ServerError(
                    f"{self._connection.url('models')} lists {', '.join(map(repr, sorted(cards)))} and not "
                    f"{self.base_model!r}. {suggestion(self.base_model, cards)}Give one of them as model."
                )
            card = cards.get(self.base_model, {})
            parent = cards.get(str(card.get("parent")), {})
            limit = card.get("max_model_len") or parent.get("max_model_len")
            self._context = _smallest(self._context, limit if isinstance(limit, int) else None)
            self._asked_context = True
        return self._context


def _completion_seed(batch: PromptBatch, sample: int) -> int:
    """Derive the seed of a continuation, so that it does not repeat the draws of its beginning."""
    begun, seed = len(batch.begun(sample)), batch.seeds[sample]
    return sample_seed(seed, begun) if begun else seed


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
