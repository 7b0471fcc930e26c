# SPDX-License-Identifier: Apache-2.0
"""Published losses for your own training code; no algorithm, trainer or reward of the package uses them."""
