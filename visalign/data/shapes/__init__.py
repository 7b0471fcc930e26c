# SPDX-License-Identifier: Apache-2.0
"""The shapes world: prompts, scenes, images and their exact verifier.

It needs numpy and pillow; no model comes in.
"""
