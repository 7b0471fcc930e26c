# SPDX-License-Identifier: Apache-2.0
"""Generate completions on a vLLM or other OpenAI-compatible server, and send it new weights."""
