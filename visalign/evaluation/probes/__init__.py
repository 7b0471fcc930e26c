# SPDX-License-Identifier: Apache-2.0
"""What moves a judge that should not: the catalogue of changed images and prompts, and what a judge's
answer to each comes to.

It needs images and scores; running a judge belongs to `visalign.pipelines.probe`.
"""
