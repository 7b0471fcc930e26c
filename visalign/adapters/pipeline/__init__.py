# SPDX-License-Identifier: Apache-2.0
"""Any diffusers pipeline as a policy, through the pipeline's own call, or a modular one's blocks.

It needs a diffusers pipeline and a row of `families.py`; nothing of a network's inside and no algorithm comes
in: what a family wants done by hand for speed gets a room of its own, with this one as its oracle.
"""
