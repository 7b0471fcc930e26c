# SPDX-License-Identifier: Apache-2.0
"""`visalign sample`: images of prompts from a model, with what was trained. Nothing that trains comes in."""
