# SPDX-License-Identifier: Apache-2.0
"""Held-out measurement of a policy: images or texts made from fixed noise, judged, and compared before
and after.

It needs a policy and a verifier handed in; it never trains and never draws a page.
"""
