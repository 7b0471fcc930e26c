# SPDX-License-Identifier: Apache-2.0
"""V of a text state for PPO: a linear head on the policy's hidden states, or a model of its own.

V at place t is the value of prompt and tokens before t, read from the same hidden state that predicts token
t. So V [B, T] stands beside log_prob [B, T], and GAE takes both as they are.

Source: PPO, arXiv 1707.06347, section 5 (shared or separate networks).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from visalign.atomic import umask_permissions
from visalign.errors import UserError
from visalign.model_files import read_tensors
from visalign.text import TextRollout

from .loading import load_whole
from .replay import pack

FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """w·h + b in float32, starting at 0, so that the first advantages are the returns; several start near it apart."""

    def __init__(self, hidden_size: int, *, critics: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, critics)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if critics > 1:
            drawn = torch.randn(critics, hidden_size, generator=torch.Generator().manual_seed(0))
            self.linear.weight.data.copy_(0.1 * drawn / hidden_size**0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [*N] float32 of hidden states [*N, H]; [*N, C] of several critics."""
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.linear(hidden.float())
            return values[..., 0] if self.linear.out_features == 1 else values

    def save(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file({name: w.detach().contiguous() for name, w in self.state_dict().items()}, folder / FILE)
        umask_permissions(folder / FILE)

    def load(self, folder: Path) -> None:
        state = read_tensors(Path(folder) / FILE)
        if (saved := state["linear.weight"].shape) != (expected := self.linear.weight.shape):
            raise UserError(
                f"The value head in {folder} has (critics, hidden size) {tuple(saved)}, this one {tuple(expected)}. "
                "Load it with the model it was trained on."
            )
        self.load_state_dict(state)


class ValueModel(nn.Module):
    """A separate network for V, all trained: a transformer without language head (`AutoModel`), and a `ValueHead`."""

    def __init__(self, trunk: PreTrainedModel, *, critics: int = 1) -> None:
        super().__init__()
        self.trunk = trunk.eval().requires_grad_(True)
        size = trunk.config.get_text_config().hidden_size
        self.head = ValueHead(size, critics=critics).to(trunk.device)

    @classmethod
    def from_pretrained(
        cls, folder_or_id: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", critics: int = 1
    ) -> ValueModel:
        """The trunk of a language model, with a new head, or with the one that `save` left in the folder."""
        model = cls(load_whole(AutoModel, str(folder_or_id), dtype).to(device), critics=critics)
        if (Path(folder_or_id) / FILE).is_file():
            model.head.load(Path(folder_or_id))
        return model

    def values(self, rollout: TextRollout, rows: Tensor | slice | None = None) -> Tensor:
        """Compute V [b, T] (or [b, T, C]) float32 before each token, differentiable; 0 where the loss mask is 0."""
        if rollout.images is not None:
            raise UserError("A ValueModel reads only text, and this rollout has images. Give the policy a ValueHead.")
        chosen = torch.arange(len(rollout))[slice(None) if rows is None else rows]
        device, live = self.trunk.device, (rollout.loss_mask[chosen] != 0).any(1).nonzero()[:, 0]
        critics = self.head.linear.out_features
        shape = (len(chosen), rollout.loss_mask.shape[1], critics)
        blank = torch.zeros(shape[: 3 if critics > 1 else 2], device=device)
        if len(live) == 0:
            return blank.requires_grad_(torch.is_grad_enabled())
        packed = pack(rollout, chosen[live], device)
        hidden = self.trunk(input_ids=packed.ids, attention_mask=packed.mask, use_cache=False).last_hidden_state
        values = self.head(hidden[packed.row.to(device), packed.before.to(device)])
        return blank.index_put((live[packed.row].to(device), packed.column.to(device)), values)

    def save(self, folder: Path) -> None:
        self.trunk.save_pretrained(folder)
        self.head.save(Path(folder))
        umask_permissions(Path(folder))
