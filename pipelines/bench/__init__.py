# SPDX-License-Identifier: Apache-2.0
"""`visalign bench`: models, or folders of images, on the prompts of a benchmark, compared pair by pair."""
