# SPDX-License-Identifier: Apache-2.0
"""From what a model wrote to a number or a verdict, as pure functions of text."""
