# SPDX-License-Identifier: Apache-2.0
"""Scripts that trained the models in `assets/`: `python -m assets.build STAGE` in a checkout."""
