# SPDX-License-Identifier: Apache-2.0
"""`visalign evaluate`: rewards measured on votes and quality scores. It needs `shared` and `score`, no policy."""
