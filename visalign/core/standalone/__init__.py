# SPDX-License-Identifier: Apache-2.0
"""Published losses for your own training code.

It needs the rest of the core but `objective`; no algorithm, trainer or reward of the package uses it.
"""
