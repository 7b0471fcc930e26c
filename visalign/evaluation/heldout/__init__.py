# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a policy: images or texts from fixed noise, scored and compared before and after.

It needs a policy and a verifier handed in; it never trains and never draws a page.
"""
