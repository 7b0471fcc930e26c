# SPDX-License-Identifier: Apache-2.0
"""The HTML pages: one base, one template each, plots and wording.

It needs results already computed; nothing is measured here and no page loads anything from outside itself.
"""
