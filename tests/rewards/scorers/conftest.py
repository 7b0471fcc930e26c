# SPDX-License-Identifier: Apache-2.0
"""Images for the tests of scorers."""

import pytest
import torch


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 3, 36, 50, generator=torch.Generator().manual_seed(2)).mul(255).round() / 255
