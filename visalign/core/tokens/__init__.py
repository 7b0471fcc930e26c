# SPDX-License-Identifier: Apache-2.0
"""Token policies only: entropy over the vocabulary, the fused output head, selection of tokens.

It needs `groups` and `surrogates`; denoising steps never come in.

Common to all functions: values are [B, T] (or [N]), for tokens of B completions; entropies and log-probs are
in nats; `advantage` is [B] or [B, T]. A decision of weight 0, or with a value that is not finite, takes no
part in statistics; the others count once, unless a formula has w. Measures and thresholds are float64 without
gradient; losses are float32 or better, per decision.

Selection has two phases. `*_thresholds` looks once at the whole optimizer step, all micro-batches and devices together
(concatenate or gather the tensors, in any order). `*_keep`, `*_select` or `*_weights` applies its result to any part
of the step: with the same numbers in both phases the parts together are exactly the whole. The released codes take
means, quantiles and counts per micro-batch: there, tokens are treated differently when the batch is cut differently.

Denoising steps of fixed variance all have the same entropy, so nothing here means anything on them, and an
`Objective` refuses it there.
"""
