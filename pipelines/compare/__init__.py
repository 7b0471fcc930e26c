# SPDX-License-Identifier: Apache-2.0
"""`visalign compare`, `rank` and `agree`: images under one or several rewards. They need `score`."""
