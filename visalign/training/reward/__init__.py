# SPDX-License-Identifier: Apache-2.0
"""Training of image rewards from votes and quality scores.

The trainable reward model is given; building and saving it happens elsewhere.
"""
