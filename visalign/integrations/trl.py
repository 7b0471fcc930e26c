# SPDX-License-Identifier: Apache-2.0
"""TRL's `GRPOTrainer` with any row of the core, and judges of text as its reward functions.

    trainer = GRPOTrainer(model, objective="dapo", reward_funcs=reward_function("boxed_answer"),
                          args=GRPOConfig(...), train_dataset=rows)

Generation, sampling, rewards, optimizer, saving and logs are TRL's. The row decides advantages, ratio, clip,
selection, KL and mean; GRPOConfig's loss_type, epsilon, scale_rewards and their like decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from visalign.core import Counts, Objective, PolicyOutput, Prepared, Trajectories, named_objective

from .hosts import host, refuse_what_is_missing, required_inputs
from .judges import text_scores

Base: Any = host("trl").GRPOTrainer

GIVEN = ("entropy", "uniform", "ref_log_prob", "rollout_log_prob")
"""What TRL has beside tokens, groups and rewards; rollout_log_prob with vLLM alone."""
_COUNTS = tuple(f.name for f in fields(Counts))
_ROWS = tuple(f.name for f in fields(Prepared) if f.name not in ("counts", "ptx_counts"))
_INPUTS = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes "
    "token_type_ids mm_token_type_ids image_position_ids"
).split()
"""What TRL hands to a model beside tokens."""


def reference_beta(objective: Objective) -> float:
    """GRPOConfig's beta for a row: not 0 where it asks for a reference."""
    return objective.kl or objective.kl_in_reward or float("ref_log_prob" in required_inputs(objective))


class GRPOTrainer(Base):
    """TRL's trainer, whose optimizer step is prepared as a whole: thresholds and denominators are the step's.

    Each generation takes one pass more than TRL's own, for log-probs and entropies under the policy that
    sampled. A reward function's None leaves its sample out.

    `objective` is a row of `visalign.core.NAMED` by name, or an `Objective`; the rest is TRL's. What the row asks for
    and TRL has not (a value function, log Z) is refused, as are options of TRL that would do what the row decides.
    """

    def __init__(self, *args: Any, objective: Objective | str, **options: Any) -> None:
        name = objective if isinstance(objective, str) else "given"
        self.objective = named_objective(objective) if isinstance(objective, str) else objective
        refuse_what_is_missing(name, self.objective, GIVEN, "TRL's GRPOTrainer")
        super().__init__(*args, **options)
        self._check_options(name)

    def _check_options(self, name: str) -> None:
        a, o = self.args, self.objective
        if a.steps_per_generation != a.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation is {a.steps_per_generation} and gradient_accumulation_steps "
                f"{a.gradient_accumulation_steps}: a generation must be one optimizer step. Set both to one number."
            )
        reference = required_inputs(o).get("ref_log_prob")
        if bool(self.beta) != bool(reference):
            raise ValueError(
                f"the objective {name!r} has {reference or 'no use for a reference'} and GRPOConfig "
                f"beta={self.beta:g}. The row's own number counts: set beta={reference_beta(o):g}."
            )
        active_options = {
            "top_entropy_quantile": self.top_entropy_quantile < 1,
            "off_policy_mask_threshold": self.off_policy_mask_threshold is not None,
            "entropy_coef": self._entropy_bonus_enabled,
            "delta": a.delta is not None,
            "use_liger_kernel": a.use_liger_kernel,
            "router_aux_loss_coef": self.aux_loss_enabled,
        }
        if option := next((option for option, active in active_options.items() if active), None):
            raise ValueError(
                f"GRPOConfig's {option} changes TRL's own loss, which the objective {name!r} replaces. Leave it out, "
                "or set the objective's fields (selection, off_policy_delta, entropy)."
            )

    def _calculate_rewards(self, *args: Any, **options: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **options)  # [B of all processes, M]
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        weight = (out["completion_mask"] * out.get("tool_mask", 1)).float()
        size, T = weight.shape
        training = self.model.training
        batch = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with torch.no_grad():
            old, entropy = self._log_probs(self.model, out, batch_size=batch)

        def whole(x: Tensor | None) -> Any:
            """Gather from all processes, padded to the widest."""
            return x if x is None else self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1))

        w = whole(weight)
        drawn = torch.rand(w.shape, generator=torch.Generator().manual_seed(self.state.global_step))
        per_prompt = self.num_generations if training else self.num_generations_eval
        first = self.accelerator.process_index * size
        prepared = self.objective.prepare(
            Trajectories(
                weight=w,
                old_log_prob=whole(old),
                entropy=whole(entropy),
                group=torch.arange(len(w)) // per_prompt,
                reward=self._rewards,
                reward_weights=self.reward_weights.tolist(),
                uniform=drawn.to(w.device),
                ref_log_prob=whole(out.get("ref_per_token_logps")),
                rollout_log_prob=whole(out.get("sampling_per_token_logps")),
            )
        ).rows(slice(first, first + size))
        row_fields = {f"visalign_{field}": getattr(prepared, field) for field in _ROWS}
        out |= {k: v[:, :T] if v.ndim == 2 else v for k, v in row_fields.items() if v is not None}
        counts = {f"visalign_count_{field}": getattr(prepared.counts, field) for field in _COUNTS}
        out |= {k: v for k, v in counts.items() if v is not None}
        if "visalign_importance_weight" not in out and "importance_sampling_ratio" in out:
            out["visalign_importance_weight"] = out["importance_sampling_ratio"]  # vLLM's, as TRL corrects it
        return out

    def _log_probs(self, model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B, T] of the completions."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        more = {key: inputs[key] for key in _INPUTS if key in inputs}
        T = inputs["completion_ids"].shape[1]
        per_token = self._get_per_token_logps_and_entropies(
            model, ids, mask, T, compute_entropy=True, **options, **more
        )
        return per_token[0], per_token[1]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        log_prob, entropy = self._log_probs(model, inputs)
        counts = Counts(**{field: inputs.get(f"visalign_count_{field}") for field in _COUNTS})  # type: ignore[arg-type]
        extra_inputs = {field: inputs.get(f"visalign_{field}") for field in _ROWS}
        prepared = Prepared(**extra_inputs, counts=counts)  # type: ignore[arg-type]
        loss = self.objective.loss(prepared, PolicyOutput(log_prob=log_prob, entropy=entropy))
        logged = self._metrics["train" if self.model.training else "eval"]
        shares = self.args.gradient_accumulation_steps if self.model.training else 1  # TRL logs their mean
        for name, term in loss.terms.items():
            logged[f"visalign/{name}"].append(self.accelerator.gather(term.detach()).sum().item() * shares)
        logged["visalign/log_ratio_max"].append(self.accelerator.gather(loss.statistics.largest).max().item())
        return loss.total * self.accelerator.num_processes  # data parallelism averages the gradients


def reward_function(name: str, **options: Any) -> Callable[..., list[float | None]]:
    """Make a judge of text, as `load_text_reward` names it, a reward function of TRL; None where the judge failed.

    Columns of the data set are its metadata; a conversation is read by its assistant's last message.
    """
    from visalign.rewards.catalogue import load_text_reward

    judge = load_text_reward(name, **options)

    def score(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        # TRL's own arguments are no columns of the data set
        names = columns.keys() - {"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
        metadata = [{name: columns[name][i] for name in names} for i in range(len(prompts))]
        return text_scores(judge, completions, prompts, metadata)

    score.__name__ = judge.name  # TRL logs under it
    return score
