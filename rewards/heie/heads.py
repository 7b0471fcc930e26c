# SPDX-License-Identifier: Apache-2.0
"""HEIE's heads: a mapper from a hidden state and a picture's features to a heatmap, and a scorer beside it.

Source: Yang et al., "HEIE", CVPR 2025, arXiv 2411.17261: two cross-attentions, of the map token to the
features and back, give the map; the score comes from a token's hidden state together with the map. The
released repository has data alone, so sizes and layers are ours.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from visalign.core import soft_clamp
from visalign.rewards.base.contract import RewardError

FORMAT = "visalign-heie-2"
LOG_STD = (-4.0, 1.0)
"""Bounds of the maps' log-deviation: heat is in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class HeieSettings:
    """Sizes of the heads."""

    hidden: int
    """Width of the language part's hidden states."""
    features: int
    """Width of a picture's features."""
    width: int = 96
    """Of the heads; divisible by 4 and by `attention_heads`."""
    attention_heads: int = 4
    queries: int = 4
    """Vectors that are made of a hidden state."""
    cells: int = 8
    """Cells of the map on each side of a feature."""
    tiles: int = 2
    """n of the n × n tiles that the heads were trained with."""

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1 or self.width % 4 or self.width % self.attention_heads:
            raise ValueError(
                f"Sizes of HEIE heads are whole numbers from 1, width divisible by 4 and by attention_heads; "
                f"got {asdict(self)}."
            )


class MapHead(nn.Module):
    """Heat in [0, 1] and its log-deviation, `cells` × `cells` of them for each feature."""

    def __init__(self, settings: HeieSettings) -> None:
        super().__init__()
        width, cells = settings.width, settings.cells
        self.cells, self.queries = cells, settings.queries
        self.token, self.context = (nn.Linear(settings.hidden, settings.queries * width) for _ in range(2))
        self.picture = nn.Linear(settings.features, width)
        self.norm_token, self.norm_picture, self.norm_out = (nn.LayerNorm(width) for _ in range(3))
        self.to_picture = nn.MultiheadAttention(width, settings.attention_heads, batch_first=True)
        self.to_token = nn.MultiheadAttention(width, settings.attention_heads, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.out = nn.Linear(width, 2 * cells * cells)

    def forward(
        self, hidden: Tensor, context: Tensor, features: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Maps [B, rows · cells, columns · cells]: (heat logits, log-deviations).

        Args:
            hidden: [B, hidden] of the map's token.
            context: [B, hidden] of the whole picture's, which a tile needs: what it lacks may be beside it.
            features: [B, rows · columns, features].
            grid: (rows, columns).
        """
        batch = hidden.shape[0]
        place = _places(*grid, self.norm_token.normalized_shape[0]).to(features)
        both = torch.cat([self.token(hidden), self.context(context)], 1)
        tokens = self.norm_token(both.view(batch, 2 * self.queries, -1))
        seen = self.norm_picture(self.picture(features) + place)
        tokens = tokens + self.to_picture(tokens, seen, seen, need_weights=False)[0]
        told = self.to_token(seen, tokens, tokens, need_weights=False)[0]
        mixed = self.norm_out(seen + told + self.mix(torch.cat([seen, told * seen], -1)))
        cells = self.out(mixed).view(batch, *grid, 2, self.cells, self.cells)
        maps = cells.permute(0, 3, 1, 4, 2, 5).reshape(batch, 2, grid[0] * self.cells, grid[1] * self.cells)
        return maps[:, 0], soft_clamp(maps[:, 1] - 1.5, *LOG_STD)


class ScoreHead(nn.Module):
    """A logit from a hidden state and a heatmap of any size."""

    def __init__(self, settings: HeieSettings) -> None:
        super().__init__()
        width = settings.width
        self.token = nn.Sequential(nn.Linear(settings.hidden, width), nn.GELU(), nn.Linear(width, width))
        self.heat = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.pooled = nn.Linear(32, width)
        self.out = nn.Sequential(nn.GELU(), nn.Linear(width, 1))

    def forward(self, hidden: Tensor, heat: Tensor) -> Tensor:
        """Logits [B] of plausibility.

        Args:
            hidden: [B, hidden].
            heat: [B, h, w] in [0, 1].
        """
        found = self.heat(heat[:, None])
        pooled = torch.cat([found.mean((2, 3)), found.amax((2, 3))], 1)
        return self.out(self.token(hidden) + self.pooled(pooled))[:, 0]


class HeieHeads(nn.Module):
    """Both heads, with a saved form."""

    def __init__(self, settings: HeieSettings) -> None:
        super().__init__()
        self.settings = settings
        self.mapper, self.scorer = MapHead(settings), ScoreHead(settings)

    def save(self, file: str | Path, *, half: bool = False) -> None:
        """Write weights and sizes as safetensors.

        Args:
            file: to write.
            half: in float16; they are read as float32 again.
        """
        from safetensors.torch import save_file

        metadata = {"format": FORMAT, "settings": json.dumps(asdict(self.settings))}
        dtype = torch.float16 if half else torch.float32
        state = {
            key: value.detach().to("cpu", dtype).contiguous() for key, value in self.state_dict().items()
        }
        save_file(state, str(file), metadata=metadata)
        Path(file).chmod(0o644)

    @classmethod
    def load(cls, file: str | Path) -> HeieHeads:
        """Read what `save` wrote, as float32.

        Args:
            file: safetensors.

        Raises:
            FileNotFoundError: there is none.
            RewardError: it holds other things, or keys are missing, left over or of other sizes.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(file).is_file():
            raise FileNotFoundError(
                f"There are no HEIE heads at {file}; take the packaged judge 'shapes-heie', or train some, "
                "and give their folder: "
                "`python -m visalign.pipelines.packaged.train_heie --model MODEL --out FOLDER`."
            )
        try:
            with safe_open(str(file), "pt") as opened:
                metadata = opened.metadata() or {}
                state = {key: opened.get_tensor(key) for key in opened.keys()}  # no mapping
        except SafetensorError as error:
            raise RewardError(f"{file} is no safetensors file: {error}.") from error
        if metadata.get("format") != FORMAT:
            raise RewardError(f"{file} has the format {metadata.get('format')!r}; needed is {FORMAT!r}.")
        try:
            heads = cls(HeieSettings(**json.loads(metadata["settings"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RewardError(f"{file} does not say the sizes of HEIE heads: {error}") from error
        try:
            heads.load_state_dict(state)
        except RuntimeError as error:
            raise RewardError(
                f"{file} does not hold all keys of HEIE heads and no others: {error}"
            ) from error
        return heads.eval()


def _places(rows: int, columns: int, width: int) -> Tensor:
    """[rows · columns, width]: sines and cosines of row and column, as shares of the picture."""
    step = torch.exp(torch.arange(width // 4) * (-math.log(50.0) / max(width // 4 - 1, 1))) * math.pi * 25
    down, across = (((torch.arange(n) + 0.5) / n)[:, None] * step for n in (rows, columns))
    y = torch.cat([down.sin(), down.cos()], 1)[:, None].expand(-1, columns, -1)
    x = torch.cat([across.sin(), across.cos()], 1)[None].expand(rows, -1, -1)
    return torch.cat([y, x], -1).reshape(rows * columns, width)
