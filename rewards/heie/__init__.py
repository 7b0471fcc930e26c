# SPDX-License-Identifier: Apache-2.0
"""HEIE: a judge that draws where an image is wrong.

It needs `vlm`; its data and its training script belong to `visalign.pipelines.packaged`.
"""
