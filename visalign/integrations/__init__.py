# SPDX-License-Identifier: Apache-2.0
"""The objectives and the judges inside other people's trainers: one file per host.

It needs `core` and `rewards`, and a host only where its file is imported; no host is a dependency, and no
trainer of ours comes in.
"""
