# SPDX-License-Identifier: Apache-2.0
"""Prompt sets, the embedded shapes world with its exact verifier, and the packaged model folders.

It needs files, numpy and pillow; nothing is judged or trained here.
"""
