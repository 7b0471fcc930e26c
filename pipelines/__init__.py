# SPDX-License-Identifier: Apache-2.0
"""End-to-end jobs: one file each, all wiring, the command line.

It needs every wing, and alone puts them together; no algorithm belongs here.
"""
