# SPDX-License-Identifier: Apache-2.0
"""HPSv3 and its ensemble of LoRA members in one pass.

It needs `vlm`; other questions asked of a model belong to `questions`.
"""
