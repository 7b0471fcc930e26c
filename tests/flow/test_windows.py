# SPDX-License-Identifier: Apache-2.0
"""Windows of stochastic steps by hand; the published ones stand in the golden numbers."""

import numpy as np

from visalign.flow.windows import window_steps


def test_windows_by_hand():
    moving = [window_steps(5, 2, i, order="progressive", every=2, stride=2) for i in range(8)]
    assert moving == [[0, 1], [0, 1], [2, 3], [2, 3], [4], [4], [0, 1], [0, 1]]  # never an empty one
    windows = {tuple(window_steps(5, 2, 0, order="random", draw=np.random.default_rng(i))) for i in range(50)}
    assert windows == {(0, 1), (1, 2), (2, 3), (3, 4)}
    windows = {tuple(window_steps(4, 2, 0, draw=np.random.default_rng(i))) for i in range(80)}
    assert len(windows) == 6
    shorter = [window_steps(4, 1, i, order="exp_decay", every=3, threshold=1, rate=1.0) for i in range(10)]
    assert [window[0] for window in shorter] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 0]
    linear = [window_steps(4, 1, i, order="decay", every=4, least=2) for i in range(12)]  # 4, 3.5, 3, 2.5
    assert [window[0] for window in linear] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    final = [window_steps(5, 2, i, order="progressive", every=2, stride=2, roll_back=False) for i in (4, 5, 99)]
    assert final == [[4], [4], [4]]
