# SPDX-License-Identifier: Apache-2.0
"""Heads under their published keys: layouts, collapse, float32, refusals by name."""

from __future__ import annotations

import pytest
import torch

from visalign.rewards.base.contract import RewardError
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.weights.affine_head import AffineHead


def head(activation: str = "none") -> AffineHead:
    torch.manual_seed(0)
    return AffineHead(6, widths=(10, 8, 5, 4, 1), activation=activation).eval()  # pyright: ignore[reportArgumentType]


class TestAffineHead:
    def test_published_keys_and_sizes(self) -> None:
        """The LAION files (linear and relu), ImageReward and HP: same widths, two sets of indices."""
        for activation, indices in (("none", (0, 2, 4, 6, 7)), ("relu", (0, 3, 6, 9, 11))):
            state = AffineHead(768, activation=activation).state_dict()  # pyright: ignore[reportArgumentType]
            assert list(state) == [f"layers.{n}.{part}" for n in indices for part in ("weight", "bias")]
            shapes = [tuple(state[f"layers.{n}.weight"].shape) for n in indices]
            assert shapes == [(1024, 768), (128, 1024), (64, 128), (16, 64), (1, 16)]

    def test_collapse_is_the_same_map(self) -> None:
        one, x = head(), torch.randn(50, 6)
        affine = one.collapse()
        assert isinstance(affine, torch.nn.Linear) and affine.weight.dtype == torch.float32
        assert not any(p.requires_grad for p in affine.parameters())
        torch.testing.assert_close(affine(x)[:, 0], one(x), rtol=1e-5, atol=1e-6)
        assert (affine(x)[:, 0] - one.double()(x)).abs().max() < 1e-6
        with pytest.raises(ValueError, match="no affine map; score with the layers"):
            head("relu").collapse()

    def test_half_precision_in_float32_inside(self) -> None:
        one, x = head(), torch.randn(5, 6).bfloat16()
        assert one(x).dtype == torch.float32 and torch.equal(one(x), one(x.float()))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(one(x.float()), one(x))
        with pytest.raises(RuntimeError, match="same dtype"):
            one.bfloat16()(x)

    def test_wrong_files_are_refused_by_name(self) -> None:
        state = head().state_dict()
        del state["layers.6.bias"]
        state["layers.8.bias"] = torch.zeros(1)
        with pytest.raises(RewardError, match=r"missing: layers\.6\.bias; unexpected: layers\.8\.bias"):
            AffineHead.from_state_dict(state)
        with pytest.raises(RewardError, match="is no five-layer head"):
            AffineHead.from_state_dict({})
        state = head().state_dict() | {"layers.2.weight": torch.zeros(8, 11)}
        with pytest.raises(RewardError, match=r"of another shape: layers\.2\.weight"):
            AffineHead.from_state_dict(state)


def ranknet() -> RanknetHead:
    torch.manual_seed(1)
    return RanknetHead(6, hidden=(8, 4)).eval()


class TestRanknetHead:
    def test_published_keys_and_sizes(self) -> None:
        with torch.device("meta"):
            state = RanknetHead(3584).state_dict()
        assert {name: tuple(value.shape) for name, value in state.items()} == {
            "rm_head.0.weight": (1024, 3584),
            "rm_head.0.bias": (1024,),
            "rm_head.3.weight": (16, 1024),
            "rm_head.3.bias": (16,),
            "rm_head.5.weight": (2, 16),
            "rm_head.5.bias": (2,),
        }

    def test_round_trip_and_refusals(self) -> None:
        one, x = ranknet(), torch.randn(3, 6)
        assert torch.equal(RanknetHead.from_state_dict(one.state_dict())(x), one(x))
        state = one.state_dict()
        state["rm_head.7.bias"] = state.pop("rm_head.5.bias")
        with pytest.raises(RewardError, match=r"missing: rm_head.5.bias; unexpected: rm_head.7.bias"):
            RanknetHead.from_state_dict(state)
        with pytest.raises(RewardError, match=r"rm_head\.3\.weight \(4, 9\) instead of \(4, 8\)"):
            RanknetHead.from_state_dict(one.state_dict() | {"rm_head.3.weight": torch.zeros(4, 9)})
