# SPDX-License-Identifier: Apache-2.0
"""RewardFusion: hand values, bounds, neighbours that are none; ConvexDA's vertices."""

from __future__ import annotations

import numpy as np
import torch
from scipy.spatial import ConvexHull

from tests.support.core import assert_values, f64
from visalign.core.rewards.fusion import convex_vertices, neighbour_weights, reward_fusion

NAN = float("nan")


class TestRewardFusion:
    def test_only_the_most_similar_above_the_threshold(self) -> None:
        similarity = f64(0.91, 0.95, 0.5, 0.95, 0.99)[None]
        assert_values(neighbour_weights(similarity, top=2)[0], 0, 0.95, 0, 0, 0.99)
        assert_values(neighbour_weights(similarity, threshold=0.5, top=9)[0], 0.91, 0.95, 0.5, 0.95, 0.99)

    def test_without_neighbours_the_reward_is_kept_to_the_bit(self) -> None:
        reward = torch.rand(50, generator=torch.Generator().manual_seed(1))
        assert torch.equal(reward_fusion(reward, torch.rand(50, 3), torch.full((50, 3), 0.89)), reward)
        assert torch.equal(reward_fusion(reward, torch.empty(50, 0), torch.empty(50, 0)), reward)

    def test_a_missing_neighbour_takes_no_place(self) -> None:
        near, similarity = f64(NAN, 1, 3)[None], f64(1, 0.95, 0.92)[None]
        assert_values(reward_fusion(f64(0), near, similarity, top=1), 0.95 / 1.95)
        assert_values(reward_fusion(f64(NAN), near, similarity), NAN)
        assert_values(reward_fusion(f64(0), f64(1)[None], f64(NAN)[None]), 0)


class TestConvexVertices:
    def test_by_hand(self) -> None:
        """A square with its middle, one corner twice, and a third direction that the plane leaves out."""
        square = f64(0, 0, 0, 2, 2, 0, 2, 2, 1, 1, 0, 2).reshape(6, 2)
        assert convex_vertices(square).tolist() == [0, 1, 2, 3]
        depth = f64(0.0, 0.001, 0.001, 0.0, 0.0, 0.001)[:, None]
        assert convex_vertices(torch.cat([square, depth], 1)).tolist() == [0, 1, 2, 3]

    def test_few_equal_and_aligned_texts(self) -> None:
        assert convex_vertices(f64(3)[:, None]).tolist() == [0]
        assert convex_vertices(torch.ones(4, 3)).tolist() == [0]
        assert convex_vertices(torch.empty(0, 3)).tolist() == []
        line = torch.tensor([[1.0], [0.2], [3.0], [-1.0]]) * torch.tensor([[0.3, -0.7, 0.1]])
        assert convex_vertices(line).tolist() == [2, 3]
        assert convex_vertices(line[:, :1]).tolist() == [2, 3]

    def test_they_are_those_of_qhull_in_the_principal_plane(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(20):
            points = torch.randn(12, 6, dtype=torch.float64, generator=generator)
            centred = (points - points.mean(0)).numpy()
            plane = centred @ np.linalg.eigh(centred.T @ centred)[1][:, -2:]
            assert convex_vertices(points).tolist() == sorted(ConvexHull(plane).vertices.tolist())
