# SPDX-License-Identifier: Apache-2.0
"""`visalign collect`: votes of people and judges on images, agreement, export. It needs `shared` and `score`."""
