# SPDX-License-Identifier: Apache-2.0
"""HPSv3's head on a vision-language model: mean and log-deviation of the reward, read at one position.

The position is found before the head runs: [B, D] goes through it, not [B, L, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

Pooling = Literal["special", "last", "mean"]
HIDDEN = (1024, 16)
DROPOUT = 0.05
PLACES = (0, 3, 5)
"""Where the three linear layers stand under `rm_head`."""


class RanknetHead(nn.Module):
    """Linear, ReLU, dropout, Linear, ReLU, Linear under the published keys `rm_head.{0,3,5}.{weight,bias}`.

    Args:
        input_dim: width of the hidden states; 3584 for the 7B model.
        hidden: widths of the two inner layers.
        outputs: 2 for (mean, log-deviation), 1 for a mean alone.

    Ma et al., HPSv3, arXiv 2508.03789, released code.
    """

    def __init__(self, input_dim: int, *, hidden: tuple[int, int] = HIDDEN, outputs: int = 2) -> None:
        super().__init__()
        self.rm_head = nn.Sequential(
            nn.Linear(input_dim, hidden[0]),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(hidden[0], hidden[1]),
            nn.ReLU(),
            nn.Linear(hidden[1], outputs),
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> RanknetHead:
        """The head whose widths the six tensors `rm_head.{0,3,5}.{weight,bias}` tell, in evaluation mode,
        float32; ValueError names missing and unexpected keys, or shapes that do not follow one another.
        """
        wanted = {f"rm_head.{place}.{part}" for place in PLACES for part in ("weight", "bias")}
        if set(state) != wanted:
            raise ValueError(
                f"The head needs {', '.join(sorted(wanted))}: missing {sorted(wanted - set(state))}, "
                f"unexpected {sorted(set(state) - wanted)}."
            )
        first, second, third = (state[f"rm_head.{place}.weight"].shape for place in PLACES)
        head = cls(first[1], hidden=(first[0], second[0]), outputs=third[0])
        try:
            head.load_state_dict({key: value.float() for key, value in state.items()}, strict=True)
        except RuntimeError as error:
            raise ValueError(f"The layers of the head do not fit one another: {error}") from error
        return head.eval()

    def forward(self, hidden: Tensor) -> Tensor:
        """Head outputs [*, 2] of hidden states [*, D], in float32 whatever dtype they come in."""
        dtype = self.rm_head[0].weight.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"The head must stay in float32; it is {dtype}. Move the tower alone.")
        with torch.autocast(hidden.device.type, enabled=False):
            return self.rm_head(hidden.to(dtype))

    def pooled(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        *,
        pooling: Pooling = "special",
        special_token_id: int | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Head outputs of whole rows, read as `pooling` says.

        "special": at the reward token, which stands exactly once in each row. "last": at the last token that
        is no padding. "mean": the outputs averaged over all tokens that are no padding; the released code
        leaves the last of them out.

        Args:
            hidden: [B, L, D] last hidden states.
            input_ids: [B, L] tokens.
            pooling: one of the three.
            special_token_id: the reward token, for "special".
            pad_token_id: the padding; without it or an attention_mask every token counts. Without the mask,
                the row ends before its first padding token.
            attention_mask: [B, L], 0 where there is no token; needed for left padding.

        Returns:
            [B, 2], or [B, outputs].

        Raises:
            ValueError: a row without the reward token or with several, an empty row, an unknown pooling.
        """
        if pooling == "special":
            if special_token_id is None:
                raise ValueError('pooling="special" needs special_token_id, the id of the reward token.')
            return self(_take(hidden, special_positions(input_ids, special_token_id)))
        valid = valid_tokens(input_ids, pad_token_id, attention_mask)
        if pooling == "last":
            order = torch.arange(valid.shape[1], device=valid.device)
            return self(_take(hidden, torch.where(valid, order, -1).amax(1)))
        if pooling == "mean":
            logits = self(hidden)
            weight = valid.to(logits.dtype)[..., None]
            return (logits * weight).sum(1) / weight.sum(1)
        raise ValueError(f'pooling must be "special", "last" or "mean"; got {pooling!r}.')


def special_positions(input_ids: Tensor, special_token_id: int) -> Tensor:
    """Position [B] of the token that must stand exactly once in each row of input_ids [B, L]."""
    found = input_ids == special_token_id
    count = found.sum(1)
    if bool((count != 1).any()):
        bad = {row: int(n) for row, n in enumerate(count.tolist()) if n != 1}
        raise ValueError(
            f"The reward token {special_token_id} must stand once in each row; rows and their counts: {bad}. "
            "Escape it where it is part of a prompt."
        )
    return found.int().argmax(1)


def valid_tokens(
    input_ids: Tensor, pad_token_id: int | None = None, attention_mask: Tensor | None = None
) -> Tensor:
    """Bool [B, L]: is a token, by the attention mask, else everything before the row's first padding."""
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}; got "
                f"{tuple(attention_mask.shape)}."
            )
        valid = attention_mask != 0
    elif pad_token_id is None:
        valid = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        valid = (input_ids == pad_token_id).cumsum(1) == 0
    empty = (~valid.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"Rows {empty} hold no token; with left padding, pass attention_mask.")
    return valid


def _take(hidden: Tensor, position: Tensor) -> Tensor:
    """hidden [B, L, D] at position [B], [B, D]."""
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), position]
