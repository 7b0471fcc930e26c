# SPDX-License-Identifier: Apache-2.0
"""Sample completions on vLLM or another OpenAI-compatible server, for off-policy training.

The server is the rollout policy μ: `rollout.log_prob` holds its log-probs, and the ratio to those of the
policy under training corrects for kernels, precision and weights. That is valid only if the server's
log-probs belong to the distribution it samples from:

- By default vLLM gives log-probs of the raw logits, right only at temperature 1 without top_k and top_p.
  Otherwise the server must run with `--logprobs-mode processed_logprobs` (vLLM 0.10.2 or later) and
  `logprobs_mode` must say so; a probe of two tokens checks it.
- The tokens that top_k and top_p keep are read from the server's list of most probable tokens, which is
  complete if its probabilities sum to 1. So top_p needs a top_k of at most `max_logprobs`.
- Everything that the server would take from its own defaults (penalties, min_p, end tokens) is sent.

Unknown numbers are NaN: the entropy, or with top_k `full_log_prob`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from visalign.adapters.causal_lm.batches import PromptBatch, assemble_rollout
from visalign.adapters.causal_lm.generation import Completion
from visalign.adapters.causal_lm.loading import end_tokens, pad_id
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError, suggestion
from visalign.remote import ServerConnection, ServerError
from visalign.seeds import sample_seed
from visalign.text import Prompt, Sampling, StoppingCriteria, TextRollout
from visalign.text.decoding import decode

from .completions import (
    CompletionRequest,
    LogprobsMode,
    check_processed,
    check_sampling,
    needs_processed,
    read_completion,
)
from .weights import adapter_name, load_adapter, reload_weights, served_models, unload_adapter


class ServerGenerator:
    """Generate completions on a server, with the signature of `TextPolicy.generate`.

    Prompts, end tokens and limits are those of the `policy` under training. `base_url` is as for OpenAI clients,
    "http://host:8000/v1", `model` the policy's name on the server (vLLM: --served-model-name). `logprobs_mode` and
    `max_logprobs` are as the server was started; leave some room above top_k, since tokens that tie with the k-th can
    be sampled too. `parallel` requests are in flight, one per sample; `connection` has timeout, retries, backoff and
    patience of `ServerConnection`. A server that restarts within the patience is given its weights again.
    """

    weights_folder: str | None = None
    """Folder, as the server sees it, of the weights last sent; None: those it was started with."""

    def __init__(
        self,
        policy: CausalLMPolicy,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        max_logprobs: int = 20,
        parallel: int = 64,
        **connection: float,
    ) -> None:
        options: Any = connection
        self._connection = ServerConnection(base_url, api_key=api_key, **options)
        self._policy, self.tokenizer = policy, policy.tokenizer
        self.base_model = self.model = model
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.max_logprobs, self.parallel = max_logprobs, parallel
        self._probed = False

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
        """Complete P prompts G times each, as `CausalLMPolicy.generate` does, without images, a request per sample.

        NaN in the rollout: `entropy` without top_k, `full_log_prob` with it.
        """
        policy, sampling, stopping = self._policy, sampling or Sampling(), stopping or StoppingCriteria()
        check_sampling(sampling, self.logprobs_mode, self.max_logprobs)
        encoded = policy.encode(prompts)
        if images is not None or encoded.images is not None:
            raise UserError("Generation by a server sends token ids and reads no images. Leave images out.")
        options: dict[str, Any] = {"num_generations": num_generations, "group": group, "after": after}
        batch = PromptBatch.build(policy, prompts, encoded, seeds=seeds, context=self._context_length, **options)
        ends = end_tokens(policy.model, policy.prompts, stopping)
        completions = self._complete(batch, sampling, stopping, ends)
        return assemble_rollout(batch, completions, self.tokenizer, sampling, pad_id(self.tokenizer, ends))

    def sync(self, folder: str | Path, *, server_folder: str | None = None) -> str:
        """Let vLLM load the LoRA adapter in `folder` (on the server `server_folder`), and return its name.

        The previous adapter is unloaded. Keep the folder: a restarted server is given it again.
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
        """Let a vLLM server reload the whole model from the folder that it was started on."""
        self.weights_folder = str(folder)
        reload_weights(self._connection)

    def _complete(
        self, batch: PromptBatch, sampling: Sampling, stopping: StoppingCriteria, ends: Sequence[int]
    ) -> dict[int, Completion]:
        def seed(sample: int) -> int:  # a continuation must not repeat the draws of its beginning
            begun = len(batch.begun(sample))
            return sample_seed(batch.seeds[sample], begun) if begun else batch.seeds[sample]

        requests = [
            CompletionRequest(
                url=self._connection.url("completions"),
                model=self.model,
                sample=sample,
                prompt=batch.prompt_of(sample).ids,
                limit=room,
                sampling=sampling,
                stopping=stopping,
                ends=ends,
                seed=seed(sample),
                top_logprobs=self.max_logprobs if sampling.truncates else 1,
                vocabulary=self._policy.model.get_input_embeddings().weight.shape[0],  # type: ignore[union-attr]
            )
            for sample, room in batch.rooms(stopping.max_new_tokens).items()
        ]
        text_of = partial(decode, self.tokenizer)
        return {
            request.sample: read_completion(answer, request, text_of)
            for request, answer in zip(requests, self._post(requests), strict=True)
        }

    def _post(self, requests: Sequence[CompletionRequest]) -> list[Mapping[str, Any]]:
        """Post all requests; again, with the weights, if the server restarted (404 for its adapter, or an outage)."""

        def post() -> list[Mapping[str, Any]]:
            if requests and needs_processed(requests[0].sampling) and not self._probed:
                self._probed = check_processed(self._connection, self.model, list(requests[0].prompt))
            bodies = [request.body() for request in requests]
            return self._connection.post_all("completions", bodies, parallel=self.parallel)

        outages, is_whole = self._connection.outages, self.model == self.base_model
        try:
            answers = post()
            if self.weights_folder is None or not is_whole or self._connection.outages == outages:
                return answers
        except ServerError as error:
            if self.weights_folder is None or is_whole or error.status != 404:
                raise
        if is_whole:
            reload_weights(self._connection)
        else:
            load_adapter(self._connection, self.model, str(self.weights_folder))
        return post()

    @cached_property
    def _context_length(self) -> int | None:
        """Context length of policy and server; raises if the server does not serve the model."""
        cards = served_models(self._connection)
        if cards and self.base_model not in cards:
            raise ServerError(
                f"{self._connection.url('models')} lists {', '.join(map(repr, sorted(cards)))} and not "
                f"{self.base_model!r}. {suggestion(self.base_model, cards)}Give one of them as model."
            )
        card = cards.get(self.base_model, {})
        parent = cards.get(str(card.get("parent")), {})  # of an adapter, whose card has no limit
        limits = (self._policy.context_length, card.get("max_model_len"), parent.get("max_model_len"))
        return min((limit for limit in limits if isinstance(limit, int)), default=None)
