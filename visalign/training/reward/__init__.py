# SPDX-License-Identifier: Apache-2.0
"""Training of image judges from votes and quality scores.

It needs a trainable judge handed in; how judges are built or saved stays outside.
"""
